"""Helpers for messages: the cause of an error on one line, and counts with a noun."""

import numpy as np

from remixer_t5x.cli import conversions
from remixer_t5x.errors import UserError, format_count, root_cause_message


def test_the_reason_is_the_root_cause_on_one_line():
    def chain(*errors):
        error = None
        for outer in reversed(errors):
            outer.__cause__, error = error, outer
        return error

    assert (
        root_cause_message(chain(RuntimeError('generating failed'), ValueError('no column\n extra')))
        == 'no column extra'
    )
    assert root_cause_message(chain(UserError('rows.csv has no rows'), StopIteration())) == 'rows.csv has no rows'
    assert root_cause_message(PermissionError(13, 'Permission denied', 'rows.csv')) == 'Permission denied'
    assert root_cause_message(KeyError('text')) == "KeyError: 'text'"
    assert root_cause_message(AssertionError()) == 'AssertionError: '
    assert len(root_cause_message(ValueError('x' * 1000))) == 300


def test_only_a_count_of_one_has_a_singular_noun():
    assert [format_count(count, 'row') for count in (0, 1, 1000)] == ['0 rows', '1 row', '1,000 rows']
    assert conversions.describe_params({'scale': np.zeros(1)}) == '1 parameter in 1 array'
