"""Modules that a test has just written: found when they are imported, and forgotten after their test file.

Python lists a folder once and again only after the folder's time of change: a module written in the same tick of the
clock as that listing is not found. Another thread's import is enough to list the folder of a test.
"""

import importlib.abc
import importlib.machinery
import inspect
import os
import pathlib
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


def forget(folder: pathlib.Path) -> None:
    """Forgets the modules below `folder`, and what gin and seqio know of them: another test may write them again."""
    below = f'{folder}{os.sep}'
    names = {name for name, module in list(sys.modules.items()) if _begins(below, module)}
    for name in names:
        del sys.modules[name]
    if names and 'gin' in sys.modules:
        _forget_configurables(names)
    if names and 'seqio' in sys.modules:
        _forget_tasks(names)


def _begins(below, module) -> bool:
    # Strings, because there are thousands of modules. A folder without __init__.py is a module without a file. From the
    # dictionary, because torch.classes invents a `__path__` that is not a list.
    attributes = getattr(module, '__dict__', {})
    places = [attributes.get('__file__'), *(attributes.get('__path__') or ())]
    return any(str(place).startswith(below) for place in places)


def _forget_configurables(names) -> None:
    # gin has no public way: it refuses a second function of one name, although the first one's module is gone.
    config = sys.modules['gin'].config
    for selector, registered in list(config._REGISTRY.items()):
        if registered.wrapped.__module__ in names:
            config._REGISTRY.pop(selector)
            config._INVERSE_REGISTRY.pop(registered.wrapped, None)


def _forget_tasks(names) -> None:
    """seqio does not say which module registered a task: one that uses a function of the module is taken for its."""
    seqio = sys.modules['seqio']
    tasks = {name for name in seqio.TaskRegistry.names() if _used_by(seqio.TaskRegistry.get(name)) & names}
    mixtures = {name for name in seqio.MixtureRegistry.names() if _parts(seqio.MixtureRegistry.get(name)) & tasks}
    for registry, found in ((seqio.TaskRegistry, tasks), (seqio.MixtureRegistry, mixtures)):
        for name in found:
            registry.remove(name)


def _used_by(task) -> set:
    """Names of the modules whose functions a task calls."""
    functions = [*task.preprocessors, *task.metric_fns, task.postprocess_fn, *vars(task.source).values()]
    return {getattr(inspect.unwrap(getattr(one, 'func', one)), '__module__', None) for one in functions}


def _parts(mixture) -> set:
    return {task.name for task in mixture.tasks}
