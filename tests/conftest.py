"""Settings for all tests, made before JAX is imported, which tests share a process, and fixtures of several folders."""

import collections
import contextlib
import gc
import itertools
import os
import pathlib
import random
import resource
import sys

import hypothesis
import pytest

from tests.support import cheap_processes, written_modules

# The first example of a property compiles, on a machine that may be busy.
hypothesis.settings.register_profile('no deadline', deadline=None)
hypothesis.settings.load_profile('no deadline')
# The tests compile hundreds of tiny programs and run each a few times: optimising them takes longer than it saves.
CHEAP = ('--xla_backend_optimization_level=0', '--xla_cpu_parallel_codegen_split_count=1')
os.environ['XLA_FLAGS'] = ' '.join([os.environ.get('XLA_FLAGS', ''), *CHEAP]).strip()
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# No test reads from which line of code an operation came; to write the calls that led to each takes 4% of a run's time.
os.environ.setdefault('JAX_TRACEBACK_IN_LOCATIONS_LIMIT', '0')
# torch's threads wait for each other by spinning: next to other tests, two of them take 20 times as long as one. NumPy
# reads this too.
os.environ['OMP_NUM_THREADS'] = '1'
# Read here, as the tests have a cache of their own (`shared`).
USERS_CACHE = pathlib.Path(os.environ.get('REMIXER_T5X_CACHE') or '~/.cache/remixer_t5x').expanduser()
# The scripts that tests start would install into the environment of `VENV=/path scripts/test.sh`.
os.environ.pop('VENV', None)
# TensorFlow reads these when it is imported: a request to a bucket that failed is repeated after a millisecond.
os.environ['GCS_RETRY_CONFIG_INIT_DELAY_TIME_US'] = '1000'
os.environ['GCS_RETRY_CONFIG_MAX_DELAY_TIME_US'] = '1000'
sys.meta_path.append(written_modules.WrittenModules())


def pytest_addoption(parser):
    text = 'shuffle the files, and the tests in each file; the same number gives the same order'
    parser.addoption('--random-order-seed', type=int, metavar='N', help=text)
    text = 'write the processor seconds of every test, dearest first, to this file'
    parser.addoption('--processor-seconds', type=pathlib.Path, metavar='FILE', help=text)


def pytest_make_parametrize_id(config, val, argname):
    """A test's name does not hold the content of a file: workers refuse to start when their names of tests differ.

    gzip writes the second at which it compressed into what it makes, and workers collect in different seconds.
    """
    if isinstance(val, bytes):
        return argname
    return None  # pytest's own name


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Long files first, so that no worker is left with one at the end; or a random order.

    Not by pytest-randomly, which would have to be switched off in every ordinary run.
    """
    if config.option.random_order_seed is None:
        tests = collections.Counter(item.path for item in items)
        places = {name: place for place, name in enumerate(LONG_FILES)}
        items.sort(key=lambda item: (places.get(item.path.stem, len(places)), -tests[item.path]))
    else:
        shuffled = random.Random(config.option.random_order_seed)
        shuffled.shuffle(items)
        files = {path: shuffled.random() for path in sorted({item.path for item in items})}
        items.sort(key=lambda item: files[item.path])


def pytest_collection_finish(session):
    """Programs that an earlier test, or an earlier run of the tests, has compiled are read from the disk; and the
    settings of `cheap_processes`.
    """
    if 'jax' in sys.modules:
        from tests.support import kept_programs

        folder = _compiled_folder(session.config)
        kept_programs.remove_old(folder)
        kept_programs.keep(str(folder))
        session.stash[_LOADED] = kept_programs.LoadedPrograms()
    cheap_processes.after_imports()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    if _LOADED in item.session.stash:
        item.session.stash[_LOADED].unload_if_many()


_LOADED = pytest.StashKey['kept_programs.LoadedPrograms']()


def _compiled_folder(config):
    """A folder for compiled programs that outlives the run; one for each kind of CPU, whose instructions they use.

    It is in the user's cache, because a fresh clone compiles the same programs; in the checkout where the user's cache
    cannot be written.
    """
    from remixer_t5x.devices import compilation_cache

    for place in (USERS_CACHE / 'tests', config.rootpath / '.jax_cache'):
        folder = place / compilation_cache.machine_name()
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    raise OSError(f'neither {USERS_CACHE} nor {config.rootpath} can be written: set REMIXER_T5X_CACHE')


def _processor_seconds():
    """What this process and its children that ended have used, in user and system seconds together."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Each report says what its process has used since the report before it."""
    report = yield
    now = _processor_seconds()
    report.processor_seconds = now - item.session.stash.get(_SEEN, now)
    item.session.stash[_SEEN] = now
    return report


_SEEN = pytest.StashKey[float]()


def pytest_runtestloop(session):
    session.stash[_SEEN] = _processor_seconds()


def pytest_terminal_summary(terminalreporter):
    """Where the time went: seconds of each folder of tests, over all processes; and the order, if it was random."""
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
        terminalreporter.section('seconds by folder: of the clock, of processors')
        for folder, seconds in [*wall.most_common(), ('all', sum(wall.values()))]:
            used = processor[folder] if folder != 'all' else sum(processor.values())
            terminalreporter.write_line(f'{seconds:7.1f}s {used:7.1f}s {folder}')
    if options.processor_seconds is not None:
        lines = [f'{seconds:.2f} {test}' for test, seconds in tests.most_common()]
        options.processor_seconds.write_text('\n'.join([*lines, '']))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests of one file share a process, its fixtures and what it has compiled; the contract's are split by sublayer.

    Not by marks of groups: pytest-xdist 3.8 writes them into an attribute that pytest 9.2 does not read any more.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition('::')
            if not file.endswith('test_contract.py'):
                return file
            words = test.partition('[')[2].rstrip(']').split('-')
            return f'{file}:{next((word for word in words if word not in SIDES), "")}'

    # Files in the order of the collection, made above.
    config.option.loadscopereorder = False
    return ByFile(config, log)


# Those that take longest, longest first.
LONG_FILES = (
    *('test_several_processes', 'test_runs', 'test_contract', 'test_recovery', 'test_faults', 'test_liveness'),
    *('test_own_task', 'test_export', 'test_copied_run', 'test_docs', 'test_encoder_commands', 'test_studies'),
    *('test_trained_model', 'test_local_files', 'test_meshes', 'test_decoder_only', 'test_pipeline', 'test_learned'),
    *('test_seq2seq', 'test_text_tasks', 'test_compare', 'test_task_commands', 'test_resume', 'test_loop'),
    *('test_info', 'test_beam_search', 'test_report', 'test_corpora', 'test_bucket', 'test_bucket_commands'),
    *('test_data_cache', 'test_language_model', 'test_page', 'test_t5_semantics', 'test_manager', 'test_predictions'),
    *('test_imports', 'test_guide', 'test_decoding'),
)
# What ids of the contract's tests have in addition to the name of a sublayer.
SIDES = {'encoder', 'decoder', 'one', 'packed'}


@pytest.fixture(scope='session', autouse=True)
def shared(tmp_path_factory):
    """A folder of this test run, whatever worker asks; the project's cache is in it and not in the user's home."""
    own = tmp_path_factory.getbasetemp()
    folder = own.parent if 'PYTEST_XDIST_WORKER' in os.environ else own
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('REMIXER_T5X_CACHE', str(folder / 'cache'))
        yield folder


@pytest.fixture(scope='module', autouse=True)
def _own_garbage(request):
    """Files that libraries leave open are closed under the filters of the module that allows it, not in a later one."""
    yield
    if any('ResourceWarning' in str(mark.args) for mark in request.node.iter_markers('filterwarnings')):
        gc.collect()


@pytest.fixture(scope='module', autouse=True)
def _own_modules(shared):
    """Modules that a test file writes, as the guide tells users to do, are unknown to the next test file."""
    yield
    written_modules.forget(shared)


@pytest.fixture(scope='session')
def compiled(pytestconfig):
    """The folder of compiled programs, for real processes."""
    return _compiled_folder(pytestconfig)


@pytest.fixture(scope='session')
def training(tmp_path_factory, compiled):
    """Starts training runs in processes of their own: `TrainingRuns`."""
    from tests.support.tiny_training import TrainingRuns

    return TrainingRuns(tmp_path_factory.mktemp('training'), compiled)


@pytest.fixture
def warm_python(compiled):
    """A `WarmPython`: a command that starts Python with the libraries imported."""
    from tests.support.warm_python import WarmPython

    with contextlib.closing(WarmPython(compiled)) as python:
        yield python


@pytest.fixture
def clean_gin():
    """What a test configures in gin ends with it."""
    yield
    sys.modules['gin'].clear_config()


@pytest.fixture(scope='session')
def tiny():
    """The module `tests.support.tiny_training`."""
    from tests.support import tiny_training

    return tiny_training
