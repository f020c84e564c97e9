"""Every function that reads files without `untrusted_files` is listed here with the reason why this is safe.

`tests/test_untrusted_files.py` fuzzes the readers that use `untrusted_files`.
"""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
OWN = 'written by this process'
PEER = 'sent by another process of this run'
TRUSTED = 'trusted, see docs/faults.md'
CHECKED = 'validated by safe_paths; tests/interop and tests/checkpoints test damaged files'
SYSTEM = 'written by the operating system'
VERIFIED = 'data that is read in bounded memory; tests/remixer_tasks tests damaged files'
NOT_READ = 'opened but not read'
READERS = {
    'remixer_t5x/data/task_vocabulary.py::_write_files': TRUSTED,
    'remixer_t5x/data/task_vocabulary.py::save_vocabulary': OWN,
    'remixer_t5x/checkpoints/durable.py::commit_checkpoint': OWN,
    'remixer_t5x/checkpoints/untrusted.py::_read_array_metadata': CHECKED,
    'remixer_t5x/checkpoints/manager.py::_gather_stream_positions': PEER,
    'remixer_t5x/cli/streams.py::protect': NOT_READ,
    'remixer_t5x/cli/info/settings.py::_all_macros': TRUSTED,
    'remixer_t5x/interop/huggingface/pytorch_export.py::read_code': TRUSTED,
    'remixer_t5x/config/files.py::<module>': TRUSTED,
    'remixer_t5x/config/files.py::shipped': TRUSTED,
    'remixer_t5x/config/files.py::read': TRUSTED,
    'remixer_t5x/config/user_modules.py::imported_modules': TRUSTED,
    'remixer_t5x/extras/forecast/hlo_costs.py::_cost_estimate': OWN,
    'remixer_t5x/extras/reports/sweep.py::_last_line': OWN,
    'remixer_t5x/evaluate/results.py::write': OWN,
    'remixer_t5x/extras/reproduce/tables.py::read_papers': TRUSTED,
    'remixer_t5x/data/token_alignment.py::span_arrays': 'targets that a task has written',
    'tasks/remixer_tasks/benchmarks/text_metrics.py::span_metrics': 'targets that a task has written',
    'tasks/remixer_tasks/vocabulary/huggingface_tokenizer.py::load': 'the output of our child process',
    'tasks/remixer_tasks/vocabulary/huggingface_tokenizer.py::token_texts': 'JSON that the tokenizer returns',
    'remixer_t5x/data/pipeline.py::require_cache': TRUSTED,
    'remixer_t5x/data/stream.py::capture': OWN,
    'remixer_t5x/devices/collectives.py::_poll': PEER,
    'remixer_t5x/devices/collectives.py::_wait_for_value': PEER,
    'remixer_t5x/devices/collectives.py::check_same': OWN,
    'remixer_t5x/cli/process_flags.py::_code_digests': NOT_READ,
    'remixer_t5x/devices/compilation_cache.py::machine_name': SYSTEM,
    'remixer_t5x/extras/export/run.py::__init__': 'the folder of this program, which its user trusts',
    'remixer_t5x/extras/export/run.py::_load_function': 'the folder of this program, which its user trusts',
    'remixer_t5x/extras/serve/server.py::_read_body': 'a request of at most 1 MiB; see tests/extras/test_serve.py',
    'remixer_t5x/evaluate/text_inputs.py::_open': 'standard input, and files opened by untrusted_files',
    'remixer_t5x/interop/huggingface/t5_tokenizer.py::_read_pieces': CHECKED,
    'remixer_t5x/interop/huggingface/t5_tokenizer.py::write': CHECKED,
    'remixer_t5x/interop/shared_folder.py::importable_code': TRUSTED,
    'remixer_t5x/interop/t5x/checkpoint.py::_open_msgpack': CHECKED,
    'remixer_t5x/interop/t5x/checkpoint.py::_read_leaf': CHECKED,
    'remixer_t5x/interop/t5x/checkpoint.py::_write_array': NOT_READ,
    'remixer_t5x/kernels/self_check.py::_cache_path': 'the package itself',
    'remixer_t5x/kernels/self_check.py::run_check': 'the compilation cache, as JAX reads it',
    'remixer_t5x/run_folder/model_dir.py::lock_model_dir': 'at most 200 bytes of a non-blocking descriptor',
    'remixer_t5x/run_folder/trackers.py::_run_calls': NOT_READ,
    'remixer_t5x/temporary.py::_open_locked': NOT_READ,
    'remixer_t5x/temporary.py::_remove_abandoned_entries': NOT_READ,
    'remixer_t5x/temporary.py::sync': NOT_READ,
    'remixer_t5x/train/hooks.py::_upload': OWN,
    'tasks/remixer_tasks/caching.py::read_cached_splits': TRUSTED,
    'tasks/remixer_tasks/caching.py::read_completed': TRUSTED,
    'tasks/remixer_tasks/corpora/text_corpus.py::_open_documents': VERIFIED,
    'tasks/remixer_tasks/corpora/streamed_text.py::_read': 'text in a position that tf.data has restored',
    'tasks/remixer_tasks/files/download.py::_fetch_file': 'an archive whose SHA-256 is in this package',
    'tasks/remixer_tasks/files/row_files.py::__init__': VERIFIED,
    'tasks/remixer_tasks/files/download.py::_sha256': VERIFIED,
    'tasks/remixer_tasks/files/row_files.py::open_bytes': 'opened by untrusted_files',
    'tasks/remixer_tasks/python_docs.py::read': 'an installed package',
    'tasks/remixer_tasks/vocabulary/sentencepiece_vocabulary.py::_load': VERIFIED,
}


def read_sources():
    """Returns the name and the text of every module except `untrusted_files`."""
    paths = sorted(path for folder in ('remixer_t5x', 'tasks') for path in (ROOT / folder).rglob('*.py'))
    named = [(path.relative_to(ROOT).as_posix(), path.read_text(encoding='utf-8')) for path in paths]
    return [(name, text) for name, text in named if name != 'remixer_t5x/untrusted_files.py']


def find_readers():
    """Returns 'file::function' for every call that opens a file for reading or parses JSON."""
    return {
        f'{name}::{function}'
        for name, text in read_sources()
        for function in _find_readers(ast.parse(text), '<module>')
    }


READ_FUNCTIONS = {'read_text', 'read_bytes', 'GFile', 'load', 'loads'}
READ_FUNCTIONS |= {'ZipFile', 'GzipFile', 'fromfile', 'memmap', 'is_zipfile'}


def _find_readers(node, function):
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else function
        if isinstance(child, ast.Call) and _reads(child):
            yield function
        yield from _find_readers(child, inside)


def _reads(call):
    name = getattr(call.func, 'attr', getattr(call.func, 'id', ''))
    module = ast.unparse(call.func).rpartition('.')[0]
    if module == 'untrusted_files':
        return False
    if name == 'open':
        values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == 'mode')]
        modes = [value.value for value in values if isinstance(getattr(value, 'value', None), str)]
        return not any(set(mode) & set('wax') and len(mode) < 4 for mode in modes)
    return name in READ_FUNCTIONS and (not name.startswith('load') or module in ('json', 'np', 'tomllib'))


def test_every_function_that_reads_a_file_is_listed():
    """New readers use `untrusted_files` and are added to its tests, or are added to `READERS` with a reason."""
    readers = find_readers()
    unlisted, removed = sorted(readers - READERS.keys()), sorted(READERS.keys() - readers)
    assert not unlisted, f'{unlisted} read files without untrusted_files: use it, or add them to READERS'
    assert not removed, f'{removed} no longer read a file: remove them from READERS'


READING = ('open(p)', 'p.open("rb")', 'json.load(f)', 'json.loads(t)', 'p.read_text()')
WRITING = ('open(p, "w")', 'p.open("ab")', 'open(p, mode="x")', 'untrusted_files.opened(p)')


@pytest.mark.parametrize('text', [*READING, *WRITING])
def test_calls_that_read_files_are_detected(text):
    tree = ast.parse(f'class A:\n  def b(self):\n    {text}')
    assert list(_find_readers(tree, '<module>')) == ['b'] * (text in READING)
