"""Settings for all tests, made before JAX is imported."""

import os

import pytest

# The tests compile hundreds of tiny programs and run each a few times: optimising them takes longer than it saves.
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_backend_optimization_level=0'.strip()
os.environ.setdefault('JAX_PLATFORMS', 'cpu')


def pytest_collection_modifyitems(items):
    """Tests of one file share a process and what they have compiled; those of the contract, the most, by sublayer."""
    for item in items:
        group = item.nodeid.partition('::')[0]
        if item.path.name == 'test_contract.py' and hasattr(item, 'callspec'):
            group += f':{item.callspec.params.get("name")}'
        item.add_marker(pytest.mark.xdist_group(group))
