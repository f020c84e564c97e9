"""Values of the wrong type or out of range raise a one-line error before anything is called."""

import ast
import collections
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

import pytest

from remixer_t5x import ranges
from remixer_t5x.cli import train
from remixer_t5x.config import gin_files, loading, reference_resolver
from remixer_t5x.data import batch_formats
from remixer_t5x.errors import UserError
from remixer_t5x.models import interface


@dataclasses.dataclass
class Sizes:
    width: int
    rate: float = 0.5
    name: str | None = None
    fast: bool = False
    depth: int = None  # type: ignore[assignment]
    other: list | int = 3
    names: Sequence[str] = ()
    makers: Sequence[Callable[[], int]] = ()
    heads: ranges.Count = 1
    dropout: ranges.Rate | None = 0.0
    make: Callable[[], int] = int
    rates: Mapping[str, float] | None = None
    dtype: ranges.FloatDtype = 'float32'


@pytest.mark.parametrize(
    ('argument', 'value', 'allowed'),
    [('width', 'big', 'a whole number'), ('width', 64.0, 'a whole number'), ('width', True, 'a whole number'),
     ('width', None, 'a whole number'), ('rate', 'fast', 'a number'), ('name', 3, 'a text or None'),
     ('fast', 1, 'True or False'), ('depth', 'x', 'a whole number or None'), ('other', 'x', 'a whole number'),
     ('heads', 0, 'at least 1'), ('heads', 1.5, 'a whole number'), ('dropout', 1, 'from 0 to below 1 or None'),
     ('dropout', -0.1, 'from 0'), ('dropout', float('nan'), 'from 0'), ('make', 'int', 'a reference'),
     ('width', [3], 'a whole number'), ('rates', ['a'], "a dictionary, as in {'a': 1} or None"),
     ('other', {}, 'a list'), ('names', 'x', "a list, got 'x'; set MACRO = ['x']"),
     ('makers', 'x', "a list, got 'x'; set MACRO = VALUE"), ('dtype', 'bf16', "'float32' or 'bfloat16'")],
)  # fmt: skip
def test_values_of_the_wrong_type_or_range_are_rejected(argument, value, allowed):
    with pytest.raises(UserError) as error:
        ranges.check_argument(Sizes, argument, value, 'MACRO')
    line = str(error.value)
    assert line.startswith('MACRO must be ') and allowed in line and repr(value) in line
    if argument != 'width':
        with pytest.raises(UserError, match=argument.upper()):
            ranges.check_fields(dataclasses.replace(Sizes(1), **{argument: value}))


@pytest.mark.parametrize(
    ('argument', 'value'),
    [('width', 3), ('rate', 1), ('rate', 1.5), ('name', None), ('name', 'a'), ('fast', True), ('depth', None),
     ('other', [3]), ('other', (3,)), ('rates', {'a': 1}), ('make', [3]),
     ('width', Sizes), ('absent', 'x'), ('dropout', None), ('dropout', 0), ('heads', 1), ('make', int)],
)  # fmt: skip
def test_valid_and_unverifiable_values_are_accepted(argument, value):
    ranges.check_argument(Sizes, argument, value, 'MACRO')


@pytest.mark.parametrize(
    ('flag', 'allowed'),
    [(('EMBED_DIM', 'big'), 'EMBED_DIM must be a whole number'),
     (('NUM_HEADS', '0'), 'NUM_HEADS must be a whole number of at least 1'),
     (('stack.Stack.dropout_rate', 'a'), 'stack.Stack.dropout_rate must be a number')],
)  # fmt: skip
def test_a_model_with_an_invalid_setting_is_rejected(flag, allowed):
    with pytest.raises(UserError, match=allowed):
        loading.load_macro_values(loading.ConfigSources(['models/t5_1_1.gin', 'sizes/tiny.gin'], [flag]), 'MODEL')


@pytest.mark.parametrize(
    ('text', 'number'),
    [('8', 8), (' 8', 8), ('-1', None), ('\u00b2', None), ('\u0663', None), ('9' * 5000, None), ('99999999999', None),
     ('1_000', None), ('abc', None), ('', None), ('1.5', None), (3, 3), (str(2**31 - 1), 2**31 - 1)],
)  # fmt: skip
def test_a_whole_number_is_ascii_and_has_32_bits(text, number):
    assert ranges.parse_whole_number(text) == number


def numeric_macros() -> tuple[dict[str, str], dict[str, list]]:
    """Returns a file that reads each macro with a numeric value, and the arguments that each macro sets."""
    macros, arguments = {}, collections.defaultdict(list)
    for name, text in gin_files.read_shipped_files().items():
        if name.startswith('experiments/'):
            continue
        for macro, value in re.findall(r'^([A-Z_0-9]+) = (.*)', text.text, re.M):
            if isinstance(_literal(value), int | float) and not isinstance(_literal(value), bool):
                macros[macro] = [*gin_files.find_files_with_macro(macro), name][0]
        bindings = re.findall(r'^(?:\w+/)*(\w+)\.(\w+)\.(\w+) = %([A-Z_0-9]+)$', text.text, re.M)
        for module, rest, argument, macro in bindings:
            if statement := text.imports.get(module):
                function = reference_resolver.import_by_name(f'{statement.module}.{rest}')
                annotation = ranges.get_annotation(function, argument)
                types = [base for base, _ in map(ranges.split_annotation, ranges.get_union_members(annotation))]
                if int in types or float in types:
                    macros[macro] = name
                    arguments[macro].append((function, argument))
    return macros, arguments


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None


MACROS, ARGUMENTS = numeric_macros()
SMALL = {'EMBED_DIM': 16, 'NUM_HEADS': 2, 'HEAD_DIM': 8, 'MLP_DIM': 16}
SMALL |= {'NUM_ENCODER_LAYERS': 1, 'NUM_DECODER_LAYERS': 1}
SHAPES = {'inputs': 4, 'targets': 4}


def test_numeric_macros_are_found():
    assert len(MACROS) > 70
    assert {'DROPOUT_RATE', 'LEARNING_RATE', 'MICROBATCHES', 'NUM_HEADS', 'TOP_P', 'EVAL_PERIOD'} <= MACROS.keys()


def matches_annotations(macro, value) -> bool:
    try:
        for function, argument in ARGUMENTS[macro]:
            ranges.check_argument(function, argument, value, macro)
    except UserError:
        return False
    return True


@pytest.mark.parametrize('macro', sorted(MACROS))
def test_any_number_is_accepted_or_rejected_with_a_user_error(macro):
    """Builds the run with each value that the type of the setting permits."""
    file = MACROS[macro]
    first = file if file.startswith('models/') else 'models/gmlp.gin' if 'gmlp' in file else 'models/t5_1_1.gin'
    parts = ['data/python_docs.gin', 'optimizers/adamw.gin', 'hardware/cpu.gin']
    base = ['runs/infer.gin', 'runs/eval.gin'] if macro.startswith(('INFER', 'DECODER_SEED', 'FOLLOW')) else []
    paths = [*base, first, 'sizes/tiny.gin', *parts, 'runs/finetune.gin', *([file] if file != first else [])]
    small = {name: value for name, value in SMALL.items() if not first.endswith(('tim.gin', 'gmlp.gin'))}
    unset = {'FILES', 'PAIRS', 'HF_DATASET', 'INPUTS', 'TARGETS'} & _find_unset_macros(paths)
    for value in (0, -1, 1.5, None, 'fast'):
        if not matches_annotations(macro, value):
            continue
        flags = [(macro, str(value)), ('MODEL_DIR', 'x'), ('INITIAL_CHECKPOINT_PATH', 'x'), ('CHECKPOINT_PATH', 'x')]
        flags += [(name, 'x') for name in unset]
        try:
            loading.load_gin_config(loading.ConfigSources(paths, flags, defaults=small), train.ROOT)
            reference_resolver.evaluate_macro(macro, None)
            run = reference_resolver.call_configured(train.ROOT, deferred=(train.TRAINING_TASK, train.EVALUATION_TASKS))
            if file.startswith(('models/', 'sublayers/', 'sizes/')):
                model = run.step_config.model
                interface.compute_param_shapes(model, batch_formats.get_batch_shapes(model.model_type, SHAPES))
        except UserError as error:
            assert '\n' not in str(error) and 'bug' not in str(error)


def _find_unset_macros(paths: list[str]) -> set[str]:
    texts = [text for file in paths for text in gin_files.GinReader((), ()).read(file)]
    return {name for text in texts for name in text.referenced_macros} - {
        name for text in texts for name in text.assigned_macros
    }
