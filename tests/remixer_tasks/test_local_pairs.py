"""A user's labelled rows: every format gives the same pairs, and every mistake one line that says what to type."""

import csv
import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import seqio
from hypothesis import given
from hypothesis import strategies as st

from remixer_t5x.errors import UserError
from remixer_tasks import local_pairs, text_pairs
from remixer_tasks.files import row_files
from remixer_tasks.files.malformed import Malformed

BYTES = seqio.ByteVocabulary(extra_ids=100)
ROWS = [{'question': f'is {i}, "{i}" even?', 'label': 'yes' if i % 2 == 0 else 'no', 'id': i} for i in range(40)]
TEMPLATES = 'question {id}: {question}', 'label'
PAIRS = {(f'question {row["id"]}: {row["question"]}', row['label']) for row in ROWS}


def write(folder, name, rows=ROWS):
    kind = name.removesuffix('.gz').rpartition('.')[2]
    names = list(rows[0])
    if kind == 'parquet':
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
        data = (folder / name).read_bytes()
    elif kind == 'jsonl':
        data = '\n'.join(json.dumps(row) for row in rows).encode()
    elif kind == 'csv':
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator='\r\n')
        writer.writeheader()
        writer.writerows(rows)
        data = text.getvalue().encode()
    else:
        data = '\n'.join('\t'.join(map(str, cells)) for cells in [names, *(row.values() for row in rows)]).encode()
    (folder / name).write_bytes(gzip.compress(data) if name.endswith('.gz') else data)
    return str(folder / name)


def texts(task, split):
    dataset = task.get_dataset({'inputs': 64, 'targets': 16}, split=split, shuffle=False, num_epochs=1)
    return {
        (row['inputs_pretokenized'].decode(), row['targets_pretokenized'].decode())
        for row in dataset.as_numpy_iterator()
    }


@pytest.mark.parametrize('name', ['a.jsonl', 'a.tsv', 'a.csv', 'a.parquet', 'a.csv.gz', 'a.jsonl.gz'])
def test_every_format_gives_the_pairs_and_holds_some_out(tmp_path, name):
    corpus = local_pairs.corpus(write(tmp_path, name), *TEMPLATES, validation_fraction=0.2)
    task = text_pairs.task(corpus, BYTES)
    train, held_out = texts(task, 'train'), texts(task, 'validation')
    assert held_out and not train & held_out and train | held_out == PAIRS


def test_held_out_files_of_ones_own(tmp_path):
    train, other = write(tmp_path, 'a.jsonl', ROWS[:30]), write(tmp_path, 'b.csv', ROWS[30:])
    task = text_pairs.task(local_pairs.corpus(train, *TEMPLATES, validation_files=other), BYTES)
    assert len(texts(task, 'train')) == 30
    assert texts(task, 'validation') == PAIRS - texts(task, 'train')


@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=5))
def test_csv_is_read_as_python_writes_it(tmp_path_factory, rows):
    """Commas, quotes and line ends within cells; NUL and separators of lines that are not RFC 4180's are left out."""
    clean = [
        tuple(''.join(c for c in cell if c not in '\r\0' and not 0xD800 <= ord(c) < 0xE000) for cell in row)
        for row in rows
    ]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerows([('a', 'b'), *clean])
    path = tmp_path_factory.mktemp('csv') / 'rows.csv'
    path.write_bytes(text.getvalue().encode())
    found = [
        (row['a'], row['b']) for _, row in row_files.read(str(path), row_files.RowLayout(), Malformed(strict=True))
    ]
    assert found == clean


def test_rows_that_cannot_be_read_are_counted_or_refused(tmp_path, capsys):
    bad = ['{"question": "a", "label": null}', '[1]', '{"question"', '{"question": " ", "label": "no"}']
    (tmp_path / 'a.jsonl').write_text('\n'.join([*bad, *(json.dumps(row) for row in ROWS)]))
    corpus = local_pairs.corpus(str(tmp_path / 'a.jsonl'), 'question', 'label')
    assert len(list(corpus.training_documents())) > 30
    assert '4 malformed skipped' in capsys.readouterr().err
    strict = local_pairs.corpus(str(tmp_path / 'a.jsonl'), 'question', 'label', strict=True)
    with pytest.raises(UserError, match=':1: column label is empty'):
        list(strict.training_documents())


@pytest.mark.parametrize(
    ('name', 'content', 'templates', 'said'),
    [
        ('a.txt', 'a', TEMPLATES, 'set PAIRS_FORMAT to one of jsonl, tsv, csv, parquet'),
        (
            'a.jsonl',
            '{"q": "a"}',
            ('question', 'label'),
            "INPUTS is 'question' and the data has no column 'question'; the columns are 'q'",
        ),
        ('a.jsonl', '{"q": "a", "l": "b"}', ('{q', 'l'), 'must have columns in braces, as in'),
        ('a.csv.gz', 'no gzip', TEMPLATES, 'damaged gzip file'),
        ('a.parquet', 'no parquet', TEMPLATES, 'not a readable Parquet file'),
    ],
)
def test_mistakes_are_one_line(tmp_path, name, content, templates, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=said) as error:
        list(local_pairs.corpus(str(tmp_path / name), *templates).training_documents())
    assert '\n' not in str(error.value)
