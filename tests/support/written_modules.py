"""Imports of modules that a test has just written.

Python lists a folder once and again only after the folder's time of change: a module written in the same tick of the
clock as that listing is not found. Another thread's import is enough to list the folder of a test.
"""

import importlib.abc
import importlib.machinery
import sys
import tempfile


class WrittenModules(importlib.abc.MetaPathFinder):
    """Asked last: looks into the temporary folders of the path once more, without what Python remembers of them."""

    def find_spec(self, fullname, path=None, target=None):
        temporary = tempfile.gettempdir()
        folders = [folder for folder in (sys.path if path is None else path) if folder.startswith(temporary)]
        for folder in folders:
            sys.path_importer_cache.pop(folder, None)
        return importlib.machinery.PathFinder.find_spec(fullname, folders, target) if folders else None
