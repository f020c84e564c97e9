"""Paths in the repository, files in new folders, and the environment of child processes."""

import os
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = ROOT / 'configs'
GOLDEN = ROOT / 'tests' / 'golden'
SCRIPTS = ROOT / 'scripts'


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a text file, and creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def environment(**changes: str) -> dict[str, str]:
    """Returns environment variables for a child process that imports this checkout and uses the CPU."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / 'tasks')])
    return {**os.environ, 'PYTHONPATH': paths, 'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '3', **changes}
