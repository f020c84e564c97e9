"""The tables of `info` for fixed numbers."""

from remixer_t5x.cli.info import model, sharding
from remixer_t5x.costs.counts import ModelCounts
from remixer_t5x.costs.step_memory import StepMemory
from remixer_t5x.devices.partition import ShardingRow

COUNTS = ModelCounts(
    parameters={('b', 'only', 'kernel'): 6, ('a', 'x', 'kernel'): 1, ('a', 'y', 'kernel'): 2, ('a', 'scale'): 4},
    forward_flops={(): 5.0, ('a', 'x'): 10.0, ('a', 'y'): 20.0, ('b', 'only'): 65.0},
    tokens=10,
)
GIB = 2**30
MEMORY = StepMemory(GIB, 2 * GIB, 1000, 0, 3 * GIB, 24, 0, 6 * GIB + 1024)
SHARDINGS = [
    ShardingRow('mlp/wi', (4, 6), ('embed', 'mlp'), (('data', 'fsdp'), None), 24, ''),
    ShardingRow('bias', (5,), ('heads',), (None,), 20, 'heads=5 is not divisible by 4: replicated'),
]


def rows(table):
    """Returns the non-empty cells of each row."""
    columns = (list(column.cells) for column in table.columns)
    return [[cell.strip() for cell in row if cell] for row in zip(*columns, strict=True)]


def test_a_row_of_modules_includes_everything_below_it():
    assert rows(model.cost_table(COUNTS, 2)) == [
        ['a', '7', '53.8', '30', '30.0'],
        ['x', '1', '7.7', '10', '10.0'],
        ['y', '2', '15.4', '20', '20.0'],
        # An only child shares its parent's row.
        ['b/only', '6', '46.2', '65', '65.0'],
        ['loss (outside modules)', '0', '0.0', '5', '5.0'],
        ['total', '13', '100.0', '100', '100.0'],
    ]
    assert model.cost_table(COUNTS, 1).row_count == 4


def test_a_parameter_is_shown_with_its_axes_share_and_note():
    assert rows(sharding.sharding_table(SHARDINGS)) == [
        ['mlp/wi', '4 x 6', 'embed, mlp', 'data+fsdp, -', '24', '1/4'],
        ['bias', '5', 'heads', '-', '20', 'all'],
        ['heads=5 is not divisible by 4: replicated'],
        ['total', '44', '37.9%'],
    ]
