"""Where the repository keeps what tests read, and the environment of the processes that tests start."""

import os
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = ROOT / 'configs'
GOLDEN = ROOT / 'tests' / 'golden'
SCRIPTS = ROOT / 'scripts'


def environment(**changes: str) -> dict[str, str]:
    """Environment of a child process that imports this checkout, on the CPU, with `changes`."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / 'tasks')])
    return {**os.environ, 'PYTHONPATH': paths, 'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '3', **changes}
