"""Finds and reads gin files in the current folder, the search paths, and the shipped configs."""

import dataclasses
import functools
import os
import pathlib
import tokenize
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from gin import config_parser
from gin.config_parser import BindingStatement, ImportStatement, IncludeStatement

from remixer_t5x.errors import UserError, suggest_similar_name, to_one_line

MODELS_FOLDER = 'models/'
FLAG = '--gin.'
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
# Files that error messages suggest first if more than one file sets a macro.
_PREFERRED_FILES = ('models/t5_1_1.gin', 'sizes/tiny.gin', 'data/own_text.gin', 'hardware/cpu.gin', 'runs/pretrain.gin')
# Files that error messages suggest only if there is no other file, or never: experiments, which configure complete
# runs, and files that commands load by default.
_LOW_PRIORITY_FILES = ('experiments/', 'defaults', 'runs/eval', 'runs/infer')
# Advice for macros, settings and flags of T5X that have different names in remixer_t5x.
T5X_NAMES: dict[str, dict[str, str]] = tomllib.loads((_PACKAGE / 'config/t5x_names.toml').read_text(encoding='utf-8'))


class ReferenceCollector(config_parser.ParserDelegate):
    """Collects the references (`@name`) and macros (`%name`) in parsed values, without importing modules."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> None:
        self.names.append(f'@{scoped_configurable_name}')

    def macro(self, macro_name: str) -> None:
        self.names.append(f'%{macro_name}')


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
    def statements(self) -> list[tuple[Any, list[str]]]:
        """Pairs of a statement parsed by gin, and the references (`@name`) and macros (`%name`) in its value.

        Raises UserError if the text is not valid gin.
        """
        try:
            return _parse_statements(self.text)
        except (SyntaxError, ValueError, RecursionError, tokenize.TokenError) as error:
            problem = to_one_line(str(getattr(error, 'msg', error.args[0])).splitlines()[-1].strip(' .'))
            raise UserError(
                f'{self.locate(getattr(error, "lineno", 0) or 1)}{problem}; write NAME = value or '
                'module.name.setting = value, put quotes around texts and @ before references, and close brackets'
            ) from None

    @functools.cached_property
    def bindings(self) -> dict[str, tuple[BindingStatement, list[str]]]:
        """Maps each macro or setting, such as `scope/module.Class.argument`, to the last statement that sets it."""
        pairs = [(each, names) for each, names in self.statements if isinstance(each, BindingStatement)]
        return {f'{each.scope}/{each.selector}.{each.arg_name}'.strip('/.'): (each, names) for each, names in pairs}

    @functools.cached_property
    def assigned_macros(self) -> dict[str, str]:
        """Maps each macro set by the text to its location, for error messages."""
        lines = {name: each.location.line_num for name, (each, _) in self.bindings.items() if not each.arg_name}
        return {name: self.name if self.is_flag else f'{self.locate(line)}{name}' for name, line in lines.items()}

    @functools.cached_property
    def referenced_macros(self) -> dict[str, str]:
        """Maps each macro read by the text to its location, for error messages."""
        pairs = [(name, self.locate(each.location.line_num)) for each, names in self.statements for name in names]
        return {name[1:]: f'{location}{name}' for name, location in pairs if name[0] == '%'}

    @functools.cached_property
    def imports(self) -> dict[str, ImportStatement]:
        """Maps each name bound by an import statement to that statement."""
        imports = [each for each, _ in self.statements if isinstance(each, ImportStatement)]
        return {each.bound_name(): each for each in imports if not each.module.startswith('__gin__')}

    @functools.cached_property
    def includes(self) -> list[IncludeStatement]:
        return [each for each, _ in self.statements if isinstance(each, IncludeStatement)]

    def locate(self, line: int) -> str:
        """Returns the start of an error message about a line."""
        return f'{self.name}: ' if self.is_flag else f'{self.name} line {line}: '


@functools.cache
def _parse_statements(text: str) -> list[tuple[Any, list[str]]]:
    statements, collector = [], ReferenceCollector()
    for statement in config_parser.ConfigParser(text, collector):
        statements.append((statement, collector.names))
        collector.names = []
    return statements


def find_shipped_folder() -> pathlib.Path:
    """Returns the folder of the shipped configs, which is in the package (wheel) or next to the package (checkout)."""
    inside = _PACKAGE / 'configs'
    return inside if inside.is_dir() else _PACKAGE.parent / 'configs'


@functools.cache
def read_shipped_files() -> dict[str, GinText]:
    """Returns the shipped gin files, keyed by name, except for the files for T5X's scripts."""
    folder = find_shipped_folder()
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob('*.gin'))}
    return {
        name: GinText(name, path.read_text(encoding='utf-8'), shipped=True)
        for name, path in files.items()
        if not name.startswith('t5x/')
    }


def find_files_with_macro(macro: str) -> list[str]:
    """Returns the names of the shipped files that read a macro, those to suggest first.

    Replaces a partial file, such as runs/_common.gin, by the files that include it.
    """
    texts = read_shipped_files()
    direct = {name for name, text in texts.items() if macro in text.referenced_macros}
    partial = {name for name in direct if '/_' in name}
    names = [name for name, text in texts.items() if name in direct or partial & {x.filename for x in text.includes}]
    return sorted((name for name in names if '/_' not in name), key=lambda name: name.startswith(_LOW_PRIORITY_FILES))


def is_known_macro(macro: str) -> bool:
    """Returns whether a shipped file reads or sets a macro."""
    return any(
        macro in text.referenced_macros or macro in text.assigned_macros for text in read_shipped_files().values()
    )


def suggest_file(setting: str) -> str:
    """Returns `; add --gin_file=X` if a shipped file X sets the macro or configures the class `setting`.

    Returns '' if there is no such file.
    """
    texts = {name: text for name, text in read_shipped_files().items() if not name.startswith(_LOW_PRIORITY_FILES)}
    prefixes = (f'{setting} ', f'{setting}.')
    direct = {name for name, text in texts.items() if any(f'{each} '.startswith(prefixes) for each in text.bindings)}
    names = [name for name, text in texts.items() if direct & {name, *(each.filename for each in text.includes)}]
    names = sorted((name for name in names if '/_' not in name), key=lambda name: name not in _PREFERRED_FILES)
    others = ' or another file that sets it' if len(names) > 1 else ''
    return f'; add --gin_file={names[0]}{others}' if names else ''


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
    if pathlib.Path(name, 'config.gin').is_file():
        advice = f'; did you mean {name}/config.gin?'
    if 't5x/' in name:
        advice = "; T5X's gin files configure T5X's classes: docs/t5x.md lists their counterparts"
    raise UserError(
        f'{included_by}gin file {name!r} is not in the current folder, --gin_search_paths or shipped configs{advice}'
    )


def parse_model_flag(text: str) -> list[str]:
    """Splits the value of --model, such as `bert+sublayers/fnet+ENCODER_MIXER=@fnet.FNet`, into gin files and settings.

    `NAME` refers to the shipped file models/NAME.gin if it exists; `NAME.gin`, and any other `NAME`, refer to NAME.gin.
    The settings override all gin files. Raises UserError if a name is empty, or if a setting comes first.
    """
    parts: list[str] = []
    for name in map(str.strip, text.split('+')):
        file = f'{name.removesuffix(".gin")}.gin'
        if file == '.gin' or ('=' in name and not parts):
            raise UserError(
                f'--model must be one or more names joined by +, got {text!r}; pass --model=t5_1_1, or '
                '--model=remixer+NAME=VALUE'
            )
        is_shipped = name != file and f'{MODELS_FOLDER}{file}' in read_shipped_files()
        parts.append(name if '=' in name else f'{MODELS_FOLDER}{file}' if is_shipped else file)
    return parts


class GinReader:
    """Reads gin files and the files that they include. The files in `model` replace the files in models/."""

    def __init__(self, search_paths: Sequence[str] = (), model: Sequence[str] = ()):
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
                yield from self.read(other, '--model: ', in_model=True)
            return
        if path in self._open_files:
            raise UserError(f'{included_by}{file} must not include itself; remove one of the include statements')
        try:
            text = GinText(file, path.read_text(encoding='utf-8-sig'), shipped)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f'{included_by}gin file {file} cannot be read: {error}') from None
        self._open_files.append(path)
        lines, start = text.text.split('\n'), 0
        imports = {each.location.line_num for each, _ in text.statements if isinstance(each, ImportStatement)}
        for include in (*text.includes, None):
            end = include.location.line_num if include else len(lines) + 1
            above = [line if number in imports else '' for number, line in enumerate(lines[:start], 1)]
            yield GinText(file, '\n'.join([*above, *lines[start : end - 1], '']), shipped)
            start = end
            if include:
                yield from self.read(include.filename, text.locate(end), shipped, in_model)
        self._open_files.pop()
