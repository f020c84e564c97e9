"""Modules that a test writes, imports and names in gin files, as the guide tells users to do."""

import sys

import gin


def forget(*names: str) -> None:
    """The next import of these modules reads their files again, and gin takes what it finds there.

    gin has no public way: it refuses a second function of one name, although the first one's module is gone.
    """
    for name in names:
        sys.modules.pop(name, None)
    config = gin.config
    for selector, registered in list(config._REGISTRY.items()):
        if selector.partition('.')[0] in names:
            config._REGISTRY.pop(selector)
            config._INVERSE_REGISTRY.pop(registered.wrapped, None)
