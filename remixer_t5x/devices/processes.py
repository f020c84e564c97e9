"""One run over several processes: how they find each other, connect, and exit together.

It uses `jax.distributed`: every process connects to the coordinator, which is process 0, and JAX then sees the devices
of all processes. Addresses come from flags, from the environment, and from what JAX knows about TPU, Slurm, Open MPI
and Kubernetes. A single process does not connect.
"""

import contextlib
import dataclasses
import functools
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
_BY_HAND = 'give --coordinator_address=HOST:PORT --process_count=N --process_index=I'


@dataclasses.dataclass(frozen=True)
class Processes:
    """The flags about the processes of a run; None if not given.

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
    given = {name: getattr(settings, name) for name in FLAGS}
    known = {name: value if value is not None else environment.get(VARIABLES[name]) for name, value in given.items()}
    count = _number('count', known['count'], 1)
    index = _number('index', known['index'], 0)
    if count == 1 and index in (None, 0):
        return None
    cluster = None
    if None in known.values():
        cluster = _Cluster.find(environment)
        if cluster is None and any(value is not None for value in known.values()):
            missing = ' and '.join(FLAGS[name] for name, value in known.items() if value is None)
            raise UserError(f'{_given(known)} is given without {missing}; {_BY_HAND}')
    if cluster is not None:
        count = cluster.count() if count is None else count
        if count == 1:
            return None
        index = cluster.index() if index is None else index
    if count is None or index is None:
        return None
    if index >= count:
        raise UserError(
            f'{FLAGS["index"]} is {index} of {FLAGS["count"]} {count}; processes are numbered 0 to {count - 1}'
        )
    timeout = _seconds('initialization_timeout', settings.initialization_timeout)
    address = cluster.address(timeout) if cluster is not None and known['address'] is None else known['address']
    return Place(_address(address), count, index, cluster.devices() if cluster is not None else None)


def _given(known: dict[str, Any]) -> str:
    return ' and '.join(f'{FLAGS[name]}={value}' for name, value in known.items() if value is not None)


def _number(name: str, value: int | str | None, least: int) -> int | None:
    if value is None:
        return None
    number = ranges.whole_number(value, least)
    if number is None:
        raise UserError(
            f'{FLAGS[name]} (or {VARIABLES[name]}) must be a whole number from {least} to {2**31 - 1}, got {value!r}; '
            f'{_BY_HAND}'
        )
    return number


def _seconds(name: str, value: int | str) -> int:
    number = ranges.whole_number(value, 1)
    if number is None:
        raise UserError(f'--{name} is {value!r}; it takes seconds, as in --{name}=60')
    return number


def _address(text: Any) -> str:
    host, colon, port = str(text).rpartition(':')
    if not (host and colon and ranges.whole_number(port, 1, 65535)):
        raise UserError(
            f'{FLAGS["address"]} is {text!r}; it takes the host of process 0 and a free port there, '
            f'as in {FLAGS["address"]}=node1:8476'
        )
    return text


class _Cluster:
    """What JAX knows about the cluster that started this process."""

    def __init__(self, kind: Any, environment: Any):
        self._kind, self._environment = kind, environment

    @classmethod
    def find(cls, environment: Any) -> '_Cluster | None':
        # JAX asks its own list in `initialize`, which cannot handle a single process.
        for kind in jax_workarounds.cluster_types():
            if _passes_over(kind.__name__, environment):
                continue
            if _asked(kind.is_env_present, kind.__name__):
                return cls(kind, environment)
        if 'KUBERNETES_SERVICE_HOST' in environment and 'JOB_COMPLETION_INDEX' in environment:
            raise UserError(
                'this is a pod of an indexed Kubernetes job, and the package kubernetes that finds the others is not '
                f'installed; pip install kubernetes, or {_BY_HAND} (--process_count=1 for a single pod)'
            )
        return None

    def count(self) -> int:
        return int(_asked(self._kind.get_process_count, self._kind.__name__))

    def index(self) -> int:
        return int(_asked(self._kind.get_process_id, self._kind.__name__))

    def address(self, timeout: int) -> str:
        port = self._environment.get('JAX_COORDINATOR_PORT')
        ask = functools.partial(
            self._kind.get_coordinator_address, timeout_secs=timeout, override_coordinator_port=port
        )
        return _asked(ask, self._kind.__name__)

    def devices(self) -> tuple[int, ...] | None:
        """One device for each of several processes of a machine; all devices for the only process there.

        JAX itself takes a single device in both cases, which would leave seven of eight GPUs idle.
        """
        local = self._kind.get_local_process_id()
        beside = _processes_here(self._environment)
        if local is None or 'JAX_LOCAL_DEVICE_IDS' in self._environment or beside == 1:
            return None
        visible = self._environment.get('CUDA_VISIBLE_DEVICES')
        if visible is not None and beside is not None and len(visible.split(',')) < beside:
            return None  # The scheduler has bound this process to its own device.
        return (int(local),)


def _passes_over(kind: str, environment: Any) -> bool:
    if 'Tpu' in kind:
        return environment.get('JAX_PLATFORMS') == 'cpu'
    # Pods of another kind (a notebook, a job of one pod) have no number, and run alone.
    return kind == 'K8sCluster' and 'JOB_COMPLETION_INDEX' not in environment


def _processes_here(environment: Any) -> int | None:
    """The number of processes of this run on this machine, according to Slurm and Open MPI."""
    if 'OMPI_COMM_WORLD_LOCAL_SIZE' in environment:
        return _of_cluster('OMPI_COMM_WORLD_LOCAL_SIZE', environment['OMPI_COMM_WORLD_LOCAL_SIZE'])
    # '4', '4(x2)' or '4,3': the number on each machine. If numbers differ, some machine has several.
    text = environment.get('SLURM_STEP_TASKS_PER_NODE') or environment.get('SLURM_TASKS_PER_NODE')
    if not text:
        return None
    return max(_of_cluster('SLURM_TASKS_PER_NODE', part.partition('(')[0]) for part in text.split(','))


def _of_cluster(name: str, text: str) -> int:
    number = ranges.whole_number(text, 1)
    if number is None:
        raise UserError(f'{name} must be a whole number of at least 1, got {text!r}; unset it, or {_BY_HAND}')
    return number


def _asked(question: Callable[[], Any], kind: str) -> Any:
    try:
        return question()
    except Exception as error:
        text = ' '.join(str(error).split())
        raise UserError(
            f'{kind} does not say which processes belong together ({text[:200]}); {_BY_HAND}, or --process_count=1 '
            'for a single process'
        ) from error


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
    timeout = _seconds('heartbeat_timeout', settings.heartbeat_timeout)
    watch = collectives.Watch(name, timeout)
    try:
        _join(place, _seconds('initialization_timeout', settings.initialization_timeout), timeout, saves)
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


def _join(place: Place, waiting: int, heartbeat: int, saves: bool) -> None:
    _check_port(place)
    jax.config.update('jax_enable_preemption_service', saves)
    if place.index == 0:
        # If a process does not connect, JAX aborts with a log that does not name these.
        line = f'process 0 waits up to {waiting} s for {place.count} processes at {place.address}'
        print(f'{line} (--initialization_timeout)', file=sys.stderr, flush=True)
    jax.distributed.initialize(
        place.address,
        place.count,
        place.index,
        place.devices,
        coordinator_bind_address=_bind_address(place.address) if place.index == 0 else None,
        cluster_detection_method='deactivate',
        initialization_timeout=waiting,
        heartbeat_timeout_seconds=heartbeat,
    )
    collectives.connected(place.index, place.count)


def _bind_address(address: str) -> str | None:
    """Where the coordinator listens: only at `address`, if that is one of this machine's, because JAX asks nobody who
    connects for a password. None is JAX's default: all addresses, or JAX_COORDINATOR_BIND_ADDRESS.
    """
    host, _, port = address.rpartition(':')
    host = '127.0.0.1' if host == 'localhost' else host.strip('[]')
    if _BIND in os.environ:
        return None
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)}
        if len(found) != 1:
            return None
        [one] = found
        if ipaddress.ip_address(one).is_loopback and one != host:
            # The name of a machine often means a loopback address on that machine, and another on the others.
            return None
        # Any free port will do: this asks whether the address is one of this machine's.
        socket.create_server((one, 0), family=_family(one)).close()
    except (OSError, ValueError):
        return None
    return f'[{one}]:{port}' if ':' in one else f'{one}:{port}'


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ':' in host else socket.AF_INET


def _check_port(place: Place) -> None:
    """Checks the port, because JAX 0.10 crashes if it is taken."""
    port = int(place.address.rpartition(':')[2])
    if place.index == 0 and _BIND not in os.environ:
        host = (_bind_address(place.address) or '').rpartition(':')[0].strip('[]')
        try:
            socket.create_server((host, port), family=_family(host)).close()
        except OSError as error:
            raise UserError(
                f'port {port} of {place.address} cannot be opened ({error.strerror or error}); give another port '
                f'in {FLAGS["address"]}, to all processes'
            ) from error
