"""Reports on untrusted runs are written completely or raise a one-line error."""

import json
import pathlib

import pytest

from remixer_t5x.errors import UserError
from remixer_t5x.extras.reports import report_writer
from remixer_t5x.run_folder import model_dir
from tests.support import untrusted_inputs

LINE = {'kind': 'train', 'step': 1, 'loss': 2.0, 'timing': {'clock': 1.0, 'seconds_per_step': 0.5}}
ROW = {'index': 0, 'input': 'a', 'target': 'b', 'prediction': 'c', 'metrics': {}}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / 'run'
    (folder / 'eval' / 'predictions').mkdir(parents=True)
    (folder / model_dir.MARKER_FILE).write_text('{}')
    (folder / model_dir.METRICS).write_text(json.dumps(LINE) + '\n')
    (folder / 'eval' / 'predictions' / 'cogs-gen-2.jsonl').write_text(json.dumps(ROW) + '\n')
    return folder


def write_report(run):
    report_writer.write_report([str(run)], str(run.parent / 'report.html'))
    return (run.parent / 'report.html').read_text()


def format_record(record, text):
    """Returns `record` as a line of JSON, with values that Python would not write, such as {'loss': '1e999'}."""
    return json.dumps({name: value for name, value in record.items() if name not in text})[:-1] + ''.join(
        f', "{name}": {value}' for name, value in text.items()
    ) + '}\n'  # fmt: skip


def test_a_lone_surrogate_becomes_a_question_mark(run):
    texts = {name: rf'"{name} \ud800 text"' for name in ('prediction', 'input', 'target')}
    (run / 'eval' / 'predictions' / 'cogs-gen-2.jsonl').write_text(format_record(ROW, texts))
    (run / 'eval' / model_dir.METRICS).write_text(format_record({'step': 2, 'f1': 5.0}, {'kind': r'"gen/\ud800x"'}))
    page = write_report(run)
    assert '?x' in page and page.count('? text') == len(texts)


@pytest.mark.parametrize(
    'text',
    [
        {'step': 'NaN'}, {'step': '9' * 30}, {'loss': '1e999'}, {'timing': '3'}, {'kind': 'null'}, {'index': '[0]'},
        {'score': '"0"'},
    ],
)  # fmt: skip
def test_a_report_without_a_valid_record_raises_one_line_and_keeps_the_old_report(run, text):
    (run.parent / 'report.html').write_text('the old report')
    is_metric = text.keys() <= {*LINE}
    file, record = (model_dir.METRICS, LINE) if is_metric else ('eval/predictions/cogs-gen-2.jsonl', ROW)
    (run / file).write_text(format_record(record, text))
    with pytest.raises(UserError, match='no metrics yet' if is_metric else 'line 1: it is not a prediction') as error:
        write_report(run)
    assert len(str(error.value).splitlines()) == 1
    assert (run.parent / 'report.html').read_text() == 'the old report'
    assert sorted(path.name for path in run.parent.iterdir()) == ['report.html', 'run']


@pytest.mark.parametrize('name', [model_dir.METRICS, model_dir.CONFIG, 'eval/predictions/cogs-gen-3.jsonl'])
def test_the_report_does_not_wait_for_a_pipe(run, name):
    (run / name).unlink(missing_ok=True)
    untrusted_inputs.create_special_path('pipe', run / name)
    with pytest.raises(UserError, match=pathlib.Path(name).name) as error:
        write_report(run)
    assert len(str(error.value).splitlines()) == 1
