"""Tasks format rows and score predictions as T5's library does, whose results golden/make_t5_tasks.py recorded."""

import hashlib
import json
import pathlib

import pytest

from remixer_t5x import tf_data
from remixer_tasks import catalogue
from tests.support import toy_tasks
from tests.support.paths import write_text

GOLDEN = pathlib.Path(__file__).parent / 'golden'
T5 = json.loads((GOLDEN / 't5_tasks.json').read_text())
REAL_ROWS = json.loads((GOLDEN / 't5_real_rows.json').read_text())
FIELDS = ('inputs', 'targets', 'answers', 'label', 'idx/question', 'idx/passage', 'idx/query')
# Our task for each task of the recorded scores.
TASK_NAMES = {
    'super_glue/boolq': 'super_glue_boolq_v102',
    'super_glue/cb': 'super_glue_cb_v102',
    'super_glue/rte': 'super_glue_rte_v102',
    'super_glue/multirc': 'super_glue_multirc_v102',
    'super_glue/record': 'super_glue_record_v102',
    'glue/cola': 'glue_cola_v002',
    'glue/mrpc': 'glue_mrpc_v002',
    'glue/mnli': 'glue_mnli_v002',
    'glue/stsb': 'glue_stsb_v002',
    'squad': 'squad_v010_allanswers',
    'wsc': 'super_glue_wsc_v102_simple_eval',
    'dpr': 'dpr_v001_simple',
}


@pytest.fixture(scope='module')
def raw_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('raw')
    for name, text in T5['files'].items():
        write_text(folder / name, text)
    return str(folder)


def to_python(value):
    if isinstance(value, bytes):
        return value.decode()
    return [to_python(item) for item in value] if value.ndim else value.item()


def read_rows(name, data_dir):
    task_name, split = name.split('/')
    task = catalogue.find_task(task_name)
    dataset = task.to_text(task.create_source(data_dir).get_dataset(split, shuffle=False))
    return [
        {key: to_python(value) for key, value in example.items() if key in FIELDS}
        for example in tf_data.iterate_as_numpy(dataset)
    ]


def sorted_lines(rows):
    return sorted(json.dumps(row, sort_keys=True, ensure_ascii=False) for row in rows)


@pytest.mark.parametrize('name', sorted(T5['examples']))
def test_rows_have_the_text_format_of_t5(name, raw_folder):
    assert sorted_lines(read_rows(name, raw_folder)) == sorted_lines(T5['examples'][name])


@pytest.mark.parametrize('name', sorted(REAL_ROWS))
def test_real_rows_have_the_text_format_of_t5(name, real_data):
    count, digest = REAL_ROWS[name]
    rows = sorted_lines(read_rows(name, str(real_data)))
    assert len(rows) == count
    assert hashlib.sha256('\n'.join(rows).encode()).hexdigest() == digest


def as_bytes(example):
    """Returns the example as tf.data yields it."""
    converters = {str: str.encode, list: lambda texts: [text.encode() for text in texts], int: int}
    return {name: converters[type(value)](value) for name, value in example.items()}


def score(task, examples, predictions):
    """Returns all metrics of the postprocessed targets and predictions."""
    postprocess = task.postprocess or (lambda text, **_: text)
    targets = [postprocess(example['targets'], example=as_bytes(example), is_target=True) for example in examples]
    outputs = [
        postprocess(text, example=as_bytes(example), is_target=False)
        for text, example in zip(predictions, examples, strict=True)
    ]
    values = {}
    for metric in task.metrics:
        values.update(metric(targets, outputs))
    return values


@pytest.mark.parametrize('index', range(len(T5['scores'])))
def test_scores_of_predictions_equal_those_of_t5(index):
    case = T5['scores'][index]
    actual = score(catalogue.find_task(TASK_NAMES[case['task']]), case['examples'], case['predictions'])
    assert actual == pytest.approx(case['metrics'], abs=1e-9)


def test_splits_without_labels_have_no_metrics():
    for name in ('super_glue_rte_v102', 'glue_stsb_v002', 'super_glue_multirc_v102', 'super_glue_wsc_v102_simple_eval'):
        task = catalogue.find_task(name)
        target = '-1.0' if 'stsb' in name else '<unk>'
        example = {'targets': target, 'idx/question': 0, 'label': -1, 'targets_pretokenized': 'x'}
        assert score(task, [example, example], ['entailment', '1.0']) == {}, name


def test_tfds_and_raw_files_give_the_same_examples(raw_folder, tmp_path):
    """The TFDS datasets are prepared from the raw files by TFDS."""
    for folder, config in (('WSC', 'wsc.fixed'), ('MultiRC', 'multirc'), ('ReCoRD', 'record'), ('CB', 'cb')):
        files = pathlib.Path(raw_folder) / 'super_glue' / folder
        toy_tasks.prepare_super_glue(config, files, tmp_path, rows_per_file=2)
    for name in (
        'super_glue_wsc_v102_simple_train/train',
        'super_glue_multirc_v102/validation',
        'super_glue_record_v102/validation',
        'super_glue_cb_v102/validation',
    ):
        task, split = name.split('/')
        prepared, raw = (catalogue.find_task(task).create_source(folder) for folder in (str(tmp_path), raw_folder))
        assert prepared.find_origin(split).startswith(str(tmp_path / 'super_glue'))
        assert sorted_lines(read_rows(name, str(tmp_path))) == sorted_lines(read_rows(name, raw_folder)), name
        assert prepared.count_examples(split) == raw.count_examples(split)
