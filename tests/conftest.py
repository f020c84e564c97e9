"""pytest configuration: settings that precede the import of JAX, the order of tests, reports and common fixtures."""

import collections
import contextlib
import gc
import itertools
import os
import pathlib
import random
import resource
import signal
import sys
from multiprocessing import forkserver

import hypothesis
import psutil
import pytest

from tests.support import process_overhead, temporary_modules

# The first example of a hypothesis test includes the compilation.
hypothesis.settings.register_profile('no deadline', deadline=None)
hypothesis.settings.load_profile('no deadline')
# The tests compile hundreds of small programs and run each only a few times: optimization takes longer than it saves.
CHEAP_XLA_FLAGS = ('--xla_backend_optimization_level=0', '--xla_cpu_parallel_codegen_split_count=1')
os.environ['XLA_FLAGS'] = ' '.join([os.environ.get('XLA_FLAGS', ''), *CHEAP_XLA_FLAGS]).strip()
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# No test reads the source locations of operations, and recording them takes 4% of the test time.
os.environ.setdefault('JAX_TRACEBACK_IN_LOCATIONS_LIMIT', '0')
# torch's threads busy-wait: next to other tests, two threads take 20 times as long as one. NumPy also reads this.
os.environ['OMP_NUM_THREADS'] = '1'
# Read before the fixture `shared` sets REMIXER_T5X_CACHE.
USER_CACHE = pathlib.Path(os.environ.get('REMIXER_T5X_CACHE') or '~/.cache/remixer_t5x').expanduser()
# Scripts started by tests must not install packages into the environment of `VENV=/path scripts/test.sh`.
os.environ.pop('VENV', None)
# Retry failed bucket requests after a millisecond. TensorFlow reads these variables when it is imported.
os.environ['GCS_RETRY_CONFIG_INIT_DELAY_TIME_US'] = '1000'
os.environ['GCS_RETRY_CONFIG_MAX_DELAY_TIME_US'] = '1000'
# Shell scripts start background commands with SIGINT ignored, and child processes inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.append(temporary_modules.WrittenModules())


def pytest_addoption(parser):
    text = 'shuffle the files and the tests within each file, with N as the seed'
    parser.addoption('--random-order-seed', type=int, metavar='N', help=text)
    parser.addoption('--long', action='store_true', help='also run the long tests of tests/faults')
    text = 'write the CPU time of each test to FILE, in descending order'
    parser.addoption('--processor-seconds', type=pathlib.Path, metavar='FILE', help=text)


def pytest_make_parametrize_id(config, val, argname):
    """Keeps bytes out of test ids, which must be the same in all pytest-xdist workers.

    The output of gzip contains a timestamp, and workers collect tests at different times.
    """
    if isinstance(val, bytes):
        return argname
    return None  # the default id


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Sorts long files first, so that no worker starts one at the end, or shuffles the tests.

    pytest-randomly is not used, because it would have to be disabled in every ordinary run.
    """
    if config.option.random_order_seed is None:
        test_counts = collections.Counter(item.path for item in items)
        ranks = {name: rank for rank, name in enumerate(LONG_FILES)}
        items.sort(key=lambda item: (ranks.get(item.path.stem, len(ranks)), -test_counts[item.path]))
    else:
        rng = random.Random(config.option.random_order_seed)
        rng.shuffle(items)
        ranks = {path: rng.random() for path in sorted({item.path for item in items})}
        items.sort(key=lambda item: ranks[item.path])


def pytest_collection_finish(session):
    """Enables the cache of compiled programs and the settings of `process_overhead`."""
    from tests.support import program_cache

    folder = _compiled_folder(session.config)
    program_cache.remove_old_entries(folder)
    program_cache.enable_cache(str(folder))
    session.stash[_LOADED_PROGRAMS] = program_cache.LoadedPrograms()
    process_overhead.configure_after_imports()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    item.session.stash[_LOADED_PROGRAMS].unload_if_many()


_LOADED_PROGRAMS = pytest.StashKey['program_cache.LoadedPrograms']()


def _compiled_folder(config):
    """Returns the persistent folder of compiled programs for this type of CPU.

    It is in the user's cache, which other clones share, or in the checkout if that cache is not writable.
    """
    from remixer_t5x.devices import compilation_cache

    for parent in (USER_CACHE / 'tests', config.rootpath / '.jax_cache'):
        folder = parent / compilation_cache.get_machine_name()
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    raise OSError(f'neither {USER_CACHE} nor {config.rootpath} is writable: set REMIXER_T5X_CACHE')


def _processor_seconds():
    """Returns the user and system CPU seconds of this process, its finished children and those of the fork server."""
    usages = [resource.getrusage(target) for target in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    server = forkserver._forkserver._forkserver_pid
    return seconds + (sum(psutil.Process(server).cpu_times()[:4]) if server else 0.0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Adds the CPU seconds since the previous report to each report."""
    report = yield
    now = _processor_seconds()
    report.processor_seconds = now - item.session.stash.get(_LAST_PROCESSOR_SECONDS, now)
    item.session.stash[_LAST_PROCESSOR_SECONDS] = now
    return report


_LAST_PROCESSOR_SECONDS = pytest.StashKey[float]()


def pytest_runtestloop(session):
    session.stash[_LAST_PROCESSOR_SECONDS] = _processor_seconds()


def pytest_terminal_summary(terminalreporter):
    """Prints the seed of a random order, and the wall and CPU seconds of each test folder over all processes."""
    options = terminalreporter.config.option
    if options.random_order_seed is not None:
        terminalreporter.section(f'random order: --random-order-seed {options.random_order_seed}')
    wall, processor, tests = collections.Counter(), collections.Counter(), collections.Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            folder = report.nodeid.partition('::')[0].rpartition('/')[0]
            wall[folder] += report.duration
            processor[folder] += getattr(report, 'processor_seconds', 0.0)
            tests[report.nodeid] += getattr(report, 'processor_seconds', 0.0)
    if sum(wall.values()) > 60:
        terminalreporter.section('wall and CPU seconds by folder')
        for folder, seconds in [*wall.most_common(), ('all', sum(wall.values()))]:
            used = processor[folder] if folder != 'all' else sum(processor.values())
            terminalreporter.write_line(f'{seconds:7.1f}s {used:7.1f}s {folder}')
    if options.processor_seconds is not None:
        lines = [f'{seconds:.2f} {test}' for test, seconds in tests.most_common()]
        options.processor_seconds.write_text('\n'.join([*lines, '']))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Runs the tests of a file in one process, to share fixtures and programs, but splits the contract by sublayer.

    xdist_group marks are not used: pytest-xdist 3.8 writes them to an attribute that pytest 9.2 no longer reads.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition('::')
            if not file.endswith('test_sublayer_contract.py'):
                return file
            return f'{file}:{test.partition("[")[2].rstrip("]").partition("-")[0]}'

    # Keep the order of `pytest_collection_modifyitems`.
    config.option.loadscopereorder = False
    return ByFile(config, log)


# The slowest test files, in descending order of time.
LONG_FILES = (
    *('test_several_processes', 'test_runs', 'test_sublayer_contract'),
    'test_sublayer_ablation',
    *('test_own_task', 'test_export', 'test_docs', 'test_encoder_commands', 'test_studies'),
    *('test_trained_model', 'test_local_files', 'test_meshes', 'test_faults', 'test_recovery', 'test_decoder_only'),
    'test_pipeline',
    *('test_learned_weights', 'test_seq2seq', 'test_text_tasks', 'test_compare', 'test_task_commands', 'test_resume'),
    *('test_loop', 'test_info', 'test_beam_search', 'test_report', 'test_corpora', 'test_bucket'),
    *('test_bucket_commands', 'test_data_cache', 'test_language_model', 'test_report_page', 'test_t5_semantics'),
    *('test_checkpoint_manager', 'test_predictions', 'test_imports', 'test_guide'),
    'test_decoding',
)


@pytest.fixture(scope='session', autouse=True)
def shared(tmp_path_factory):
    """Yields a temporary folder that all workers share, and moves the project's cache into it."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('REMIXER_T5X_CACHE', str(folder / 'cache'))
        yield folder


@pytest.fixture(scope='module', autouse=True)
def _collect_garbage(request):
    """Closes files that libraries leave open while the module's filter for ResourceWarning is still active."""
    yield
    if any('ResourceWarning' in str(mark.args) for mark in request.node.iter_markers('filterwarnings')):
        gc.collect()


@pytest.fixture(scope='module', autouse=True)
def _unload_written_modules(shared):
    """Unloads the modules that a test file wrote."""
    yield
    temporary_modules.unload(shared)


@pytest.fixture(scope='session')
def training(tmp_path_factory):
    """Returns a `TrainingRuns`, which starts training runs in separate processes."""
    from tests.support.tiny_training import TrainingRuns

    return TrainingRuns(tmp_path_factory.mktemp('training'))


@pytest.fixture
def warm_python():
    """Yields a `WarmPython`: a command that starts Python with the libraries already imported."""
    from tests.support.warm_python import WarmPython

    with contextlib.closing(WarmPython()) as python:
        yield python


@pytest.fixture
def clean_gin():
    """Clears the gin configuration after the test."""
    yield
    sys.modules['gin'].clear_config()


@pytest.fixture(scope='session')
def tiny():
    """Returns the module `tests.support.tiny_training`."""
    from tests.support import tiny_training

    return tiny_training
