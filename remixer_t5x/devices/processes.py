"""One run over several processes: how they find each other, connect, and exit together.

It uses `jax.distributed`: every process connects to the coordinator, which is process 0, and JAX then sees the devices
of all processes. Addresses come from flags, from the environment, and from what JAX knows about TPU, Slurm, Open MPI
and Kubernetes. A single process does not connect.
"""

import contextlib
import dataclasses
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from remixer_t5x import ranges
from remixer_t5x.devices import collectives, jax_workarounds
from remixer_t5x.errors import UserError

FLAGS = {'address': '--coordinator_address', 'count': '--process_count', 'index': '--process_index'}
VARIABLES = {'address': 'JAX_COORDINATOR_ADDRESS', 'count': 'JAX_NUM_PROCESSES', 'index': 'JAX_PROCESS_ID'}
_BIND = 'JAX_COORDINATOR_BIND_ADDRESS'
_BY_HAND = 'type --coordinator_address=HOST:PORT --process_count=N --process_index=I'


@dataclasses.dataclass(frozen=True)
class Processes:
    """The flags about the processes of a run; None if not set.

    Attributes:
        address: HOST:PORT of process 0, which listens there.
        count: number of processes.
        index: index of this process, from 0.
        initialization_timeout: seconds to wait for the other processes at the start.
        heartbeat_timeout: seconds without a sign of life after which a process counts as lost.
    """

    address: str | None = None
    count: int | str | None = None
    index: int | str | None = None
    initialization_timeout: int | str = 300
    heartbeat_timeout: int | str = 100


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of this process in a run. `devices` are the numbers of its local devices, None for all that it sees."""

    address: str
    count: int
    index: int
    devices: tuple[int, ...] | None = None


def find(settings: Processes, environment: Any = os.environ) -> Place | None:
    """The place of this process, None for a single process. Does not touch devices.

    Raises UserError if flags are wrong or incomplete, or if the cluster does not answer.
    """
    flags = {name: getattr(settings, name) for name in FLAGS}
    values = {name: environment.get(VARIABLES[name]) if flag is None else flag for name, flag in flags.items()}
    count, index = (
        None
        if values[name] is None
        else _integer(f'{FLAGS[name]} (or {VARIABLES[name]})', values[name], minimum, _BY_HAND)
        for name, minimum in (('count', 1), ('index', 0))
    )
    if count == 1 and not index:
        return None
    timeout = _integer('--initialization_timeout', settings.initialization_timeout, 1, 'type seconds, such as 300')
    address, devices = values['address'], None
    if None in values.values():
        cluster = _find_cluster(environment)
        if cluster is None:
            if any(value is not None for value in values.values()):
                present = ' and '.join(f'{FLAGS[name]}={value}' for name, value in values.items() if value is not None)
                missing = ' and '.join(FLAGS[name] for name, value in values.items() if value is None)
                raise UserError(f'{present} is set without {missing}; {_BY_HAND}')
            return None
        with _cluster_errors(cluster):
            count = int(cluster.get_process_count()) if count is None else count
            if count == 1:
                return None
            index = int(cluster.get_process_id()) if index is None else index
            port = environment.get('JAX_COORDINATOR_PORT')
            address = address or cluster.get_coordinator_address(timeout_secs=timeout, override_coordinator_port=port)
        devices = _local_devices(cluster, environment)
    assert count is not None and index is not None
    if index >= count:
        raise UserError(
            f'{FLAGS["index"]} is {index} of {FLAGS["count"]} {count}; processes are numbered 0 to {count - 1}'
        )
    host, _, port = str(address).rpartition(':')
    if not (host and ranges.whole_number(port, 1, 65535)):
        raise UserError(
            f'{FLAGS["address"]} must be the host of process 0 and a free port there, got {address!r}; '
            f'type {FLAGS["address"]}=node1:8476'
        )
    return Place(str(address), count, index, devices)


def _integer(name: str, value: int | str, minimum: int, advice: str) -> int:
    number = ranges.whole_number(value, minimum)
    if number is None:
        raise UserError(f'{name} must be a whole number from {minimum} to {2**31 - 1}, got {value!r}; {advice}')
    return number


def _find_cluster(environment: Any) -> Any:
    """JAX's class for the cluster that started this process; None without a cluster.

    `jax.distributed.initialize` would search by itself, but it cannot handle a single process.
    """
    for cluster in jax_workarounds.cluster_types():
        if 'Tpu' in cluster.__name__ and environment.get('JAX_PLATFORMS') == 'cpu':
            continue
        # Pods of another kind (a notebook, a job of one pod) have no number, and run alone.
        if cluster.__name__ == 'K8sCluster' and 'JOB_COMPLETION_INDEX' not in environment:
            continue
        with _cluster_errors(cluster):
            if cluster.is_env_present():
                return cluster
    if 'KUBERNETES_SERVICE_HOST' in environment and 'JOB_COMPLETION_INDEX' in environment:
        raise UserError(
            'this is a pod of an indexed Kubernetes job, and the package kubernetes that finds the others is not '
            f'installed; pip install kubernetes, or {_BY_HAND} (--process_count=1 for a single pod)'
        )
    return None


@contextlib.contextmanager
def _cluster_errors(cluster: Any) -> Iterator[None]:
    """Raises UserError if the cluster does not answer."""
    try:
        yield
    except Exception as error:
        text = ' '.join(str(error).split())
        raise UserError(
            f'{cluster.__name__} does not tell which processes belong together ({text[:200]}); {_BY_HAND}, or '
            '--process_count=1 for a single process'
        ) from error


def _local_devices(cluster: Any, environment: Any) -> tuple[int, ...] | None:
    """One device for each of several processes of a machine; all devices for the only process there.

    JAX itself takes a single device in both cases, which would leave seven of eight GPUs idle.
    """
    local = cluster.get_local_process_id()
    # '4', '4(x2)' or '4,3': the number on each machine. If numbers differ, some machine has several.
    variables = ('OMPI_COMM_WORLD_LOCAL_SIZE', 'SLURM_STEP_TASKS_PER_NODE', 'SLURM_TASKS_PER_NODE')
    name = next((name for name in variables if environment.get(name)), None)
    on_machine = 0
    if name is not None:
        counts = [text.partition('(')[0] for text in environment[name].split(',')]
        on_machine = max(_integer(name, count, 1, f'unset it, or {_BY_HAND}') for count in counts)
    if local is None or 'JAX_LOCAL_DEVICE_IDS' in environment or on_machine == 1:
        return None
    visible = environment.get('CUDA_VISIBLE_DEVICES')
    # The scheduler may have bound this process to its own device.
    is_bound = visible is not None and len(visible.split(',')) < on_machine
    return None if is_bound else (int(local),)


@contextlib.contextmanager
def together(settings: Processes, tell: Callable[[BaseException, str], int], saves: bool = False) -> Iterator[None]:
    """The context of a run over all processes; does nothing for a single process.

    Reports an exception raised within, tells the other processes, and ends this process, so that no process waits for
    the rest.

    Args:
        settings: from flags.
        tell: prints an error with the name of its process, and returns the exit code.
        saves: whether the run handles SIGTERM by saving and stopping (see `preemption`); otherwise SIGTERM ends the
            process.
    """
    place = find(settings)
    if place is None:
        yield
        return
    name = f'process {place.index}'
    timeout = _integer('--heartbeat_timeout', settings.heartbeat_timeout, 1, 'type seconds, such as 100')
    watch = collectives.Watch(name, timeout)
    try:
        _connect(place, int(settings.initialization_timeout), timeout, saves)
    except BaseException as error:
        collectives.leave(tell(error, name))
    watch.start()
    try:
        yield
        watch.close()
        # A barrier, so that the first process, which is the coordinator, exits last.
        jax.distributed.shutdown()
    except BaseException as error:
        watch.wait_for_reason(error)
        code = tell(error, name)
        watch.failed(code, str(error) or type(error).__name__)
        collectives.leave(code)


def _connect(place: Place, timeout: int, heartbeat: int, saves: bool) -> None:
    bind_address = None
    if place.index == 0:
        bind_address = _bind_address(place.address)
        _check_port(place.address, bind_address)
        # If a process does not connect, JAX aborts with a log that does not name these.
        line = f'process 0 waits up to {timeout} s for {place.count} processes at {place.address}'
        print(f'{line} (--initialization_timeout)', file=sys.stderr, flush=True)
    jax.config.update('jax_enable_preemption_service', saves)
    jax.distributed.initialize(
        place.address,
        place.count,
        place.index,
        place.devices,
        coordinator_bind_address=bind_address,
        cluster_detection_method='deactivate',
        initialization_timeout=timeout,
        heartbeat_timeout_seconds=heartbeat,
    )
    collectives.connected(place.index, place.count)


def _bind_address(address: str) -> str | None:
    """The address at which the coordinator listens: only `address`, if it belongs to this machine, because JAX asks
    nobody who connects for a password. None is JAX's default: all addresses, or JAX_COORDINATOR_BIND_ADDRESS.
    """
    host, _, port = address.rpartition(':')
    host = '127.0.0.1' if host == 'localhost' else host.strip('[]')
    if _BIND in os.environ:
        return None
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)}
        if len(addresses) != 1:
            return None
        [ip] = addresses
        if ipaddress.ip_address(ip).is_loopback and ip != host:
            # The name of a machine often means a loopback address on that machine, and another on the others.
            return None
        # Any free port: this asks whether the address belongs to this machine.
        socket.create_server((ip, 0), family=_family(ip)).close()
    except (OSError, ValueError):
        return None
    return f'[{ip}]:{port}' if ':' in ip else f'{ip}:{port}'


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ':' in host else socket.AF_INET


def _check_port(address: str, bind_address: str | None) -> None:
    """Raises UserError if the coordinator cannot listen there, because JAX 0.10 crashes if the port is taken."""
    port, host = int(address.rpartition(':')[2]), (bind_address or '').rpartition(':')[0].strip('[]')
    if _BIND in os.environ:
        return
    try:
        socket.create_server((host, port), family=_family(host)).close()
    except OSError as error:
        raise UserError(
            f'port {port} of {address} cannot be opened ({error.strerror or error}); type another port in '
            f'{FLAGS["address"]}, for all processes'
        ) from error
