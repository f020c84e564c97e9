"""One line about a run: it redraws on a terminal, and is printed plainly, every log period, in a log."""

import dataclasses
import time
from collections.abc import Callable, Mapping

import jax
import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

# Dense matmul peak of one device in bfloat16, FLOP/s, from the makers' data sheets; keys start `device_kind`.
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
    """bfloat16 peak of one JAX device, FLOP/s; None if unknown (then utilisation is not shown)."""
    found = [kind for kind in PEAK_FLOPS if device_kind.lower().startswith(kind.lower())]
    return PEAK_FLOPS[max(found, key=len)] if found else None


@dataclasses.dataclass(frozen=True)
class Work:
    """What one step costs: `flops` of model arithmetic (None: unknown), `tokens` processed, `peak` FLOP/s of
    all `devices`.
    """

    tokens: float
    flops: float | None = None
    peak: float | None = None
    devices: int = 1

    @classmethod
    def of_step(cls, tokens: float, devices: int, flops: Callable[[], float] | None) -> 'Work':
        """The work of a step. `flops` counts the arithmetic over the whole batch; it is called if the devices' peak is
        known, and None does not show utilisation.
        """
        peak = peak_flops(jax.devices()[0].device_kind)
        return cls(tokens, flops() if flops and peak else None, peak and peak * devices, devices)


class Clock:
    """Speed between logs; `pause` excludes time that is not training (evaluation, the wait for a checkpoint)."""

    def __init__(self, work: Work, step: int):
        self._work, self._step = work, step
        self._start = time.perf_counter()
        self._paused = self._waited = 0.0

    def pause(self, seconds: float) -> None:
        self._paused += seconds

    def wait(self, seconds: float) -> None:
        """Adds seconds for which the host had no batch; the device may still have computed the previous step."""
        self._waited += seconds

    def lap(self, step: int) -> dict[str, float]:
        """Seconds per step, tokens/s (also for each device), utilisation (`mfu`, 0 to 1, where known) and seconds of
        waiting for data since the last lap, and `memory`; empty without steps.
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
        return {**timing, **memory()}


def memory() -> dict[str, float]:
    """The memory of this process, in MiB: `host_mib`, and the first device's `device_mib` and `device_peak_mib` if its
    backend counts them.
    """
    found = {'host_mib': psutil.Process().memory_info().rss / 2**20}
    stats = jax.local_devices()[0].memory_stats() or {}
    for name, key in (('device_mib', 'bytes_in_use'), ('device_peak_mib', 'peak_bytes_in_use')):
        if key in stats:
            found[name] = stats[key] / 2**20
    return found


def duration(seconds: float) -> str:
    """A readable duration: 45s, 3m20s, 2h05m, 3d04h."""
    whole = int(seconds)
    if whole < 60:
        return f'{whole}s'
    if whole < 3600:
        return f'{whole // 60}m{whole % 60:02d}s'
    if whole < 86400:
        return f'{whole // 3600}h{whole // 60 % 60:02d}m'
    return f'{whole // 86400}d{whole // 3600 % 24:02d}h'


def describe(step: int, total: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> str:
    """step 300/1000 · loss 4.812 · rate 0.01 · 12,345 tokens/s · MFU 41% · 3m20s left"""
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
        parts.append(f'{duration(timing["seconds_per_step"] * (total - step))} left')
    return ' · '.join(parts)


class ProgressLine:
    """The line of one run. `update` moves the bar each step, `log` changes the numbers, `say` prints a line
    above.
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
        text = describe(step, self._total, numbers, timing)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, description=text)
        else:
            self.say(text)

    def say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, markup=False)
            # Otherwise a log file on a pipe would show lines only after a full buffer.
            self._console.file.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
