"""Training and evaluation numbers: adds up sums and weights, divides once, and writes to TensorBoard and JSONL.

`metrics.jsonl` has one object per log or evaluation: `kind` ('train' or an evaluation's name), `step`, the
numbers, and the numbers that depend on the machine (`clock`, `seconds`, `tokens_per_second`, `host_mib`) under
`timing`. Without `timing` the file of a run that was killed and resumed equals an unbroken run's.
"""

import contextlib
import io
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
from etils import epath

from remixer_t5x.errors import UserError

# Sums over tokens, as the model's `loss` gives them; `weights` counts the target tokens.
PER_TOKEN = {'loss': 'loss', 'z_loss': 'z_loss', 'correct': 'accuracy'}
COUNTS = ('weights', 'sequences', 'nonfinite', 'spike')
LAST = ('learning_rate',)
STEPS = 'steps'
# Steps whose update was skipped (`bad_steps`); means leave their numbers out.
SKIPPED = 'skipped'


class Window:
    """Metrics since the last log. `add` keeps device arrays and never waits; `totals` fetches them.

    Sums are Python floats added in step order, so saving, restoring and continuing a window gives the same bits.
    """

    def __init__(self, totals: Mapping[str, float] | None = None):
        self._totals = dict(totals or {})
        self._pending: list[Mapping[str, jax.Array]] = []

    def add(self, metrics: Mapping[str, jax.Array]) -> None:
        self._pending.append(metrics)

    def totals(self) -> dict[str, float]:
        """The sums of all numbers, the number of `steps`, and the last `learning_rate`. Waits for the device."""
        for metrics in jax.device_get(self._pending):
            if metrics.get('nonfinite', 0.0) > 0 or metrics.get('spike', 0.0) > 0:
                self._totals[SKIPPED] = self._totals.get(SKIPPED, 0.0) + 1.0
                continue
            for name, value in metrics.items():
                kept = 0.0 if name in LAST else self._totals.get(name, 0.0)
                self._totals[name] = kept + float(value)
            self._totals[STEPS] = self._totals.get(STEPS, 0.0) + 1.0
        self._pending = []
        return dict(self._totals)


def means(totals: Mapping[str, float]) -> dict[str, float]:
    """Means for a reader: sums over tokens divided by `weights`, once; other numbers averaged over steps."""
    weights = totals.get('weights', 0.0)
    found = {}
    for name, value in totals.items():
        if name in PER_TOKEN:
            found[PER_TOKEN[name]] = value / weights if weights else math.nan
        elif name not in (*COUNTS, *LAST, STEPS, SKIPPED):
            found[name] = value / totals[STEPS]
    found.setdefault(PER_TOKEN['loss'], math.nan)
    found.update({name: totals[name] for name in (*LAST, SKIPPED) if name in totals})
    return {**found, 'tokens': weights}


def perplexity(loss: float) -> float:
    """exp(loss), infinite if that exceeds float64."""
    return math.exp(loss) if loss < 700 else math.inf


class Writer(Protocol):
    """Where numbers go."""

    def write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class JsonlWriter:
    """One JSON object per line. Drops lines after `restored_step`, which the resumed run writes again."""

    def __init__(self, path: epath.Path, restored_step: int):
        self._path = path
        try:
            kept = _lines_until(path, restored_step)
            # A rename does not leave half a file if this process is killed here.
            fresh = path.parent / (path.name + '.new')
            fresh.write_text(''.join(kept))
            fresh.replace(path)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        record = {
            'kind': kind,
            'step': step,
            **{name: _finite(value) for name, value in numbers.items()},
            'timing': {'clock': time.time(), **{name: _finite(value) for name, value in timing.items()}},
        }
        try:
            # Opened each time, so that each line is on disk before a checkpoint that follows it.
            with self._path.open('a') as file:
                file.write(json.dumps(record) + '\n')
                file.flush()
                # Object stores have no descriptor, and keep files that were closed.
                with contextlib.suppress(AttributeError, io.UnsupportedOperation):
                    os.fsync(file.fileno())
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def close(self) -> None:
        pass


class TensorBoardWriter:
    """TensorBoard event files in `folder`; tags are `kind/name`."""

    def __init__(self, folder: epath.Path, restored_step: int):
        # Imported here, because models and most tests do not need it.
        from tensorboardX import SummaryWriter

        # The purge hides what was logged after the checkpoint that this run resumes from.
        purge = restored_step + 1 if restored_step else None
        self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=30)

    def write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        for name, value in {**numbers, **timing}.items():
            if not math.isfinite(value):
                # It could not be drawn.
                continue
            self._writer.add_scalar(f'{kind}/{name}', value, step)

    def close(self) -> None:
        self._writer.close()


class Writers:
    """Several writers as one; closed together."""

    def __init__(self, *writers: Writer):
        self._writers = writers

    def write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write(kind, step, numbers, timing)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def read(path: epath.Path) -> list[dict[str, Any]]:
    """The complete records of a metrics.jsonl, in order, without an unfinished last line."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def _lines_until(path: epath.Path, step: int) -> list[str]:
    return [json.dumps(record) + '\n' for record in read(path) if record['step'] <= step]


def _finite(value: float) -> float | None:
    # JSON has no NaN, and readers other than Python's refuse it.
    return float(value) if math.isfinite(value) else None


@contextlib.contextmanager
def writing(path: epath.Path) -> Iterator[None]:
    """Turns an OSError into a UserError that says why `path` cannot be written."""
    try:
        yield
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: epath.Path, error: OSError) -> UserError:
    return UserError(
        f'{path} cannot be written ({error.strerror or error}); free some space or check the rights of '
        'its folder, and run the same command again'
    )
