"""Resolved values equal those of gin, and do not change when another configuration is loaded."""

import functools

import gin
import pytest

from remixer_t5x.config import loading, reference_resolver
from remixer_t5x.config.loading import ConfigSources

MODULE = """
import dataclasses
import itertools

numbers = itertools.count()


@dataclasses.dataclass
class Motor:
    power: int = 1


@dataclasses.dataclass
class Garage:
    make: object
    spare: object = None

    def build(self):
        return self.make()


def number():
    return next(numbers)


def open(garage, built=None):
    return garage, garage.build(), built


def build(make):
    return make()


def wrap(make):
    return Garage(make)
"""
HEAD = """from __gin__ import dynamic_registration
import toy_garage

toy_garage.Motor.power = 2
fast/toy_garage.Motor.power = 3
MOTOR/toy_garage.Motor.power = 4
toy_garage.open.garage = {}
"""


@pytest.fixture
def garage(tmp_path, monkeypatch):
    (tmp_path / 'toy_garage.py').write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def load(root, *lines):
        (tmp_path / 'toy.gin').write_text(HEAD.format(root) + '\n'.join(lines) + '\n')
        loading.load_gin_config(ConfigSources(['toy.gin']), 'toy_garage.open')

    yield load
    gin.clear_config()


MOTORS = {
    'a reference': ['toy_garage.Garage.make = @toy_garage.Motor'],
    'a scope': ['toy_garage.Garage.make = @fast/toy_garage.Motor'],
    'a macro': ['toy_garage.Garage.make = %MOTOR', 'MOTOR = @toy_garage.Motor'],
    'a call': ['toy_garage.Garage.make = @toy_garage.Motor', 'toy_garage.Garage.spare = @toy_garage.Motor()'],
    'a factory that a function returns': [
        'toy_garage.Garage.make = @fast/toy_garage.wrap',
        'toy_garage.wrap.make = @toy_garage.Motor',
    ],
    'a call in a macro': [
        'toy_garage.Garage.make = @toy_garage.Motor',
        'toy_garage.Garage.spare = [{"one": %MOTOR}]',
        'MOTOR = @toy_garage.Motor()',
    ],
}


def power(motor):
    """Returns the power of a motor, of the motor that a garage builds, or None."""
    built = motor.build() if hasattr(motor, 'build') else motor
    return built and built.power


@pytest.mark.parametrize('root', ['@toy_garage.Garage()', '@fast/toy_garage.Garage()'])
@pytest.mark.parametrize('lines', MOTORS.values(), ids=MOTORS)
def test_values_and_scopes_equal_those_of_gin(garage, root, lines):
    import toy_garage

    garage(root, *lines)
    theirs, *their_motors = gin.get_configurable(toy_garage.open)()
    ours, *our_motors = reference_resolver.call_configured('toy_garage.open')
    assert (list(map(power, our_motors)), ours.spare) == (list(map(power, their_motors)), theirs.spare)


def test_call_arguments_are_evaluated_for_each_factory_call(garage):
    lines = ['toy_garage.Motor.power = %N', 'N = @toy_garage.number()']
    garage('@toy_garage.Garage()', 'toy_garage.Garage.make = @toy_garage.Motor', *lines)
    built_garage, first, _ = reference_resolver.call_configured('toy_garage.open')
    assert built_garage.build().power == first.power + 1 and built_garage.build().power == first.power + 2


def test_values_do_not_change_with_the_next_configuration(garage):
    garage('@toy_garage.Garage()', 'toy_garage.Garage.make = @toy_garage.Motor')
    built_garage, *_ = reference_resolver.call_configured('toy_garage.open')
    garage('@toy_garage.Garage()', 'toy_garage.Garage.make = @toy_garage.Motor', 'toy_garage.Motor.power = 9')
    assert built_garage.build().power == 2


def test_a_deferred_value_is_created_once_at_its_first_use(garage):
    import toy_garage

    lines = ['toy_garage.Garage.make = @toy_garage.number', 'toy_garage.open.built = @toy_garage.number()']
    garage('@toy_garage.Garage()', *lines)
    _, built_by_open, built = reference_resolver.call_configured('toy_garage.open', deferred=['toy_garage.open.built'])
    assert toy_garage.number() == built_by_open + 1
    assert built() == built() == built_by_open + 2


@pytest.mark.parametrize('argument', ['1', '@toy_garage.number()'])
def test_a_factory_keeps_the_name_of_its_class(garage, argument):
    lines = ['toy_garage.Garage.make = @fast/toy_garage.wrap', 'toy_garage.wrap.make = @toy_garage.Motor']
    garage('@toy_garage.Garage()', *lines, f'toy_garage.Motor.power = {argument}')
    factory = reference_resolver.call_configured('toy_garage.open')[1].make
    while isinstance(factory, functools.partial):
        factory = factory.func
    assert factory.__name__ == 'Motor'
