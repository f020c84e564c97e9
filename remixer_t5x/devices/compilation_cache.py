"""Enables JAX's persistent compilation cache, so that a command can reuse programs compiled by earlier commands.

The key of a cache entry is a hash of the program, the compiler's version and options, and the devices. Code compiled
for a CPU uses the instructions of that CPU, so each type of machine has a separate folder in the cache. This module
does not import JAX, which reads the environment variables when it is imported.
"""

import contextlib
import hashlib
import os
import platform
import threading
from collections.abc import MutableMapping
from pathlib import Path

CACHE_FOLDER = 'compiled'
# Maximum size of the cache, beyond which JAX evicts the least recently used entries. A compiled train step takes 1 to
# 50 MB.
MAX_BYTES = 2 * 2**30
# Minimum compile time of programs to cache. Loading a program that compiles faster would take as long as compiling it.
MIN_COMPILE_SECONDS = 0.2
# Name of the threads that run XLA's compiler, which cannot be interrupted.
COMPILE_THREAD_NAME = 'compile'


def enable_compilation_cache(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets environment variables to enable JAX's compilation cache.

    The folder is $REMIXER_T5X_CACHE/compiled (default ~/.cache/remixer_t5x/compiled). Does nothing if
    JAX_COMPILATION_CACHE_DIR or JAX_ENABLE_COMPILATION_CACHE is set, or if the folder is not writable.
    """
    if 'JAX_COMPILATION_CACHE_DIR' in environment or 'JAX_ENABLE_COMPILATION_CACHE' in environment:
        return
    root = Path(environment.get('REMIXER_T5X_CACHE') or '~/.cache/remixer_t5x').expanduser()
    folder = root / CACHE_FOLDER / get_machine_name()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        environment['JAX_COMPILATION_CACHE_DIR'] = str(folder)
        environment.setdefault('JAX_COMPILATION_CACHE_MAX_SIZE', str(MAX_BYTES))
        environment.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', str(MIN_COMPILE_SECONDS))


def get_machine_name() -> str:
    """Returns a name shared by machines with the same CPU instruction set: the architecture and 8 hex digits."""
    text = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines()
        text = next((line for line in lines if line.startswith(('flags', 'Features'))), text)
    return f'{platform.machine()}-{hashlib.sha256(text.encode()).hexdigest()[:8]}'


def is_compiling() -> bool:
    """Returns whether a thread is running XLA's compiler."""
    return any(thread.name.startswith(COMPILE_THREAD_NAME) for thread in threading.enumerate())
