"""The tree behind the table of `info`."""

import pytest

from remixer_t5x.costs.counts import Counts
from remixer_t5x.costs.table import cost_table, module_tree, quantity

COUNTS = Counts(
    parameters={('b', 'only', 'kernel'): 6, ('a', 'x', 'kernel'): 1, ('a', 'y', 'kernel'): 2, ('a', 'scale'): 4},
    forward_flops={(): 5.0, ('a', 'x'): 10.0, ('a', 'y'): 20.0, ('b', 'only'): 65.0},
    tokens=10,
)


def test_rows_hold_everything_below_them():
    tree = module_tree(COUNTS)
    assert (tree.parameters, tree.flops) == (13, 100.0)
    assert (tree.children['a'].parameters, tree.children['a'].flops) == (7, 30.0)


def test_an_only_child_shares_its_parents_row():
    assert [node.name for node in module_tree(COUNTS).children.values()] == ['a', 'b/only']


@pytest.mark.parametrize('depth, rows', [(1, 3), (2, 5), (9, 5)])
def test_depth_limits_the_rows(depth, rows):
    assert cost_table(COUNTS, depth).row_count == rows


@pytest.mark.parametrize(
    'number, text', [(0, '0 '), (999, '999 '), (999.6, '1 k'), (1.234e12, '1.23 T'), (2.5e18, '2.5 E')]
)
def test_quantities_keep_three_digits(number, text):
    assert quantity(number) == text
