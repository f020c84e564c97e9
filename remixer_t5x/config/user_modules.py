"""Allows gin to import the user's modules from the current folder, which is not on `sys.path`.

Libraries try to import optional packages, which may not be installed. If the current folder were on `sys.path`, files
with the names of these packages would be executed, although the folder may be untrusted. Therefore, the only
modules that can be imported from this folder are those that the user's gin files and flags name, and their imports.
"""

import ast
import importlib.abc
import importlib.machinery
import os
import pathlib
import sys
import traceback
import types
from collections.abc import Iterator

# Top-level names of the modules that may be imported from the current folder.
importable_modules: set[str] = set()


class _CurrentFolderFinder(importlib.abc.MetaPathFinder):
    """Finds the modules named in `importable_modules` in `folder`, if no other finder finds them."""

    def __init__(self, folder: str):
        self._folder = folder

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if path is not None or name not in importable_modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, [self._folder])
        if spec is not None:
            importable_modules.update(find_imported_modules(spec))
        return spec


def install_module_finder(folder: str) -> None:
    """Makes the modules named in `importable_modules` importable from `folder`. Called by the console script."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _CurrentFolderFinder)]
    sys.meta_path.append(_CurrentFolderFinder(folder))


def find_imported_modules(spec: importlib.machinery.ModuleSpec) -> Iterator[str]:
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


def find_user_frames(error: BaseException) -> traceback.StackSummary:
    """Returns the frames of an error that are in the user's modules, or the location of a syntax error.

    The user's modules are the modules named in gin files and flags, and the modules that they import from the current
    folder; installed modules are excluded.
    """
    if isinstance(error, SyntaxError) and error.filename and error.filename.endswith('.py'):
        return traceback.StackSummary.from_list([(error.filename, error.lineno or 1, '<module>', None)])
    names = importable_modules - sys.stdlib_module_names - {'remixer_t5x', 'remixer_tasks'}

    def is_user_module(frame: types.FrameType) -> bool:
        # AutoGraph executes generated files, whose globals are those of the original module.
        path, module = frame.f_code.co_filename, frame.f_globals.get('__name__', '')
        is_file = path == frame.f_globals.get('__file__') and f'-packages{os.sep}' not in path
        return is_file and module.partition('.')[0] in names

    frames = traceback.walk_tb(error.__traceback__)
    return traceback.StackSummary.extract((frame, line) for frame, line in frames if is_user_module(frame))
