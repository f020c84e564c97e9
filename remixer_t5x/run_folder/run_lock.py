"""One run for each MODEL_DIR: a kernel lock on a file in it, which a killed process cannot leave behind."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator

from etils import epath

from remixer_t5x.errors import UserError

LOCK = 'run.lock'


@contextlib.contextmanager
def held(folder: epath.Path) -> Iterator[None]:
    """Holds the lock of `folder`. Raises UserError with the process that holds it if another run does.

    On NFS the lock works across machines. Object stores have no locks; there this does nothing.
    """
    if '://' in str(folder):
        yield
        return
    with open(folder / LOCK, 'a+') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip() or 'another process'
            raise UserError(
                f'MODEL_DIR {folder} is in use by {who}; wait for it or stop it, or give this run another MODEL_DIR'
            ) from None
        except OSError:
            # This file system has no locks.
            yield
            return
        file.truncate(0)
        file.write(f'process {os.getpid()} on {socket.gethostname()}')
        file.flush()
        yield
        file.truncate(0)
