"""Extracts the one-line error of a call or of the output of a process."""

from collections.abc import Callable
from typing import Any

import pytest

from remixer_t5x.errors import UserError


def error_message(call: Callable[..., object], *arguments: Any) -> str:
    """Returns the message of the UserError that the call raises: one line of at most 1,000 characters."""
    with pytest.raises(UserError) as raised:
        call(*arguments)
    message = str(raised.value)
    assert len(message.splitlines()) == 1 and len(message) <= 1000, message
    return message


def printed_error(output: str) -> str:
    """Returns the only line of `output` that starts with 'error: ', and checks that there is no traceback."""
    (error,) = [line for line in output.splitlines() if line.startswith('error: ')]
    assert 'Traceback' not in output
    return error
