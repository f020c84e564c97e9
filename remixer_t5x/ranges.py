"""Checks the types and ranges of settings, which are declared by annotating arguments and dataclass fields.

An argument such as `dropout_rate: ranges.Rate = 0.0` is checked when gin binds it. The decorator `validate_arguments`
also checks the arguments of direct calls. Dataclasses call `check_fields` in `__post_init__`.
"""

import collections.abc
import dataclasses
import functools
import inspect
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from remixer_t5x.errors import UserError


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers or strings allowed for a setting, and a description of them for error messages."""

    description: str
    contains: Callable[[Any], bool]


Function = typing.TypeVar('Function', bound=Callable[..., Any])

Count = Annotated[int, Range('a whole number of at least 1', lambda n: n >= 1)]
NonNegativeInt = Annotated[int, Range('a non-negative integer', lambda n: n >= 0)]
Rate = Annotated[float, Range('a number from 0 to below 1', lambda n: 0 <= n < 1)]
Fraction = Annotated[float, Range('a number from 0 to 1', lambda n: 0 <= n <= 1)]
OpenFraction = Annotated[float, Range('a number above 0 and below 1', lambda n: 0 < n < 1)]
PositiveFraction = Annotated[float, Range('a number above 0 and at most 1', lambda n: 0 < n <= 1)]
Positive = Annotated[float, Range('a number above 0', lambda n: n > 0)]
NonNegative = Annotated[float, Range('a non-negative number', lambda n: n >= 0)]
AboveOne = Annotated[float, Range('a number above 1', lambda n: n > 1)]
LocalPath = Annotated[str, Range('a local path', lambda path: '://' not in path)]
FloatDtype = Annotated[str, Range("'float32' or 'bfloat16'", lambda name: name in ('float32', 'bfloat16'))]

_DESCRIPTIONS: dict[Any, str] = {
    int: 'a whole number',
    float: 'a number',
    bool: 'True or False',
    str: 'a text',
    types.NoneType: 'None',
    collections.abc.Mapping: "a dictionary, as in {'a': 1}",
    dict: "a dictionary, as in {'a': 1}",
    collections.abc.Sequence: 'a list',
    list: 'a list',
    tuple: 'a list in parentheses',
}
_TYPES_BY_NAME: dict[str, Any] = {'None': None, 'Any': Any} | {kind.__name__: kind for kind in _DESCRIPTIONS}
_TYPES_BY_NAME |= {name: kind for name, kind in vars().items() if isinstance(kind, type(Count))}
_SCALARS = (bool, int, float, str, types.NoneType)
_CONTAINERS = (list, tuple, dict)
_LISTS = {collections.abc.Sequence, list, tuple}


def check_argument(function: Callable[..., Any], argument: str, value: Any, setting: str) -> None:
    """Raises UserError if the value of a setting does not match the annotation of the argument that it sets."""
    check_setting(setting, value, get_annotation(function, argument))


def validate_arguments(function: Function) -> Function:
    """Decorates a function to raise UserError for arguments that do not match their annotations."""

    @functools.wraps(function)
    def call_checked(*args: Any, **kwargs: Any) -> Any:
        for name, value in inspect.signature(function).bind_partial(*args, **kwargs).arguments.items():
            check_argument(function, name, value, name)
        return function(*args, **kwargs)

    return typing.cast(Function, call_checked)


def check_fields(instance: Any, **names: str) -> None:
    """Checks all fields of a dataclass; errors refer to a field by `names[field]` or by its name in upper case."""
    for field in dataclasses.fields(instance):
        kind = get_annotation(type(instance), field.name)
        check_setting(names.get(field.name, field.name.upper()), getattr(instance, field.name), kind)


def check_setting(setting: str, value: Any, kind: Any) -> None:
    """Raises UserError if a number, string, boolean or None does not match an annotation such as `Count | None`.

    Lists and dictionaries are checked only if the annotation consists of types in `_DESCRIPTIONS`. Their items, and
    values of other types, are not checked.
    """
    if not isinstance(value, _SCALARS + _CONTAINERS) or kind is inspect.Parameter.empty:
        return
    kinds = [split_annotation(each) for each in get_union_members(kind)]
    if isinstance(value, _CONTAINERS) and not all(base in _DESCRIPTIONS for base, _ in kinds):
        return
    if any(base in (Any, object) or isinstance(base, typing.TypeVar | str | typing.ForwardRef) for base, _ in kinds):
        return
    if any(base is typing.Literal for base, _ in kinds) or any(
        _value_matches_type(value, base, bounds) for base, bounds in kinds
    ):
        return
    descriptions = [bounds.description if bounds else _DESCRIPTIONS.get(base, '') for base, bounds in kinds]
    is_reference = isinstance(value, str) and re.fullmatch(r'[\w/]+(\.\w+)+', value)
    reference = f'@{value}' if is_reference else '@...'
    if not any(descriptions):
        advice = f'set {setting} = {reference}' if isinstance(value, str) else f'remove {setting}'
        raise UserError(
            f'{setting} must be a reference, as in @module.Class (in Python, an object), got {value!r}; {advice}'
        )
    allowed = ' or '.join(description or 'a reference' for description in descriptions)
    is_macro_or_argument = re.fullmatch(r'[A-Z_]+|(\w+\.)+\w+', setting)
    items = [item for each in get_union_members(kind) for item in typing.get_args(each)]
    is_text_list = isinstance(value, str) and 'a list' in descriptions and all(item in (str, ...) for item in items)
    example = [value] if is_text_list else reference if is_reference and '' in descriptions else 'VALUE'
    advice = f'; set {setting} = {example}' if is_macro_or_argument else ''
    raise UserError(f'{setting} must be {allowed}, got {value!r}{advice}')


def check_reference(setting: str, function: Callable[..., Any], is_call: bool, kind: Any) -> None:
    """Raises UserError if a reference to a function or class does not match an annotation.

    Args:
        is_call: whether the value of the setting is the result of the function instead of the function.
        kind: the annotation. Without annotations of the setting and of the function's result, nothing is checked.
    """
    kinds = [each for each in get_union_members(kind) if each not in (None, types.NoneType)]
    created = function if isinstance(function, type) else inspect.signature(function).return_annotation
    is_object = any(_is_subtype(created, each) for each in kinds)
    results = [typing.get_args(each)[-1] for each in kinds if typing.get_origin(each) is collections.abc.Callable]
    is_factory = any(_is_subtype(created, each) for each in results)
    must_be, name = f'{setting} must be', function.__name__
    if is_call and is_factory and not is_object:
        raise UserError(f'{must_be} a class or function, got {name}(); remove () after its name')
    if is_object and not is_factory and len(results) == len(kinds) and hasattr(function, 'init_with_output'):
        raise UserError(f'{must_be} a function, got the Flax module {name}; use a function with the same arguments')
    if not is_call and is_object and not is_factory:
        raise UserError(f'{must_be} an object, got {name}, which creates one; add () after its name')
    bases = {split_annotation(each)[0] for each in kinds}
    if is_object or is_factory or not bases or is_call and not isinstance(function, type):
        return
    if bases <= _LISTS:
        raise UserError(f'{must_be} a list, got {name}; put references in parentheses: (@NAME,)')
    if bases <= _DESCRIPTIONS.keys():
        raise UserError(f'{must_be} {" or ".join(_DESCRIPTIONS[base] for base in bases)}, got @{name}')
    if isinstance(function, type) and len(results) == len(kinds) and all(isinstance(each, type) for each in results):
        classes = ' or '.join(each.__name__ for each in results)
        raise UserError(
            f'{must_be} a class or function that creates {classes}, got @{name}; use a subclass of {classes}'
        )


def _is_subtype(created: Any, kind: Any) -> bool:
    """Returns whether objects with the annotation `created` match `kind`; False for any object."""
    base, created_base = split_annotation(kind)[0], split_annotation(created)[0]
    if created == kind or base in _LISTS and created_base in _LISTS:
        return kind not in (Any, object, inspect.Parameter.empty)
    if not isinstance(created, type) or base is not collections.abc.Callable:
        return isinstance(created_base, type) and base in created_base.__mro__[:-1]
    call = next((vars(each)['__call__'] for each in created.__mro__ if '__call__' in vars(each)), None)
    return call is not None and _is_subtype(inspect.signature(call).return_annotation, typing.get_args(kind)[-1])


def match_items(values: Sequence[Any], kind: Any) -> list[tuple[Any, Any]]:
    """Returns pairs of the items of a list and their annotations; an empty list if `kind` is not a type of lists."""
    kinds = [each for each in get_union_members(kind) if split_annotation(each)[0] in _LISTS]
    args = typing.get_args(kinds[0]) if len(kinds) == 1 else ()
    if len(args) == 1 or args[1:] == (...,):
        args = args[:1] * len(values)
    return list(zip(values, args, strict=False))


def _value_matches_type(value: Any, base: Any, bounds: Range | None) -> bool:
    if isinstance(value, _CONTAINERS):
        # Lists and tuples are interchangeable in gin.
        return isinstance(value, (list, tuple) if base in (list, tuple) else base)
    if type(value) is not base and not (base is float and type(value) is int):
        return False
    return bounds is None or ((base is str or math.isfinite(value)) and bounds.contains(value))


def get_union_members(kind: Any) -> list[Any]:
    """Returns the members of a (possibly nested) union type, or a list with only `kind` for any other type."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return [part for each in typing.get_args(kind) for part in get_union_members(each)] if is_union else [kind]


def split_annotation(kind: Any) -> tuple[Any, Range | None]:
    """Returns the runtime type and the range of an annotation such as `Count`."""
    if typing.get_origin(kind) is Annotated:
        base, *notes = typing.get_args(kind)
        return base, next((note for note in notes if isinstance(note, Range)), None)
    return (types.NoneType if kind is None else typing.get_origin(kind) or kind), None


def parse_whole_number(text: object, least: int = 0, most: int = 2**31 - 1) -> int | None:
    """Parses a whole number in a range; returns None for any other value.

    The default range contains the non-negative 32-bit integers, which C++ code accepts.
    """
    if not re.fullmatch('[+-]?[0-9]{1,18}', str(text).strip()) or not least <= int(str(text)) <= most:
        return None
    return int(str(text))


def get_annotation(function: Callable[..., Any], argument: str) -> Any:
    """Returns the annotation of an argument; `Parameter.empty` if there is none.

    A string annotation (`from __future__ import annotations`) is resolved only if it consists of types in this module,
    built-in types and containers, because evaluating other names could import TensorFlow.
    """
    try:
        parameter = inspect.signature(function).parameters[argument]
        kind = parameter.annotation
        if isinstance(kind, str):
            names = [name.removeprefix('ranges.').partition('[')[0] for name in kind.split(' | ')]
            kind = functools.reduce(operator.or_, [_TYPES_BY_NAME[name] for name in names])
    except (ValueError, KeyError, TypeError):
        return inspect.Parameter.empty
    return kind if parameter.default is not None or kind is parameter.empty else kind | None
