"""Settings for all tests, made before JAX is imported, and which tests share a process."""

import os

import hypothesis
import pytest

# The first example of a property compiles, on a machine that may be busy.
hypothesis.settings.register_profile('no deadline', deadline=None)
hypothesis.settings.load_profile('no deadline')
# The tests compile hundreds of tiny programs and run each a few times: optimising them takes longer than it saves.
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_backend_optimization_level=0'.strip()
os.environ.setdefault('JAX_PLATFORMS', 'cpu')


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

    return ByFile(config, log)


# What ids of the contract's tests have beside the name of a sublayer.
SIDES = {'encoder', 'decoder', 'one', 'packed'}
