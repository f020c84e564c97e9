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
_PREFERRED = ('models/t5_1_1', 'sizes/tiny', 'data/own_text', 'optimizers/adamw_rms', 'hardware/cpu', 'runs/pretrain')
# Modules that the user's gin files and flags import, which may be in the current folder.
of_user: set[str] = set()
# Counterparts of T5X's macros, settings and flags.
T5X: dict[str, dict[str, str]] = tomllib.loads((_PACKAGE / 'config/t5x_names.toml').read_text(encoding='utf-8'))


@dataclasses.dataclass(frozen=True)
class Text:
    """A gin file or a part of it between include statements, or a flag (`name` begins with `--gin.`).

    A part keeps the number of its lines and the imports above it; other lines are blank.
    """

    name: str
    text: str
    shipped: bool = False

    @property
    def is_flag(self) -> bool:
        return self.name.startswith(FLAG)

    @functools.cached_property
    def macros_set(self) -> dict[str, str]:
        """Macros that are set, and the place of each."""
        return self._places(r'^([\w/]+)\s*=')

    @functools.cached_property
    def macros_read(self) -> dict[str, str]:
        """Macros that are read, and the place of each."""
        return self._places(r'%([\w/.]+)')

    def _places(self, pattern: str) -> dict[str, str]:
        lines = enumerate(self.text.splitlines(), 1)
        return {
            name: self.name if self.is_flag else f'{self.name} line {number}'
            for number, line in lines
            for name in re.findall(pattern, _QUOTED.sub('', line))
        }

    @functools.cached_property
    def imports(self) -> dict[str, str]:
        """Statements that import modules, by the name that each binds."""
        lines = [line.partition('#')[0].strip() for line in self.text.splitlines() if _IMPORT.match(line)]
        words = [(line, re.split(r'[\s.]+', line)) for line in lines if '__gin__' not in line]
        return {each[1] if each[0] == 'import' and 'as' not in each else each[-1]: line for line, each in words}


def shipped_folder() -> pathlib.Path:
    """Returns the folder of the shipped configs: in the package in a wheel, one level up in a checkout."""
    inside = _PACKAGE / 'configs'
    return inside if inside.is_dir() else _PACKAGE.parent / 'configs'


@functools.cache
def shipped() -> dict[str, Text]:
    """Returns the shipped gin files by the names that a user types, such as `models/t5_1_1.gin`.

    The text of a file whose name begins with `_` is added to the files that include it.
    """
    folder = shipped_folder()
    texts = {str(path.relative_to(folder)): path.read_text(encoding='utf-8') for path in sorted(folder.rglob('*.gin'))}
    whole = {}
    for name, text in texts.items():
        parts = [texts[match['file']] for match in _INCLUDE.finditer(text) if '/_' in match['file']]
        whole[name] = Text(name, '\n'.join([text, *parts]), shipped=True)
    return {name: text for name, text in whole.items() if not pathlib.PurePath(name).name.startswith('_')}


def readers(macro: str) -> list[str]:
    """Returns the shipped files that read a macro."""
    return [name for name, text in shipped().items() if macro in text.macros_read and name != 'defaults.gin']


def is_known(macro: str) -> bool:
    """Returns whether a shipped file reads or sets a macro."""
    return any(macro in text.macros_read or macro in text.macros_set for text in shipped().values())


def add_one_that_sets(setting: str) -> str:
    """Advises `; add --gin_file=X, or another file of FOLDER/` that sets a macro or a class; empty if none does."""
    names = [
        n for n, text in shipped().items() if setting in text.macros_set or re.search(rf'^{setting}\.', text.text, re.M)
    ]
    # An experiment is a whole run; adding one to another answers no question.
    parts = [name for name in names if not name.startswith(('experiments/', 't5x/', 'defaults'))]
    if not parts:
        return ''
    first = min(parts, key=lambda name: (name.removesuffix('.gin') not in _PREFERRED, name))
    folder = first.partition('/')[0]
    others = sum(name.startswith(f'{folder}/') for name in parts) > 1
    return f'; add --gin_file={first}' + (f', or another file of {folder}/' if others else '')


def find(name: str, search_paths: Sequence[str] = (), asked_by: str = '', prefer_shipped: bool = False) -> pathlib.Path:
    """Finds a gin file in the current folder, the search paths, and the shipped configs, in this order.

    Commands and shipped files set `prefer_shipped`: no file in the current folder may take the place of a shipped one,
    because gin runs code. Raises UserError, with the nearest shipped file, if there is none.
    """
    bare = name.removeprefix('configs/')
    candidates = [pathlib.Path(name).expanduser(), *(pathlib.Path(path).expanduser() / name for path in search_paths)]
    candidates.insert(0 if prefer_shipped else len(candidates), shipped_folder() / bare)
    if path := next(filter(pathlib.Path.is_file, candidates), None):
        return path
    folder, _, rest = bare.rpartition('/')
    folders = {name.rpartition('/')[0] for name in shipped()}
    (near,) = difflib.get_close_matches(folder, folders, n=1) or [folder]
    advice = nearest(f'{near}/{rest}'.lstrip('/'), shipped()) or f'; they are in {shipped_folder()}'
    if re.search(r't5x/(examples|configs)/', name):
        advice = "; T5X's own gin files build T5X's classes: docs/t5x.md has their names here"
    raise UserError(f'{asked_by}gin file {name!r} not found here or among the shipped configs{advice}')


class Reader:
    """Reads gin files with what they include; `model` are files and texts to read in place of those of models/."""

    def __init__(self, search_paths: Sequence[str], model: Sequence[str | Text]):
        self._search_paths, self._model, self._open = search_paths, model, list[pathlib.Path]()
        self.model_read = False

    def read(self, name: str, asked_by: str = '', by_us: bool = False, in_model: bool = False) -> Iterator[Text]:
        """Yields the texts of a file in gin's order; `asked_by` names the include statement in errors."""
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
