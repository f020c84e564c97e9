"""The tables of `info --memory` and `info --sharding`, from numbers given here."""

import io

import pytest
from rich.console import Console

from remixer_t5x.costs import memory_table, sharding_table
from remixer_t5x.costs.step_memory import StepMemory
from remixer_t5x.devices.partition import ShardingRow

GIB = 2**30
FOUND = StepMemory(GIB, 2 * GIB, 1000, 0, 3 * GIB, 24, 0, 6 * GIB + 1024)
ROWS = [
    ShardingRow('mlp/wi', (4, 6), ('embed', 'mlp'), (('data', 'fsdp'), None), 24, ''),
    ShardingRow('bias', (5,), ('heads',), (None,), 20, 'heads=5 does not divide by 4: replicated'),
]


def printed(table):
    console = Console(file=io.StringIO(), width=160)
    console.print(table)
    lines = console.file.getvalue().splitlines()
    return [' '.join(line.split()) for line in lines if line.strip()]


def test_shares_are_of_the_device_where_its_memory_is_known():
    lines = printed(memory_table.memory_table(FOUND, 8 * GIB))
    assert 'optimizer state 2,147,483,648 2,048.0 25.0' in lines
    assert lines[-1] == 'total 6,442,451,968 6,144.0 75.0'
    assert printed(memory_table.memory_table(FOUND, None))[-1] == 'total 6,442,451,968 6,144.0'


@pytest.mark.parametrize(
    ('available', 'start'),
    [(8 * GIB, 'fits: 2.00 GiB'), (4 * GIB, 'does not fit: 6.00 GiB'), (None, 'the hardware file')],
)
def test_the_verdict(available, start):
    assert memory_table.verdict(FOUND, available).startswith(start)


def test_a_parameter_is_shown_with_its_axes_its_share_and_its_note():
    lines = printed(sharding_table.sharding_table(ROWS))
    assert 'mlp/wi 4 x 6 embed, mlp data+fsdp, - 24 1/4' in lines
    assert lines[lines.index('bias 5 heads - 20 all') + 1] == 'heads=5 does not divide by 4: replicated'
    assert lines[-1] == 'total 44 37.9%'
