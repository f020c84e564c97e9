"""The cause of an error on one line."""

from remixer_t5x.errors import UserError, root_cause_message


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
