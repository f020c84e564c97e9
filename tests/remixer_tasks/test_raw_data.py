"""Labelled datasets from raw files: layouts, order, positions, and errors of one line."""

import json

import numpy as np
import pytest

from remixer_t5x.errors import UserError
from remixer_tasks import catalogue, mixtures, vocabularies
from remixer_tasks.corpora import arrow_files
from tests.support.paths import write_text

RTE = [{'premise': f'P {n}.', 'hypothesis': 'H.', 'label': 'entailment', 'idx': n} for n in range(40)]
CSV = 'premise,hypothesis,label\n"A ""b"",\nc.",d,not_entailment\ne,f,entailment\n'


def wsc_row(text, index, word):
    target = {'span1_index': 1, 'span1_text': text.split()[1], 'span2_index': index, 'span2_text': word}
    return json.dumps({'text': text, 'idx': 0, 'label': True, 'target': target})


def write_rte(folder, train=RTE, validation=RTE[:7], name='super_glue/RTE'):
    for file, rows in (('train', train), ('val', validation)):
        write_text(folder / f'{name}/{file}.jsonl', ''.join(json.dumps(row) + '\n' for row in rows))


def texts(name, split, folder):
    _, examples = catalogue.read_examples(name, split, n=100, data_dir=str(folder))
    return [inputs for _, pairs in examples for inputs, _ in pairs]


def test_rows_keep_the_order_of_the_file_and_become_ids_with_eos(tmp_path):
    write_rte(tmp_path)
    assert texts('super_glue_rte_v102', 'train', tmp_path) == [f'rte hypothesis: H. premise: P {n}.' for n in range(40)]
    vocabulary = vocabularies.byte()
    task = catalogue.task('super_glue_rte_v102', vocabulary, str(tmp_path))
    dataset = task.get_dataset({'inputs': 64, 'targets': 8}, 'validation', shuffle=False)
    example = next(dataset.as_numpy_iterator())
    assert example['inputs'].tolist() == [*vocabulary.encode('rte hypothesis: H. premise: P 0.'), 1]
    assert example['targets'].tolist() == [*vocabulary.encode('entailment')[:7], 1], 'a truncated text ends with EOS'


def test_the_first_layout_whose_files_exist_is_read(tmp_path):
    """The first file is a CSV file with quotes and line breaks."""
    write_text(tmp_path / 'nli_datasets/rte/dev.csv', CSV)
    assert catalogue.locate_splits(catalogue.find_task('glue_rte_v002').dataset, str(tmp_path)) == {
        'train': None,
        'validation': str(tmp_path / 'nli_datasets/rte/dev.csv'),
        'test': None,
    }
    expected = ['rte sentence1: A "b",\nc. sentence2: d', 'rte sentence1: e sentence2: f']
    assert texts('glue_rte_v002', 'validation', tmp_path) == expected
    write_text(tmp_path / 'glue/RTE/dev.tsv', 'index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n')
    assert texts('glue_rte_v002', 'validation', tmp_path) == ['rte sentence1: a sentence2: b']


def test_a_pronoun_at_the_end_is_marked_with_asterisks(tmp_path):
    """As in T5, the text then ends with a space."""
    write_text(tmp_path / 'super_glue/WSC/train.jsonl', wsc_row('They gave it to her', 4, 'her'))
    assert texts('super_glue_wsc_v102_simple_train', 'train', tmp_path) == ['wsc: They gave it to *her* ']


def test_the_same_rows_are_always_stored_as_the_same_bytes(tmp_path):
    """A run resumes after the cache was cleared or on another computer, although its data is fingerprinted.

    The order of fields in a serialized map changes with the process unless they are sorted.
    """
    write_rte(tmp_path)
    source = catalogue.task('super_glue_rte_v102', vocabularies.byte(), str(tmp_path)).source
    (path,) = source.list_shards('train')
    fields = [b'hypothesis', b'idx', b'label', b'premise']
    records = arrow_files.ArrowDocuments([path]).read_documents(np.arange(len(RTE)))
    assert all(sorted(fields, key=bytes(record).index) == fields for record in records)


def test_folders_are_searched_in_order(tmp_path, monkeypatch):
    """The argument, or REMIXER_T5X_DATA, precedes the downloads; a changed file is read again."""
    for name, count in (('argument', 1), ('environment', 2), ('cache/data', 3)):
        write_rte(tmp_path / name, validation=RTE[:count])

    def count(data_dir=None):
        return len(catalogue.read_examples('super_glue_rte_v102', 'validation', 100, data_dir)[1])

    monkeypatch.delenv('REMIXER_T5X_DATA', raising=False)
    monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path / 'nothing'))
    assert count() == 3
    assert catalogue.get_download_folder() == str(tmp_path / 'cache/data')
    monkeypatch.setenv('REMIXER_T5X_DATA', str(tmp_path / 'environment'))
    assert count() == 2
    assert count(str(tmp_path / 'argument')) == 1
    write_rte(tmp_path / 'argument', validation=RTE[:5])
    assert count(str(tmp_path / 'argument')) == 5


INVALID_ROWS = [
    ('super_glue_rte_v102', 'super_glue/RTE/train.jsonl', '{"premise": "cut\n', ':1: invalid JSON'),
    ('super_glue_rte_v102', 'super_glue/RTE/train.jsonl', '{"premise": "P", "hypothesis": 3, "idx": 0}\n',
     ":1: the field 'hypothesis' must be a string, got 3"),
    ('super_glue_rte_v102', 'super_glue/RTE/train.jsonl',
     '{"premise": "P", "hypothesis": "H", "idx": 0, "label": "maybe"}\n',
     ":1: the label must be one of entailment, not_entailment, got 'maybe'"),
    ('super_glue_multirc_v102', 'super_glue/MultiRC/train.jsonl', '{"idx": 0, "passage": {"text": "x"}}\n',
     ":1: the field 'questions' is missing"),
    # T5 rejects this pronoun, because its index is that of 'it\ther'.
    ('super_glue_wsc_v102_simple_train', 'super_glue/WSC/train.jsonl', wsc_row('They gave it to\ther', 4, 'her'),
     ":1: span2_text must be word 4 of the text and not the first word, got 'her'"),
    ('glue_stsb_v002', 'glue/STS-B/train.tsv', 'sentence1\tsentence2\tscore\na\tb\t1.5\na\tb\tgood\n',
     ":3: could not convert string to float: 'good'"),
    ('dpr_v001_simple', 'dpr_wsc/train.c.txt', 'A b c.\nb\nA,c\nD\n\n', ":1: 'D' is not in list"),
    ('cogs_v001', 'cogs/train.tsv', 'A b .\tb ( x _ 1 )\n', ':1: 2 columns instead of 3'),
    ('squad_v010_allanswers', 'squad/train-v1.1.json', '{"data": [{}]}', ":1: the field 'paragraphs' is missing"),
]  # fmt: skip


@pytest.mark.parametrize(('task', 'file', 'text', 'message'), INVALID_ROWS)
def test_invalid_rows_are_rejected_with_file_and_line(tmp_path, cache_folder, task, file, text, message):
    write_text(tmp_path / file, text)
    with pytest.raises(UserError) as error:
        catalogue.read_examples(task, 'train', data_dir=str(tmp_path))
    assert str(error.value).startswith(f'{tmp_path / file}{message}')
    assert '\n' not in str(error.value)
    assert list(cache_folder.glob('rows/*')) == [], 'an incomplete file was cached'


def test_unknown_names_and_missing_files_are_rejected(tmp_path):
    folder = str(tmp_path)
    with pytest.raises(UserError, match='did you mean super_glue_rte_v102'):
        catalogue.find_task('super_glue_rte')
    with pytest.raises(UserError, match='cogs/train.tsv in .*; set DATA_DIR .*, or run remixer-t5x data get cogs'):
        catalogue.read_examples('cogs_v001', 'train', 1, folder)
    with pytest.raises(UserError, match="must be one of train, validation.* got 'dev'"):
        catalogue.read_examples('cogs_v001', 'dev', 1, folder)
    with pytest.raises(UserError, match='EXCLUDED_TASKS must contain only tasks of .* got glue'):
        mixtures.glue(vocabularies.byte(), folder, ['glue'])
