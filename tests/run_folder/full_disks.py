"""A disk without room, for this process: no file may grow beyond a number of bytes."""

import contextlib
import resource


@contextlib.contextmanager
def full(size=0):
    """Within it, writing beyond `size` bytes of a file fails as it does on a full disk, with another number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
