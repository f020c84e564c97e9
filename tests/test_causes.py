"""A UserError that replaces another error states its cause."""

import ast
import pathlib

import pytest

from remixer_t5x.errors import UserError, reason

ROOT = pathlib.Path(__file__).parents[1]
# The type of these alone is the cause, which the message states in its own words.
SPECIFIC = {
    *('AttributeError', 'BlockingIOError', 'BrokenPipeError', 'EOFError', 'KeyError', 'LookupError', 'TypeError'),
    *('binascii.Error', 'pickle.UnpicklingError', 'queue.Empty', 'tf.errors.ResourceExhaustedError'),
    'tokenize.TokenError',
}
# Handlers of a wider type whose cause is known: the text of a value that was parsed, or a check before the `raise`.
KNOWN = {
    'remixer_t5x/devices/described_hardware.py': 'ValueError',
    'remixer_t5x/lazy.py': 'ModuleNotFoundError',
    'remixer_t5x/cli/main.py': 'RuntimeError',
    'remixer_t5x/config/loading.py': 'tokenize.TokenError ValueError SyntaxError',
    'remixer_t5x/extras/forecast/forecast.py': 'Exception',
    'tasks/remixer_tasks/objectives/ul2.py': 'ValueError',
    'tasks/remixer_tasks/vocabulary/sentencepiece_vocabulary.py': 'ValueError',
    'tasks/remixer_tasks/vocabulary/huggingface_tokenizer.py': 'subprocess.TimeoutExpired',
}


def names(tree):
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def causes_left_out(tree):
    """Yields (line, caught types) for each UserError raised in a handler without the caught error or a part of it."""
    for handler in ast.walk(tree):
        if not isinstance(handler, ast.ExceptHandler):
            continue
        types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        known = {handler.name}
        for node in ast.walk(handler):
            if isinstance(node, ast.Assign) and names(node.value) & known:
                known |= names(ast.Tuple(node.targets))
        for node in ast.walk(handler):
            exception = node.exc if isinstance(node, ast.Raise) else None
            if exception and 'UserError' in names(exception) and not names(exception) & known:
                yield node.lineno, {ast.unparse(kind) for kind in types}


@pytest.mark.parametrize('folder', ['remixer_t5x', 'tasks'])
def test_no_library_error_is_replaced_by_a_guess(folder):
    for path in sorted((ROOT / folder).rglob('*.py')):
        name = path.relative_to(ROOT).as_posix()
        for line, types in causes_left_out(ast.parse(path.read_text(encoding='utf-8'))):
            assert types <= SPECIFIC | set(KNOWN.get(name, '').split()), (
                f'{name}:{line} must show its {types}: errors.reason(error)'
            )


def test_the_reason_is_the_root_cause_on_one_line():
    def raised(*chain):
        error = None
        for outer in reversed(chain):
            outer.__cause__, error = error, outer
        return error

    assert reason(raised(RuntimeError('generating failed'), ValueError('no column\n extra'))) == 'no column extra'
    assert reason(raised(UserError('rows.csv has no rows'), StopIteration())) == 'rows.csv has no rows'
    assert reason(PermissionError(13, 'Permission denied', 'rows.csv')) == 'Permission denied'
    assert reason(KeyError('text')) == "KeyError: 'text'"
    assert reason(AssertionError()) == 'AssertionError: '
    assert len(reason(ValueError('x' * 1000))) == 300
