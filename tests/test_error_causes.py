"""A UserError that replaces another error states its cause."""

import ast
import pathlib

import pytest

from remixer_t5x.errors import UserError, reason

ROOT = pathlib.Path(__file__).parents[1]
# Exceptions whose type alone states the cause, so the message does not need their text.
SPECIFIC = {
    *('AttributeError', 'BlockingIOError', 'BrokenPipeError', 'EOFError', 'KeyError', 'LookupError', 'TypeError'),
    *('binascii.Error', 'pickle.UnpicklingError', 'queue.Empty', 'tf.errors.ResourceExhaustedError'),
    'tokenize.TokenError',
}
# Handlers of broader types whose cause is known: a parsed value, or a check before the `raise`.
KNOWN_CAUSES = {
    'remixer_t5x/devices/described_hardware.py': 'ValueError',
    'remixer_t5x/lazy.py': 'ModuleNotFoundError',
    'remixer_t5x/cli/main.py': 'RuntimeError',
    'remixer_t5x/config/loading.py': 'tokenize.TokenError ValueError SyntaxError',
    'remixer_t5x/extras/forecast/forecast.py': 'Exception',
    'tasks/remixer_tasks/objectives/ul2.py': 'ValueError',
    'tasks/remixer_tasks/vocabulary/sentencepiece_vocabulary.py': 'ValueError',
    'tasks/remixer_tasks/vocabulary/huggingface_tokenizer.py': 'subprocess.TimeoutExpired',
}


def names_in(tree):
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def find_missing_causes(tree):
    """Yields (line, caught types) for each UserError that a handler raises without using the caught error."""
    for handler in ast.walk(tree):
        if not isinstance(handler, ast.ExceptHandler):
            continue
        types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        known = {handler.name}
        for node in ast.walk(handler):
            if isinstance(node, ast.Assign) and names_in(node.value) & known:
                known |= names_in(ast.Tuple(node.targets))
        for node in ast.walk(handler):
            exception = node.exc if isinstance(node, ast.Raise) else None
            if exception and 'UserError' in names_in(exception) and not names_in(exception) & known:
                yield node.lineno, {ast.unparse(kind) for kind in types}


@pytest.mark.parametrize('folder', ['remixer_t5x', 'tasks'])
def test_no_library_error_is_replaced_by_a_guess(folder):
    for path in sorted((ROOT / folder).rglob('*.py')):
        name = path.relative_to(ROOT).as_posix()
        for line, types in find_missing_causes(ast.parse(path.read_text(encoding='utf-8'))):
            assert types <= SPECIFIC | set(KNOWN_CAUSES.get(name, '').split()), (
                f'{name}:{line} must show its {types}: errors.reason(error)'
            )


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
