"""A few trials of the fault injection (python -m tests.faults) with real processes."""

import jax.numpy as jnp

from remixer_t5x.checkpoints import checkpoint_manager
from remixer_t5x.data.prefetch import DataPosition
from remixer_t5x.run_folder import model_dir
from tests.faults import __main__ as faults
from tests.support import compare_runs


def test_runs_with_faults_equal_an_uninterrupted_run(tmp_path, capsys, monkeypatch):
    """A kill during the write of a checkpoint, changed data, and an environment without HOME and TMPDIR."""
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'cache'))
    names = ('kill_in_write', 'changed', 'poor_environment')
    argv = ['--folder', str(tmp_path / 'runs'), '--train_steps', '60', *(f'--only={name}' for name in names)]
    code = faults.main(argv)
    table = capsys.readouterr().out
    print(table)
    assert code == 0
    assert all(f'| {name} | 1 | 1 |' in table for name in names)


def test_the_comparison_detects_changed_arrays_logs_and_positions(tmp_path):
    def run(name, value=1.0, loss=2.0, batches=4):
        folder = model_dir.create_model_dir(tmp_path / name)
        (folder / 'metrics.jsonl').write_text(f'{{"kind": "train", "step": 1, "loss": {loss}, "timing": {{}}}}\n')
        checkpoints = checkpoint_manager.RunCheckpoints(folder)
        checkpoints.save(1, {'w': jnp.full(3, value)}, DataPosition(batches), {'window': {}})
        checkpoints.close()
        return folder

    reference = run('reference')
    assert compare_runs.difference(reference, run('same'), 1) is None
    assert compare_runs.difference(reference, run('bit', value=1.0000001), 1) == 'the array w'
    assert compare_runs.difference(reference, run('log', loss=2.5), 1) == 'the log at step 1'
    assert compare_runs.difference(reference, run('position', batches=5), 1) == 'the number of batches drawn'
