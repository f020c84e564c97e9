"""Imports modules that a test has just written, and unloads them after the test file.

Python caches the listing of a folder until its modification time changes, so it does not find a module that was written
within the resolution of that time. An import in another thread is enough to cache the listing of a test's folder.
"""

import importlib.abc
import importlib.machinery
import inspect
import os
import pathlib
import sys
import tempfile


class WrittenModules(importlib.abc.MetaPathFinder):
    """Searches the temporary folders on the path again, without cached listings. Must be the last finder."""

    def find_spec(self, fullname, path=None, target=None):
        temporary = tempfile.gettempdir()
        folders = [folder for folder in (sys.path if path is None else path) if folder.startswith(temporary)]
        for folder in folders:
            sys.path_importer_cache.pop(folder, None)
        return importlib.machinery.PathFinder.find_spec(fullname, folders, target) if folders else None


def unload(folder: pathlib.Path) -> None:
    """Removes the modules below `folder` and their gin and seqio registrations, so that tests can reuse their names."""
    prefix = f'{folder}{os.sep}'
    names = {name for name, module in list(sys.modules.items()) if _is_below(prefix, module)}
    for name in names:
        del sys.modules[name]
    if names and 'gin' in sys.modules:
        _unregister_configurables(names)
    if names and 'seqio' in sys.modules:
        _unregister_tasks(names)


def _is_below(prefix, module) -> bool:
    # Compares strings, because there are thousands of modules. A namespace package has a path but no file. The lookup
    # in the dictionary bypasses the `__path__` of torch.classes, which is not a list.
    attributes = getattr(module, '__dict__', {})
    paths = [attributes.get('__file__'), *(attributes.get('__path__') or ())]
    return any(str(path).startswith(prefix) for path in paths)


def _unregister_configurables(names) -> None:
    # gin has no public function for this, and rejects a second function with the same name.
    config = sys.modules['gin'].config
    for selector, registered in list(config._REGISTRY.items()):
        if registered.wrapped.__module__ in names:
            config._REGISTRY.pop(selector)
            config._INVERSE_REGISTRY.pop(registered.wrapped, None)


def _unregister_tasks(names) -> None:
    """Removes the tasks that use functions of these modules; seqio does not store which module registered a task."""
    seqio = sys.modules['seqio']
    tasks = {name for name in seqio.TaskRegistry.names() if _modules_used_by(seqio.TaskRegistry.get(name)) & names}
    mixtures = {
        name
        for name in seqio.MixtureRegistry.names()
        if {task.name for task in seqio.MixtureRegistry.get(name).tasks} & tasks
    }
    for registry, registered in ((seqio.TaskRegistry, tasks), (seqio.MixtureRegistry, mixtures)):
        for name in registered:
            registry.remove(name)


def _modules_used_by(task) -> set:
    """Returns the names of the modules whose functions a task calls."""
    functions = [*task.preprocessors, *task.metric_fns, task.postprocess_fn, *vars(task.source).values()]
    return {getattr(inspect.unwrap(getattr(f, 'func', f)), '__module__', None) for f in functions}
