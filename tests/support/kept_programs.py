"""Compiled programs on the disk, for all processes of a test run and for the next runs: whole ones only."""

import contextlib
import pathlib
import time

import jax
from jax._src import cache_key, compilation_cache, compiler, lru_cache

# Programs that nobody has compiled for so long are removed: the code that they belong to is gone, or it is time to
# compile them again.
DAYS = 7


def keep(folder: str) -> None:
    """This process takes compiled programs from `folder` and adds its own."""
    jax.config.update('jax_compilation_cache_dir', folder)
    jax.config.update('jax_compilation_cache_max_size', -1)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
    lru_cache.LRUCache.put = _put_whole
    compiler._cache_write = _write_from_every_process
    # Without the fingerprint of the devices, which differs between the processes of one run: process 1 would find no
    # program of process 0.
    cache_key._hash_accelerator_config = cache_key._hash_devices
    # JAX decides once whether it reads from a folder, and from which.
    compilation_cache.reset_cache()


def remove_old(folder: pathlib.Path) -> None:
    """Removes programs of more than `DAYS` days ago."""
    oldest = time.time() - DAYS * 24 * 3600
    for program in folder.iterdir():
        # Another process may have removed it.
        with contextlib.suppress(FileNotFoundError):
            if program.stat().st_mtime < oldest:
                program.unlink()


def _write_from_every_process(key, seconds, name, backend, executable, host_callbacks):
    """As JAX's own, which writes in process 0 alone: the programs of process 1 for its own devices would be lost."""
    if not host_callbacks:
        compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))


def _put_whole(cache, key: str, value: bytes) -> None:
    """As JAX's own, which writes in place: of a process that is killed then, others would read half of a program."""
    path = pathlib.Path(str(cache.path), f'{key}-cache')
    if not path.exists():
        temporary = path.with_name(f'{key}.{time.time_ns()}.tmp')
        temporary.write_bytes(value)
        temporary.rename(path)
