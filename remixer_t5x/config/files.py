"""Finds and reads gin files: in the current folder, the search paths, and among the shipped configs."""

import dataclasses
import difflib
import functools
import pathlib
import re
import tomllib
from collections.abc import Iterator, Sequence

from remixer_t5x.errors import UserError, nearest

MODELS = 'models/'
FLAG = '--gin.'
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_INCLUDE = re.compile(r"""include\s+(['"])(?P<file>.+?)\1""")
_IMPORT = re.compile(r'(?:from|import)\s')
_QUOTED = re.compile(r"""'[^'\n]*'|"[^"\n]*"|\#.*""")
# Suggested first if several files set a macro.
_PREFERRED = ('models/t5_1_1.gin', 'sizes/tiny.gin', 'data/own_text.gin', 'hardware/cpu.gin', 'runs/pretrain.gin')
# Counterparts of T5X's macros, settings and flags.
T5X: dict[str, dict[str, str]] = tomllib.loads((_PACKAGE / 'config/t5x_names.toml').read_text(encoding='utf-8'))


@dataclasses.dataclass(frozen=True)
class Text:
    """A gin file, a part of a file between include statements, or a flag (its `name` begins with `--gin.`).

    A part has blank lines instead of the lines of other parts, except for the imports above it.
    """

    name: str
    text: str
    shipped: bool = False

    @property
    def is_flag(self) -> bool:
        return self.name.startswith(FLAG)

    @functools.cached_property
    def macros_set(self) -> dict[str, str]:
        """The macros that are set, with their places for error messages."""
        places = self._find(r'^([\w/]+)\s*=')
        return {name: self.name if self.is_flag else f'{place}{name}' for name, place in places.items()}

    @functools.cached_property
    def macros_read(self) -> dict[str, str]:
        """The macros that are read, with their places for error messages."""
        return {name: f'{place}%{name}' for name, place in self._find(r'%([\w/.]+)').items()}

    def _find(self, pattern: str) -> dict[str, str]:
        lines = enumerate(self.text.splitlines(), 1)
        return {
            name: f'{self.name}: ' if self.is_flag else f'{self.name} line {number}: '
            for number, line in lines
            for name in re.findall(pattern, _QUOTED.sub('', line))
        }

    @functools.cached_property
    def imports(self) -> dict[str, str]:
        """The import statements, by the name that each binds."""
        lines = [line.partition('#')[0].strip() for line in self.text.splitlines() if _IMPORT.match(line)]
        words = [(line, re.split(r'[\s.]+', line)) for line in lines if '__gin__' not in line]
        return {each[1] if each[0] == 'import' and 'as' not in each else each[-1]: line for line, each in words}


def shipped_folder() -> pathlib.Path:
    """Returns the folder of the shipped configs: in the package in a wheel, one level up in a checkout."""
    inside = _PACKAGE / 'configs'
    return inside if inside.is_dir() else _PACKAGE.parent / 'configs'


@functools.cache
def shipped() -> dict[str, Text]:
    """Returns the shipped gin files by the names that a user types, without those for T5X's own scripts.

    The text of a file whose name begins with `_` is added to the files that include it.
    """
    folder = shipped_folder()
    texts = {str(path.relative_to(folder)): path.read_text(encoding='utf-8') for path in sorted(folder.rglob('*.gin'))}
    whole = {}
    for name, text in texts.items():
        parts = [texts[match['file']] for match in _INCLUDE.finditer(text) if '/_' in match['file']]
        if not name.startswith('t5x/') and '/_' not in name:
            whole[name] = Text(name, '\n'.join([text, *parts]), shipped=True)
    return whole


def readers(macro: str) -> list[str]:
    """Returns the shipped files that read a macro."""
    return [name for name, text in shipped().items() if macro in text.macros_read]


def is_known(macro: str) -> bool:
    """Returns whether a shipped file reads or sets a macro."""
    return any(macro in text.macros_read or macro in text.macros_set for text in shipped().values())


def advise_file(setting: str) -> str:
    """Returns `; add --gin_file=X` with a shipped file that sets a macro or a class; empty if none does."""
    names = [
        name for name, text in shipped().items()
        # An experiment file configures a complete run, so it cannot be added to another one.
        if not name.startswith(('experiments/', 'defaults'))
        and (setting in text.macros_set or re.search(rf'^{setting}\.', text.text, re.M))
    ]  # fmt: skip
    first = min(names, key=lambda name: name not in _PREFERRED, default='')
    return first and f'; add --gin_file={first}' + (', or another file that sets it' if len(names) > 1 else '')


def find(name: str, search_paths: Sequence[str] = (), asked_by: str = '', prefer_shipped: bool = False) -> pathlib.Path:
    """Finds a gin file in the current folder, the search paths, and the shipped configs, in this order.

    With `prefer_shipped`, which commands and shipped files set, a file in the current folder cannot replace a shipped
    one: gin runs code. Raises UserError if there is no such file.
    """
    bare = name.removeprefix('configs/')
    candidates = [pathlib.Path(folder).expanduser() / pathlib.Path(name).expanduser() for folder in ('', *search_paths)]
    candidates.insert(0 if prefer_shipped else len(candidates), shipped_folder() / bare)
    if path := next(filter(pathlib.Path.is_file, candidates), None):
        return path
    folder, _, rest = bare.rpartition('/')
    (near,) = difflib.get_close_matches(folder, {name.rpartition('/')[0] for name in shipped()}, n=1) or [folder]
    advice = nearest(f'{near}/{rest}'.lstrip('/'), shipped()) or f'; they are in {shipped_folder()}'
    if 't5x/' in name:
        advice = "; T5X's own gin files build T5X's classes: docs/t5x.md has their names here"
    raise UserError(f'{asked_by}gin file {name!r} not found here or among the shipped configs{advice}')


class Reader:
    """Reads gin files and the files that they include; `model` are files and texts to read in place of models/*.gin."""

    def __init__(self, search_paths: Sequence[str] = (), model: Sequence[str | Text] = ()):
        self._search_paths, self._model, self._open = search_paths, model, list[pathlib.Path]()
        self.model_read = False

    def read(self, name: str, asked_by: str = '', by_us: bool = False, in_model: bool = False) -> Iterator[Text]:
        """Yields the parts of a file in gin's order; `asked_by` names the include statement in errors."""
        path = find(name, self._search_paths, asked_by, by_us).resolve()
        folder = shipped_folder().resolve()
        shipped = path.is_relative_to(folder)
        file = str(path.relative_to(folder)) if shipped else name
        if self._model and shipped and file.startswith(MODELS) and not in_model:
            # If several files of models/ are named, the model takes the place of the first.
            replacement, self.model_read = () if self.model_read else self._model, True
            for other in replacement:
                yield from [other] if isinstance(other, Text) else self.read(other, '--model: ', in_model=True)
            return
        if path in self._open:
            raise UserError(f'{asked_by}{file} includes itself; remove one of the include lines')
        try:
            lines = [*path.read_text(encoding='utf-8').split('\n'), '']
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f'{asked_by}gin file {file} cannot be read: {error}') from None
        self._open.append(path)
        start = 0
        for number, line in enumerate(lines, 1):
            include = _INCLUDE.match(line)
            if include or number == len(lines):
                above = [line if _IMPORT.match(line) else '' for line in lines[:start]]
                yield Text(file, '\n'.join([*above, *lines[start : number - 1], '']), shipped)
                start = number
            if include:
                yield from self.read(include['file'], f'{file} line {number}: ', shipped, in_model)
        self._open.pop()
