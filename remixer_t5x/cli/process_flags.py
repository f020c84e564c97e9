"""Defines flags that identify a process of a run, and checks that all processes have the same configuration.

The flags are not gin macros, because they differ between processes. The command, configuration, code and device type
must be the same in all processes, and are compared before any operation that waits for another process.
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

# Maps each flag to a field of `devices.processes.ProcessFlags`, the placeholder of the flag's value, and its help.
_FLAGS = {
    'coordinator_address': ('address', 'HOST:PORT', 'address of process 0'),
    'process_count': ('count', 'N', 'number of processes; 1 runs this process alone, even on a cluster'),
    'process_index': ('index', 'N', 'index of this process, from 0'),
    'initialization_timeout': (
        'initialization_timeout',
        'SECONDS',
        'maximum time to wait for the other processes (default 300)',
    ),
    'heartbeat_timeout': (
        'heartbeat_timeout',
        'SECONDS',
        'time without a heartbeat after which a process counts as lost (default 100)',
    ),
}
# Settings that may differ between processes: the paths of MODEL_DIR and its vocabulary, and profiling.
# `run_setup.create_shared_model_dir` checks that all processes share MODEL_DIR, and the vocabulary ids are compared
# later.
MAY_DIFFER = ('MODEL_DIR', 'PROFILE_PERIOD', 'remixer_tasks.vocabularies.saved.folder')
# Prefixes of environment variables that affect compilation by JAX, and of those that may differ between processes.
_COMPILER_VARIABLES = ('JAX_', 'XLA_', 'LIBTPU_')
_PROCESS_VARIABLES = (
    *('JAX_COORDINATOR_', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID', 'JAX_LOCAL_DEVICE_IDS', 'JAX_COMPILATION_CACHE_DIR'),
    *('JAX_CUDA_VISIBLE_DEVICES', 'JAX_LOG', 'JAX_DUMP', 'JAX_TRACEBACK', 'JAX_CROSS_HOST'),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for runs with several processes to a parser, as an argument group."""
    group = parser.add_argument_group(
        'several processes',
        'detected on TPU, Slurm, Open MPI and Kubernetes; otherwise, set all of the first three flags',
    )
    for flag, (_, metavar, help) in _FLAGS.items():
        group.add_argument(f'--{flag}', metavar=metavar, help=help, type=str if metavar == 'HOST:PORT' else int)


@contextlib.contextmanager
def connect_processes(args: argparse.Namespace, saves: bool = False) -> Iterator[None]:
    """Connects the processes of a run within a `with` block. With `saves`, the block can save its state after SIGTERM.

    Must be called after the gin files are loaded. Raises UserError in all processes if their command, code, settings or
    devices differ.
    """
    import jax

    from remixer_t5x.devices import collectives, processes

    print_error = functools.partial(args.report_error, verbose=args.verbose)
    with processes.connect_processes(_build_process_flags(args), print_error, saves):
        if collectives.is_distributed():
            collectives.check_same_on_processes(collect_shared_values(args.command))
            # Initializing JAX's devices waits for the other processes.
            first, *_ = devices = jax.local_devices()
            kind = f'{len(devices)} {first.device_kind} ({first.client.platform_version})'
            collectives.check_same_on_processes({'the devices of a process': kind})
        yield


def collect_shared_values(command: str) -> dict[str, Any]:
    """Returns the values that must be equal in all processes, in the order in which they are compared."""
    from remixer_t5x.checkpoints import compatibility
    from remixer_t5x.config import loading
    from remixer_t5x.run_folder import model_dir

    # Keeps relative paths, because processes may run in different folders.
    text = loading.get_config_text(absolute_paths=False)
    settings = compatibility.parse_bindings(text)
    return {
        'the command': command,
        **{f'version of {name}': version for name, version in model_dir.get_package_versions().items()},
        'version of Python': platform.python_version(),
        **{
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_COMPILER_VARIABLES) and not name.startswith(_PROCESS_VARIABLES)
        },
        **{name: value for name, value in settings.items() if name not in MAY_DIFFER},
        'imports of the gin files': [line for line in text.splitlines() if line.startswith(('import ', 'from '))],
        **_hash_code(),
    }


def _hash_code() -> dict[str, str]:
    """Returns digests of this project's packages, and of all loaded modules that are not in installed packages."""
    packages = (remixer_t5x, remixer_tasks)
    files = {package.__name__: sorted(pathlib.Path(package.__path__[0]).rglob('*.py')) for package in packages}
    elsewhere = tuple(f'{folder}/' for folder in (sysconfig.get_paths()['stdlib'], *(p.__path__[0] for p in packages)))
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, '__file__', None) or ''
        # TensorFlow's AutoGraph loads the code that it generates as modules with random names.
        if name.startswith('__autograph_generated_file'):
            continue
        if file.endswith('.py') and '-packages/' not in file and not file.startswith(elsewhere):
            files[name] = [pathlib.Path(file)]
    digests = {}
    for name, paths in files.items():
        contents = [(path.name, path.read_bytes() if path.exists() else b'') for path in paths]
        digests[f'the code of {name}'] = hashlib.sha256(repr(contents).encode()).hexdigest()[:16]
    return digests


def _build_process_flags(args: argparse.Namespace) -> Any:
    from remixer_t5x.devices import processes

    values = {field: getattr(args, flag) for flag, (field, _, _) in _FLAGS.items()}
    return processes.ProcessFlags(**{field: value for field, value in values.items() if value is not None})


def require_single_process(
    args: argparse.Namespace, option: str, advice: str = 'start the command once, with --process_count=1'
) -> None:
    """Raises UserError with `advice` if flags, environment variables or the cluster define several processes."""
    from remixer_t5x.devices import processes

    if processes.resolve_distributed_config(_build_process_flags(args)) is not None:
        raise UserError(f'{option} must be used in one process, got several; {advice}')
