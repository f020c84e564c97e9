"""A fixture of several tests of generation."""

import pytest


@pytest.fixture(scope='session')
def toy():
    from tests.models import toy_generation

    return toy_generation
