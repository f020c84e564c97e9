"""Rows for `infer`: the same files and template give the same inputs as finetuning reads."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from remixer_t5x.errors import UserError
from remixer_t5x.evaluate.text_inputs import TextInputs
from remixer_tasks import local_pairs, pair_inputs, text_pairs

ROWS = [{'number': str(i), 'name': f'n{i}, "quoted"', 'answer': 'even' if i % 2 == 0 else 'odd'} for i in range(9)]
TEMPLATE = 'is {number} of {name} even?'


def write(folder, name, rows=ROWS):
    path = folder / name
    if name.endswith('.parquet'):
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name.endswith('.jsonl'):
        path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    elif name.endswith('.tsv'):
        path.write_text(''.join('\t'.join(row) + '\n' for row in [list(rows[0]), *(row.values() for row in rows)]))
    else:
        with path.open('w', newline='') as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter=';' if name == 'other.csv' else ',')
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


@pytest.mark.parametrize('name', ['a.csv', 'a.tsv', 'a.jsonl', 'a.parquet', 'other.csv'])
def test_rows_are_read_as_finetuning_reads_them(tmp_path, name):
    path, delimiter = write(tmp_path, name), ';' if name == 'other.csv' else None
    held_out = write(tmp_path, 'held_out.jsonl', [{'number': '1', 'name': 'n', 'answer': 'odd'}])
    corpus = local_pairs.corpus(path, TEMPLATE, 'answer', validation_files=held_out, delimiter=delimiter)
    trained = {document.split(text_pairs.SEPARATOR)[0] for document in corpus.training_documents()}
    found = pair_inputs.texts(TextInputs(path), TEMPLATE, delimiter)
    assert list(found) == list(found) == [TEMPLATE.format(**row) for row in ROWS]
    assert set(found) == trained and found.shown == path and not found.is_stdin


def test_lines_are_texts_where_the_template_adds_nothing(tmp_path):
    (tmp_path / 'a.txt').write_text('one\ntwo\n')
    lines = TextInputs(str(tmp_path / 'a.txt'))
    assert list(pair_inputs.texts(lines, 'question')) == list(pair_inputs.texts(lines, '{question}')) == ['one', 'two']
    assert pair_inputs.texts(lines, None) is lines
    (tmp_path / 'b.tsv').write_text('a\tx\nb\ty\n')
    assert list(pair_inputs.texts(TextInputs(str(tmp_path / 'b.tsv')), '{1}')) == ['x', 'y']


def test_rows_without_a_template_are_refused_not_read_as_lines(tmp_path):
    path = write(tmp_path, 'a.csv')
    with pytest.raises(UserError, match=r'has rows, which need a template.* --gin.INPUTS='):
        list(pair_inputs.texts(TextInputs(path), None))
    assert len(list(TextInputs(path, format='txt'))) == 10


@pytest.mark.parametrize(
    ('options', 'said'),
    [
        ({'path': 'a.txt'}, r"INPUTS is 'is .number.*has lines of text; give rows with the column number and name"),
        ({'path': '-'}, r'standard input has lines of text; .* --gin.INPUT_TEMPLATE=None'),
        ({'path': '-', 'format': 'jsonl'}, r'rows cannot be read from standard input'),
        ({'path': 'a.csv', 'field': 'name'}, r"--field is 'name' and INPUTS is .*; leave --field out"),
        ({'path': 'short.jsonl'}, r"has no column 'name'; the columns are 'number'"),
        ({'path': 'null.jsonl'}, r'null.jsonl line 2: column name is empty; correct the row'),
        ({'path': 'bad.jsonl'}, r'bad.jsonl line 2: invalid JSON .*; correct the row'),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 'a.csv')
    (tmp_path / 'a.txt').write_text('is 3 even?\n')
    (tmp_path / 'short.jsonl').write_text('{"number": 3}\n')
    (tmp_path / 'null.jsonl').write_text('{"number": 3, "name": "x"}\n{"number": 3, "name": null}\n')
    (tmp_path / 'bad.jsonl').write_text('{"number": 3, "name": "x"}\n{"number\n')
    with pytest.raises(UserError, match=said) as error:
        list(pair_inputs.texts(TextInputs(**options), TEMPLATE))
    assert '\n' not in str(error.value)
