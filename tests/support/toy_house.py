"""A small module for gin to configure, so that tests of configuration do not depend on the shipped models."""

import os
import sys
from unittest import mock

import gin
import pytest

MODULE = """
import dataclasses


@dataclasses.dataclass(frozen=True)
class Engine:
    power: int
    dtype: str = 'float32'


@dataclasses.dataclass(frozen=True)
class Turbine:
    power: int = 7


def run(engine, colour='red'):
    return engine, colour


def refuse(power):
    from remixer_t5x.errors import UserError
    raise UserError(f'power is {power}; give less')


def crash(power):
    raise KeyError('a bug')
"""
CONFIG = """from __gin__ import dynamic_registration
import toy_house

ENGINE = @toy_house.Engine()
POWER = 5
toy_house.Engine.power = %POWER
toy_house.run.engine = %ENGINE
"""


@pytest.fixture(scope='session')
def toy_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp('modules')
    (folder / 'toy_house.py').write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture
def car_folder(toy_module, tmp_path, monkeypatch):
    """Changes to a folder with `car.gin`, and clears the gin configuration at the end."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'car.gin').write_text(CONFIG)
    yield tmp_path
    gin.clear_config()


@pytest.fixture
def clean_environment():
    """Restores the environment variables, which `main` changes, after the test."""
    with mock.patch.dict(os.environ):
        yield
