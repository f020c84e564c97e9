"""Training and evaluation numbers: sums and weights add up, one division at the end; then to TensorBoard and
JSONL.

`metrics.jsonl` has one object per log or evaluation: `kind` ('train' or an evaluation's name), `step`, the
numbers, and what depends on the machine (`clock`, `seconds`, `tokens_per_second`, `host_mib`) under `timing`. Without
`timing` the file of a run that was killed and resumed equals an unbroken run's.
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
# Steps whose update was left out (`bad_steps`); their numbers are in no mean.
SKIPPED = 'skipped'


class Window:
    """Metrics since the last log. `add` keeps device arrays and never waits; `totals` fetches them.

    Sums are Python floats added in step order, so a window that was saved, restored and continued gives the
    same bits.
    """

    def __init__(self, totals: Mapping[str, float] | None = None):
        self._totals = dict(totals or {})
        self._pending: list[Mapping[str, jax.Array]] = []

    def add(self, metrics: Mapping[str, jax.Array]) -> None:
        self._pending.append(metrics)

    def totals(self) -> dict[str, float]:
        """All numbers added up, and how many `steps` they are; `learning_rate` is the last one. Waits for the
        device.
        """
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
    """What a reader wants: sums over tokens divided by `weights`, once; the other numbers averaged over
    steps.
    """
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
    """exp(loss), infinite where that leaves float64."""
    return math.exp(loss) if loss < 700 else math.inf


class Writer(Protocol):
    """Where numbers go."""

    def write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class JsonlWriter:
    """One JSON object per line. Lines after `restored_step` are dropped: the resumed run writes those again."""

    def __init__(self, path: epath.Path, restored_step: int):
        self._path = path
        try:
            kept = _lines_until(path, restored_step)
            # A rename cannot leave half a file behind if this process is killed here.
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
                # Object stores have no descriptor, and keep what is closed.
                with contextlib.suppress(AttributeError, io.UnsupportedOperation):
                    os.fsync(file.fileno())
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def close(self) -> None:
        pass


class TensorBoardWriter:
    """TensorBoard event files in `folder`; tags are `kind/name`."""

    def __init__(self, folder: epath.Path, restored_step: int):
        # Imported here: a run of floors 0 to 4 and most tests do without it.
        from tensorboardX import SummaryWriter

        # The purge hides, in TensorBoard, what was logged after the checkpoint that this run goes on from.
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
    """All of several writers; closed together."""

    def __init__(self, *writers: Writer):
        self._writers = writers

    def write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write(kind, step, numbers, timing)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def read(path: epath.Path) -> list[dict[str, Any]]:
    """The complete records of a metrics.jsonl, in order; an unfinished last line is left out."""
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
    # JSON has no NaN; other readers than Python's refuse it.
    return float(value) if math.isfinite(value) else None


@contextlib.contextmanager
def writing(path: epath.Path) -> Iterator[None]:
    """Turns an OSError into a UserError: `path` cannot be written, and why."""
    try:
        yield
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: epath.Path, error: OSError) -> UserError:
    return UserError(
        f'{path} cannot be written ({error.strerror or error}); free some space or check the rights of '
        'its folder, and run the same command again'
    )
