"""`remixer-t5x report` on two small runs."""

import json
import shutil

import pytest

from remixer_t5x.cli.main import main
from tests.support import command_folder

TRAIN = [
    'train', '--gin_file=experiments/own_text.gin', '--gin.FILES=text.txt', '--gin.VALIDATION_FRACTION=0.5',
    '--gin.VOCABULARY=@vocabularies.byte()', '--gin.VOCAB_SIZE=384',
    "--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 14}",
    '--gin.EMBED_DIM=8', '--gin.NUM_HEADS=1', '--gin.HEAD_DIM=8', '--gin.REMIXER_DIM=8', '--gin.NUM_ENCODER_LAYERS=1',
    '--gin.NUM_DECODER_LAYERS=1', '--gin.BATCH_SIZE=2', '--gin.TRAIN_STEPS=2', '--gin.WARMUP_STEPS=1',
    '--gin.LOG_PERIOD=1', '--gin.EVAL_PERIOD=2', '--gin.EVAL_STEPS=1', '--gin.CHECKPOINT_PERIOD=2',
]  # fmt: skip


@pytest.fixture(scope='module')
def current_folder(tmp_path_factory):
    """Yields the current folder with two runs, `first` and `second`, that differ in their seeds."""
    row = {'index': 0, 'input': '<script>alert(1)</script>', 'target': 'a b', 'prediction': '<script>alert(2)</script>'}
    types = {f'type_{n}': 1.5 * n for n in range(9)}
    record = {'kind': 'gen/cogs', 'step': 2, 'exact_match': 36.0, **types, 'timing': {}}
    with command_folder.working_directory(tmp_path_factory.mktemp('report')) as folder:
        (folder / 'text.txt').write_text('\n\n'.join(f'Paragraph {n} of a text about {n} things.' for n in range(60)))
        assert main([*TRAIN, '--gin.MODEL_DIR=first']) == 0
        shutil.copytree('first', 'second')
        config = folder / 'second' / 'config.gin'
        config.write_text(config.read_text().replace('\nSEED = 0\n', '\nSEED = 1\n'))
        (folder / 'first' / 'eval' / 'predictions').mkdir(parents=True)
        (folder / 'first' / 'eval' / 'predictions' / 'cogs-gen-2.jsonl').write_text(json.dumps(row) + '\n')
        (folder / 'first' / 'eval' / 'metrics.jsonl').write_text(json.dumps(record) + '\n')
        yield folder


def test_a_report_on_two_seeds_has_the_pictures_of_the_first(current_folder, capsys):
    assert main(['report', 'first', 'second', '--pictures', '--text=What is it?', '--pictures_dir=pictures']) == 0
    assert capsys.readouterr().out.startswith('report       report.html')
    text = (current_folder / 'report.html').read_text()
    assert '<script>alert' not in text and 'alert(2)' in text
    for words in ('SEED', 'type 8', '36.00', 'What H learned, encoder', 'Self-attention, encoder', 'Cross-attention',
                  'Pseudo-attention, decoder to text', 'H is near zero in 1 of 1 layers'):  # fmt: skip
        assert words in text, words
    assert text.count('What H learned, encoder</b>') == 1
    names = {path.name for path in (current_folder / 'pictures').iterdir()}
    assert {'first-remixer-encoder.png', 'first-remixer-encoder.svg', 'first-attention-cross.svg'} <= names
    assert not [name for name in names if name.startswith('second')]


def test_pictures_are_omitted_without_the_vocabulary(current_folder, capsys):
    shutil.copytree('first', 'moved', dirs_exist_ok=True)
    config = current_folder / 'moved' / 'config.gin'
    config.write_text(config.read_text().replace('import vocabularies', 'import vocabularies_of_mine'))
    assert main(['report', 'moved', '--pictures', '--out=moved.html']) == 0
    reason = 'No pictures of what was learned: '
    assert reason in capsys.readouterr().err and reason in (current_folder / 'moved.html').read_text()


@pytest.mark.parametrize(
    ('argv', 'line'),
    [
        (['first/checkpoints'], 'is not a run (it has no remixer_t5x_run.json)'),
        (['empty'], 'empty has no metrics yet; wait for the first log (LOG_PERIOD steps)'),
        (['first', '--text=x'], '--text requires --pictures'),
        (['first', '--out=text.txt/x.html'], 'use another file for --out'),
    ],
)
def test_an_invalid_flag_is_one_line_and_exit_code_2(current_folder, capsys, argv, line):
    shutil.copytree('first', 'empty', dirs_exist_ok=True)
    (current_folder / 'empty/metrics.jsonl').write_text('')
    assert main(['report', *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith('error: ') and error.count('\n') == 1 and line in error
