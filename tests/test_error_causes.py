"""The cause of an error, which messages quote on one line."""

from remixer_t5x.errors import UserError, reason


def test_the_reason_is_the_root_cause_on_one_line():
    def chain(*errors):
        error = None
        for outer in reversed(errors):
            outer.__cause__, error = error, outer
        return error

    assert reason(chain(RuntimeError('generating failed'), ValueError('no column\n extra'))) == 'no column extra'
    assert reason(chain(UserError('rows.csv has no rows'), StopIteration())) == 'rows.csv has no rows'
    assert reason(PermissionError(13, 'Permission denied', 'rows.csv')) == 'Permission denied'
    assert reason(KeyError('text')) == "KeyError: 'text'"
    assert reason(AssertionError()) == 'AssertionError: '
    assert len(reason(ValueError('x' * 1000))) == 300
