import pytest

from tests.support.toy_house import clean_environment  # noqa: F401 (fixture)


def pytest_collection_modifyitems(items):
    for item in items:
        # Libraries emit these warnings while a command runs.
        if '/tests/cli/' in str(item.path):
            item.add_marker(pytest.mark.filterwarnings('ignore::DeprecationWarning'))
            item.add_marker(pytest.mark.filterwarnings('ignore::ResourceWarning'))
