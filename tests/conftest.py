"""Settings for all tests, made before JAX is imported, which tests share a process, and fixtures of several folders."""

import collections
import os
import random

import hypothesis
import pytest

# The first example of a property compiles, on a machine that may be busy.
hypothesis.settings.register_profile('no deadline', deadline=None)
hypothesis.settings.load_profile('no deadline')
# The tests compile hundreds of tiny programs and run each a few times: optimising them takes longer than it saves.
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_backend_optimization_level=0'.strip()
os.environ.setdefault('JAX_PLATFORMS', 'cpu')


def pytest_addoption(parser):
    text = 'shuffle the files, and the tests in each file; the same number gives the same order'
    parser.addoption('--random-order-seed', type=int, metavar='N', help=text)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Not by pytest-randomly, which would have to be switched off in every ordinary run."""
    if config.option.random_order_seed is not None:
        shuffled = random.Random(config.option.random_order_seed)
        shuffled.shuffle(items)
        files = {path: shuffled.random() for path in sorted({item.path for item in items})}
        items.sort(key=lambda item: files[item.path])


def pytest_terminal_summary(terminalreporter):
    """Where the time went: seconds of each folder of tests, over all processes; and the order, if it was random."""
    seed = terminalreporter.config.option.random_order_seed
    if seed is not None:
        terminalreporter.section(f'random order: --random-order-seed {seed}')
    spent = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            spent[report.nodeid.rpartition('::')[0].rpartition('/')[0]] += getattr(report, 'duration', 0.0)
    if sum(spent.values()) > 60:
        terminalreporter.section('seconds by folder')
        for folder, seconds in spent.most_common():
            terminalreporter.write_line(f'{seconds:7.1f}s {folder}')


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests of one file share a process, its fixtures and what it has compiled; those of the contract by sublayer.

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

    # Files in the order of the collection, where that is the random one.
    config.option.loadscopereorder &= config.option.random_order_seed is None
    return ByFile(config, log)


# What ids of the contract's tests have beside the name of a sublayer.
SIDES = {'encoder', 'decoder', 'one', 'packed'}


@pytest.fixture(scope='session')
def compiled(tmp_path_factory):
    """A folder for compiled programs which all real processes of this test run share, whatever worker starts them."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if 'PYTEST_XDIST_WORKER' in os.environ else own) / 'compiled'
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope='session')
def training(tmp_path_factory, compiled):
    """Starts training runs in processes of their own: `TrainingRuns`."""
    from tests.support.training_runs import TrainingRuns

    return TrainingRuns(tmp_path_factory.mktemp('training'), compiled)


@pytest.fixture(scope='session')
def tiny():
    """The module `tests.support.tiny_training`."""
    from tests.support import tiny_training

    return tiny_training


@pytest.fixture(scope='session')
def folders():
    """The module `tests.support.hf_folders`."""
    from tests.support import hf_folders

    return hf_folders
