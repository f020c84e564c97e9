"""Every function that reads files without `untrusted_files` is listed here with the reason why this is safe.

`tests/test_untrusted_files.py` fuzzes the readers that use `untrusted_files`.
"""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
# Functions by the reason why they may read a file without `untrusted_files`. Paths are relative to the packages.
REASONS = {
    'trusted, see docs/faults.md': """
        data/task_vocabulary.py::_write_vocabulary_files cli/info/settings.py::_read_all_macros
        interop/huggingface/pytorch_export.py::read_pytorch_code config/gin_files.py::<module>
        config/gin_files.py::read_shipped_files config/gin_files.py::read config/user_modules.py::find_imported_modules
        extras/reproduce/tables.py::read_papers data/pipeline.py::require_cache
        interop/shared_folder.py::make_code_importable remixer_tasks/caching.py::_describe_cached_split
        remixer_tasks/caching.py::_read_text remixer_tasks/huggingface_datasets.py::_read_commit
    """,
    'written by this process': """
        data/task_vocabulary.py::save_vocabulary checkpoints/durable_folders.py::commit_checkpoint
        extras/forecast/hlo_costs.py::_parse_cost_estimate extras/reports/sweep.py::read_last_line
        evaluate/checkpoint_evaluation.py::write data/resumable_iterator.py::capture_position
        train/hooks.py::_upload_trace devices/collectives.py::check_same_on_processes
    """,
    'opened but not read': """
        cli/console.py::protect_standard_streams cli/process_flags.py::_hash_code
        interop/t5x/checkpoint.py::_write_array run_folder/trackers.py::_run_calls temporary_files.py::_open_and_lock
        temporary_files.py::_remove_abandoned_entries temporary_files.py::sync_to_disk
    """,
    'validated by untrusted_files; tests/interop and tests/checkpoints test damaged files': """
        checkpoints/untrusted_checkpoints.py::_read_array_metadata
        interop/huggingface/t5_tokenizer.py::_read_vocabulary_pieces
        interop/huggingface/tokenizer_export.py::write_tokenizer interop/t5x/checkpoint.py::_open_msgpack_checkpoint
        interop/t5x/checkpoint.py::_read_array
    """,
    'data that is read in bounded memory; tests/remixer_tasks tests damaged files': """
        remixer_tasks/corpora/text_corpus.py::_open_documents remixer_tasks/files/row_files.py::__init__
        remixer_tasks/files/download.py::_compute_file_sha256
        remixer_tasks/vocabulary/sentencepiece_vocabulary.py::_load_model
    """,
    'sent by another process of this run': """
        checkpoints/checkpoint_manager.py::_gather_stream_positions devices/collectives.py::_poll_failure_key
        devices/collectives.py::_wait_for_value
    """,
    'targets that a task has written': """
        data/token_alignment.py::make_span_arrays remixer_tasks/benchmarks/text_metrics.py::span_metrics
    """,
    'the folder of this program, which its user trusts': """
        extras/export/standalone.py::__init__ extras/export/standalone.py::_load_function
    """,
    'the output of our child process': 'remixer_tasks/vocabulary/huggingface_tokenizer.py::load_tokenizer',
    'JSON that the tokenizer returns': 'remixer_tasks/vocabulary/huggingface_tokenizer.py::token_texts',
    'written by the operating system': 'devices/compilation_cache.py::get_machine_name',
    'a request of at most 1 MiB; see tests/extras/test_serve.py': 'extras/serve/server.py::_read_body',
    'the package itself': 'kernels/self_check.py::_get_cache_path',
    'the compilation cache, as JAX reads it': 'kernels/self_check.py::run_kernel_check',
    'at most 200 bytes of a non-blocking descriptor': 'run_folder/model_dir.py::lock_model_dir',
    'text in a position that tf.data has restored': 'remixer_tasks/corpora/streamed_text.py::_read_from_position',
    'an archive whose SHA-256 is in this package': 'remixer_tasks/files/download.py::_fetch_file',
    'standard input, and files opened by untrusted_files': 'remixer_tasks/files/row_files.py::open_bytes',
    'an installed package': 'remixer_tasks/python_docs.py::read_documentation',
}
READERS = {name for names in REASONS.values() for name in names.split()}


def read_sources():
    """Yields the name and the text of every module except `untrusted_files`."""
    for package in (ROOT / 'remixer_t5x', ROOT / 'tasks'):
        for path in sorted(package.rglob('*.py')):
            name = path.relative_to(package).as_posix()
            if name != 'untrusted_files.py':
                yield name, path.read_text(encoding='utf-8')


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
    """New readers use `untrusted_files` and are added to its tests, or are added to `REASONS`."""
    readers = find_readers()
    unlisted, removed = sorted(readers - READERS), sorted(READERS - readers)
    assert not unlisted, f'{unlisted} read files without untrusted_files: use it, or add them to REASONS'
    assert not removed, f'{removed} no longer read a file: remove them from REASONS'
