"""Datasets of Hugging Face's `datasets` are read as corpora and tasks."""

import gzip
import json
import shutil

import pytest
import seqio

from remixer_t5x.errors import UserError
from remixer_tasks import huggingface_datasets, text_pairs
from remixer_tasks.files.text_lines import BadRecords
from tests.support.error_lines import error_message

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
    assert texts == ["['Ann', 'is', 'in'] ['B-PER', 'O', 'O']", "['no', 'one'] ['O', 'O']", "['hidden'] [None]"]


def test_float32_numbers_have_their_shortest_text_and_labels_their_names():
    """This includes those in objects."""
    features = {'score': datasets.Value('float32'), 'label': datasets.ClassLabel(names=['no', 'yes'])}
    values = {'score': [0.1, None], 'label': [1, None]}
    inner = [{name: value[row] for name, value in values.items()} for row in range(2)]
    rows = datasets.Dataset.from_dict({**values, 'inner': inner}, datasets.Features({**features, 'inner': features}))
    names = ('score', 'label', 'inner.score', 'inner.label')
    parser = huggingface_datasets._RowParser('', rows.features, lambda row: ' '.join(f'{row[n]}' for n in names), None)
    assert [parser.parse_row(row, 1) for row in rows] == ['0.1 yes 0.1 yes', 'None None None None']


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
    (tmp_path / 'train-0.5.csv.jsonl.gz').rename(tmp_path / 'train.csv.gz')
    assert 'read CSV and TSV with' in error_message(lambda: list(corpus.read(BadRecords(strict=True))))
    (tmp_path / 'train.jsonl').touch()
    assert '(its files are empty)' in error_message(lambda: list(corpus.read(BadRecords(strict=True))))


def test_a_configuration_is_a_folder_with_data_files(tmp_path):
    for language in ('de', 'en'):
        (tmp_path / language).mkdir()
        (tmp_path / language / 'train[1].txt').write_text(f'words of {language}\nother {language}\n')
        (tmp_path / language / 'LICENSE').write_text('none')
    (tmp_path / 'README.md').write_text('---\nconfigs:\n- config_name: default\n  data_files: fr/*\n---\n')
    corpus = huggingface_datasets.corpus(HubDataset(str(tmp_path), 'de'))
    assert {*corpus.read_training_documents()} < {'words of de', 'other de'}
    missing = huggingface_datasets.corpus(HubDataset(str(tmp_path), 'fr'))
    assert "got 'fr'" in error_message(lambda: list(missing.read_training_documents()))
