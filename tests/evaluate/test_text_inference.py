"""Files of predictions are in order, and are continued only with the same texts and model."""

import contextlib
import gzip
import json
import types
from unittest import mock

import pytest
import seqio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remixer_t5x.devices import collectives
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import text_inference
from remixer_t5x.evaluate.predictions import Decoding, Prediction
from remixer_t5x.models.beam_search import BeamSearch
from remixer_t5x.models.decoding import Greedy, RowDecoder
from remixer_t5x.models.sampling import Sampling
from remixer_tasks.pair_inputs import TextInputs

BYTES = seqio.ByteVocabulary(extra_ids=0)
ORIGIN = {'checkpoint': '/runs/x/checkpoints/10', 'decoder': 'Greedy()', 'lengths': {'inputs': 16}, 'seed': 1}
TEXTS = ['one', '', 'drei\u2028', 'a "quoted" text', 'ends\\', 'one', 'a text that is too long', 'x']


def echo(inputs, first):
    """Answers with the ids, and with the reversed ids."""
    return [Prediction([ids, ids[::-1]], [-float(first + row), -9.0]) for row, ids in enumerate(inputs)]


def run(path, texts=TEXTS, origin=ORIGIN, window=3, **codec):
    rest = iter(texts)
    output = text_inference.PredictionWriter(str(path), origin, rest, 'in.txt')
    with contextlib.closing(output):
        text_inference.write_predictions(rest, output, text_inference.TextCodec(BYTES, 16, **codec), echo, window)
    return output


def rows(path):
    return [json.loads(line) for line in path.read_text().split('\n')[:-1]]


def test_each_text_has_its_row_in_order(tmp_path):
    output = run(tmp_path / 'new' / 'out.jsonl')
    lines = rows(tmp_path / 'new' / 'out.jsonl')
    assert [row['index'] for row in lines] == list(range(8)) and [row['input'] for row in lines] == TEXTS
    assert [row['prediction'] for row in lines[:6]] == TEXTS[:6]
    assert lines[6]['prediction'] == 'a text that is ' and lines[6]['truncated'] is True and 'truncated' not in lines[5]
    assert lines[3]['predictions'][0] == TEXTS[3] and lines[3]['scores'] == [-3.0, -9.0]
    assert (output.counts.written, output.counts.truncated, output.counts.before) == (8, 1, 0)
    # Only the first row has the origin.
    assert [ORIGIN.items() <= row.items() for row in lines] == [True, *[False] * 7]
    assert set(lines[1]) == {'index', 'input', 'prediction', 'score', 'predictions', 'scores'}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(1, 9))
def test_an_output_truncated_anywhere_is_continued(tmp_path, data, window):
    complete, truncated = tmp_path / 'whole.jsonl', tmp_path / 'cut.jsonl'
    if not complete.exists():
        run(complete)
    content = complete.read_bytes()
    truncated.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    lines = truncated.read_bytes().count(b'\n')
    output = run(truncated, window=window)
    assert truncated.read_bytes() == content
    assert (output.counts.before, output.counts.written, output.counts.truncated) == (lines, 8, 1)


@pytest.mark.parametrize(
    ('change', 'line'),
    [
        ({'texts': ['one', 'two', *TEXTS[2:]]}, 'line 2 is not the prediction of text 1 of in.txt'),
        ({'texts': TEXTS[:5]}, 'line 6 is not the prediction of text 5 of in.txt'),
        ({'origin': {**ORIGIN, 'lengths': {'inputs': 8}}}, "written with lengths {'inputs': 16}, but"),
    ],
)
def test_an_output_of_other_texts_or_models_is_rejected(tmp_path, change, line):
    run(tmp_path / 'out.jsonl')
    before = (tmp_path / 'out.jsonl').read_bytes()
    with pytest.raises(UserError, match=line):
        run(tmp_path / 'out.jsonl', **change)
    assert (tmp_path / 'out.jsonl').read_bytes() == before


def test_the_output_of_no_texts_is_an_empty_file(tmp_path):
    run(tmp_path / 'out.jsonl', texts=[])
    assert (tmp_path / 'out.jsonl').read_text() == ''


def test_processes_that_cannot_share_the_output_are_rejected(monkeypatch):
    monkeypatch.setattr(collectives, 'is_distributed', lambda: True)
    inference = text_inference.TextInference(mock.Mock(), None, BYTES, 'run', None, TextInputs('in.txt'), '-')
    with pytest.raises(UserError, match='must be files'):
        inference.check_settings()


def test_long_texts_can_be_rejected(tmp_path):
    with pytest.raises(UserError, match='input with index 6 must have at most .* 16 tokens, got 24'):
        run(tmp_path / 'out.jsonl', refuse_long=True)
    # The rows before it are kept.
    assert len(rows(tmp_path / 'out.jsonl')) == 6


class Unchanged:
    def __call__(self, logits, tokens, step):
        return logits


class CustomSampling(RowDecoder):
    pass


@pytest.mark.parametrize(
    ('decoder', 'seed'),
    [
        (Sampling(), 3),
        (CustomSampling(), 3),
        (BeamSearch(beams=2), None),
        (Greedy(logits_processor=(Unchanged(),)), None),
    ],
)
def test_an_output_has_the_decoder_and_the_seed_of_sampling(tmp_path, decoder, seed):
    decoding = Decoding(1, {'inputs': 16, 'targets': 4}, decoder, seed=3)
    model = types.SimpleNamespace(model_type='encoder_decoder')
    inference = text_inference.TextInference(
        model, None, BYTES, '', decoding, TextInputs(), str(tmp_path / 'out.jsonl')
    )
    output = inference.open_output('/x', iter(()))
    with contextlib.closing(output):
        output.write([{'index': 0, 'input': 'a'}])
    (origin,) = rows(tmp_path / 'out.jsonl')
    assert origin['lengths'] == {'inputs': 16, 'targets': 4} and origin.get('seed') == seed
    # Addresses of functions and objects differ between processes.
    assert type(decoder).__name__ in origin['decoder'] and ' at 0x' not in origin['decoder']


@pytest.mark.parametrize('model_type', ['classifier', 'span', 'token_labels', 'embedding'])
def test_the_output_of_a_head_has_no_decoder_and_continues_one_that_has(tmp_path, model_type):
    file, model = tmp_path / 'out.jsonl', types.SimpleNamespace(model_type=model_type)
    decoding = Decoding(1, {'inputs': 16, 'targets': 4}, Sampling())
    inference = text_inference.TextInference(model, None, BYTES, '', decoding, TextInputs(), str(file))
    with contextlib.closing(inference.open_output('/x', iter(()))) as output:
        output.write([{'index': 0, 'input': 'a'}])
    (row,) = rows(file)
    assert row == {'index': 0, 'input': 'a', 'checkpoint': '/x', 'lengths': {'inputs': 16, 'targets': 4}}
    file.write_text(json.dumps({**row, 'decoder': 'Greedy()'}) + '\n')
    assert inference.open_output('/x', iter('a')).counts.before == 1


def test_texts_from_lines_and_fields(tmp_path):
    lines = tmp_path / 'a.txt'
    lines.write_bytes('one\n\nthr\u2028e\re\r\nlast'.encode())
    assert list(TextInputs(str(lines))) == ['one', '', 'thr\u2028e\re', 'last']
    records = tmp_path / 'a.jsonl.gz'
    with gzip.open(records, 'wt') as file:
        file.write('{"text": "one", "body": "b"}\n\n{"body": "c", "text": ""}\n')
    assert list(TextInputs(str(records))) == ['one', ''] and list(TextInputs(str(records), 'body')) == ['b', 'c']
    capital = records.rename(tmp_path / 'A.JSONL.GZ')
    assert list(TextInputs(str(capital))) == ['one', '']
    for name, content in (('b.txt', 'one\r\n'), ('b.jsonl', '{"text": "one"}\n')):
        (tmp_path / name).write_text(content, encoding='utf-8-sig')
        assert list(TextInputs(str(tmp_path / name))) == ['one']
    plain = tmp_path / 'plain'
    plain.write_text('{"text": "one"}\n')
    assert list(TextInputs(str(plain))) == ['{"text": "one"}']
    assert list(TextInputs(str(plain), format='jsonl')) == ['one']


@pytest.mark.parametrize(
    ('name', 'content', 'line'),
    [
        ('a.jsonl', '{"text": "a"}\n{"text": \n', 'a.jsonl:2: invalid JSON'),
        ('a.jsonl', '{"text": "a"}\n\n{"body": "b"}\n', ":3: field 'text' is not a string in body"),
        ('a.txt', b'\xff\xfe', 'a.txt:1: invalid UTF-8'),
        ('missing.txt', None, 'missing.txt: No such file.*--input=FILE'),
    ],
)
def test_a_bad_input_is_reported(tmp_path, name, content, line):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=line):
        list(TextInputs(str(tmp_path / name)))
