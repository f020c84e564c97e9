"""JAX's persistent compilation cache for tests: shared by the processes of a run and kept for later runs."""

import contextlib
import gc
import os
import pathlib
import time

import jax
from jax.experimental.compilation_cache import compilation_cache

# Entries older than this belong to code that has changed, or are worth compiling again.
DAYS = 7
# Linux allows a process 65,530 memory mappings (vm.max_map_count). Compiled programs take most of them, and beyond the
# limit XLA ends the process with a segmentation fault.
MAX_MAPPINGS = 40_000
# Number of compilations between two checks, because reading the mappings takes milliseconds.
CHECK_PERIOD = 200


def enable_cache(folder: str) -> None:
    """Enables the compilation cache in `folder` for this process and the processes that it starts.

    A process that is killed while it writes leaves an incomplete entry: later processes then warn, and compile that
    program again.
    """
    options = {
        'jax_compilation_cache_dir': folder,
        'jax_persistent_cache_min_compile_time_secs': 0.0,
        'jax_persistent_cache_min_entry_size_bytes': -1,
    }
    for name, value in options.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)
    # JAX opens the cache once, at the first compilation.
    compilation_cache.reset_cache()


def remove_old_entries(folder: pathlib.Path) -> None:
    """Removes entries written more than `DAYS` days ago."""
    oldest = time.time() - DAYS * 24 * 3600
    for program in folder.iterdir():
        # Another process may have removed the entry.
        with contextlib.suppress(FileNotFoundError):
            if program.stat().st_mtime < oldest:
                program.unlink()


class LoadedPrograms:
    """Unloads the programs of this process before it has too many memory mappings."""

    def __init__(self):
        self._compiled = 0
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, duration: float, **_) -> None:
        if event == '/jax/core/compile/backend_compile_duration':
            self._compiled += 1

    def unload_if_many(self) -> None:
        """Removes all programs from memory if the process has more than `MAX_MAPPINGS`."""
        if self._compiled >= CHECK_PERIOD:
            self._compiled = 0
            if count_mappings() > MAX_MAPPINGS:
                jax.clear_caches()
                gc.collect()


def count_mappings() -> int:
    """Counts the memory mappings of this process; 0 on systems without /proc."""
    maps = pathlib.Path('/proc/self/maps')
    return len(maps.read_bytes().splitlines()) if maps.exists() else 0
