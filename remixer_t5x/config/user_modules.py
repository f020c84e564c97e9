"""Allows gin to import the user's modules from the current folder, which is not on `sys.path`.

Libraries try to import optional packages, which may not be installed. If the current folder were on `sys.path`, files
with the names of these packages would be executed, although the folder may be untrusted. Therefore, only modules that
the user's gin files and flags name, and modules that these modules import, can be imported from it.
"""

import ast
import importlib.abc
import importlib.machinery
import pathlib
import sys
from collections.abc import Iterator

# Top-level names of the modules that may be imported from the current folder.
allowed: set[str] = set()


class _CurrentFolderFinder(importlib.abc.MetaPathFinder):
    """Finds the `allowed` modules in `folder` if no other finder finds them."""

    def __init__(self, folder: str):
        self._folder = folder

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if path is not None or name not in allowed:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, [self._folder])
        if spec is not None:
            allowed.update(imported_modules(spec))
        return spec


def install(folder: str) -> None:
    """Makes the `allowed` modules in `folder` importable. The command line calls this function."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _CurrentFolderFinder)]
    sys.meta_path.append(_CurrentFolderFinder(folder))


def imported_modules(spec: importlib.machinery.ModuleSpec) -> Iterator[str]:
    """Yields the top-level names of all imports in the files of a module or package."""
    folders = [pathlib.Path(folder) for folder in spec.submodule_search_locations or ()]
    for file in [file for folder in folders for file in folder.rglob('*.py')] or [pathlib.Path(spec.origin or '')]:
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # Importing the module will raise the error.
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (name.name.partition('.')[0] for name in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition('.')[0]
