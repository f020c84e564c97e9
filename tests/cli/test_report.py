"""`remixer-t5x report` on two small runs."""

import json
import shutil

import pytest

from remixer_t5x.cli.main import main
from remixer_t5x.run_folder import model_dir
from tests.support import command_folder, saved_run

CONFIG = saved_run.CONFIG.replace("include 'models/t5_1_1.gin'", "include 'models/remixer.gin'")
CONFIG += 'REMIXER_DIM = 8\nSEED = 0\n'


@pytest.fixture(scope='module')
def current_folder(tmp_path_factory):
    """Yields the current folder with two runs, `first` and `second`, that differ in their seeds."""
    row = {'index': 0, 'input': '<script>alert(1)</script>', 'target': 'a b', 'prediction': '<script>alert(2)</script>'}
    types = {f'type_{n}': 1.5 * n for n in range(9)}
    record = {'kind': 'gen/cogs', 'step': 2, 'exact_match': 36.0, **types, 'timing': {}}
    losses = [{'kind': 'train', 'step': step, 'loss': 6.0 / step, 'timing': {}} for step in (1, 2)]
    with command_folder.working_directory(tmp_path_factory.mktemp('report')) as folder:
        saved_run.write_run(folder / 'first', CONFIG, steps=(2,))
        (folder / 'first' / model_dir.METRICS).write_text(''.join(json.dumps(line) + '\n' for line in losses))
        shutil.copytree('first', 'second')
        (folder / 'second' / model_dir.CONFIG).write_text(CONFIG.replace('SEED = 0', 'SEED = 1'))
        (folder / 'first' / 'eval' / 'predictions').mkdir(parents=True)
        (folder / 'first' / 'eval' / 'predictions' / 'cogs-gen-2.jsonl').write_text(json.dumps(row) + '\n')
        (folder / 'first' / 'eval' / 'metrics.jsonl').write_text(json.dumps(record) + '\n')
        (folder / 'text.txt').write_text('a file')
        yield folder


def test_a_report_on_two_seeds_has_the_pictures_of_the_first(current_folder, capsys):
    assert main(['report', 'first', 'second', '--pictures', '--text=What is it?', '--pictures_dir=pictures']) == 0
    assert capsys.readouterr().out.startswith('report       report.html')
    text = (current_folder / 'report.html').read_text()
    assert '<script>alert' not in text and 'alert(2)' in text
    for words in ('SEED', 'type_8', '36.00', 'What H learned, encoder', 'Self-attention, encoder', 'Cross-attention',
                  'Pseudo-attention, decoder to text'):  # fmt: skip
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


def test_invalid_arguments_raise_a_one_line_error(current_folder, capsys):
    shutil.copytree('first', 'empty')
    (current_folder / 'empty/metrics.jsonl').write_text('')
    for argv, line in ((['empty'], 'no metrics yet'), (['first', '--out=text.txt/x.html'], 'text.txt/x.html')):
        assert main(['report', *argv]) == 2
        error = capsys.readouterr().err
        assert error.startswith('error: ') and error.count('\n') == 1 and line in error
