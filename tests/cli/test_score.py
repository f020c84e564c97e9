"""`score` prints a line for each pair, with the log-likelihood of the model."""

import json
import math

import gin
import numpy as np
import pytest

import remixer_t5x
from remixer_t5x.cli.main import main
from tests.support import saved_run

ROWS = [{'n': 3, 'answer': 'odd'}, {'n': 14, 'answer': 'even'}, {'n': 5, 'answer': 'it is odd'}]


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    return saved_run.write_run(tmp_path_factory.mktemp('score') / 'run', steps=(1,))


@pytest.fixture
def pairs(tmp_path):
    (tmp_path / 'pairs.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in ROWS))
    (tmp_path / 'pairs.csv').write_text('n,answer\n' + ''.join(f'{row["n"]},"{row["answer"]}"\n' for row in ROWS))
    yield tmp_path
    gin.clear_config()


def test_each_pair_has_a_line_with_its_score(run, pairs, capsys, monkeypatch):
    trained, texts = remixer_t5x.load(str(run)), []
    vocabulary = type(trained.vocabulary)
    encode = vocabulary.encode
    monkeypatch.setattr(vocabulary, 'encode', lambda self, text: texts.append(text) or encode(self, text))
    flags = ['--inputs=is {n} even?', '--targets=answer', '--batch_size=2']
    assert main(['score', str(run), str(pairs / 'pairs.jsonl'), *flags, f'--output={pairs}/out.jsonl']) == 0
    # Each text is tokenized once.
    assert [texts.count(text) for text in ('is 3 even?', 'odd')] == [1, 1]
    summary = capsys.readouterr().err.strip().splitlines()[-1]
    assert main(['score', str(run), str(pairs / 'pairs.csv'), *flags]) == 0
    assert capsys.readouterr().out == (pairs / 'out.jsonl').read_text()
    rows = [json.loads(line) for line in (pairs / 'out.jsonl').read_text().splitlines()]
    assert [row['input'] for row in rows] == ['is 3 even?', 'is 14 even?', 'is 5 even?']
    assert [row['target'] for row in rows] == [row['answer'] for row in ROWS]
    expected = trained.score([row['input'] for row in rows], [row['target'] for row in rows])
    np.testing.assert_allclose([row['score'] for row in rows], expected, rtol=1e-4)
    # Bytes and the end token.
    assert [row['tokens'] for row in rows] == [4, 5, 10]
    assert f'3 pairs, 19 target tokens: log-likelihood {expected.mean():.4f} per pair' in summary
    assert summary.endswith(f'perplexity {math.exp(-expected.sum() / 19):.4g}')


def test_a_row_without_a_column_is_reported_before_a_file_is_created(run, pairs, capsys):
    (pairs / 'bad.jsonl').write_text('{"n": 3, "answer": "odd"}\n{"n": 3}\n')
    flags = ['--inputs=n', '--targets=answer', f'--output={pairs}/scores.jsonl']
    assert main(['score', str(run), str(pairs / 'bad.jsonl'), *flags]) == 2
    error = capsys.readouterr().err
    assert "bad.jsonl row 2: --targets must use columns of the data ('n')" in error and 'DELIMITER' not in error
    assert not (pairs / 'scores.jsonl').exists()
    (pairs / 'bad.jsonl').write_text('{"n": 3, "answer": "odd"}\n3\n')
    assert main(['score', str(run), str(pairs / 'bad.jsonl'), *flags]) == 2
    error = capsys.readouterr().err
    assert 'bad.jsonl:2: the line is not a JSON object; correct or remove the row' in error and 'STRICT' not in error
    for name, text, advice in (('a.sh', 'n', 'convert it to one of'), ('a.csv', 'n,answer\n"3', 'correct the line')):
        (pairs / name).write_text(text)
        assert main(['score', str(run), str(pairs / name), *flags]) == 2
        error = capsys.readouterr().err
        assert advice in error and 'PAIRS_FORMAT' not in error


def test_a_pair_that_is_too_long_is_named_by_its_index_in_the_file(run, pairs, capsys):
    """Windows have 16 pairs; pair 16 has the 12 tokens that the model accepts, and pair 17 has one more."""
    lines = [{'inputs': 'n', 'targets': 'x' * (11 + (index == 17))} for index in range(18)]
    (pairs / 'long.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in lines))
    command = ['score', str(run), str(pairs / 'long.jsonl'), '--batch_size=1', f'--output={pairs}/scores.jsonl']
    assert main(command) == 2
    error = capsys.readouterr().err
    assert 'targets of the pair with index 17 must have at most 12 tokens, got 13' in error
    # The first window was written, and the remedy must not fail because of its file.
    assert not (pairs / 'scores.jsonl').exists()
    # --max_length sets both lengths, so the remedy must keep the 40 tokens of an input.
    assert main([*command, '--max_length=40']) == 0 and '--max_length=40' in error
    assert len((pairs / 'scores.jsonl').read_text().splitlines()) == 18
