"""Every module that reads files without `untrusted_files` is listed here with the reason why this is safe.

`tests/test_untrusted_files.py` fuzzes the readers that use `untrusted_files`.
"""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
# Modules by the reason why they may read a file without `untrusted_files`. Paths are relative to the packages.
REASONS = {
    'trusted, see docs/faults.md': """
        data/task_vocabulary.py cli/info/settings.py interop/huggingface/pytorch_export.py config/gin_files.py
        config/user_modules.py extras/reproduce/tables.py data/pipeline.py interop/shared_folder.py
        remixer_tasks/caching.py
    """,
    'written by this process': """
        checkpoints/durable_folders.py extras/forecast/hlo_costs.py extras/reports/sweep.py
        evaluate/checkpoint_evaluation.py data/resumable_iterator.py train/hooks.py devices/collectives.py
    """,
    'opened but not read': """
        cli/console.py cli/process_flags.py interop/t5x/checkpoint.py run_folder/trackers.py temporary_files.py
    """,
    'validated by untrusted_files; tests/interop and tests/checkpoints test damaged files': """
        checkpoints/untrusted_checkpoints.py interop/huggingface/t5_tokenizer.py
        interop/huggingface/tokenizer_export.py
    """,
    'data that is read in bounded memory; tests/remixer_tasks tests damaged files': """
        remixer_tasks/corpora/text_corpus.py remixer_tasks/files/text_lines.py remixer_tasks/files/download.py
        remixer_tasks/vocabulary/sentencepiece_vocabulary.py
    """,
    'sent by another process of this run': 'checkpoints/checkpoint_manager.py',
    'targets that a task has written': """
        data/token_alignment.py remixer_tasks/benchmarks/text_metrics.py
    """,
    'the folder of this program, which its user trusts': 'extras/export/standalone.py',
    'the output of our child process': 'remixer_tasks/vocabulary/huggingface_tokenizer.py',
    'written by the operating system': 'devices/compilation_cache.py',
    'a request of at most 1 MiB; see tests/extras/test_serve.py': 'extras/serve/server.py',
    'the package itself': 'kernels/self_check.py',
    'at most 200 bytes of a non-blocking descriptor': 'run_folder/model_dir.py',
    'text in a position that tf.data has restored': 'remixer_tasks/corpora/streamed_text.py',
    'an installed package': 'remixer_tasks/python_docs.py',
}
LISTED = {name for names in REASONS.values() for name in names.split()}
READ_FUNCTIONS = {'read_text', 'read_bytes', 'GFile', 'load', 'loads'}
READ_FUNCTIONS |= {'ZipFile', 'GzipFile', 'fromfile', 'memmap', 'is_zipfile'}


def reads_file(call):
    """Returns whether a call opens a file for reading or parses JSON."""
    name = getattr(call.func, 'attr', getattr(call.func, 'id', ''))
    module = ast.unparse(call.func).rpartition('.')[0]
    if module == 'untrusted_files':
        return False
    if name == 'open':
        values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == 'mode')]
        modes = [value.value for value in values if isinstance(getattr(value, 'value', None), str)]
        return not any(set(mode) & set('wax') and len(mode) < 4 for mode in modes)
    return name in READ_FUNCTIONS and (not name.startswith('load') or module in ('json', 'np', 'tomllib'))


def test_every_module_that_reads_a_file_is_listed():
    """New readers use `untrusted_files` and are added to its tests, or their modules are added to `REASONS`."""
    readers = set()
    for package in (ROOT / 'remixer_t5x', ROOT / 'tasks'):
        for path in package.rglob('*.py'):
            nodes = ast.walk(ast.parse(path.read_text(encoding='utf-8')))
            if any(isinstance(node, ast.Call) and reads_file(node) for node in nodes):
                readers.add(path.relative_to(package).as_posix())
    assert readers - {'untrusted_files.py'} == LISTED
