"""The progress of a run: its speed, what its time is spent on, and the line that shows it."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import psutil
from etils import epath
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from remixer_t5x import untrusted_files
from remixer_t5x.run_folder import object_store

STEPS, DATA, COMPILE, STATE = 'steps', 'waiting for data', 'compiling', 'making or restoring the state'
EVALUATION, CHECKPOINT, OTHER = 'evaluation', 'checkpoints', 'imports and opening files'
# In MODEL_DIR: a line for each process of the run that ended.
TIMES = 'goodput.jsonl'
# Dense matmul peak of one device in bfloat16, FLOP/s, from the manufacturers' data sheets; keys start `device_kind`.
PEAK_FLOPS = {
    'TPU v2': 45e12 / 2,
    'TPU v3': 123e12 / 2,
    'TPU v4': 275e12,
    'TPU v5 lite': 197e12,
    'TPU v5e': 197e12,
    'TPU v5p': 459e12,
    'TPU v5': 459e12,
    'TPU v6 lite': 918e12,
    'TPU v6e': 918e12,
    'NVIDIA A100': 312e12,
    'NVIDIA H100 PCIe': 756e12,
    'NVIDIA H100 NVL': 835e12,
    'NVIDIA H100': 989e12,
    'NVIDIA H200': 989e12,
    'NVIDIA GH200': 989e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Returns the bfloat16 peak of one JAX device, FLOP/s; None if unknown, and then utilization is not shown."""
    kinds = [kind for kind in PEAK_FLOPS if device_kind.lower().startswith(kind.lower())]
    return PEAK_FLOPS[max(kinds, key=len)] if kinds else None


@dataclasses.dataclass(frozen=True)
class Work:
    """The cost of one step: `tokens`, `flops` of model arithmetic if known, and `peak` FLOP/s of all `devices`."""

    tokens: float
    flops: float | None = None
    peak: float | None = None
    devices: int = 1

    @classmethod
    def of_step(cls, tokens: float, devices: int, flops: Callable[[], float] | None) -> 'Work':
        """Returns the work of a step; calls `flops` for the whole batch's arithmetic if the devices' peak is known."""
        peak = peak_flops(jax.devices()[0].device_kind)
        return cls(tokens, flops() if flops and peak else None, peak and peak * devices, devices)


class Clock:
    """Measures the speed between logs; `pause` excludes time that is not training (evaluation, checkpoints)."""

    def __init__(self, work: Work, step: int):
        self._work, self._step = work, step
        self._start = time.perf_counter()
        self._paused = self._waited = 0.0

    def pause(self, seconds: float) -> None:
        self._paused += seconds

    def wait(self, seconds: float) -> None:
        """Adds seconds without a batch on the host; the device may still have computed the previous step."""
        self._waited += seconds

    def lap(self, step: int) -> dict[str, float]:
        """Returns the speed since the last lap, and `memory_usage`; empty without steps.

        Seconds per step, tokens/s (also per device), utilization (`mfu`, 0 to 1, if known) and seconds of waiting for
        data.
        """
        now, steps = time.perf_counter(), step - self._step
        if not steps:
            return {}
        per_step = max(now - self._start - self._paused, 1e-9) / steps
        speed = self._work.tokens / per_step
        timing = {'seconds_per_step': per_step, 'tokens_per_second': speed, 'data_wait_seconds': self._waited}
        timing['tokens_per_second_per_device'] = speed / self._work.devices
        self._start, self._step, self._paused, self._waited = now, step, 0.0, 0.0
        if self._work.flops and self._work.peak:
            timing['mfu'] = self._work.flops / per_step / self._work.peak
        return {**timing, **memory_usage()}


class Timeline:
    """Measures what a process spends its time on: steps, waiting for data, compilation, evaluation, and so on.

    Each moment belongs to one name, so they add up to the time since the constructor. OTHER is the rest, as imports,
    opening and closing files.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._name, self._since = clock, OTHER, clock()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Counts the time of the block as `name`, except for blocks within it."""
        outer = self._name
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def seconds(self) -> dict[str, float]:
        """Returns seconds by name until now, the most first."""
        self._switch(self._name)
        return dict(sorted(self._seconds.items(), key=lambda pair: -pair[1]))

    def _switch(self, name: str) -> None:
        now = self._clock()
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + now - self._since
        self._name, self._since = name, now


def describe_times(seconds: Mapping[str, float]) -> str:
    """Formats shares of at least a thousandth, as in `steps 93.1% · compiling 4.0% · checkpoints 2.9%`."""
    total = sum(seconds.values()) or 1.0
    return ' · '.join(f'{name} {100 * part / total:.1f}%' for name, part in seconds.items() if part >= total / 1000)


def add_times(folder: epath.Path, first: int, last: int, seconds: Mapping[str, float]) -> None:
    """Appends the line of a process from step `first` to step `last`. Raises object_store.CannotWrite."""
    path = folder / TIMES
    line = json.dumps({'first': first, 'last': last, 'seconds': {name: round(s, 3) for name, s in seconds.items()}})
    with object_store.wrap_write_errors(path):
        known = untrusted_files.read_text(path, 'move it away') if path.exists() else ''
        object_store.write_atomically(path, f'{known}{line}\n')


def read_times(folder: epath.Path) -> dict[str, float]:
    """Returns seconds by name, summed over the processes of a run; {} if no process has ended."""
    path, total = folder / TIMES, dict[str, float]()
    if not path.exists():
        return {}
    with object_store.wrap_read_errors(path):
        for line in untrusted_files.read_json_lines(path):
            seconds = line.value.get('seconds') if isinstance(line.value, dict) else None
            for name, value in seconds.items() if isinstance(seconds, dict) else ():
                if isinstance(value, int | float) and 0 <= value < 1e12:
                    total[str(name)] = total.get(str(name), 0.0) + value
    return dict(sorted(total.items(), key=lambda pair: -pair[1]))


def memory_usage() -> dict[str, float]:
    """Returns `host_mib`, and the first device's `device_mib` and `device_peak_mib` if its backend counts them."""
    mebibytes = {'host_mib': psutil.Process().memory_info().rss / 2**20}
    stats = jax.local_devices()[0].memory_stats() or {}
    for name, key in (('device_mib', 'bytes_in_use'), ('device_peak_mib', 'peak_bytes_in_use')):
        if key in stats:
            mebibytes[name] = stats[key] / 2**20
    return mebibytes


def format_duration(seconds: float) -> str:
    """Formats a duration: 45s, 3m20s, 2h05m, 3d04h."""
    whole = int(seconds)
    if whole < 60:
        return f'{whole}s'
    if whole < 3600:
        return f'{whole // 60}m{whole % 60:02d}s'
    if whole < 86400:
        return f'{whole // 3600}h{whole // 60 % 60:02d}m'
    return f'{whole // 86400}d{whole // 3600 % 24:02d}h'


def describe_step(step: int, total: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> str:
    """Formats `step 300/1000 · loss 4.812 · rate 0.01 · 12,345 tokens/s · MFU 41% · 3m20s left`."""
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


class ProgressLine:
    """The line of one run, redrawn on a terminal and printed at every log in a file.

    `update` moves the bar at each step, `log` changes the numbers, and `say` prints a line above.
    """

    def __init__(self, total: int, step: int = 0, console: Console | None = None, quiet: bool = False):
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._total, self._quiet = total, quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if self._console.is_terminal and not quiet:
            self._bar = Progress(BarColumn(bar_width=20), TextColumn('{task.description}'), console=self._console)
            self._task = self._bar.add_task(f'step {step}/{total} · compiling', total=total, completed=step)
            self._bar.start()

    def update(self, step: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step)

    def log(self, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """`numbers` has `loss`; `timing` is `Clock.lap`'s."""
        text = describe_step(step, self._total, numbers, timing)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, description=text)
        else:
            self.say(text)

    def say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, markup=False)
            # Without this, a pipe would show lines only when the buffer is full.
            self._console.file.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
