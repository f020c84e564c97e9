"""Measures a run's speed and the time spent on each activity, and prints the run's progress."""

import contextlib
import dataclasses
import datetime
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import psutil

from remixer_t5x.devices import chips

STEPS, WAITING_FOR_DATA, COMPILE, RESTORING_STATE = (
    'steps',
    'waiting for data',
    'compiling',
    'creating or restoring the state',
)
EVALUATION, CHECKPOINT, OTHER_ACTIVITIES = 'evaluation', 'checkpoints', 'imports and opening files'


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The cost of a train step on a batch of full length, in model FLOPs, and the devices that run it.

    `peak` is the peak throughput of all devices in FLOP/s. `flops` and `peak` are None if they are unknown.
    """

    flops: float | None = None
    peak: float | None = None
    devices: int = 1

    @classmethod
    def create_for_current_devices(cls, devices: int, flops: Callable[[], float] | None) -> 'StepCost':
        """Returns a step's cost on the current devices. Calls `flops` only if the devices' peak throughput is known."""
        peak = chips.get_peak_flops(jax.devices()[0].device_kind)
        return cls(flops() if flops and peak else None, peak and peak * devices, devices)


class ActivityTimer:
    """Measures the time that a process spends on each activity, such as training steps, data loading or compilation.

    Activities do not overlap, so their seconds add up to the time since construction. Time outside of
    `measure_activity` blocks, such as the time for imports, is attributed to the activity OTHER_ACTIVITIES.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._name, self._since = clock, OTHER_ACTIVITIES, clock()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measure_activity(self, name: str) -> Iterator[None]:
        """Attributes the time of the block to the activity `name`, except for nested `measure_activity` blocks."""
        outer = self._name
        self._switch_activity(name)
        try:
            yield
        finally:
            self._switch_activity(outer)

    def get_seconds_by_activity(self) -> dict[str, float]:
        """Returns the seconds spent on each activity so far, in descending order."""
        self._switch_activity(self._name)
        return dict(sorted(self._seconds.items(), key=lambda pair: -pair[1]))

    def _switch_activity(self, name: str) -> None:
        now = self._clock()
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + now - self._since
        self._name, self._since = name, now


class SpeedMeter:
    """Measures the training speed between two logs. Pauses for evaluations and checkpoints do not count."""

    def __init__(self, cost: StepCost, step: int, timeline: ActivityTimer):
        self._cost, self._step, self._timeline = cost, step, timeline
        self._before = timeline.get_seconds_by_activity()
        self._positions = 0

    def add_batch(self, positions: int) -> None:
        """Counts the encoder and decoder positions of a batch."""
        self._positions += positions

    def measure_speed(self, step: int) -> dict[str, float]:
        """Returns the memory usage, and the training speed since the last call; {} if no step has run since then.

        The speed consists of seconds per step, tokens per second (total and per device), seconds spent waiting for
        data, and the model FLOPs utilization (`mfu`, 0 to 1) if it is known. The device may be busy while the host
        waits for data.
        """
        steps = step - self._step
        if not steps:
            return {}
        seconds = self._timeline.get_seconds_by_activity()
        in_steps, waited = (seconds.get(name, 0.0) - self._before.get(name, 0.0) for name in (STEPS, WAITING_FOR_DATA))
        per_step = max(in_steps + waited, 1e-9) / steps
        speed = self._positions / steps / per_step
        timing = {'seconds_per_step': per_step, 'tokens_per_second': speed, 'data_wait_seconds': waited}
        timing['tokens_per_second_per_device'] = speed / self._cost.devices
        self._before, self._step, self._positions = seconds, step, 0
        if self._cost.flops and self._cost.peak:
            timing['mfu'] = self._cost.flops / per_step / self._cost.peak
        return {**timing, **measure_memory_usage()}


def format_activity_shares(seconds: Mapping[str, float]) -> str:
    """Formats each activity's share of the total time, as in `steps 93.1% · compiling 4.0% · checkpoints 2.9%`.

    Omits shares below 0.1%.
    """
    total = sum(seconds.values()) or 1.0
    return ' · '.join(f'{name} {100 * part / total:.1f}%' for name, part in seconds.items() if part >= total / 1000)


def measure_memory_usage() -> dict[str, float]:
    """Returns the memory usage in MiB: `host_mib` and, if JAX reports them, `device_mib` and `device_peak_mib`.

    The device memory is that of the first local device.
    """
    mebibytes = {'host_mib': psutil.Process().memory_info().rss / 2**20}
    stats = jax.local_devices()[0].memory_stats() or {}
    for name, key in (('device_mib', 'bytes_in_use'), ('device_peak_mib', 'peak_bytes_in_use')):
        if key in stats:
            mebibytes[name] = stats[key] / 2**20
    return mebibytes


def format_duration(seconds: float) -> str:
    """Formats a duration, as in 0:03:20 or 3 days, 4:00:00."""
    return str(datetime.timedelta(seconds=int(seconds)))


def format_progress(step: int, total: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> str:
    """Formats a progress line: `step 300/1000 · loss 4.8120 · rate 0.01 · 12,345 tokens/s · MFU 41% · 0:03:20 left`."""
    parts = [f'step {step}/{total}', f'loss {numbers["loss"]:.4f}']
    if 'learning_rate' in numbers:
        parts.append(f'rate {numbers["learning_rate"]:.2g}')
    if 'skipped' in numbers:
        parts.append(f'{numbers["skipped"]:.0f} skipped')
    if 'tokens_per_second' in timing:
        parts.append(f'{timing["tokens_per_second"]:,.0f} tokens/s')
    if 'mfu' in timing:
        parts.append(f'MFU {100 * timing["mfu"]:.0f}%')
    if step < total and 'seconds_per_step' in timing:
        parts.append(f'{format_duration(timing["seconds_per_step"] * (total - step))} left')
    return ' · '.join(parts)
