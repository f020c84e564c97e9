"""Configures JAX's persistent compilation cache, so that a command reuses the programs of earlier commands.

JAX names an entry by a hash of the program, the compiler's options, its version, and the devices. The code in an entry
for a CPU uses that CPU's instructions, so the entries of each kind of machine have a separate folder, and different
machines can share a cache folder. This file does not import JAX, which reads these variables when it is imported.
"""

import hashlib
import os
import platform
from collections.abc import MutableMapping
from pathlib import Path

FOLDER = 'compiled'
# JAX removes the least recently read entries beyond this size. A train step takes 1 to 50 MB.
MAX_BYTES = 2 * 2**30
# Programs that compile faster are not cached, because reading them takes as long.
MIN_SECONDS = 0.2


def enable(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets JAX's variables for a cache below $REMIXER_T5X_CACHE (~/.cache/remixer_t5x), in its folder `compiled`.

    Does nothing if the user has set JAX_COMPILATION_CACHE_DIR or JAX_ENABLE_COMPILATION_CACHE, or if the folder cannot
    be written.
    """
    if 'JAX_COMPILATION_CACHE_DIR' in environment or 'JAX_ENABLE_COMPILATION_CACHE' in environment:
        return
    root = Path(environment.get('REMIXER_T5X_CACHE') or '~/.cache/remixer_t5x').expanduser()
    folder = root / FOLDER / machine_name()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        environment['JAX_COMPILATION_CACHE_DIR'] = str(folder)
        environment.setdefault('JAX_COMPILATION_CACHE_MAX_SIZE', str(MAX_BYTES))
        environment.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', str(MIN_SECONDS))


def machine_name() -> str:
    """Returns a name for machines whose CPUs have the same instructions: the architecture and 8 hex digits."""
    text = platform.processor()
    try:
        lines = Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines()
        text = next((line for line in lines if line.startswith(('flags', 'Features'))), text)
    except OSError:
        pass
    return f'{platform.machine()}-{hashlib.sha256(text.encode()).hexdigest()[:8]}'
