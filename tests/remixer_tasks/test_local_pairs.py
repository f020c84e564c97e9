"""Local labelled rows for finetuning and `infer`: all formats give the same pairs, and malformed rows are counted."""

import csv
import gzip
import io
import json
import os
import re
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import seqio
from hypothesis import given
from hypothesis import strategies as st

from remixer_t5x.data import pipeline, task_batches
from remixer_t5x.errors import UserError
from remixer_tasks import local_pairs, text_pairs
from remixer_tasks.files import row_files, text_lines
from remixer_tasks.files.text_lines import BadRecords
from remixer_tasks.pair_inputs import TextInputs

BYTES = seqio.ByteVocabulary(extra_ids=100)
ROWS = [{'question': f'is {i}, "{i}" even?', 'label': 'yes' if i % 2 == 0 else 'no', 'id': str(i)} for i in range(40)]
TEMPLATES = 'question {id}: {question}', 'label'
PAIRS = {(f'question {row["id"]}: {row["question"]}', row['label']) for row in ROWS}
SPLITS = 'train', 'validation'
GOOD_ROW = '{"q": "b", "a": "c"}\n'
DUPLICATE_COLUMNS = io.BytesIO()
pq.write_table(pa.table([['1'], ['2'], ['3']], ['q', 'a', 'q']), DUPLICATE_COLUMNS)


def write(folder, name, rows=ROWS):
    path, cells = folder / name, [list(rows[0]), *(row.values() for row in rows)]
    if name.endswith('.parquet'):
        pq.write_table(pa.Table.from_pylist(rows), path)
        return str(path)
    with (gzip.open if name.endswith('.gz') else open)(path, 'wt', newline='') as file:
        if '.jsonl' in name:
            file.writelines(json.dumps(row) + '\n' for row in rows)
        elif '.tsv' in name:
            file.writelines('\t'.join(row) + '\n' for row in cells)
        else:
            csv.writer(file).writerows(cells)
    return str(path)


def texts(task, split):
    dataset = task.get_dataset({'inputs': 64, 'targets': 16}, split=split, shuffle=False, num_epochs=1)
    return {
        (row['inputs_pretokenized'].decode(), row['targets_pretokenized'].decode())
        for row in dataset.as_numpy_iterator()
    }


def read_pairs(folder, name, content, inputs='q', targets='a', **settings):
    """Writes a file; returns its pairs and the summary of the skipped rows."""
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    skipped = BadRecords(strict=False)
    corpus = local_pairs.corpus(str(folder / name), inputs, targets, **settings)
    return [
        tuple(pair.split(text_pairs.SEPARATOR)) for pair in corpus.read(skipped)
    ], skipped.describe_skipped_records()


@pytest.mark.parametrize('name', ['a.jsonl', 'a.tsv', 'a.parquet', 'a.csv.gz'])
def test_every_format_gives_the_pairs_for_training_and_infer(tmp_path, name):
    path = write(tmp_path, name)
    task = text_pairs.task(local_pairs.corpus(path, *TEMPLATES, validation_fraction=0.2), BYTES)
    train, held_out = texts(task, 'train'), texts(task, 'validation')
    assert held_out and not train & held_out and train | held_out == PAIRS
    inputs = TextInputs(path, template=TEMPLATES[0])
    assert list(inputs) == list(inputs) == [TEMPLATES[0].format(**row) for row in ROWS]
    assert set(inputs) == {text for text, _ in PAIRS} and inputs.display_name == path and not inputs.is_stdin


def test_the_held_out_rows_do_not_depend_on_the_text_of_the_templates(tmp_path):
    """Rows with the same pair are in the same split, even if another column differs."""
    path = write(tmp_path, 'a.jsonl', [{**row, 'copy': copy} for row in ROWS for copy in ('first', 'second')])

    def held_out(*templates):
        corpus = local_pairs.corpus(path, *templates, validation_fraction=0.2)
        train, other = (
            set(corpus.open_documents(split).read_documents(np.arange(len(corpus.open_documents(split)))))
            for split in SPLITS
        )
        assert train and other and not train & other
        return {re.search(rb'is (\d+),', document)[1] for document in other}

    first = held_out('{id} {question}', 'label')
    assert held_out('Question {question} is number {id}.', 'answer: {label}') == first


def test_validation_files_are_held_out(tmp_path):
    train, other = write(tmp_path, 'a.jsonl', ROWS[:30]), write(tmp_path, 'b.csv', ROWS[30:])
    task = text_pairs.task(local_pairs.corpus(train, *TEMPLATES, validation_files=other), BYTES)
    assert len(texts(task, 'train')) == 30
    assert texts(task, 'validation') == PAIRS - texts(task, 'train')
    (tmp_path / 'link.jsonl').symlink_to('a.jsonl')
    with pytest.raises(UserError, match='VALIDATION_PAIRS and PAIRS must not share files'):
        local_pairs.corpus(train, validation_files=str(tmp_path / 'link.jsonl'))


def test_rows_that_are_only_evaluated_are_counted_once(tmp_path, capsys):
    (tmp_path / 'a.jsonl').write_text(GOOD_ROW + 'cut\n' + GOOD_ROW)
    only_evaluated = local_pairs.corpus(None, 'q', 'a', validation_files=str(tmp_path / 'a.jsonl'))
    assert [len(only_evaluated.open_documents(split)) for split in SPLITS] == [2, 2]
    assert ': 2 documents to evaluate, 1 malformed skipped' in capsys.readouterr().err


@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=5))
def test_csv_is_read_as_python_writes_it(tmp_path_factory, rows):
    """Cells contain commas, quotes and newlines, but no carriage returns, NUL characters or surrogates."""
    clean = [
        tuple(''.join(c for c in cell if c not in '\r\0' and not 0xD800 <= ord(c) < 0xE000) for cell in row)
        for row in rows
    ]
    text = io.StringIO()
    csv.writer(text).writerows([('a', 'b'), *clean])
    path = tmp_path_factory.mktemp('csv') / 'rows.csv'
    path.write_bytes(text.getvalue().encode())
    read = row_files.read_rows(str(path), row_files.RowLayout(), BadRecords(strict=True))
    assert [(row['a'], row['b']) for _, row in read] == clean


@pytest.mark.parametrize(
    ('row', 'expected', 'message'),
    [
        (r'{"q": "\ud83d x", "a": "y"}', [('? x', 'y')], ''),
        ('{"q": "x", "a": NaN}', [], ':1: column a is empty'),
        ('{"q": "x", "a": [null]}', [], ':1: column a must be a string'),
        ('{"q": "x"}', [], ":1: TARGETS must use columns of the data ('q'), got 'a'"),
        ('{"q": "x", "a": "y", "other": NaN}', [('x', 'y')], ''),
        ('{"q": "x", "a": -2.0}', [('x', '-2')], ''),
        ('{"q": "x", "a": 12345678901234567890123}', [('x', '12345678901234567890123')], ''),
        ('{"q": " ", "a": "y"}', [], 'the inputs are empty'),
    ],
)
def test_an_unusual_row_is_read_or_counted_as_malformed(tmp_path, row, expected, message):
    content = GOOD_ROW + row + '\n'
    read, skipped = read_pairs(tmp_path, 'a.jsonl', content)
    assert read == [('b', 'c'), *expected]
    assert (message.replace(':1:', ':2:') in skipped and '1 malformed' in skipped) if message else skipped == ''
    if message:
        strict = local_pairs.corpus(str(tmp_path / 'a.jsonl'), 'q', 'a', strict=True)
        with pytest.raises(UserError, match='a.jsonl:2: .*STRICT = False'):
            list(strict.read_training_documents())


def test_missing_values_and_bytes_of_parquet(tmp_path):
    numbers, binary = [1.5, float('nan'), None, 2.0], [b'a', b'\xff', b'c', None]
    pq.write_table(pa.table({'q': ['x', 'y', 'z', 'w'], 'a': numbers, 'b': binary}), tmp_path / 'a.parquet')
    content = (tmp_path / 'a.parquet').read_bytes()
    read, skipped = read_pairs(tmp_path, 'a.parquet', content)
    assert read == [('x', '1.5'), ('w', '2')] and skipped.count('column a is empty') == 2
    read, _ = read_pairs(tmp_path, 'a.parquet', content, targets='q', columns=['a'])
    assert [number for *_, number in read] == ['1.5', '', '', '2']
    read, _ = read_pairs(tmp_path, 'a.parquet', content, targets='q', columns=['b'])
    assert [text for *_, text in read] == ['a', 'c', '']
    read, skipped = read_pairs(tmp_path, 'a.parquet', content, targets='b')
    assert read == [('x', 'a'), ('z', 'c')]
    assert ":2: 'utf-8' codec can't decode" in skipped and ':4: column b is empty' in skipped


def test_float32_numbers_of_parquet_have_their_shortest_text(tmp_path):
    numbers = pa.array([0.1, 3.8, 2.0, None, float('nan')], pa.float32())
    objects = pa.StructArray.from_arrays([numbers], ['x'])
    pq.write_table(pa.table({'q': [*'vwxyz'], 'a': numbers, 'b': objects}), tmp_path / 'a.parquet')
    content = (tmp_path / 'a.parquet').read_bytes()
    read, skipped = read_pairs(tmp_path, 'a.parquet', content)
    assert read == read_pairs(tmp_path, 'a.parquet', content, targets='b.x')[0]
    assert read == [('v', '0.1'), ('w', '3.8'), ('x', '2')] and skipped.count('column a is empty') == 2


@pytest.mark.parametrize('name', ['0', 'x!r ü'])
def test_a_column_may_have_any_name(tmp_path, name):
    row = json.dumps({name: 'x', 'a': 'y'}, ensure_ascii=False)
    assert read_pairs(tmp_path, 'a.jsonl', row, inputs=name)[0] == [('x', 'y')]
    assert read_pairs(tmp_path, 'a.jsonl', row, inputs=f'is {{{name}}} {{{{so}}}}?')[0] == [('is x {so}?', 'y')]


@pytest.mark.parametrize('name', ['a.jsonl', 'a.parquet'])
def test_templates_may_use_the_items_of_a_column_with_objects(tmp_path, name):
    path = write(tmp_path, name, [{'translation': None}, {'translation': {'en': 'cat', 'de': 'Katze'}}])
    corpus = local_pairs.corpus(path, 'translate: {translation.en}', 'translation.de')
    skipped = BadRecords(strict=False)
    assert list(corpus.read(skipped)) == [f'translate: cat{text_pairs.SEPARATOR}Katze']
    assert f'{name}:1: column translation.en is empty' in skipped.describe_skipped_records()


@pytest.mark.parametrize('name', ['a.jsonl', 'a.csv', 'a.parquet'])
@pytest.mark.parametrize('settings', [{'inputs': '{questoin}'}, {'columns': ['questoin']}])
def test_a_misspelt_column_raises_an_error_with_the_most_similar_column(tmp_path, name, settings):
    path = write(tmp_path, name)
    corpus = local_pairs.corpus(**{'files': path, 'inputs': 'id', 'targets': 'label'} | settings)
    message = f"must use columns of {path} .'question', 'label', 'id'., got 'questoin'; did you mean 'question'"
    with pytest.raises(UserError, match=message):
        list(corpus.read(BadRecords(strict=False)))


def test_a_suggested_column_is_quoted_because_its_name_may_contain_spaces(tmp_path):
    (tmp_path / 'a.csv').write_text('q, a\nb, c\n')
    with pytest.raises(UserError, match="got 'a'; did you mean ' a'"):
        list(local_pairs.corpus(str(tmp_path / 'a.csv'), 'q', 'a').read(BadRecords(strict=False)))


def test_columns_of_a_file_without_names_are_numbers(tmp_path):
    name, content = 'a.csv', '1,x,y\n2,z,w'
    assert read_pairs(tmp_path, name, content, '{1}', '2')[0] == [('x', 'y'), ('z', 'w')]
    for targets in (None, '{7}'):
        assert list(TextInputs(str(tmp_path / name), template='{1}', targets=targets)) == ['x', 'z']
    # Every line is a row, even if its cells are equal to the column numbers.
    assert read_pairs(tmp_path, 'b.csv', '0,1\n1,0\n', '{0}', '{1}')[0] == [('0', '1'), ('1', '0')]
    assert list(TextInputs(str(tmp_path / 'b.csv'), template='{0}')) == ['0', '1']
    # A column name in either template means that the file has names.
    assert read_pairs(tmp_path, name, '1,a\nx,y\n', '{1}')[0] == [('x', 'y')]
    assert list(TextInputs(str(tmp_path / name), template='{1}', targets='a')) == ['x']
    with pytest.raises(UserError, match="a.csv .'0', '1', '2'., got '7'"):
        read_pairs(tmp_path, name, content, '{1}', '7')


def test_other_delimiters_and_encodings(tmp_path):
    assert read_pairs(tmp_path, 'a.csv', 'q;a\n"x;1";y\n', delimiter=';')[0] == [('x;1', 'y')]
    assert list(TextInputs(str(tmp_path / 'a.csv'), template='is {q}', delimiter=';')) == ['is x;1']
    assert read_pairs(tmp_path, 'a.tsv', 'q|a\nx|y\n', delimiter='|')[0] == [('x', 'y')]
    text = 'q\ta\ncaf\u00e9\u2028\toui\n'
    assert read_pairs(tmp_path, 'a.tsv', text.encode('utf-16'), encoding='utf-16')[0] == [('caf\u00e9\u2028', 'oui')]
    latin = 'é\ta\nà\toui'.encode('latin-1')
    assert read_pairs(tmp_path, 'a.tsv', latin, inputs='é', encoding='latin-1')[0] == [('à', 'oui')]
    assert read_pairs(tmp_path, 'a.jsonl', GOOD_ROW.encode('utf-16'), encoding='utf-16')[0] == [('b', 'c')]
    with pytest.raises(UserError, match='ENCODING must be the encoding of'):
        read_pairs(tmp_path, 'a.tsv', latin, encoding='ascii')


def test_malformed_csv_rows_and_too_long_texts_are_counted(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(text_lines, 'MAX_CHARACTERS', 30)
        read, skipped = read_pairs(tmp_path, 'a.jsonl', GOOD_ROW, inputs='{q}' * 40)
    assert not read and 'the inputs have more than 30 characters' in skipped
    read, skipped = read_pairs(tmp_path, 'a.csv', 'q,a\n"x"y,z\nb,c\n')
    assert read == [('b', 'c')] and ':2: invalid CSV' in skipped
    read, skipped = read_pairs(tmp_path, 'a.csv', b'q,a\n"x\n\xff\ny",z\n"b\nd",c\n\xff\n"e",f\n')
    assert read == [('b\nd', 'c'), ('e', 'f')]
    assert ', 2 malformed' in skipped and ':3: invalid UTF-8' in skipped and ':7: invalid UTF-8' in skipped
    with pytest.raises(UserError, match=r'a.csv line 3: a quoted cell .* never closed \(.*\); correct the line$'):
        read_pairs(tmp_path, 'a.csv', b'q,a\n\xff\n"x,y\nb,c\n')


@pytest.mark.parametrize(
    ('name', 'content'),
    [('a.csv', 'a,b\n1,2\n,\n'), ('a.tsv', 'a\n1\n \n')],
)
def test_infer_skips_no_row_of_a_table(tmp_path, name, content):
    """Blank lines are allowed only outside of the rows, because predictions are matched to rows by number."""
    path, last = tmp_path / name, content.splitlines()[-1]
    inputs = TextInputs(str(path), template='is {a}?')
    path.write_text(f'\n{content}\n\n')
    assert [text.split() for text in inputs] == [['is', '1?'], ['is', '?']]
    path.write_text(f'{content}\n\n{last}\n')
    with pytest.raises(UserError, match=f'{name}:4: a blank line; correct the row'):
        list(inputs)


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('a.json', b'[{"q": "b", "a": "c"}]', r"one JSON object on each line; run jq -c '.\[\]'"),
        ('a.csv', gzip.compress(b'q,a\nb,c\n', mtime=0), 'column names cannot be read.* convert the file to UTF-8'),
        ('a.csv', b'q;a\nb;c\n', "a.csv .'q;a'.*check the delimiter"),
        ('a.csv', b'q,a,q\n1,2,3\n', "must have different names, got 'q' twice"),
        ('a.parquet', DUPLICATE_COLUMNS.getvalue(), "must have different names, got 'q' twice"),
        ('a.txt', b'a', 'rename it, or set PAIRS_FORMAT to one of jsonl, tsv, csv, parquet'),
        ('a.parquet', b'no parquet', 'not a Parquet file'),
        ('a.jsonl', GOOD_ROW.encode() * 40, 'a.jsonl has no two different documents or rows, so.* VALIDATION_PAIRS'),
        ('a.jsonl', GOOD_ROW.encode() + b'{"q": null, "a": "c"}', 'different documents or rows, 1 malformed skipped'),
    ],
)
def test_an_unusable_file_is_rejected_with_a_hint(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(local_pairs.corpus(str(path), 'q', 'a').read_training_documents())


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'delimiter': r'\t'}, 'DELIMITER must be one character .*; for a tab, pass --gin.DELIMITER="'),
        ({'encoding': 'rot13'}, 'ENCODING must be a text encoding.* got .rot13.'),
        # Templates are not format strings.
        *(({'inputs': text}, 'INPUTS must use columns of .*a.csv') for text in ('{q.__class__}', '{q:>1000000000}')),
        ({'files': []}, r'data/\*.jsonl'),
    ],
)
def test_a_wrong_setting_is_rejected(tmp_path, monkeypatch, settings, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'a.csv').write_text('q,a\nb,c\n')
    with pytest.raises(UserError, match=message):
        list(local_pairs.corpus(**{'files': 'a.csv', 'inputs': 'q', 'targets': 'a'} | settings).read(BadRecords(True)))


def test_inputs_that_cannot_be_rows_are_rejected(tmp_path):
    (tmp_path / 'null.jsonl').write_text('{"id": 3, "question": "x"}\n{"id": 3, "question": null}\n')
    (tmp_path / 'some.jsonl').write_text('{"id": 3, "question": "x"}\n{"id": 3}\n')
    table, some = write(tmp_path, 'a.csv'), str(tmp_path / 'some.jsonl')
    for settings, message in (
        ({'path': table}, r'is a table, which requires a template.* --gin.INPUTS='),
        ({'path': table, 'template': '{questoin}'}, 'INPUTS must use columns of .*a.csv .*did you mean .question..$'),
        ({'path': str(tmp_path / 'null.jsonl'), 'template': '{question}'}, r'null.jsonl:2: column question is empty'),
        (
            {'path': some, 'template': '{question}'},
            r"some.jsonl:2: .* \('id'\), got 'question'; correct the row or INP",
        ),
        ({'path': some, 'field': 'id', 'template': 'question'}, "INPUT_FIELD .*got 'id'.*INPUT_TEMPLATE='{id}'"),
        ({'format': 'jsonl', 'template': 'question'}, 'rows .* in a file, got standard input'),
    ):
        with pytest.raises(UserError, match=message):
            list(TextInputs(**settings))


def test_standard_input_is_read_once(monkeypatch):
    """`infer` counts the lines of a file before it reads them, so /dev/stdin must not be accepted as a file."""
    read, write = os.pipe()
    os.write(write, b'a\n\0\n')
    os.close(write)
    with open(read) as pipe:
        monkeypatch.setattr(sys, 'stdin', pipe)
        with pytest.raises(UserError, match='it is a pipe, socket or device, .* or --input=- for a pipe'):
            list(TextInputs('/dev/stdin'))
        with pytest.raises(UserError, match='^standard input:2: a NUL character'):
            list(TextInputs('-'))


@pytest.mark.parametrize(
    ('model_type', 'row', 'inputs', 'targets', 'expected'),
    [
        ('token_labels', {'tokens': ['a b', 'c'], 'tags': ['X', 'O']}, '{tokens}', '{tags}',
         {'encoder_input_tokens': [*b'a_bc'], 'labels': [1, 0, 0, 0], 'label_weights': [1, 0, 0, 1]}),
        ('span', {'q': 'e', 'c': 'no yes', 'a': {'text': ['yes'], 'answer_start': [3]}}, '{q} context: {c}', '{a}',
         {'encoder_input_tokens': [*b'econtext:noyes'], 'start_positions': 11, 'end_positions': 13,
          'label_weights': 1}),
        ('embedding', {'a': 'x y', 'b': 'z', 's': 0.5}, '{a}\t{b}', '{s}',
         {'encoder_input_tokens': [*b'x y'], 'positive_input_tokens': [*b'z'], 'label_weights': 0.5}),
    ],
    ids=['token_labels', 'span', 'embedding'],
)  # fmt: skip
def test_rows_become_the_arrays_of_a_head(model_type, row, inputs, targets, expected, tmp_path):
    """`TrainBatches` also checks that the position in these pipelines can be saved."""
    path, held_out = write(tmp_path, 'rows.jsonl', [row] * 40), write(tmp_path, 'held_out.jsonl', [row])
    task = text_pairs.task(local_pairs.corpus(path, inputs, targets, held_out), BYTES)
    lengths = {'inputs': 20, 'targets': 60}
    config = pipeline.DatasetConfig(lambda: task, lengths, 4, model_type=model_type, labels=('O', 'X'))
    for name, array in next(task_batches.TrainBatches(config)).items():
        values = expected[name]
        if 'tokens' in name:
            values = [*(byte + 3 for byte in values), BYTES.eos_id]
        values = np.pad(values, (0, 20 - len(values))) if np.ndim(values) else values
        np.testing.assert_array_equal(array[0], values, err_msg=name)
