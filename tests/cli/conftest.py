import pytest

from tests.support.toy_house import clean_environment, house, toy_module  # noqa: F401 (fixtures)


def pytest_collection_modifyitems(items):
    for item in items:
        # Libraries warn in the middle of a command.
        if '/tests/cli/' in str(item.path):
            item.add_marker(pytest.mark.filterwarnings('ignore::DeprecationWarning'))
            item.add_marker(pytest.mark.filterwarnings('ignore::ResourceWarning'))
