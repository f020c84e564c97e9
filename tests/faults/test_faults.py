"""The harness that breaks runs (python -m tests.faults), on a few of its faults: real processes of the command line."""

from tests.faults import __main__ as faults
from tests.support import compare_runs


def test_broken_runs_end_as_the_unbroken_one(tmp_path, capsys, monkeypatch, compiled):
    """A kill inside a checkpoint's write, refused changes, and low limits without HOME and TMPDIR."""
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'cache'))
    names = ('kill_in_write', 'changed', 'poor_environment')
    argv = ['--folder', str(tmp_path / 'runs'), '--only', ','.join(names), '--train_steps', '60']
    code = faults.main(argv, compiled)
    table = capsys.readouterr().out
    print(table)
    assert code == 0
    assert all(f'| {name} | 1 | 1 |' in table for name in names)


def test_a_run_that_differs_is_told(tmp_path):
    """The comparison sees one other bit, one other line and another place in the data."""
    from remixer_t5x.checkpoints import manager
    from remixer_t5x.data.prefetch import Position
    from remixer_t5x.run_folder import model_dir

    def run(name, value=1.0, loss=2.0, batches=4):
        import jax.numpy as jnp

        folder = model_dir.claim(tmp_path / name)
        (folder / 'metrics.jsonl').write_text(f'{{"kind": "train", "step": 1, "loss": {loss}, "timing": {{}}}}\n')
        checkpoints = manager.Checkpoints(folder)
        checkpoints.save(1, {'w': jnp.full(3, value)}, Position(batches), {'window': {}})
        checkpoints.close()
        return folder

    one = run('one')
    assert compare_runs.difference(one, run('same'), 1) is None
    assert compare_runs.difference(one, run('bit', value=1.0000001), 1) == 'the array w'
    assert compare_runs.difference(one, run('log', loss=2.5), 1) == 'the log at step 1'
    assert compare_runs.difference(one, run('place', batches=5), 1) == 'the number of batches drawn'


def test_the_table_counts_failures():
    told, failed = faults.Told, faults.Failed
    table = faults.table({'kill': [told(3, 1.5), told(5, 2.5), failed('no')]})
    assert table.splitlines()[-1] == '| kill | 3 | 2 | 4 (5) | 2.0 (2.5) |'
