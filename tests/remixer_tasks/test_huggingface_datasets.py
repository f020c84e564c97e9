"""Datasets of Hugging Face's `datasets` are read as corpora and tasks."""

import gzip
import json
import shutil

import pytest
import seqio

from remixer_t5x.errors import UserError
from remixer_tasks import huggingface_datasets, text_pairs
from remixer_tasks.files.row_files import BadRecords
from tests.support.error_lines import error_message
from tests.support.fake_hub import FakeHub

datasets = pytest.importorskip('datasets', reason='datasets is not installed: pip install datasets')
from remixer_tasks.huggingface_datasets import HubDataset  # noqa: E402 (after the skip)

BYTES = seqio.ByteVocabulary(extra_ids=100)
LABELS = ['no', 'yes']


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Returns saved datasets of 60 rows with a question, a class label and a text; row 7 has no question."""
    columns = {
        'question': [None if i == 7 else f'is {i} even?' for i in range(60)],
        'label': [1 - i % 2 for i in range(60)],
        'text': [f'the number {i} ' * 5 for i in range(60)],
    }
    features = datasets.Features(
        question=datasets.Value('string'), label=datasets.ClassLabel(names=LABELS), text=datasets.Value('string')
    )
    rows = datasets.Dataset.from_dict(columns, features)
    path = tmp_path_factory.mktemp('saved')
    datasets.DatasetDict(train=rows, dev=rows.select(range(20, 30))).save_to_disk(path / 'both')
    rows.save_to_disk(path / 'rows')
    (path / 'parquet').mkdir()
    rows.to_parquet(path / 'parquet' / 'train.parquet')
    return path


def texts(task, split):
    dataset = task.get_dataset({'inputs': 64, 'targets': 16}, split=split, shuffle=False, num_epochs=1)
    return {
        (row['inputs_pretokenized'].decode(), row['targets_pretokenized'].decode())
        for row in dataset.as_numpy_iterator()
    }


def pair_task(path, **settings):
    corpus = huggingface_datasets.pairs(HubDataset(str(path), **settings), 'question: {question}', 'label')
    return text_pairs.task(corpus, BYTES)


def test_a_schema_error_is_shown_with_its_cause(tmp_path):
    """datasets wraps it in an error whose message does not include the cause."""
    rows = [{'text': 'a', 'meta': {'x': 1}}, {'text': 'b', 'meta': {'y': 's'}, 'extra': 3}]
    for index, row in enumerate(rows):
        (tmp_path / f'train-{index}.jsonl').write_text(json.dumps(row) + '\n')
    corpus = huggingface_datasets.corpus(HubDataset(str(tmp_path)))
    message = error_message(lambda: list(corpus.read(BadRecords(strict=False))))
    assert 'extra' in message and 'use a folder' not in message


def test_the_error_for_a_single_row_names_the_setting_of_hugging_face_datasets(tmp_path):
    (tmp_path / 'train.jsonl').write_text('{"text": "a"}\n')
    corpus = huggingface_datasets.corpus(HubDataset(str(tmp_path)))
    assert 'is a single example; set HF_VALIDATION_SPLIT' in error_message(corpus.prepare_folder)


def test_rows_become_pairs_with_the_names_of_labels(folder, capsys):
    task = pair_task(folder / 'both', validation_split='dev')
    expected = {(f'question: is {i} even?', LABELS[1 - i % 2]) for i in range(60)}
    assert texts(task, 'train') == expected - {('question: is 7 even?', 'no')}
    assert texts(task, 'validation') == {(f'question: is {i} even?', LABELS[1 - i % 2]) for i in range(20, 30)}
    assert '1 malformed skipped' in capsys.readouterr().err


def test_lists_of_class_labels_become_names_separated_by_spaces():
    tags = datasets.Sequence(datasets.ClassLabel(names=['O', 'B-PER']))
    columns = {'words': [['Ann', 'is', 'in'], ['no', 'one'], ['hidden']], 'tags': [[1, 0, 0], [0, 0], [-1]]}
    features = datasets.Features(words=datasets.Sequence(datasets.Value('string')), tags=tags)
    parse = huggingface_datasets._RowParser(
        'rows', features, lambda row: f'{row["words"]} {row["tags"]}', None
    ).parse_row
    texts = [parse(row, 1) for row in datasets.Dataset.from_dict(columns, features)]
    assert texts == ["['Ann', 'is', 'in'] ['B-PER', 'O', 'O']", "['no', 'one'] ['O', 'O']", "['hidden'] None"]


def test_float32_numbers_have_their_shortest_text():
    rows = datasets.Dataset.from_dict({'score': [0.1, None]}, datasets.Features(score=datasets.Value('float32')))
    parser = huggingface_datasets._RowParser('rows', rows.features, lambda row: str(row['score']), None)
    assert [parser.parse_row(row, 1) for row in rows] == ['0.1', 'None']


@pytest.mark.parametrize('streaming', [False, True])
def test_cells_of_csv_are_kept_as_written(tmp_path, streaming):
    """pandas, with which datasets reads CSV files, converts columns to numbers: 007 to 7, and 1 to 1.0 beside ''."""
    (tmp_path / 'train.csv').write_text('code,price,count\n007,1.50,1\n010,2,\n')
    rows = list(HubDataset(str(tmp_path))._load_split('train', streaming)[0])
    assert rows == [{'code': '007', 'price': '1.50', 'count': '1'}, {'code': '010', 'price': '2', 'count': None}]


@pytest.mark.parametrize('streaming', [False, True])
def test_quotes_in_tsv_are_ordinary_characters(tmp_path, streaming):
    (tmp_path / 'train.tsv').write_text('q\ta\nx\t"y\nz\tw"\nu\t"v" is\n')
    rows = list(HubDataset(str(tmp_path))._load_split('train', streaming)[0])
    assert [row['a'] for row in rows] == ['"y', 'w"', '"v" is']


@pytest.mark.parametrize('rows', ['x1,y1,z1', 'x1,y1,'])
def test_a_csv_file_with_more_cells_than_column_names_is_rejected(tmp_path, rows):
    """pandas would use the first column as row names, and shift the names of all columns."""
    (tmp_path / 'train.csv').write_text('q,a\nx,y\n')
    (tmp_path / 'test.csv').write_text(f'q,a\n{rows}\n')
    message = error_message(lambda: HubDataset(str(tmp_path))._load_split('train'))
    assert "test.csv must have a name for each column, got more cells than names ('q', 'a')" in message


def test_only_empty_cells_of_csv_are_missing(tmp_path):
    """By default, pandas replaces all of these texts with missing values."""
    rows = ['None,0', 'NA,1', 'null,2', ',3', 'nan,4', 'N/A,']
    (tmp_path / 'train.csv').write_text('\n'.join(['answer,number', *rows]))
    pairs = huggingface_datasets.pairs(HubDataset(str(tmp_path)), '{number}', 'answer').read(BadRecords(strict=False))
    assert [pair.split(text_pairs.SEPARATOR) for pair in pairs] == [
        ['0', 'None'],
        ['1', 'NA'],
        ['2', 'null'],
        ['4', 'nan'],
    ]


def test_templates_may_use_the_items_of_a_column_with_objects(tmp_path):
    rows = [{'translation': {'en': f'cat {index}', 'de': f'Katze {index}'}} for index in range(2)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path)
    corpus = huggingface_datasets.pairs(HubDataset(str(tmp_path)), 'translate: {translation.en}', 'translation.de')
    pairs = [pair.split(text_pairs.SEPARATOR) for pair in corpus.read(BadRecords(strict=True))]
    assert pairs == [[f'translate: cat {index}', f'Katze {index}'] for index in range(2)]


@pytest.mark.parametrize('kind', ['rows', 'parquet'])
def test_rows_are_held_out_of_a_single_split(folder, kind):
    task = pair_task(folder / kind, validation_fraction=0.2)
    train, held_out = texts(task, 'train'), texts(task, 'validation')
    assert held_out and not train & held_out and len(train | held_out) == 59


@pytest.mark.parametrize('streaming', [False, True])
def test_files_of_an_earlier_save_are_ignored(tmp_path, streaming):
    for rows, shards in ((20, 4), (9, 3)):
        columns = {'text': [f'{number} of {rows}' for number in range(rows)]}
        datasets.Dataset.from_dict(columns).save_to_disk(tmp_path, num_shards=shards)
    state = json.loads((tmp_path / 'state.json').read_text())
    # The order is that of state.json.
    state['_data_files'] = state['_data_files'][::-1]
    (tmp_path / 'state.json').write_text(json.dumps(state))
    splits, files = huggingface_datasets._load_folder(tmp_path, None, streaming)
    assert [row['text'] for row in splits['train']] == datasets.load_from_disk(tmp_path)['text']
    assert len(files['train']) == 3


@pytest.mark.parametrize(
    ('settings', 'templates', 'message'),
    [
        ({}, ('{questions}', '{label}'), "('question', 'label', 'text'), got 'questions'"),
        ({}, ('{question}', 'labels'), "got 'labels'"),
        ({'strict': True}, ('{question}', '{label}'), 'column question is empty'),
    ],
)
def test_wrong_splits_and_columns_are_rejected(folder, settings, templates, message):
    corpus = huggingface_datasets.pairs(HubDataset(str(folder / 'both'), **settings), *templates)
    assert message in error_message(lambda: list(corpus.read_training_documents()))


HOSTILE = {
    'README.md': 'file://{secret}',
    'a folder link': None,
    'state.json': None,
}


@pytest.mark.parametrize(
    ('kind', 'streaming'), [*((kind, False) for kind in HOSTILE), ('README.md', True), ('state.json', True)]
)
def test_a_folder_cannot_read_files_outside_of_it(folder, tmp_path, kind, streaming):
    """README.md, links, and state.json of `save_to_disk` can point to any file."""
    secret, untrusted = tmp_path / 'secret' / 'private.jsonl', tmp_path / 'untrusted'
    secret.parent.mkdir()
    secret.write_text('{"text": "private"}\n' * 300)
    untrusted.mkdir()
    if kind == 'state.json':
        shutil.copytree(folder / 'rows', secret.parent, dirs_exist_ok=True)
        shutil.copytree(folder / 'rows', untrusted, dirs_exist_ok=True)
        state = json.loads((untrusted / 'state.json').read_text())
        for file in untrusted.glob('*.arrow'):
            file.unlink()
        state['_data_files'] = [{'filename': f'../secret/{file["filename"]}'} for file in state['_data_files']]
        (untrusted / 'state.json').write_text(json.dumps(state))
    elif kind == 'a folder link':
        (untrusted / 'data').symlink_to(secret.parent)
    else:
        (untrusted / 'train.jsonl').write_text(''.join(f'{{"text": "public {row}"}}\n' for row in range(9)))
        name = HOSTILE[kind].format(secret=secret)
        (untrusted / 'README.md').write_text(f'---\nconfigs:\n- config_name: default\n  data_files: {name}\n---\n')
    try:
        corpus = huggingface_datasets.corpus(HubDataset(str(untrusted), validation_fraction=0.3), streaming=streaming)
        texts = {
            row['text'].decode()
            for split in ('train', 'validation')
            for row in corpus.create_source().get_dataset(split, False).as_numpy_iterator()
        }
    except UserError as error:
        assert '\n' not in str(error) and HOSTILE[kind] is None
    else:
        assert texts == {f'public {row}' for row in range(9)}


def test_the_last_extension_selects_the_reader(tmp_path):
    with gzip.open(tmp_path / 'train-0.5.csv.jsonl.gz', 'wt') as file:
        file.writelines(f'{{"text": "row {row}"}}\n' for row in range(9))
    (tmp_path / 'train.jsonl.bak').write_text('{"text": "old"}\n')
    corpus = huggingface_datasets.corpus(HubDataset(str(tmp_path)))
    assert [*corpus.read(BadRecords(strict=True))] == [f'row {row}' for row in range(9)]


def test_a_configuration_is_a_folder_with_data_files(tmp_path):
    for language in ('de', 'en'):
        (tmp_path / language).mkdir()
        (tmp_path / language / 'train[1].csv').write_text(f'text\nwords of {language}\nother {language}\n')
        (tmp_path / language / 'LICENSE').write_text('none')
    (tmp_path / 'README.md').write_text('---\nconfigs:\n- config_name: default\n  data_files: fr/*\n---\n')
    corpus = huggingface_datasets.corpus(HubDataset(str(tmp_path), 'de'))
    assert {*corpus.read_training_documents()} < {'words of de', 'other de'}
    missing = huggingface_datasets.corpus(HubDataset(str(tmp_path), 'fr'))
    assert "got 'fr'" in error_message(lambda: list(missing.read_training_documents()))


def test_a_copied_data_set_keeps_its_commit_and_prints_it(tmp_path, monkeypatch, capsys):
    """Other settings, which copy it again, read the same commit."""
    hub = FakeHub()
    try:
        hub.use_for_datasets(monkeypatch, tmp_path)
        monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'cache'))

        def read(**settings):
            """Returns the documents, and the commit that is printed in a new process."""
            huggingface_datasets._print_commit.cache_clear()
            corpus = huggingface_datasets.corpus(HubDataset('some/body', **settings))
            documents = {*corpus.read_training_documents()}
            lines = [line for line in capsys.readouterr().err.splitlines() if 'HF_REVISION' in line]
            assert len(lines) <= 1
            return documents, lines[0].split('commit ')[1].split(';')[0] if lines else None

        hub.models['some/body'] = {'main': {'train.csv': b'text\na\na\nb\n'}}
        documents, first = read()
        revisions = hub.models['some/body']
        revisions |= {'before': revisions['main'], 'main': {'train.csv': b'text\nc\nc\nd\n'}}
        assert len(first) == 40 and documents <= {'a', 'b'} and read() == (documents, first)
        assert read(strict=True) == (documents, first)
        newest = datasets.load_dataset_builder('some/body').hash
        documents, printed = read(revision=newest)
        assert documents <= {'c', 'd'} and printed is None
    finally:
        hub.close()
