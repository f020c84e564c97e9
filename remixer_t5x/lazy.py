"""TensorFlow and seqio, imported at their first use: that takes longer than all other imports together.

    from remixer_t5x.lazy import seqio, tf

A module that does so has `from __future__ import annotations`, because its signatures would be a first use. A class
that derives from one of theirs is one too, so it has a module that is imported where an object of it is made.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

# Entered while a library is imported; the command line keeps their chatter off the screen with it.
around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
# Packages that Keras, which TensorFlow imports, uses for pictures and tables where they are installed. They take a
# fifth of the time, and nothing here draws or feeds with Keras.
_NOT_FOR_KERAS = ('matplotlib', 'pandas')


class _Library:
    """Stands for the module `name`; its attributes are the module's."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(_load(self._name), attribute)


def _load(name: str) -> Any:
    if 'tensorflow' not in sys.modules:
        with around(), _without(_NOT_FOR_KERAS):
            _hide_accelerators(importlib.import_module('tensorflow'))
    if name not in sys.modules:
        with around():
            importlib.import_module(name)
    return sys.modules[name]


def _hide_accelerators(tensorflow: Any) -> None:
    """Leaves them to JAX: TensorFlow would take all memory of a GPU at its first operation."""
    for kind in ('GPU', 'TPU'):
        # Another module has let TensorFlow use them: too late, and no reason to fail.
        with contextlib.suppress(RuntimeError):
            tensorflow.config.set_visible_devices([], kind)


@contextlib.contextmanager
def _without(names: tuple[str, ...]):
    """Within it, an import of one of these packages that is not loaded yet says that it is not installed."""
    hidden = [name for name in names if name not in sys.modules]
    # Python takes None for a module that cannot be found.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


if TYPE_CHECKING:
    import seqio
    import tensorflow as tf
else:
    seqio, tf = _Library('seqio'), _Library('tensorflow')

__all__ = ['seqio', 'tf']
