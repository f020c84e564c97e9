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

_FLAGS_ADVICE = 'pass --coordinator_address=HOST:PORT --process_count=N --process_index=I'


@dataclasses.dataclass(frozen=True)
class ProcessFlags:
    """The command-line flags that describe the processes of a run; unset flags are None.

    Process 0 listens on `address` (HOST:PORT). `initialization_timeout` is the maximum number of seconds to wait for
    the other processes. A process is considered lost if it sends no heartbeat for `heartbeat_timeout` seconds.
    """

    address: str | None = None
    count: int | None = None
    index: int | None = None
    initialization_timeout: int = 300
    heartbeat_timeout: int = 100


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

    Flags take precedence over JAX's environment variables, and these over the cluster. Raises UserError if flags are
    incomplete or contradictory.
    """
    address, devices = settings.address or environment.get('JAX_COORDINATOR_ADDRESS'), None
    count, index = (
        _read_whole_number(environment, variable) if flag is None else flag
        for flag, variable in ((settings.count, 'JAX_NUM_PROCESSES'), (settings.index, 'JAX_PROCESS_ID'))
    )
    if count == 1 and not index:
        return None
    if address is None or count is None or index is None:
        cluster = _detect_cluster(environment)
        if cluster is None and (address, count, index) == (None, None, None):
            return None
        if cluster is None:
            raise UserError(f'the address, number and index of the processes must be set together; {_FLAGS_ADVICE}')
        count = int(cluster.get_process_count()) if count is None else count
        if count == 1:
            return None
        index = int(cluster.get_process_id()) if index is None else index
        port, timeout = environment.get('JAX_COORDINATOR_PORT'), settings.initialization_timeout
        address = address or cluster.get_coordinator_address(timeout_secs=timeout, override_coordinator_port=port)
        devices = _select_local_devices(cluster, environment)
    if not 0 <= index < count:
        raise UserError(f'--process_index must be from 0 to {count - 1}, got {index}; {_FLAGS_ADVICE}')
    host, _, port = address.rpartition(':')
    if not (host and ranges.parse_whole_number(port, 1, 65535)):
        raise UserError(
            f'--coordinator_address must be the host of process 0 and a free port on it, got {address!r}; '
            'pass --coordinator_address=node1:8476'
        )
    return DistributedConfig(address, count, index, devices)


def _read_whole_number(environment: Mapping[str, str], variable: str) -> int | None:
    if variable not in environment:
        return None
    number = ranges.parse_whole_number(environment[variable])
    if number is None:
        raise UserError(f'{variable} must be a whole number, got {environment[variable]!r}; {_FLAGS_ADVICE}')
    return number


def _detect_cluster(environment: Mapping[str, str]) -> Any:
    """Returns JAX's class for the cluster that started this process, or None outside of clusters.

    JAX's automatic detection would raise an error for a single process, and would assign one GPU to each process.
    """
    # A pod outside of an indexed Job, such as a notebook, is a single process.
    is_numbered_pod = 'JOB_COMPLETION_INDEX' in environment
    for cluster in jax_workarounds.list_cluster_types():
        if (is_numbered_pod or cluster.__name__ != 'K8sCluster') and cluster.is_env_present():
            return cluster
    return None


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
    try:
        _connect_process(config, settings.initialization_timeout, settings.heartbeat_timeout, saves)
    except BaseException as error:
        collectives.exit_process(print_error(error, name))
    watcher = collectives.FailureWatcher(name, settings.heartbeat_timeout)
    try:
        yield
        # The shutdown waits at a barrier, so that process 0, the coordinator, exits last. Another process may still
        # fail before it reaches the barrier, for example when it writes the summary of the run.
        jax.distributed.shutdown()
        watcher.close()
    except BaseException as error:
        is_lost = collectives.is_connection_error(error)
        if is_lost:
            watcher.wait_for_failure_report()
            reason = root_cause_message(error)
            error = UserError(f'the connection to another process failed: {reason}; run the same command again')
        code = print_error(error, name)
        if is_lost:
            code = collectives.LOST_CODE
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
