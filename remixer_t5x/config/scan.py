"""Finding gin files and reading what each of their statements says, and where.

gin itself keeps neither the place of a macro nor the text of a failed lookup, so the one-line errors of
`config.loading` need this second reading. It resolves no names and imports nothing; gin remains the judge of meaning.
"""

import dataclasses
import difflib
import io
import pathlib
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gin import config_parser

from remixer_t5x.errors import UserError

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
COMMAND_LINE = '--gin.'
_BARE_TEXT = re.compile(r"Failed to parse token '(.*)'")


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
    """`%NAME` (kind 'macro') or `@scope/selector` (kind 'configurable') inside a value; `target` as in Binding."""

    kind: str
    name: str
    target: str = ''

    @property
    def selector(self) -> str:
        return self.name.rsplit('/', 1)[-1]


@dataclasses.dataclass(frozen=True)
class Binding:
    """`selector.arg = value`; for a macro `arg` is empty and `selector` is the macro's name, with its scope.

    `target` is the selector by its full name, as far as the imports above it tell; `%NAME` for a macro.
    """

    selector: str
    arg: str
    value: Any
    place: Place
    target: str
    scope: str = ''

    @property
    def is_macro(self) -> bool:
        return not self.arg

    @property
    def key(self) -> str:
        return self.selector if self.is_macro else f'{self.selector}.{self.arg}'

    def references(self) -> Iterator[Reference]:
        return _references(self.value)


@dataclasses.dataclass
class Scan:
    """What some gin text says: its bindings in order, and which module each imported name stands for."""

    bindings: list[Binding] = dataclasses.field(default_factory=list)
    imports: dict[str, config_parser.ImportStatement] = dataclasses.field(default_factory=dict)

    def full_name(self, selector: str) -> str:
        """`seq2seq.Seq2Seq` as `remixer_t5x.model.seq2seq.Seq2Seq`, by the imports of this text."""
        first, _, rest = selector.partition('.')
        statement = self.imports.get(first)
        if statement is None or not (statement.is_from or statement.alias):
            return selector
        return f'{statement.module}.{rest}'

    def macros(self) -> dict[str, Binding]:
        return {binding.selector: binding for binding in self.bindings if binding.is_macro}

    def abbreviations(self) -> dict[str, str]:
        """Full targets by their ends: gin takes `Engine` for `car.Engine` where it knows that already."""
        targets = {ref.target for binding in self.bindings for ref in binding.references()}
        targets |= {binding.target for binding in self.bindings}
        return {end: target for target in sorted(targets) for end in _ends(target) if not target.startswith('%')}

    def final(self) -> list[Binding]:
        """The last binding of each setting and macro, with full targets."""
        by_end = self.abbreviations()
        last: dict[tuple[str, str, str], Binding] = {}
        for binding in self.bindings:
            target = by_end.get(binding.target, binding.target)
            last[binding.scope, target, binding.arg] = dataclasses.replace(binding, target=target)
        return list(last.values())

    def selectors(self) -> set[str]:
        used = {ref.selector for b in self.bindings for ref in b.references() if ref.kind == 'configurable'}
        return used | {binding.selector for binding in self.bindings if not binding.is_macro}


class _Recorder(config_parser.ParserDelegate):
    """Takes the place of gin's resolver, so that reading a value needs no import."""

    def __init__(self, above: Scan | None = None):
        self._above = above or Scan()

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        selector = scoped_configurable_name.rsplit('/', 1)[-1]
        return Reference('configurable', scoped_configurable_name, self._above.full_name(selector))

    def macro(self, scoped_name: str) -> Reference:
        return Reference('macro', scoped_name, f'%{scoped_name}')


def _ends(target: str) -> Iterator[str]:
    """`c` and `b.c` of `a.b.c`; the name itself is not an abbreviation."""
    parts = target.split('.')
    return ('.'.join(parts[start:]) for start in range(1, len(parts)))


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


def parse_value(text: str) -> Any:
    """One gin value with references unresolved. Raises SyntaxError when `text` is not exactly one value."""
    try:
        statements = list(config_parser.ConfigParser(f'X = {text}\n', _Recorder()))
    except (tokenize.TokenError, IndentationError) as error:
        raise SyntaxError(str(error)) from None
    if len(statements) != 1:
        raise SyntaxError('more than one value')
    return statements[0].value


def scan(
    text: str, file: str, shipped: bool = False, above: Scan | None = None
) -> tuple[Scan, list[config_parser.IncludeStatement]]:
    """Reads gin text; `file` is the name shown in errors, and imports of `above` hold in it. Raises UserError on a
    syntax error."""
    found, includes = Scan(imports=dict(above.imports) if above else {}), []
    try:
        for statement in config_parser.ConfigParser(io.StringIO(text), _Recorder(found)):
            if isinstance(statement, config_parser.BindingStatement):
                found.bindings.append(_binding(statement, Place(file, statement.location.line_num, shipped), found))
            elif isinstance(statement, config_parser.ImportStatement):
                found.imports[statement.bound_name()] = statement
            elif isinstance(statement, config_parser.IncludeStatement):
                includes.append(statement)
    except (SyntaxError, ValueError) as error:
        raise UserError(_syntax_message(error, file, text)) from None
    except tokenize.TokenError:
        # The tokenizer noticed at the end of the file; the statement began at the last line that is not indented.
        starts = [number for number, line in enumerate(text.splitlines(), start=1) if line[:1].isalpha()]
        line = starts[-1] if starts else 1
        raise UserError(f'{file} line {line}: a bracket or quote opened here is never closed; close it') from None
    return found, includes


def _binding(statement: config_parser.BindingStatement, place: Place, above: Scan) -> Binding:
    selector = statement.selector
    if not statement.arg_name and statement.scope:
        selector = f'{statement.scope}/{selector}'
    target = above.full_name(selector) if statement.arg_name else f'%{selector}'
    return Binding(selector, statement.arg_name, statement.value, place, target, statement.scope or '')


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


def shipped_folder() -> pathlib.Path:
    """The shipped configs: next to the modules in a wheel, one level up in a checkout."""
    inside = _PACKAGE / 'configs'
    return inside if inside.is_dir() else _PACKAGE.parent / 'configs'


def shipped_files() -> list[str]:
    """Names of the shipped gin files as a user types them: `models/t5_1_1.gin`.

    A file whose name begins with `_` is a part that other files include; the user types their names.
    """
    folder = shipped_folder()
    return sorted(str(path.relative_to(folder)) for path in folder.rglob('[!_]*.gin'))


def shipped_bindings() -> Iterator[tuple[str, Binding]]:
    """Every binding of every shipped config, with the file that a user gives for it.

    The bindings of a part (`hardware/_base.gin`) come once for each file that includes it.
    """
    for name in shipped_files():
        found, includes = _scan_shipped(name)
        for include in includes:
            if pathlib.PurePath(include.filename).name.startswith('_'):
                yield from ((name, binding) for binding in _scan_shipped(include.filename)[0].bindings)
        yield from ((name, binding) for binding in found.bindings)


def _scan_shipped(name: str) -> tuple[Scan, list[config_parser.IncludeStatement]]:
    return scan((shipped_folder() / name).read_text(encoding='utf-8'), name, shipped=True)


def find(name: str, search_paths: Sequence[str] = (), asked_by: str = '', by_us: bool = False) -> pathlib.Path:
    """The gin file called `name`: in the current folder, the search paths, then the shipped configs.

    `by_us`: a command or a shipped file asks, and means the shipped one: nothing in the folder where somebody happens
    to be may take its place, since gin runs code.

    Raises:
        UserError: it is nowhere; the message names the nearest shipped files.
    """
    shipped = shipped_folder()
    bare = name.removeprefix('configs/')
    candidates = [pathlib.Path(name).expanduser()]
    candidates += [pathlib.Path(path).expanduser() / name for path in search_paths]
    candidates += [shipped / bare]
    if by_us:
        candidates.insert(0, candidates.pop())
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    advice = nearest(bare, shipped_files()) or f'; they are in {shipped}'
    raise UserError(f'{asked_by}gin file {name!r} not found here or among the shipped configs{advice}')


def display_name(path: pathlib.Path) -> tuple[str, bool]:
    """How errors call the file, and whether it is one of ours."""
    resolved, shipped = path.resolve(), shipped_folder().resolve()
    if resolved.is_relative_to(shipped):
        return str(resolved.relative_to(shipped)), True
    return str(path), False


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing when no known name is close. Case never separates two names."""
    by_lower = {candidate.lower(): candidate for candidate in known if candidate != name}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f'; did you mean {by_lower[close[0]]}?' if close else ''
