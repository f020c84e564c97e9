"""Simulates a full disk for this process by limiting the size of files."""

import contextlib
import resource


@contextlib.contextmanager
def full(size=0):
    """In this context, writing beyond `size` bytes of a file fails as on a full disk, with another errno."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
