"""Marks as quick, in the contract, each law once for each sublayer: on the first side and row that has the sublayer."""

import functools

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name == 'test_contract.py' and _is_quick(item):
            item.add_marker(pytest.mark.quick)


def _is_quick(item):
    words = item.name.partition('[')[2].rstrip(']').split('-')
    sides = set(words) & {'encoder', 'decoder'} or {'decoder'}
    return words == [''] or any((words[0], side) in covering_rows(item.module) for side in sides)


@functools.cache
def covering_rows(contract):
    """Pairs (name, side) of the table `SUBLAYERS`, decoders first, that have every sublayer at least once."""
    seen, rows = set(), []
    for side in ('decoder', 'encoder'):
        for name, case in contract.SUBLAYERS.items():
            found = {part for factory in getattr(case, side) for part in parts(factory)}
            if found - seen:
                seen |= found
                rows.append((name, side))
    return rows


def parts(factory):
    """The sublayers of a factory: its own, and those among its arguments."""
    arguments = [value for value in factory.keywords.values() if isinstance(value, functools.partial)]
    own = [factory.func] if factory.func.__module__.startswith('remixer_t5x.models.sublayers.') else []
    return [*own, *(part for argument in arguments for part in parts(argument))]
