"""Commands for encoder-only models: masked language modelling, finetuning a classifier, labels and embeddings."""

import contextlib
import io
import json

import numpy as np
import pytest

import remixer_t5x
from remixer_t5x.cli.main import main
from tests.support import command_folder, compare_runs, saved_run, toy_tasks

STEPS = ['--gin.BATCH_SIZE=8', '--gin.LOG_PERIOD=1', '--gin.CHECKPOINT_PERIOD=2', '--gin.EVAL_PERIOD=2']
LABELS = "--gin.LABELS=('no', 'yes')"


@pytest.fixture(scope='module')
def current_folder(tmp_path_factory):
    """Yields the current folder with a saved masked language model, `mlm`, and the classifier of `classes.gin`."""
    with command_folder.working_directory(tmp_path_factory.mktemp('encoders')) as folder:
        vocabulary, lengths = 'VOCABULARY = @vocabularies.byte()\n', {'inputs': 12, 'targets': 12}
        masked = toy_tasks.config('masked', lengths, 'encoder_only')
        saved_run.write_run(folder / 'mlm', masked + vocabulary, steps=(4,))
        task = f'{vocabulary}toy_tasks.labelled.vocabulary = %VOCABULARY\n'
        (folder / 'classes.gin').write_text(toy_tasks.config('labelled', lengths, 'classifier') + task)
        (folder / 'texts.txt').write_text('text 1\ntext 2\na longer text than twelve bytes\n')
        yield folder


@pytest.fixture(scope='module')
def finetune_output():
    return io.StringIO()


@pytest.fixture(scope='module')
def classes(current_folder, finetune_output):
    flags = [*STEPS, '--gin.MODEL_DIR=classes', '--gin.TRAIN_STEPS_RELATIVE=2', LABELS, '--gin.EVAL_BATCH_SIZE=4']
    files = ['--gin_file=classes.gin', '--gin_file=runs/finetune.gin']
    with contextlib.redirect_stdout(finetune_output):
        assert main(['finetune', *files, *flags, '--gin.INITIAL_CHECKPOINT_PATH=mlm']) == 0
    return current_folder / 'classes'


def test_a_classifier_starts_with_the_encoder_and_a_fresh_head(classes, finetune_output):
    table = ' '.join(finetune_output.getvalue().split())
    assert 'parameters of mlm: 6 arrays are loaded' in table and ' fresh head/' in table
    assert any('head' in name for name in compare_runs.checkpoint_arrays(classes, 2))
    report = [record for record in compare_runs.read_log(classes) if record['kind'].endswith('labelled')]
    assert report and 0 <= report[-1]['accuracy'] <= 100


def test_eval_and_infer_predict_labels(classes, capsys):
    files = ['--gin_file=classes.gin', LABELS, '--checkpoint=classes']
    assert main(['eval', *files, '--gin.EVAL_BATCH_SIZE=4', '--output=evaluated']) == 0
    rows = (classes.parent / 'evaluated/predictions/labelled-validation-2.jsonl').read_text().splitlines()
    assert len(rows) == 10 and {json.loads(row)['prediction'] for row in rows} <= {'no', 'yes'}
    assert main(['infer', *files, '--input=texts.txt', '--output=labels.jsonl']) == 0
    rows = [json.loads(line) for line in (classes.parent / 'labels.jsonl').read_text().splitlines()]
    assert [set(row['predictions']) for row in rows] == [{'no', 'yes'}] * 3
    assert all(np.exp(row['scores']).sum() == pytest.approx(1.0, rel=1e-5) for row in rows)
    loaded = remixer_t5x.load('classes').classify(['text 1', 'text 2'])
    assert [answer.texts for answer in loaded] == [row['predictions'] for row in rows[:2]]


def test_embeddings_are_written_to_npz_files(current_folder):
    files = ['--checkpoint=mlm', '--input=texts.txt']
    assert main(['infer', *files, '--embed', '--output=sentences.npz']) == 0
    assert main(['infer', *files, '--embed=tokens', '--pooling=first', '--output=tokens.npz']) == 0
    encoded = remixer_t5x.load('mlm').encode((current_folder / 'texts.txt').read_text().splitlines())
    with np.load('sentences.npz') as embeddings:
        assert set(embeddings) == {'sentences'}
        np.testing.assert_allclose(embeddings['sentences'], encoded.mean, rtol=1e-4, atol=1e-5)
    with np.load('tokens.npz') as embeddings:
        assert np.diff(embeddings['offsets']).tolist() == [7, 7, 12] and len(embeddings['ids']) == 26
        np.testing.assert_allclose(embeddings['tokens'], encoded.hidden[encoded.mask], rtol=1e-4, atol=1e-5)
        first = embeddings['tokens'][embeddings['offsets'][:-1]]
        np.testing.assert_allclose(embeddings['sentences'], first, rtol=1e-6)


def test_embeddings_use_the_lengths_saved_from_python(tmp_path):
    """gMLP's parameters depend on the lengths, so the saved configuration contains those of the training run."""
    config = saved_run.CONFIG.replace('models/t5_1_1.gin', 'models/gmlp_mixer.gin')
    run, text = saved_run.write_run(tmp_path / 'run', config, steps=(1,)), 'a text of more than ten bytes'
    loaded = remixer_t5x.load(run, lengths={'inputs': 10})
    (tmp_path / 'text.txt').write_text(text)
    checkpoint = f'--checkpoint={loaded.save(tmp_path / "short")}'
    assert main(['infer', checkpoint, f'--input={tmp_path}/text.txt', '--embed', f'--output={tmp_path}/a.npz']) == 0
    with np.load(tmp_path / 'a.npz') as file:
        np.testing.assert_allclose(file['sentences'], loaded.encode(text).mean, rtol=1e-4, atol=1e-5)


def test_the_two_texts_of_a_pair_are_not_embedded_as_one_text(tmp_path, capsys):
    """A template of two texts is read by `infer` without --embed, which writes the similarity of the texts."""
    pairs = "include 'model_types/embedding.gin'\nINPUTS = '{a}\\t{b}'\n"
    run = saved_run.write_run(tmp_path / 'run', saved_run.CONFIG + pairs, steps=(1,))
    (tmp_path / 'pairs.jsonl').write_text('{"a": "one", "b": "two"}\n')
    flags = [f'--checkpoint={run}', f'--input={tmp_path}/pairs.jsonl', '--embed', f'--output={tmp_path}/b.npz']
    assert main(['infer', *flags]) == 2
    error = capsys.readouterr().err
    assert 'index 0' in error and "--gin.INPUT_TEMPLATE='{COLUMN}'" in error
    assert main(['infer', *flags, '--gin.INPUT_TEMPLATE={b}']) == 0
    assert 'warning' not in capsys.readouterr().err
    with np.load(tmp_path / 'b.npz') as file:
        np.testing.assert_allclose(file['sentences'], remixer_t5x.load(run).encode('two').sentence, atol=1e-5)
