"""Optional reference libraries, whose results are compared with those of remixer_t5x."""

import importlib.util

import pytest


def require(*packages: str) -> None:
    """Skips the test if one of the packages is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f'{package} is not installed: scripts/test.sh --references')
