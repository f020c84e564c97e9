"""Finds and reads gin files in the current folder, the search paths, and the shipped configs."""

import dataclasses
import functools
import os
import pathlib
import re
import tomllib
from collections.abc import Iterator, Sequence

from remixer_t5x.errors import UserError, suggest_similar_name

MODELS_FOLDER = 'models/'
FLAG = '--gin.'
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_INCLUDE = re.compile(r"""include\s+(['"])(?P<file>.+?)\1""")
_IMPORT = re.compile(r'(?:from|import)\s')
_QUOTED = re.compile(r"""'[^'\n]*'|"[^"\n]*"|\#.*""")
# Files that error messages suggest first if more than one file sets a macro.
_PREFERRED_FILES = ('models/t5_1_1.gin', 'sizes/tiny.gin', 'data/own_text.gin', 'hardware/cpu.gin', 'runs/pretrain.gin')
# Maximum number of files or settings that an error message lists.
MAX_NAMES_LISTED = 4
# Advice for macros, settings and flags of T5X that have different names in remixer_t5x.
T5X_NAMES: dict[str, dict[str, str]] = tomllib.loads((_PACKAGE / 'config/t5x_names.toml').read_text(encoding='utf-8'))


@dataclasses.dataclass(frozen=True)
class GinText:
    """The text of a gin file, of a section of a file between two include statements, or of a `--gin.` flag.

    In the text of a section, the earlier lines of the file, except for imports, are replaced by blank lines, so that
    line numbers match the file. If the text is from a flag, `name` starts with `--gin.`.
    """

    name: str
    text: str
    shipped: bool = False

    @property
    def is_flag(self) -> bool:
        return self.name.startswith(FLAG)

    @functools.cached_property
    def assigned_macros(self) -> dict[str, str]:
        """Maps each macro set by the text to its location, for error messages."""
        locations = self._locate_matches(r'^([\w/]+)\s*=')
        return {name: self.name if self.is_flag else f'{location}{name}' for name, location in locations.items()}

    @functools.cached_property
    def referenced_macros(self) -> dict[str, str]:
        """Maps each macro read by the text to its location, for error messages."""
        return {name: f'{location}%{name}' for name, location in self._locate_matches(r'%([\w/.]+)').items()}

    def find_settings_with_macro(self, macro: str) -> list[str]:
        """Returns the settings and macros whose values contain a macro."""
        return re.findall(rf'^([\w/.]+)\s*=(?:.|\n[ \t])*%{macro}(?![\w/.])', self.text, re.M)

    def _locate_matches(self, pattern: str) -> dict[str, str]:
        lines = enumerate(self.text.splitlines(), 1)
        return {
            name: f'{self.name}: ' if self.is_flag else f'{self.name} line {number}: '
            for number, line in lines
            for name in re.findall(pattern, _QUOTED.sub('', line))
        }

    @functools.cached_property
    def imports(self) -> dict[str, str]:
        """Maps each name bound by an import statement to that statement."""
        lines = [line.partition('#')[0].strip() for line in self.text.splitlines() if _IMPORT.match(line)]
        words = [(line, re.split(r'[\s.]+', line)) for line in lines if '__gin__' not in line]
        return {parts[1] if parts[0] == 'import' and 'as' not in parts else parts[-1]: line for line, parts in words}


def find_shipped_folder() -> pathlib.Path:
    """Returns the folder of the shipped configs, which is in the package (wheel) or next to the package (checkout)."""
    inside = _PACKAGE / 'configs'
    return inside if inside.is_dir() else _PACKAGE.parent / 'configs'


@functools.cache
def read_shipped_files() -> dict[str, GinText]:
    """Returns the shipped gin files, keyed by name, except for the files for T5X's scripts.

    The text of a private file, whose name starts with `_`, is appended to each file that includes it.
    """
    folder = find_shipped_folder()
    texts = {str(path.relative_to(folder)): path.read_text(encoding='utf-8') for path in sorted(folder.rglob('*.gin'))}
    public = {}
    for name, text in texts.items():
        included = [texts[match['file']] for match in _INCLUDE.finditer(text) if '/_' in match['file']]
        if not name.startswith('t5x/') and '/_' not in name:
            public[name] = GinText(name, '\n'.join([text, *included]), shipped=True)
    return public


def find_files_with_macro(macro: str) -> list[str]:
    """Returns the names of the shipped files that read a macro."""
    return [name for name, text in read_shipped_files().items() if macro in text.referenced_macros]


def is_known_macro(macro: str) -> bool:
    """Returns whether a shipped file reads or sets a macro."""
    return any(
        macro in text.referenced_macros or macro in text.assigned_macros for text in read_shipped_files().values()
    )


def suggest_file(setting: str) -> str:
    """Returns `; add --gin_file=X` if a shipped file X sets the macro or configures the class `setting`.

    Returns '' if there is no such file.
    """
    # Do not suggest experiment files, which configure complete runs, or files that commands load by default.
    excluded = ('experiments/', 'defaults', 'runs/eval', 'runs/infer')
    texts = {name: text for name, text in read_shipped_files().items() if not name.startswith(excluded)}
    pattern = re.compile(rf'^{setting}\.', re.M)
    direct = {name for name, text in texts.items() if setting in text.assigned_macros or pattern.search(text.text)}
    including = {name: [match['file'] for match in _INCLUDE.finditer(text.text)] for name, text in texts.items()}
    names = [name for name, included in including.items() if not direct.isdisjoint([name, *included])]
    first, *others = sorted(names, key=lambda name: name not in _PREFERRED_FILES) or ['']
    alternatives = ', '.join(others) if len(others) < MAX_NAMES_LISTED else 'another file that sets it'
    return first and f'; add --gin_file={first}' + (f', or {alternatives}' if others else '')


def find_file(
    name: str, search_paths: Sequence[str] = (), included_by: str = '', prefer_shipped: bool = False
) -> pathlib.Path:
    """Finds a gin file in the current folder, the search paths, or the shipped configs, in this order.

    With `prefer_shipped`, shipped configs are searched first. Commands and shipped files use this option, because gin
    executes code and a file in the current folder must not replace a shipped file. Raises UserError if the file is not
    found.
    """
    bare = name.removeprefix('configs/')
    folders = [pathlib.Path(folder).expanduser() for folder in ('', *search_paths)]
    candidates = [folder / pathlib.Path(name).expanduser() for folder in folders]
    folders += [candidate.parent for candidate in candidates]
    candidates.insert(0 if prefer_shipped else len(candidates), find_shipped_folder() / bare)
    if path := next(filter(pathlib.Path.is_file, candidates), None):
        return path
    known = [file for file in read_shipped_files() if os.path.dirname(file) == (os.path.dirname(bare) or None)] or [
        *read_shipped_files()
    ]
    known += [str(path) for folder in folders for path in folder.glob('*.gin')]
    # Compare names without folders and extensions, because equal folders and extensions make short names similar.
    advice = suggest_similar_name(bare, known, lambda file: pathlib.Path(file).stem)
    advice = advice or f'; shipped configs are in {find_shipped_folder()}'
    if 't5x/' in name:
        advice = "; T5X's gin files configure T5X's classes: docs/t5x.md lists their counterparts"
    raise UserError(
        f'{included_by}gin file {name!r} is not in the current folder, --gin_search_paths or shipped configs{advice}'
    )


def parse_model_flag(text: str, search_paths: Sequence[str] = ()) -> list[str]:
    """Splits the value of --model, such as `bert+sublayers/fnet+ENCODER_MIXER=@fnet.FNet`, into gin files and settings.

    A name without a folder refers to a file in models/, the current folder or `search_paths`. If both models/ and
    another folder contain mine.gin, `mine` selects the file in models/, and `mine.gin` the other file. Raises UserError
    if a name is empty.
    """
    parts = []
    for name in map(str.strip, text.split('+')):
        file = f'{name.removesuffix(".gin")}.gin'
        if file == '.gin':
            raise UserError(
                f'--model must be one or more names joined by +, got {text!r}; pass --model=t5_1_1, or '
                '--model=remixer+NAME=VALUE'
            )
        is_users = any(pathlib.Path(folder).expanduser().joinpath(file).is_file() for folder in ('', *search_paths))
        is_shipped = not is_users or (name != file and f'{MODELS_FOLDER}{file}' in read_shipped_files())
        parts.append(name if '=' in name else f'{MODELS_FOLDER}{file}' if is_shipped and '/' not in file else file)
    return parts


class GinReader:
    """Reads gin files and the files that they include. The files and texts in `model` replace the files in models/."""

    def __init__(self, search_paths: Sequence[str] = (), model: Sequence[str | GinText] = ()):
        self._search_paths, self._model, self._open_files = search_paths, model, list[pathlib.Path]()
        self.model_read = False

    def read(
        self, name: str, included_by: str = '', prefer_shipped: bool = False, in_model: bool = False
    ) -> Iterator[GinText]:
        """Yields the sections of a file and of its included files in the order in which gin reads them.

        Error messages show `included_by`, the location of the include statement.
        """
        path = find_file(name, self._search_paths, included_by, prefer_shipped).resolve()
        folder = find_shipped_folder().resolve()
        shipped = path.is_relative_to(folder)
        file = str(path.relative_to(folder)) if shipped else name
        if self._model and shipped and file.startswith(MODELS_FOLDER) and not in_model:
            # Replace the first file in models/ with `model`, and skip other files in models/.
            replacement, self.model_read = () if self.model_read else self._model, True
            for other in replacement:
                yield from [other] if isinstance(other, GinText) else self.read(other, '--model: ', in_model=True)
            return
        if path in self._open_files:
            raise UserError(f'{included_by}{file} must not include itself; remove one of the include statements')
        try:
            lines = [*path.read_text(encoding='utf-8').split('\n'), '']
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f'{included_by}gin file {file} cannot be read: {error}') from None
        self._open_files.append(path)
        start = 0
        for number, line in enumerate(lines, 1):
            include = _INCLUDE.match(line)
            if include or number == len(lines):
                above = [line if _IMPORT.match(line) else '' for line in lines[:start]]
                yield GinText(file, '\n'.join([*above, *lines[start : number - 1], '']), shipped)
                start = number
            if include:
                yield from self.read(include['file'], f'{file} line {number}: ', shipped, in_model)
        self._open_files.pop()
