"""Files that the process did not just write: read, or refused in one line, whatever is in them or in their place.

`USERS` are the readers of such files; a new module that reads through `untrusted_files` is added there.
"""

import contextlib
import json
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError
from tests.support import hostile_files
from tests.support.hostile_files import one_line_or_result

ROOT = pathlib.Path(__file__).parents[1]
FUZZ = settings(max_examples=60, deadline=None)


def _metrics_of_a_run(path):
    from etils import epath

    from remixer_t5x.run_folder import metrics

    for record in metrics.read_records(epath.Path(path)):
        assert record['step'] >= 0


def _a_resumed_run(path):
    from etils import epath

    from remixer_t5x.run_folder import metrics

    copy = path.with_name('resumed.jsonl')
    copy.write_bytes(untrusted_files.read_bytes(path, 10**6) if path.is_file() and path.stat().st_size < 10**6 else b'')
    metrics.JsonlWriter(epath.Path(copy if copy.stat().st_size else path), 5)
    for line in copy.read_text().splitlines():
        assert json.loads(line)['step'] <= 5


def _metrics_of_a_report(path):
    from remixer_t5x.extras.reports import overview, records

    found = records.read_records(path)
    if found:
        overview.summarize_run(records.RecordedRun('a', 'a', found))


def _predictions(path):
    from remixer_t5x.evaluate import results

    for row in results.read_predictions(str(path)):
        row['prediction'].encode()


def _texts(path):
    from remixer_t5x.evaluate import text_inputs

    for kind in ('txt', 'jsonl'):
        one_line_or_result(lambda: [text.encode() for text in text_inputs.TextInputs(str(path), format=kind)])  # noqa: B023


def _an_output_to_continue(path):
    from remixer_t5x.evaluate import text_inference

    text_inference.PredictionWriter(str(path), {'checkpoint': 'a', 'decoder': 'b'})


def _list_of_a_checkpoint(path):
    from etils import epath

    from remixer_t5x.checkpoints import durable

    with under_the_name(path, durable.FILE_LIST):
        durable.check_files(epath.Path(path.parent))


def _description_of_an_array(path):
    from remixer_t5x.checkpoints import untrusted

    with under_the_name(path, '.zarray'):
        untrusted.check_checkpoint(path.parent)


def _record_of_a_checkpoint(path):
    from etils import epath

    from remixer_t5x.checkpoints import saved_params

    place = path.with_name('run') / 'metadata'
    place.parent.mkdir(exist_ok=True)
    path.rename(place)
    try:
        record = saved_params.read_record(epath.Path(path.parent))
        assert isinstance(record, dict)
    finally:
        place.rename(path)


def _ids_of_trackers(path):
    from etils import epath

    from remixer_t5x.run_folder import trackers

    with under_the_name(path, trackers.IDS):
        assert trackers.run_id(epath.Path(path.parent), 'wandb')


def _seconds_of_a_run(path):
    from etils import epath

    from remixer_t5x.train import progress

    with under_the_name(path, progress.TIMES):
        progress.read_times(epath.Path(path.parent))


def _configuration_of_a_run(path):
    from remixer_t5x.cli import infer
    from remixer_t5x.run_folder import model_dir

    marker = path.with_name(model_dir.MARKER)
    marker.write_text('{}')
    with under_the_name(path, model_dir.CONFIG):
        infer.find_template_mismatch(str(path.parent / 'checkpoints' / '1'), None)
    marker.unlink()


def read_config_json(model_type, path):
    from remixer_t5x.interop.huggingface import folders
    from remixer_t5x.interop.huggingface.family import Config
    from remixer_t5x.interop.safetensors_files import Tensors

    *others, last = [family for family in folders.FAMILIES if model_type in family.model_types]
    config = Config({'model_type': model_type, **untrusted_files.read_object(path)}, 'folder')
    for family in others:
        with contextlib.suppress(UserError):
            family.from_config(config, Tensors({}))
    last.from_config(config, Tensors({}))


def _config_of_hugging_face(path):
    read_config_json('t5', path)


def _config_of_bert(path):
    read_config_json('bert', path)


def _config_of_gpt2(path):
    read_config_json('gpt2', path)


def _pieces_of_gpt2(path):
    from remixer_tasks.vocabulary import byte_pairs

    with under_the_name(path, byte_pairs.BOTH):
        byte_pairs.BytePairs(str(path.parent), 0).encode('ab')
    merges = path.with_name(byte_pairs.MERGES)
    merges.write_bytes(b'a b')
    with under_the_name(path, byte_pairs.VOCABULARY):
        byte_pairs.BytePairs(str(path.parent), 0).encode('ab')
    merges.unlink()


def _added_tokens(path):
    from remixer_t5x import tokenizer_files

    for name in (tokenizer_files.TOKENIZER, tokenizer_files.CONFIG, tokenizer_files.ADDED_TOKENS):
        with under_the_name(path, name):
            tokenizer_files.read_added_tokens(path.parent)


def _unigram(path):
    from remixer_tasks.vocabulary import sentencepiece_vocabulary

    sentencepiece_vocabulary.unigram_model(untrusted_files.read_object(path), 'folder')


@contextlib.contextmanager
def under_the_name(path, name):
    """The file has another name in its folder, by which a reader of the folder looks for it."""
    path.rename(path.with_name(name))
    try:
        yield
    finally:
        path.with_name(name).rename(path)


def _tokenizer_of_hugging_face(path):
    from remixer_t5x.interop.huggingface import t5_tokenizer

    with under_the_name(path, t5_tokenizer.CONFIG):
        t5_tokenizer.read(path.parent)


def _index_of_shards(path):
    from remixer_t5x.interop import safetensors_files

    with under_the_name(path, safetensors_files.INDEX):
        safetensors_files.read_folder(path.parent)


def _safetensors(path):
    from remixer_t5x.interop import safetensors_files

    safetensors_files.read_params(str(path))


def _finished_commands(path):
    from remixer_t5x.extras.reports import sweep

    with under_the_name(path, sweep.FINISHED):
        sweep.Sweep(path.parent)


def _seal_of_the_cache(path):
    from remixer_tasks.files import cache

    with under_the_name(path, cache.SEAL):
        cache.check_files(path.parent)


def _published_json(path):
    from remixer_tasks.benchmarks import raw_rows

    raw_rows.parse_json_file(str(path))


def _published_rows(path):
    from remixer_tasks.benchmarks import raw_rows

    for row in raw_rows.jsonl(str(path)):
        str(row).encode()


def _own_rows(path):
    from remixer_tasks.files import row_files
    from remixer_tasks.files.malformed import Malformed

    for kind in ('jsonl', 'tsv', 'csv'):
        skipped = Malformed(strict=False)
        layout = row_files.RowLayout(kind)
        rows = one_line_or_result(lambda: list(row_files.read(str(path), layout, skipped)))  # noqa: B023
        str(rows).encode()
        assert len(skipped.summary().splitlines()) < 2


def _lock_of_another_run(path):
    from remixer_t5x.run_folder import model_dir

    path.rename(path.with_name(model_dir.LOCK))
    try:
        from etils import epath

        with model_dir.lock_model_dir(epath.Path(path.parent)):
            pass
    finally:
        path.with_name(model_dir.LOCK).rename(path)


def _saved_vocabulary(path):
    from remixer_t5x.data import task_vocabulary
    from remixer_tasks import vocabularies

    with under_the_name(path, task_vocabulary.INDEX):
        vocabularies.saved(str(path.parent))


def _saved_words(path):
    from remixer_t5x.data import task_vocabulary
    from remixer_tasks import vocabularies

    index = path.with_name(task_vocabulary.INDEX)
    index.write_text('{"kind": "words"}')
    with under_the_name(path, task_vocabulary.WORDS):
        vocabularies.saved(str(path.parent)).encode('a')
    index.unlink()


def _a_shared_model(path):
    from remixer_t5x.interop import shared_folder

    with under_the_name(path, shared_folder.CONFIG):
        if shared_folder.is_shared(path.parent):
            shared_folder.open_folder(path.parent)


USERS = {name.removeprefix('_'): read for name, read in globals().items() if callable(read) and name.startswith('_')}
# A good record of each file of lines, for records that are good but for a few values.
RECORDS = {
    'kind': 'train', 'step': 1, 'loss': 1.0, 'timing': {'clock': 1.0}, 'prediction': 'a', 'input': 'a', 'target': 'a',
    'score': -1.0, 'index': 0, 'input_hash': 'x', 'checkpoint': 'a', 'decoder': 'b', 'text': 'a', 'config': '',
    'vocabulary': 'v', 'shape': [2], 'chunks': [2], 'dtype': '<f4', 'extra_ids': 3, 'weight_map': {}, 'vocab_size': 3,
    'hidden_size': 2, 'num_attention_heads': 1, 'n_embd': 2, 'n_head': 1, 'n_layer': 1, 'n_positions': 2,
    'vocab': {'a': 0, 'b': 1}, 'merges': ['a b', [1]], 'model': {'vocab': {'a': 0, 'b': 1, 'ab': 2}, 'merges': ['a b']},
}  # fmt: skip
LINES = st.lists(hostile_files.altered(RECORDS).map('{}\n'.format), max_size=3).map(''.join).map(str.encode)


@pytest.mark.parametrize('user', USERS)
def test_any_content_is_read_or_raises_a_one_line_error(tmp_path_factory, user):
    path = tmp_path_factory.mktemp('fuzz') / 'file'

    @FUZZ
    @given(hostile_files.CONTENTS | LINES)
    def law(content):
        path.write_bytes(content)
        one_line_or_result(USERS[user], path)

    law()


# A data set may have 40 GB, so these read them, in bounded memory: `tests/remixer_tasks` shows it.
OF_ANY_SIZE = ('own_rows', 'published_rows', 'published_json')
PLACES = [(user, kind) for user in USERS for kind in hostile_files.ODD_THINGS]


@pytest.mark.parametrize(('user', 'kind'), [one for one in PLACES if one not in [(u, 'sparse') for u in OF_ANY_SIZE]])
def test_non_files_raise_a_one_line_error(tmp_path, user, kind):
    """None of them waits for a pipe, reads a device, or fills the memory."""
    hostile_files.place_odd_thing(kind, tmp_path / 'file')
    one_line_or_result(USERS[user], tmp_path / 'file')


@pytest.mark.parametrize('text', ['NaN', '[1e999]', '{"a": -Infinity}', '9' * 400, '[' * 100_000, '{', '', '"a\nb"'])
def test_odd_json_is_rejected_in_one_short_line(text):
    with pytest.raises(untrusted_files.NotJson) as error:
        untrusted_files.parse_json(text)
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 200


def test_numbers_that_json_lacks_can_be_read_as_none():
    assert untrusted_files.parse_json('[NaN, 1e999, -Infinity, 2, 0.5]', odd_numbers=True) == [None, None, None, 2, 0.5]
    with pytest.raises(untrusted_files.NotJson, match='5,000 digits'):
        untrusted_files.parse_json('9' * 5000, odd_numbers=True)


def test_half_a_surrogate_pair_becomes_a_question_mark():
    assert untrusted_files.parse_json(r'{"\ud83d": ["\udc00x", "\ud83d\ude00"]}') == {'?': ['?x', '\U0001f600']}
    assert untrusted_files.parse_json(b'\xef\xbb\xbf{}') == {}


def test_a_line_that_is_too_long_ends_the_lines(tmp_path):
    (tmp_path / 'a').write_text('1\n[]\n' + 'x' * 30 + '\n2\n3')
    lines = list(untrusted_files.read_json_lines(tmp_path / 'a', longest=10))
    assert [(line.number, line.value, line.error) for line in lines] == [
        (1, 1, None), (2, [], None), (3, None, 'it has more than 10 bytes')
    ]  # fmt: skip
    [*_, last] = untrusted_files.read_json_lines(tmp_path / 'a')
    assert (last.value, last.ended, last.size) == (3, False, 1)


def test_a_file_is_not_read_beyond_its_limit(tmp_path):
    (tmp_path / 'a').write_bytes(b'{"a": 1}')
    assert untrusted_files.read_object(tmp_path / 'a', limit=8) == {'a': 1}
    with pytest.raises(UserError, match='more than 7 bytes; try again'):
        untrusted_files.read_object(tmp_path / 'a', 'try again', limit=7)
