"""finetune, eval and infer with a task of a few examples in memory."""

import contextlib
import io
import json
import pathlib
import types

import jax
import numpy as np
import pytest

from remixer_t5x import build_model
from remixer_t5x.checkpoints import saved_params
from remixer_t5x.cli.main import main
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.evaluate import checkpoint_evaluation
from remixer_t5x.extras.export import exported_functions
from remixer_t5x.optim import train_state
from tests.support import command_folder, toy_tasks

# The name and the labels of a task with a leaderboard.
TASK = """
toy_tasks.labelled.name = 'glue_cola_v002'
toy_tasks.labelled.labels = ('acceptable', 'unacceptable')
"""
# test_own_pairs.py tests the held-out loss.
FINETUNE = [
    *('--gin.BATCH_SIZE=8', '--gin.EVAL_BATCH_SIZE=4', '--gin.LOG_PERIOD=1', '--gin.DROPOUT_RATE=0.0'),
    '--gin.EVAL_STEPS=0',
]


@pytest.fixture(scope='module')
def current_folder(tmp_path_factory):
    """Yields the current folder with a model and a task in `toy.gin`."""
    with command_folder.working_directory(tmp_path_factory.mktemp('commands')) as folder:
        (folder / 'toy.gin').write_text(toy_tasks.config('labelled', {'inputs': 12, 'targets': 14}) + TASK)
        yield folder


def run(*argv):
    return main([*argv[:1], '--gin_file=toy.gin', *argv[1:]])


def finetune(model_dir, steps, *flags, initial=None):
    more = [f'--gin.MODEL_DIR={model_dir}', f'--gin.INITIAL_CHECKPOINT_PATH={initial}']
    more.append(f'--gin.TRAIN_STEPS_RELATIVE={steps}')
    return run('finetune', '--gin_file=runs/finetune.gin', *FINETUNE, *more, '--gin.EVAL_PERIOD=2', *flags)


@pytest.fixture(scope='module')
def finetuned(current_folder):
    """`first`: 4 steps from random parameters; `second`: 2 steps from its parameters."""
    assert finetune('first', 4, '--gin.CHECKPOINT_PERIOD=1', '--gin.KEEP_CHECKPOINTS=2') == 0
    with pytest.MonkeyPatch.context() as patch:
        # Finetuning must not initialize random parameters.
        patch.setattr(train_state.TrainStatePlan, 'jit_init', lambda plan: types.SimpleNamespace(lower=_never))
        assert finetune('second', 2, initial='first') == 0
    return current_folder


def _never(*_):
    raise AssertionError('random parameters were initialized')


def read_records(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def test_eval_evaluates_the_model_of_a_quantized_export(finetuned, monkeypatch):
    """Checks the evaluated parameters and the output folder; `tests/extras/export` tests the rounding."""
    evaluated = {}

    def record(evaluator, params, folder, outlet):
        evaluated.update(params=params, folder=str(outlet.folder))
        return []

    searched = []
    monkeypatch.setattr(checkpoint_evaluation, 'evaluate_and_write_reports', record)
    monkeypatch.setattr(
        checkpoint_evaluation, 'read_evaluated_steps', lambda folder, _: searched.append(folder) or set()
    )
    assert run('eval', '--gin.EVAL_BATCH_SIZE=4', '--checkpoint=first', '--quantize=int8', '--follow=0') == 0
    assert evaluated['folder'].endswith('first/eval_int8') and searched == [evaluated['folder']]
    exact = parameters('first')
    jax.tree.map(
        np.testing.assert_array_equal,
        evaluated['params'],
        exported_functions.round_params(build_model('toy.gin'), exact),
    )
    table = exact['token_embedder']['embedding']
    assert 0 < np.abs(evaluated['params']['token_embedder']['embedding'] - table).max() < np.abs(table).max() / 200


def read_kind(path, kind):
    return [record for record in read_records(path) if record['kind'] == kind]


def parameters(path):
    shapes = {'encoder_input_tokens': (4, 12), 'decoder_target_tokens': (4, 14)}
    abstract = saved_params.get_abstract_params(build_model('toy.gin'), shapes, Partitioner())
    return jax.device_get(saved_params.restore_params(str(path), abstract))


@pytest.mark.quick
def test_metrics_are_logged_and_the_best_is_kept(finetuned):
    evaluations = read_kind('first/metrics.jsonl', 'eval/glue_cola_v002')
    assert [record['step'] for record in evaluations] == [2, 4] and all(0 <= r['accuracy'] <= 100 for r in evaluations)
    (best_folder,) = (path for path in (finetuned / 'first/best/glue_cola_v002').iterdir() if path.name.isdigit())
    best = max(evaluations, key=lambda record: record['accuracy'])
    assert int(best_folder.name) == best['step']
    # Rotation removes the checkpoint of step 2, but not the best checkpoint.
    assert sorted(p.name for p in (finetuned / 'first/checkpoints').iterdir() if p.name.isdigit()) == ['3', '4']
    losses = [record['loss'] for record in read_kind('first/metrics.jsonl', 'train')]
    assert losses[-1] < losses[0]


@pytest.mark.quick
def test_finetuning_loads_only_parameters(finetuned):
    first = read_kind('first/metrics.jsonl', 'train')
    second = read_kind('second/metrics.jsonl', 'train')
    assert [record['step'] for record in second] == [1, 2]
    # Fresh optimizer and steps, but not fresh parameters.
    assert second[0]['param_norm'] != pytest.approx(first[0]['param_norm'], rel=1e-5)
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(parameters('first'))))
    assert second[0]['param_norm'] == pytest.approx(norm, rel=1e-5)


@pytest.fixture(scope='module')
def evaluated(finetuned):
    """Evaluates `first` into the folder `evaluated`, and returns the standard output."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run('eval', '--checkpoint=first', '--gin.EVAL_BATCH_SIZE=3', '--output=evaluated') == 0
    return out.getvalue()


@pytest.mark.quick
def test_eval_reproduces_the_metrics_of_the_training_run(finetuned, evaluated):
    trained = read_kind('first/metrics.jsonl', 'eval/glue_cola_v002')[-1]
    (result,) = read_records('evaluated/metrics.jsonl')
    assert (result['kind'], result['step']) == ('validation/glue_cola_v002', 4)
    assert result['accuracy'] == trained['accuracy'] and result['checkpoint'].endswith('first/checkpoints/4')
    assert 'accuracy' in evaluated and f'{trained["accuracy"]:.2f}' in evaluated
    rows = read_records('evaluated/predictions/glue_cola_v002-validation-4.jsonl')
    assert [row['input'] for row in rows] == [f'text {i % 7}' for i in range(10)]
    right = [row['prediction'] == row['target'] for row in rows]
    assert 100 * sum(right) / 10 == pytest.approx(result['accuracy'])
    assert list((finetuned / 'evaluated/tensorboard').iterdir())


def test_submission_files_and_ranked_labels(finetuned, capsys):
    flags = ('--submission=files', '--split=None', '--gin.RANK_CHOICES=True', '--gin.EVAL_BATCH_SIZE=4')
    assert run('eval', '--checkpoint=first/best/glue_cola_v002', *flags) == 0
    lines = (finetuned / 'files/CoLA.tsv').read_text().splitlines()
    assert lines[0] == 'index\tprediction' and [line.split('\t')[0] for line in lines[1:]] == list('01234')
    assert {line.split('\t')[1] for line in lines[1:]} <= {'0', '1'}
    assert 'CoLA.tsv: 5 predictions' in capsys.readouterr().out


def test_infer_writes_what_eval_predicts_and_continues(finetuned, evaluated, capsys):
    (finetuned / 'in.txt').write_text(''.join(f'text {i % 7}\n' for i in range(10)))
    command = ('infer', '--checkpoint=first', '--input=in.txt', '--output=out.jsonl', '--gin.INFER_BATCH_SIZE=4')
    assert run(*command) == 0
    assert '10 predictions in' in capsys.readouterr().err
    rows = read_records('out.jsonl')
    expected = read_records('evaluated/predictions/glue_cola_v002-validation-4.jsonl')
    assert [row['prediction'] for row in rows] == [row['prediction'] for row in expected]
    assert [row['score'] for row in rows] == pytest.approx([row['score'] for row in expected], rel=1e-4)

    complete = (finetuned / 'out.jsonl').read_bytes()
    (finetuned / 'out.jsonl').write_bytes(complete[: len(complete) // 2])
    capsys.readouterr()
    assert run(*command) == 0
    assert 'continuing after' in capsys.readouterr().err and (finetuned / 'out.jsonl').read_bytes() == complete
    capsys.readouterr()
    assert run('eval', '--predictions=out.jsonl') == 0
    accuracy = 100 * sum(row['prediction'] == row['target'] for row in expected) / 10
    assert f'accuracy                 {accuracy:.2f}' in capsys.readouterr().out


FINETUNE_NEW = ['finetune', '--gin_file=runs/finetune.gin', *FINETUNE, '--gin.MODEL_DIR=new']
MISTAKES = {
    'no such run': (['eval', '--checkpoint=frist'], 'does not contain a checkpoint; did you mean first?'),
    'predictions of another input': (['eval', '--predictions=other.jsonl'], 'line 2 does not match glue_cola_v002'),
    'a submission of predictions': (
        ['eval', '--predictions=other.jsonl', '--submission=files'],
        'SUBMISSION_DIR must be omitted with --predictions, which only prints metrics',
    ),
    'finetune without a checkpoint': (FINETUNE_NEW, 'INITIAL_CHECKPOINT_PATH is not set'),
}


@pytest.mark.parametrize(('argv', 'line'), MISTAKES.values(), ids=MISTAKES)
def test_an_invalid_flag_is_one_line_and_exit_code_2(finetuned, argv, line, capsys):
    rows = [{'prediction': 'acceptable', 'input': 'another text' if i == 1 else f'text {i % 7}'} for i in range(10)]
    (finetuned / 'other.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    assert run(*argv) == 2
    err = capsys.readouterr().err
    assert err.startswith('error: ') and line in err and err.count('\n') == 1
