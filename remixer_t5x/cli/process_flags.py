"""Flags that say which process of a run this is, and what all processes of a run have to share.

The flags are not gin macros: each process has its own, while the configuration, the code and the kind of devices are
the same for all of them, which is checked before anything that could wait for another process.
"""

import argparse
import contextlib
import functools
import hashlib
import os
import pathlib
import platform
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

import remixer_t5x
import remixer_tasks
from remixer_t5x.errors import UserError

# Flag, field of `devices.processes.Processes`, what its value is called, what it is.
_FLAGS = (
    ('--coordinator_address', 'address', 'HOST:PORT', 'of process 0'),
    ('--process_count', 'count', 'N', 'how many processes; 1 is this one alone, whatever the cluster says'),
    ('--process_index', 'index', 'N', 'which one this is, from 0'),
    (
        '--initialization_timeout',
        'initialization_timeout',
        'SECONDS',
        'to wait for the others at the start (default 300)',
    ),
    ('--heartbeat_timeout', 'heartbeat_timeout', 'SECONDS', 'of silence after which a process is lost (default 100)'),
)


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags, as a group."""
    group = parser.add_argument_group(
        'several processes', 'found by themselves on TPU, Slurm, Open MPI and Kubernetes; else all of the first three'
    )
    for flag, _, metavar, help in _FLAGS:
        group.add_argument(flag, metavar=metavar, help=help)


# Settings that may differ between processes: the paths of MODEL_DIR, which all share (`start.claim` checks that), and
# of its vocabulary, whose ids are compared later; and profiling.
MAY_DIFFER = ('MODEL_DIR', 'PROFILE_PERIOD', 'remixer_tasks.vocabularies.saved.folder')
# Variables that change what JAX compiles, except for variables of a single process and of logs.
_COMPILES = ('JAX_', 'XLA_', 'LIBTPU_')
_OF_ONE_PROCESS = (
    *('JAX_COORDINATOR_', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID', 'JAX_LOCAL_DEVICE_IDS', 'JAX_COMPILATION_CACHE_DIR'),
    *('JAX_CUDA_VISIBLE_DEVICES', 'JAX_LOG', 'JAX_DUMP', 'JAX_TRACEBACK', 'JAX_CROSS_HOST'),
)


@contextlib.contextmanager
def together(args: argparse.Namespace, saves: bool = False) -> Iterator[None]:
    """Joins the processes of the run for the work within; `saves`: on SIGTERM the work saves first.

    Call it after gin is loaded: raises UserError on all processes if their command, code, settings or devices differ.
    """
    from remixer_t5x.devices import collectives, processes

    given = processes.Processes(**_given(args))
    with processes.together(given, functools.partial(args.report_error, verbose=args.verbose), saves):
        if collectives.several():
            collectives.check_same(identity(args.command))
            # This starts JAX's devices, which waits for other processes.
            collectives.check_same(_devices())
        yield


def identity(command: str) -> dict[str, Any]:
    """What has to be the same in all processes before JAX starts its devices, in the order in which it is compared."""
    from remixer_t5x.checkpoints import changes
    from remixer_t5x.config import loading
    from remixer_t5x.run_folder import model_dir

    # Processes may run in different folders.
    text = loading.config_text(absolute_paths=False)
    settings = changes.bindings(text)
    return {
        'the command': command,
        **{f'version of {name}': version for name, version in model_dir.package_versions().items()},
        'version of Python': platform.python_version(),
        **{name: os.environ[name] for name in sorted(os.environ) if _is_shared(name)},
        **{name: value for name, value in settings.items() if name not in MAY_DIFFER},
        'imports of the gin files': [line for line in text.splitlines() if line.startswith(('import ', 'from '))],
        **_code(),
    }


def _is_shared(variable: str) -> bool:
    return variable.startswith(_COMPILES) and not variable.startswith(_OF_ONE_PROCESS)


def _code() -> dict[str, str]:
    """Digests of our packages and of each module that is loaded from outside of the installed packages."""
    found = {}
    for package in (remixer_t5x, remixer_tasks):
        files = sorted(pathlib.Path(package.__path__[0]).rglob('*.py'))
        found[f'the code of {package.__name__}'] = _digest(files)
    elsewhere = tuple(
        f'{folder}/' for folder in (sysconfig.get_paths()['stdlib'], *remixer_t5x.__path__, *remixer_tasks.__path__)
    )
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, '__file__', None) or ''
        if file.endswith('.py') and '-packages/' not in file and not file.startswith(elsewhere):
            found[f'the code of {name}'] = _digest([pathlib.Path(file)])
    return found


def _digest(files: list[pathlib.Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes() if file.exists() else b''
        digest.update(f'{file.name} {len(content)}\n'.encode() + content)
    return digest.hexdigest()[:16]


def _devices() -> dict[str, Any]:
    import jax

    first, *_ = devices = jax.local_devices()
    return {'the devices of a process': f'{len(devices)} {first.device_kind} ({first.client.platform_version})'}


def _given(args: argparse.Namespace) -> dict[str, str]:
    """Fields of `Processes` that flags set."""
    values = {field: getattr(args, flag.removeprefix('--')) for flag, field, *_ in _FLAGS}
    return {field: value for field, value in values.items() if value is not None}


def refuse(args: argparse.Namespace, reason: str) -> None:
    """Raises UserError where one of the flags is given."""
    for flag, field, *_ in _FLAGS:
        if field in _given(args):
            raise UserError(f'{flag} is given, and {reason}; leave it out')
