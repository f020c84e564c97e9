"""Reads what each statement of gin text says, and where.

gin itself keeps neither the place of a macro nor the text of a failed lookup, which errors of one line need. Nothing is
looked up or imported here; gin remains the judge of what a name means.
"""

import dataclasses
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from gin import config_parser
from gin.config_parser import ImportStatement, IncludeStatement

from remixer_t5x.errors import UserError

COMMAND_LINE = '--gin.'
_DYNAMIC = 'dynamic_registration'
_BARE_TEXT = re.compile(r"Failed to parse token '(.*)'")

Imports: TypeAlias = Mapping[str, ImportStatement]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a statement is: a file as the user would type it, and a line; 0 for a flag and what is in no file."""

    file: str
    line: int
    shipped: bool = False

    @property
    def on_command_line(self) -> bool:
        return self.file.startswith(COMMAND_LINE)

    def __str__(self) -> str:
        return f'{self.file} line {self.line}' if self.line else self.file


@dataclasses.dataclass(frozen=True)
class Reference:
    """`%NAME` (kind '%') or `@scope/selector` (kind '@') inside a value; `target` as in Binding."""

    kind: str
    name: str
    target: str
    evaluate: bool = False

    @property
    def selector(self) -> str:
        return self.name.rsplit('/', 1)[-1]

    def __repr__(self) -> str:
        # As gin reads it, so that the repr of a value that holds references is gin text.
        return f'{self.kind}{self.name}{"()" if self.evaluate else ""}'


@dataclasses.dataclass(frozen=True)
class Binding:
    """`selector.arg = value`; for a macro `arg` is empty and `selector` is the macro's name, with its scope.

    `target` is the selector by its full name, as far as the imports above it tell; `%NAME` for a macro. `imports` are
    of its file, by the names that they give.
    """

    selector: str
    arg: str
    value: Any
    place: Place
    target: str
    scope: str = ''
    imports: Imports = dataclasses.field(default_factory=dict, repr=False)

    @property
    def is_macro(self) -> bool:
        return not self.arg

    @property
    def key(self) -> str:
        return self.selector if self.is_macro else f'{self.selector}.{self.arg}'

    def references(self) -> Iterator[Reference]:
        return _references(self.value)

    def gin_text(self) -> str:
        """The statement with the imports that it needs, which gin can read by itself."""
        names = [reference.selector for reference in self.references() if reference.kind == '@']
        symbols = {name.partition('.')[0] for name in (names if self.is_macro else [*names, self.selector])}
        needed = [statement for name, statement in self.imports.items() if name in symbols]
        lines = [statement.format() for statement in needed]
        # A flag may shorten names of a file that is read before it, which gin allows without dynamic registration.
        if needed or (_DYNAMIC in self.imports and not self.place.on_command_line):
            lines.insert(0, f'from __gin__ import {_DYNAMIC}')
        scope = '' if self.is_macro or not self.scope else f'{self.scope}/'
        return '\n'.join([*lines, f'{scope}{self.key} = {self.value!r}'])


Statement: TypeAlias = Binding | ImportStatement | IncludeStatement


class _Recorder(config_parser.ParserDelegate):
    """Takes the place of gin's resolver, so that reading a value needs no import."""

    def __init__(self, imports: Imports):
        self._imports = imports

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        selector = scoped_configurable_name.rsplit('/', 1)[-1]
        return Reference('@', scoped_configurable_name, full_name(selector, self._imports), evaluate)

    def macro(self, scoped_name: str) -> Reference:
        return reference(f'%{scoped_name}')


def import_of(module: str, place: Place) -> ImportStatement:
    """The statement `import module`, as if it were at `place`."""
    return ImportStatement(module, False, None, config_parser.Location(place.file, place.line, 0, ''))


def reference(text: str) -> Reference:
    """`%NAME`, or a reference to a class or function that is given by its full name."""
    return Reference('%', text[1:], text) if text.startswith('%') else Reference('@', text, text)


def full_name(selector: str, imports: Imports) -> str:
    """`seq2seq.Seq2Seq` as `remixer_t5x.models.seq2seq.Seq2Seq`, by these imports."""
    first, _, rest = selector.partition('.')
    statement = imports.get(first)
    if statement is None or not (statement.is_from or statement.alias):
        return selector
    return f'{statement.module}.{rest}'


def _references(value: Any) -> Iterator[Reference]:
    if isinstance(value, Reference):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _references(key)
            yield from _references(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _references(item)


def scan(text: str, file: str, shipped: bool = False, imports: Imports | None = None) -> list[Statement]:
    """The statements of gin text, in order.

    Args:
        text: the text.
        file: its name in errors.
        shipped: whether the file is one of ours.
        imports: of other files, for text that is not in a file.

    Raises:
        UserError: a syntax error.
    """
    known = dict(imports or {})
    found: list[Statement] = []
    stream = io.StringIO(text)
    stream.name = file  # gin copies the name into the location of each statement
    try:
        for statement in config_parser.ConfigParser(stream, _Recorder(known)):
            if isinstance(statement, config_parser.BindingStatement):
                found.append(_binding(statement, Place(file, statement.location.line_num, shipped), known))
            elif isinstance(statement, ImportStatement | IncludeStatement):
                found.append(statement)
            if isinstance(statement, ImportStatement):
                known[statement.bound_name()] = statement
    except (SyntaxError, ValueError) as error:
        raise UserError(_syntax_message(error, file, text)) from None
    except tokenize.TokenError:
        # The tokenizer noticed at the end of the file; the statement began at the last line that is not indented.
        starts = [number for number, line in enumerate(text.splitlines(), start=1) if line[:1].isalpha()]
        line = starts[-1] if starts else 1
        raise UserError(f'{file} line {line}: a bracket or quote opened here is never closed; close it') from None
    return found


def _binding(statement: config_parser.BindingStatement, place: Place, imports: Imports) -> Binding:
    scope, selector, arg, value, _ = statement
    if not arg and scope:
        selector = f'{scope}/{selector}'
    target = full_name(selector, imports) if arg else f'%{selector}'
    return Binding(selector, arg, value, place, target, scope or '', imports)


def _syntax_message(error: Exception, file: str, text: str) -> str:
    line = getattr(error, 'lineno', None) or 1
    message = str(getattr(error, 'msg', None) or error)
    token = _BARE_TEXT.search(message)
    if token:
        return f"{file} line {line}: {token[1]} is not a gin value; text needs quotes, as in '{token[1]}'"
    reason = message.splitlines()[0].strip().rstrip('.')
    lines = text.splitlines()
    content = lines[line - 1].strip() if 0 < line <= len(lines) else ''
    return f'{file} line {line}: cannot read `{content}`: {reason}; write NAME = value or module.name.setting = value'
