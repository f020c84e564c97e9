"""Rows of one's own with odd values, names, separators and encodings: used, counted, or one line that helps."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from remixer_t5x.errors import UserError
from remixer_tasks import local_pairs, text_pairs
from remixer_tasks.files.malformed import Malformed

GOOD = '{"q": "b", "a": "c"}\n'


def pairs(folder, name, content, inputs='q', targets='a', **settings):
    """The pairs of a file, and what the notice says was skipped."""
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    skipped = Malformed(strict=False)
    corpus = local_pairs.corpus(str(folder / name), inputs, targets, **settings)
    return [tuple(pair.split(text_pairs.SEPARATOR)) for pair in corpus.read(skipped)], skipped.summary()


@pytest.mark.parametrize(
    ('row', 'found', 'said'),
    [
        (r'{"q": "\ud83d x", "a": "y"}', [('? x', 'y')], ''),
        ('{"q": "x", "a": NaN}', [], ':1: column a is empty'),
        ('{"q": "x", "a": Infinity}', [], ':1: column a is empty'),
        ('{"q": "x", "a": 1e999}', [], ':1: column a is empty'),
        ('{"q": "x", "a": null}', [], ':1: column a is empty'),
        ('{"q": "x", "a": [null]}', [], ':1: column a has several values'),
        ('{"q": "x", "a": {"text": null}}', [], ':1: column a has several values'),
        ('{"q": "x"}', [], ':1: the row has no column a'),
        ('{"q": "x", "a": "y", "other": NaN}', [('x', 'y')], ''),
        ('{"q": "x", "a": 12345678901234567890123}', [('x', '12345678901234567890123')], ''),
    ],
)
def test_a_row_with_an_odd_value_is_skipped_and_counted(tmp_path, row, found, said):
    read, skipped = pairs(tmp_path, 'a.jsonl', row + '\n' + GOOD)
    assert read == [*found, ('b', 'c')]
    assert (said in skipped and '1 malformed' in skipped) if said else skipped == ''


def test_missing_values_and_bytes_of_parquet(tmp_path):
    numbers, binary = [1.5, float('nan'), None, 2.0], [b'a', b'\xff', b'c', None]
    pq.write_table(pa.table({'q': ['x', 'y', 'z', 'w'], 'a': numbers, 'b': binary}), tmp_path / 'a.parquet')
    content = (tmp_path / 'a.parquet').read_bytes()
    read, skipped = pairs(tmp_path, 'a.parquet', content)
    assert read == [('x', '1.5'), ('w', '2.0')] and skipped.count('column a is empty') == 2
    read, skipped = pairs(tmp_path, 'a.parquet', content, targets='b')
    assert read == [('x', 'a'), ('z', 'c')]
    assert ':2: column b has bytes that are not UTF-8' in skipped and ':4: column b is empty' in skipped


@pytest.mark.parametrize('name', ['q.text', '0', 'a:b', 'x!r', '__class__', 'a[0]', 'two words', 'ü'])
def test_any_name_is_the_name_of_a_column(tmp_path, name):
    row = json.dumps({name: 'x', 'a': 'y'}, ensure_ascii=False)
    assert pairs(tmp_path, 'a.jsonl', row, inputs=name)[0] == [('x', 'y')]
    assert pairs(tmp_path, 'a.jsonl', row, inputs=f'is {{{name}}} {{{{so}}}}?')[0] == [('is x {so}?', 'y')]


@pytest.mark.parametrize('template', ['{q.__class__}', '{q!r}', '{q:>1000000000}', '{q[0]}', '{0.__class__}'])
def test_templates_reach_nothing_but_columns(tmp_path, template):
    with pytest.raises(UserError, match='has no column'):
        pairs(tmp_path, 'a.jsonl', GOOD, inputs=template)


@pytest.mark.parametrize('name', ['a.tsv', 'a.csv'])
def test_numbers_are_the_columns_of_a_file_without_names(tmp_path, name):
    between = '\t' if name == 'a.tsv' else ','
    content = '\n'.join(between.join(cells) for cells in [('1', 'x', 'y'), ('2', 'z', 'w')])
    assert pairs(tmp_path, name, content, '{1}', '2')[0] == [('x', 'y'), ('z', 'w')]
    # A line with just these numbers is a line of names, as pandas writes it.
    assert pairs(tmp_path, name, f'0{between}1{between}2\n{content}', '{1}', '2')[0] == [('x', 'y'), ('z', 'w')]
    with pytest.raises(UserError, match="has no column '7'; the columns are '0', '1', '2'"):
        pairs(tmp_path, name, content, '{1}', '7')


def test_other_delimiters_and_encodings(tmp_path):
    assert pairs(tmp_path, 'a.csv', 'q;a\n"x;1";y\n', delimiter=';')[0] == [('x;1', 'y')]
    assert pairs(tmp_path, 'a.tsv', 'q|a\nx|y\n', delimiter='|')[0] == [('x', 'y')]
    text = 'q\ta\ncaf\u00e9\u2028\toui\n'
    assert pairs(tmp_path, 'a.tsv', text.encode('utf-16'), encoding='utf-16')[0] == [('caf\u00e9\u2028', 'oui')]
    latin = 'é\ta\nà\toui'.encode('latin-1')
    assert pairs(tmp_path, 'a.tsv', latin, inputs='é', encoding='latin-1')[0] == [('à', 'oui')]
    assert pairs(tmp_path, 'a.jsonl', GOOD.encode('utf-16'), encoding='utf-16')[0] == [('b', 'c')]
    with pytest.raises(UserError, match='ENCODING must be that of'):
        pairs(tmp_path, 'a.tsv', latin, encoding='ascii')


@pytest.mark.parametrize('later', [[], ['"x",y']])
def test_a_quote_that_is_not_closed_stops_the_run(tmp_path, later):
    """It would swallow the rest of the file, or the rows up to the next quote."""
    rows = [f'q{i},a{i}' for i in range(40)]
    content = '\n'.join(['q,a', *rows[:30], '"never closed,no', *rows[30:], *later])
    with pytest.raises(UserError, match='line 32: a cell that begins here with a quote is not closed'):
        pairs(tmp_path, 'a.csv', content)


def test_a_quote_that_hurts_one_row_is_counted(tmp_path):
    read, skipped = pairs(tmp_path, 'a.csv', 'q,a\n"x"y,z\nb,c\n')
    assert read == [('b', 'c')] and ':2: invalid CSV' in skipped


def test_a_text_is_not_longer_than_a_line_may_be(tmp_path):
    read, skipped = pairs(tmp_path, 'a.jsonl', GOOD, inputs='{q}' * 40, longest=30)
    assert not read and 'the inputs have more than 30 characters' in skipped


@pytest.mark.parametrize(('count', 'said'), [(1, 'is a single row'), (40, 'all 40 rows of .* are held out')])
def test_equal_rows_and_a_single_row_cannot_be_held_out(tmp_path, count, said):
    (tmp_path / 'a.jsonl').write_text(GOOD * count)
    with pytest.raises(UserError, match=f'{said}.*: give VALIDATION_PAIRS, or more rows') as error:
        list(local_pairs.corpus(str(tmp_path / 'a.jsonl'), 'q', 'a').training_documents())
    assert 'document' not in str(error.value) and 'VALIDATION_FILES' not in str(error.value)


def test_held_out_rows_are_not_rows_to_train_on(tmp_path):
    (tmp_path / 'a.jsonl').write_text(GOOD)
    (tmp_path / 'link.jsonl').symlink_to('a.jsonl')
    with pytest.raises(UserError, match='is in PAIRS and in VALIDATION_PAIRS'):
        local_pairs.corpus(str(tmp_path / 'a.jsonl'), validation_files=str(tmp_path / 'link.jsonl'))


def test_the_notice_counts_rows(tmp_path, capsys):
    (tmp_path / 'a.jsonl').write_text(GOOD + GOOD.replace('b', 'd') + GOOD.replace('b', 'e'))
    list(local_pairs.corpus(str(tmp_path / 'a.jsonl'), 'q', 'a').training_documents())
    assert '2 rows, 1 held out' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('name', 'content', 'said'),
    [
        ('a.json', b'[{"q": "b", "a": "c"}, {"q": "d", "a": "e"}]', r"is one JSON array; .*jq -c '.\[\]'"),
        ('a.json', b'[\n  {"q": "b",\n   "a": "c"}\n]', 'is one JSON array'),
        ('a.json', b'{\n  "q": "b",\n  "a": "c"\n}', 'has objects over several lines'),
        ('a.csv', gzip.compress(b'q,a\nb,c\n', mtime=0), 'is a gzip file: rename it'),
        ('a.jsonl', gzip.compress(b'{}', mtime=0), 'is a gzip file: rename it'),
        ('a.csv', 'q,a\nb,c\n'.encode('utf-16'), "is UTF-16: .*set ENCODING = 'utf-16'"),
        ('a.csv', b'q;a\nb;c\n', "the columns are 'q;a'; if ';' separates the columns, set DELIMITER = ';'"),
        ('a.tsv', b'q,a\nb,c\n', "set DELIMITER = ','"),
        ('a.csv', b'q, a\nb, c\n', "the columns are 'q', ' a'"),
        ('a.csv', b'q,a\rb,c\rd,e', 'ends its lines with CR alone'),
        ('a.tsv', b'q\ta\rb\tc\rd\te', 'ends its lines with CR alone'),
        ('a.jsonl', b'{"q": "b"}\r{"q": "c"}', 'ends its lines with CR alone'),
        ('a.csv', 'q,é\nb,c\n'.encode('latin-1'), "line of column names cannot be read.*ENCODING = 'latin-1'"),
        ('a.csv', b'q,a,q\n1,2,3\n', "has two columns 'q'"),
        ('a.zip.csv', b'PK\x03\x04rest', 'is a zip archive'),
    ],
)
def test_a_file_of_another_kind_gets_the_hint_that_helps(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=said) as error:
        list(local_pairs.corpus(str(path), 'q', 'a').training_documents())
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ('settings', 'said'),
    [
        ({'delimiter': ';;'}, 'DELIMITER must be one character'),
        ({'delimiter': '"'}, 'DELIMITER'),
        ({'encoding': 'rot13'}, 'ENCODING must be an encoding of text.* got .rot13.'),
        ({'encoding': 'klingon'}, 'ENCODING'),
        ({'encoding': 7}, 'ENCODING'),
        ({'inputs': ''}, 'INPUTS must be a column'),
        ({'inputs': '{}'}, 'INPUTS must have columns in braces'),
        ({'inputs': 'a}b'}, 'INPUTS must have columns in braces'),
    ],
)
def test_a_wrong_setting_is_one_line(tmp_path, settings, said):
    with pytest.raises(UserError, match=said):
        pairs(tmp_path, 'a.csv', 'q,a\nb,c\n', **settings)


ADVICE = [([], r'data/\*.jsonl'), (['.'], r"such as './\*.jsonl'"), (['no*'], r'no\* matches no file')]


@pytest.mark.parametrize(('files', 'said'), ADVICE)
def test_the_advice_is_about_rows(tmp_path, monkeypatch, files, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said) as error:
        local_pairs.corpus(files, 'q', 'a')
    assert '.txt' not in str(error.value)
