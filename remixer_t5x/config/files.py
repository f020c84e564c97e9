"""Finds gin files: in the current folder, the search paths, and among the configs shipped with the package."""

import difflib
import pathlib
import re
from collections.abc import Iterable, Sequence

from remixer_t5x.errors import UserError

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]


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
    """`; did you mean X?`, or nothing when no known name is close. Case never separates two names.

    A name that is the beginning of a few known names means one of them: `models/t5.gin` is not a misspelt `models/tim`.
    """
    by_lower = {candidate.lower(): candidate for candidate in known if candidate != name}
    begun = name.lower().removesuffix('.gin')
    longer = sorted(by_lower[candidate] for candidate in by_lower if candidate.startswith(begun))
    if len(begun.rpartition('/')[2]) > 1 and 1 <= len(longer) <= 3:
        return f'; did you mean {" or ".join(longer)}?'
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f'; did you mean {by_lower[close[0]]}?' if close else ''


def sublayer_file(module: str) -> str:
    """The shipped file that imports a module of sublayers, for other files to use; empty if no file does."""
    pattern = re.compile(rf'^from remixer_t5x\.models\.sublayers import {re.escape(module)}$', re.MULTILINE)
    paths = sorted((shipped_folder() / 'sublayers').glob('*.gin'))
    return next((f'sublayers/{path.name}' for path in paths if pattern.search(path.read_text(encoding='utf-8'))), '')


def is_macro(name: str) -> bool:
    """Whether a shipped file reads or sets a macro of this name."""
    pattern = re.compile(rf'(^{re.escape(name)}\s*=|%{re.escape(name)}\b)', re.MULTILINE)
    return any(pattern.search(path.read_text(encoding='utf-8')) for path in shipped_folder().rglob('*.gin'))
