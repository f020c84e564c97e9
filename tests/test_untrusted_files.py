"""Files with any content, and paths that are not files, are read or raise a one-line error.

`READERS` are the functions that read untrusted files; add every new module that uses `untrusted_files`.
"""

import contextlib
import json

import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x import tokenizer_files, untrusted_files
from remixer_t5x.checkpoints import durable_folders, saved_params, untrusted_checkpoints
from remixer_t5x.cli import infer
from remixer_t5x.data import task_vocabulary
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import checkpoint_evaluation, text_inference
from remixer_t5x.extras.reports import overview, run_records, sweep
from remixer_t5x.interop import safetensors_files, shared_folder
from remixer_t5x.interop.huggingface import model_folders, t5_tokenizer
from remixer_t5x.interop.huggingface.model_family import HuggingFaceConfig
from remixer_t5x.interop.huggingface.t5 import T5
from remixer_t5x.run_folder import metrics, model_dir
from remixer_tasks import pair_inputs, vocabularies
from remixer_tasks.benchmarks import raw_rows
from remixer_tasks.files import cache, row_files
from remixer_tasks.files.text_lines import BadRecords
from remixer_tasks.vocabulary import sentencepiece_vocabulary, words_and_bytes
from tests.support import untrusted_inputs
from tests.support.untrusted_inputs import result_or_one_line_error

FUZZ = settings(max_examples=40, deadline=None)


def read_metrics(path):
    for record in metrics.read_records(epath.Path(path)):
        assert record['step'] >= 0


def resume_metrics(path):
    copy = path.with_name('resumed.jsonl')
    copy.write_bytes(untrusted_files.read_bytes(path, 10**6) if path.is_file() and path.stat().st_size < 10**6 else b'')
    metrics.JsonlWriter(epath.Path(copy if copy.stat().st_size else path), 5)
    for line in copy.read_text().splitlines():
        assert json.loads(line)['step'] <= 5


def summarize_metrics(path):
    if metrics_records := run_records.read_metrics_records(path):
        overview.summarize_run(run_records.RecordedRun('a', 'a', metrics_records))


def read_texts(path):
    for kind in ('txt', 'jsonl'):
        result_or_one_line_error(lambda: [text.encode() for text in pair_inputs.TextInputs(str(path), format=kind)])  # noqa: B023


def read_rows(path):
    for kind in ('jsonl', 'tsv', 'csv'):
        skipped = BadRecords(strict=False)
        layout = row_files.RowLayout(kind)
        rows = result_or_one_line_error(lambda: list(row_files.read_rows(str(path), layout, skipped)))  # noqa: B023
        str(rows).encode()
        assert len(skipped.describe_skipped_records().splitlines()) < 2


def read_tables(path):
    for reader in (raw_rows.read_tsv, raw_rows.read_csv, raw_rows.read_lines):
        result_or_one_line_error(lambda: list(reader(str(path))))  # noqa: B023


def read_checkpoint_record(folder):
    assert isinstance(saved_params.read_record(epath.Path(folder)), dict)


def lock_model_dir(folder):
    with model_dir.lock_model_dir(epath.Path(folder)):
        pass


def open_shared_model(folder):
    if shared_folder.is_shared_folder(folder):
        shared_folder.check_shared_folder(folder)


@contextlib.contextmanager
def renamed_to(path, name):
    """Renames a file within its folder until the end of the context."""
    renamed = path.parent / name
    renamed.parent.mkdir(exist_ok=True)
    path.rename(renamed)
    try:
        yield
    finally:
        renamed.rename(path)


def folder_reader(name, read, **others):
    """Returns a function that renames a file to `name`, writes `others` (texts by file name), and reads the folder."""

    def read_folder(path):
        for other, text in others.items():
            path.with_name(other).write_text(text)
        with renamed_to(path, name):
            read(path.parent)
        for other in others:
            path.with_name(other).unlink()

    return read_folder


def config_reader(model_type):
    def read(path):
        *others, last = [family for family in model_folders.FAMILIES if model_type in family.model_types]
        config = HuggingFaceConfig({'model_type': model_type, **untrusted_files.read_json_object(path)}, 'folder')
        for family in others:
            with contextlib.suppress(UserError):
                family.from_config(config)
        last.from_config(config)

    return read


ADDED_TOKENS = (tokenizer_files.TOKENIZER, tokenizer_files.CONFIG, tokenizer_files.ADDED_TOKENS)
READERS = {
    'run_metrics': read_metrics,
    'resumed_metrics': resume_metrics,
    'report_metrics': summarize_metrics,
    'predictions': lambda path: [
        row['prediction'].encode() for row in checkpoint_evaluation.read_predictions(str(path))
    ],
    'texts': read_texts,
    'output': lambda path: text_inference.PredictionWriter(str(path), {'checkpoint': 'a'}, iter(()), 'texts'),
    'checkpoint_file_list': folder_reader(
        durable_folders.FILE_LIST, lambda folder: durable_folders.verify_file_checksums(epath.Path(folder))
    ),
    'array_metadata': folder_reader('.zarray', untrusted_checkpoints.check_untrusted_checkpoint),
    'checkpoint_record': folder_reader('run/metadata', read_checkpoint_record),
    'run_config': folder_reader(
        model_dir.CONFIG,
        lambda folder: infer.find_template_mismatch(f'{folder}/checkpoints/1', None),
        **{model_dir.MARKER_FILE: '{}'},
    ),
    'run_lock': folder_reader(model_dir.LOCK_FILE, lock_model_dir),
    **{
        f'{model_type}_config': config_reader(model_type)
        for family in model_folders.FAMILIES
        for model_type in family.model_types
    },
    **{name: folder_reader(name, tokenizer_files.read_added_tokens) for name in ADDED_TOKENS},
    'unigram': lambda path: sentencepiece_vocabulary.build_unigram_model(
        untrusted_files.read_json_object(path), 'folder'
    ),
    'hugging_face_tokenizer': folder_reader(t5_tokenizer.CONFIG, t5_tokenizer.find_t5_tokenizer),
    'shard_index': folder_reader(safetensors_files.INDEX_FILE, T5.open_tensors),
    'safetensors': lambda path: safetensors_files.read_params(str(path)),
    'finished_commands': folder_reader(sweep.FINISHED_FILE, sweep.Sweep),
    'cache_file_list': folder_reader(cache.FILE_LIST, cache.check_file_sizes),
    'published_json': lambda path: raw_rows.parse_json_file(str(path)),
    'published_rows': lambda path: [str(row).encode() for row in raw_rows.read_jsonl(str(path))],
    'published_tables': read_tables,
    'rows': read_rows,
    'saved_vocabulary': folder_reader(task_vocabulary.INDEX_FILE, lambda folder: vocabularies.saved(str(folder))),
    'saved_words': folder_reader(
        words_and_bytes.WORDS_FILE,
        lambda folder: vocabularies.saved(str(folder)).encode('a'),
        **{task_vocabulary.INDEX_FILE: '{"kind": "words"}'},
    ),
    'shared_model': folder_reader(shared_folder.CONFIG, open_shared_model),
}
# Valid values of all fields, a few of which `altered_json` replaces.
RECORD = {
    'kind': 'train', 'step': 1, 'loss': 1.0, 'timing': {'clock': 1.0}, 'prediction': 'a', 'input': 'a', 'target': 'a',
    'score': -1.0, 'index': 0, 'input_hash': 'x', 'checkpoint': 'a', 'decoder': 'b', 'text': 'a', 'config': '',
    'vocabulary': 'v', 'shape': [2], 'chunks': [2], 'dtype': '<f4', 'extra_ids': 3, 'weight_map': {}, 'vocab_size': 3,
    'hidden_size': 2, 'num_attention_heads': 1, 'n_embd': 2, 'n_head': 1, 'n_layer': 1, 'n_positions': 2,
    'vocab': {'a': 0, 'b': 1}, 'merges': ['a b', [1]], 'model': {'vocab': {'a': 0, 'b': 1, 'ab': 2}, 'merges': ['a b']},
}  # fmt: skip
LINES = st.lists(untrusted_inputs.altered_json(RECORD).map('{}\n'.format), max_size=3).map(''.join).map(str.encode)


@pytest.mark.parametrize('name', READERS)
def test_any_content_is_read_or_raises_a_one_line_error(tmp_path_factory, name):
    path = tmp_path_factory.mktemp('fuzz') / 'file'

    @FUZZ
    @given(untrusted_inputs.CONTENTS | LINES)
    def read(content):
        path.write_bytes(content)
        result_or_one_line_error(READERS[name], path)

    read()


# All readers must not wait for a pipe or read an endless device; other paths need one reader each of files and folders.
CASES = [(name, kind) for name in READERS for kind in ('pipe', 'device')]
CASES += [(name, kind) for name in ('run_metrics', 'shard_index') for kind in ('folder', 'sparse', 'nowhere', 'itself')]


@pytest.mark.parametrize(('name', 'kind'), CASES)
def test_non_files_are_read_as_empty_or_raise_a_one_line_error(tmp_path, name, kind):
    """No reader waits for a pipe, reads a device, or fills the memory."""
    untrusted_inputs.create_special_path(kind, tmp_path / 'file')
    assert not result_or_one_line_error(READERS[name], tmp_path / 'file')


@pytest.mark.parametrize('text', ['NaN', '[1e999]', '{"a": -Infinity}', '9' * 400, '[' * 100_000, '{', '', '"a\nb"'])
def test_odd_json_is_rejected_in_one_short_line(text):
    with pytest.raises(untrusted_files.InvalidJsonError) as error:
        untrusted_files.parse_json(text)
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 200


def test_numbers_that_json_lacks_can_be_read_as_none():
    assert untrusted_files.parse_json('[NaN, 1e999, -Infinity, 2, 0.5]', odd_numbers=True) == [None, None, None, 2, 0.5]
    with pytest.raises(untrusted_files.InvalidJsonError, match='5,000 digits'):
        untrusted_files.parse_json('9' * 5000, odd_numbers=True)


def test_half_a_surrogate_pair_becomes_a_question_mark():
    assert untrusted_files.parse_json(r'{"\ud83d": ["\udc00x", "\ud83d\ude00"]}') == {'?': ['?x', '\U0001f600']}
    assert untrusted_files.parse_json(b'\xef\xbb\xbf{}') == {}


def test_reading_stops_after_a_line_that_is_too_long(tmp_path):
    (tmp_path / 'a').write_text('1\n[]\n' + 'x' * 30 + '\n2\n3')
    lines = list(untrusted_files.read_json_lines(tmp_path / 'a', longest=10))
    assert [(line.number, line.value, line.error) for line in lines] == [
        (1, 1, None), (2, [], None), (3, None, 'it has more than 10 bytes')
    ]  # fmt: skip
    [*_, last] = untrusted_files.read_json_lines(tmp_path / 'a')
    assert (last.value, last.ended, last.size) == (3, False, 1)


def test_a_file_is_not_read_beyond_its_limit(tmp_path):
    (tmp_path / 'a').write_bytes(b'{"a": 1}')
    assert untrusted_files.read_json_object(tmp_path / 'a', limit=8) == {'a': 1}
    with pytest.raises(UserError, match='more than 7 bytes; try again'):
        untrusted_files.read_json_object(tmp_path / 'a', 'try again', limit=7)
