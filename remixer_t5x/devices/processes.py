"""Connects the processes of a run through `jax.distributed`, and ends all of them if a process fails.

Every process connects to process 0, the coordinator. JAX can then use the devices of all processes. The coordinator's
address, the number of processes and the index of this process come from flags, environment variables, or the cluster
that JAX detects (TPU pods, Slurm, Open MPI, Kubernetes). A single process does not connect.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from remixer_t5x import ranges
from remixer_t5x.devices import collectives, jax_workarounds
from remixer_t5x.errors import UserError, root_cause_message

PROCESS_FLAGS = {'address': '--coordinator_address', 'count': '--process_count', 'index': '--process_index'}
PROCESS_VARIABLES = {'address': 'JAX_COORDINATOR_ADDRESS', 'count': 'JAX_NUM_PROCESSES', 'index': 'JAX_PROCESS_ID'}
_FLAGS_ADVICE = 'pass --coordinator_address=HOST:PORT --process_count=N --process_index=I'


@dataclasses.dataclass(frozen=True)
class ProcessFlags:
    """The command-line flags that describe the processes of a run; unset flags are None.

    Process 0 listens on `address` (HOST:PORT). `initialization_timeout` is the maximum number of seconds to wait for
    the other processes. A process is considered lost if it sends no heartbeat for `heartbeat_timeout` seconds.
    """

    address: str | None = None
    count: int | str | None = None
    index: int | str | None = None
    initialization_timeout: int | str = 300
    heartbeat_timeout: int | str = 100


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """The arguments of `jax.distributed.initialize`. `devices` contains local device ids; None selects all devices."""

    address: str
    count: int
    index: int
    devices: tuple[int, ...] | None = None


def resolve_distributed_config(
    settings: ProcessFlags, environment: Mapping[str, str] = os.environ
) -> DistributedConfig | None:
    """Returns the arguments of `jax.distributed.initialize`, or None for a single process. Does not initialize devices.

    Raises UserError if flags are invalid or incomplete, or if the cluster cannot be queried.
    """
    flags = {name: getattr(settings, name) for name in PROCESS_FLAGS}
    values = {name: environment.get(PROCESS_VARIABLES[name]) if flag is None else flag for name, flag in flags.items()}
    address, devices = values['address'], None
    count, index = (
        None if values[name] is None else _parse_integer(name, values[name], minimum)
        for name, minimum in (('count', 1), ('index', 0))
    )
    if count == 1 and not index:
        return None
    timeout = _parse_integer('initialization_timeout', settings.initialization_timeout, 1)
    if None in values.values():
        cluster = _detect_cluster(environment)
        if cluster is None:
            missing = ' and '.join(PROCESS_FLAGS[name] for name, value in values.items() if value is None)
            if any(value is not None for value in values.values()):
                raise UserError(f'{missing} must be set in a run with several processes; {_FLAGS_ADVICE}')
            return None
        with _wrap_cluster_errors(cluster):
            count = int(cluster.get_process_count()) if count is None else count
            if count == 1:
                return None
            index = int(cluster.get_process_id()) if index is None else index
            port = environment.get('JAX_COORDINATOR_PORT')
            address = address or cluster.get_coordinator_address(timeout_secs=timeout, override_coordinator_port=port)
        devices = _select_local_devices(cluster, environment)
    assert count is not None and index is not None
    if index >= count:
        raise UserError(f'{PROCESS_FLAGS["index"]} must be from 0 to {count - 1}, got {index}; {_FLAGS_ADVICE}')
    host, _, port = str(address).rpartition(':')
    if not (host and ranges.parse_whole_number(port, 1, 65535)):
        raise UserError(
            f'{PROCESS_FLAGS["address"]} must be the host of process 0 and a free port on it, got {address!r}; '
            f'pass {PROCESS_FLAGS["address"]}=node1:8476'
        )
    return DistributedConfig(str(address), count, index, devices)


def _parse_integer(name: str, value: Any, minimum: int) -> int:
    number = ranges.parse_whole_number(value, minimum)
    if number is None:
        source = f'{PROCESS_FLAGS[name]} (or {PROCESS_VARIABLES[name]})' if name in PROCESS_FLAGS else f'--{name}'
        advice = _FLAGS_ADVICE if name in PROCESS_FLAGS else f'pass seconds, as in --{name}=300'
        raise UserError(f'{source} must be a whole number of at least {minimum}, got {value!r}; {advice}')
    return number


def _detect_cluster(environment: Mapping[str, str]) -> Any:
    """Returns JAX's class for the cluster that started this process, or None outside of clusters.

    JAX's automatic detection would raise an error for a single process, and would assign one GPU to each process.
    """
    is_numbered_pod = 'KUBERNETES_SERVICE_HOST' in environment and 'JOB_COMPLETION_INDEX' in environment
    for cluster in jax_workarounds.list_cluster_types():
        with _wrap_cluster_errors(cluster):
            # A pod outside of an indexed Job, such as a notebook, is a single process.
            if (is_numbered_pod or cluster.__name__ != 'K8sCluster') and cluster.is_env_present():
                return cluster
    if is_numbered_pod:
        raise UserError(
            'the package kubernetes, which detects the processes of an indexed Job, must be installed; run pip '
            f'install kubernetes, or {_FLAGS_ADVICE} (--process_count=1 for a single pod)'
        )
    return None


@contextlib.contextmanager
def _wrap_cluster_errors(cluster: Any) -> Iterator[None]:
    """Raises UserError if the cluster cannot be queried."""
    try:
        yield
    except Exception as error:
        raise UserError(
            f"JAX's {cluster.__name__} cannot find the processes of this run ({root_cause_message(error)}); "
            f'{_FLAGS_ADVICE}, or '
            '--process_count=1 for a single process'
        ) from error


def _select_local_devices(cluster: Any, environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """Returns the GPU of the local rank if the machine runs several processes, or None to use all devices.

    JAX always assigns one GPU, so a single process on a machine with eight GPUs would use only one GPU.
    """
    local = cluster.get_local_process_id()
    # Slurm formats the number of processes per machine as '4', '4(x2)' or '4,3'.
    names = ('OMPI_COMM_WORLD_LOCAL_SIZE', 'SLURM_STEP_TASKS_PER_NODE', 'SLURM_TASKS_PER_NODE')
    text = next((environment[name] for name in names if environment.get(name)), '0')
    per_machine = max(int(count.partition('(')[0]) for count in text.split(','))
    visible = environment.get('CUDA_VISIBLE_DEVICES', ',' * per_machine)
    # If a process sees fewer GPUs than the machine has processes, the scheduler has assigned a GPU to each process.
    is_assigned = 'JAX_LOCAL_DEVICE_IDS' in environment or len(visible.split(',')) < per_machine
    return None if local is None or per_machine == 1 or is_assigned else (int(local),)


@contextlib.contextmanager
def connect_processes(
    settings: ProcessFlags, print_error: Callable[[BaseException, str], int], saves: bool = False
) -> Iterator[None]:
    """Connects the processes of a run for the duration of the block. Does nothing for a single process.

    If the block raises an exception, the exception is printed and reported to the other processes, and this process
    exits, so that all processes end.

    `print_error` prints an error with the name of the process, and returns the exit code. If `saves` is true, the run
    saves a checkpoint and stops on SIGTERM (see `preemption`); otherwise SIGTERM ends the process.
    """
    config = resolve_distributed_config(settings)
    if config is None:
        yield
        return
    name = f'process {config.index}'
    heartbeat = _parse_integer('heartbeat_timeout', settings.heartbeat_timeout, 1)
    try:
        _connect_process(config, int(settings.initialization_timeout), heartbeat, saves)
    except BaseException as error:
        collectives.exit_process(print_error(error, name))
    watcher = collectives.FailureWatcher(name, heartbeat)
    try:
        yield
        # The shutdown waits at a barrier, so that process 0, the coordinator, exits last. Another process may still
        # fail before it reaches the barrier, for example when it writes the summary of the run.
        jax.distributed.shutdown()
        watcher.close()
    except BaseException as error:
        watcher.wait_for_failure_report(error)
        code = print_error(error, name)
        watcher.report_failure(code, str(error) or type(error).__name__)
        collectives.exit_process(code)


def _connect_process(config: DistributedConfig, timeout: int, heartbeat: int, saves: bool) -> None:
    bind_address = None
    if config.index == 0:
        # Bind to the given address, because JAX does not authenticate connections and by default listens on all
        # interfaces.
        host, _, port = config.address.rpartition(':')
        if host in ('localhost', '127.0.0.1') and 'JAX_COORDINATOR_BIND_ADDRESS' not in os.environ:
            bind_address = f'127.0.0.1:{port}'
        # Print the address first, because JAX aborts without printing it if a process does not connect.
        line = f'process 0 waits up to {timeout} s for {config.count} processes at {config.address}'
        print(f'{line} (--initialization_timeout)', file=sys.stderr, flush=True)
    jax.config.update('jax_enable_preemption_service', saves)
    jax.distributed.initialize(
        config.address,
        config.count,
        config.index,
        config.devices,
        coordinator_bind_address=bind_address,
        cluster_detection_method='deactivate',
        initialization_timeout=timeout,
        heartbeat_timeout_seconds=heartbeat,
    )
