"""Training and evaluation numbers: adds up sums and weights, divides once, and writes them to metrics.jsonl.

`metrics.jsonl` has one object per log or evaluation: `kind` ('train' or an evaluation's name), `step`, the
numbers, and the numbers that depend on the machine (`clock`, `seconds`, `tokens_per_second`, `host_mib`) under
`timing`. Without `timing` the file of a run that was killed and resumed equals an unbroken run's.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from etils import epath

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError
from remixer_t5x.run_folder import object_store
from remixer_t5x.run_folder.growing_object import GrowingObject
from remixer_t5x.run_folder.object_store import replace

# Sums over tokens, as the model's `loss` gives them; `weights` counts the target tokens.
PER_TOKEN = {'loss': 'loss', 'z_loss': 'z_loss', 'correct': 'accuracy'}
COUNTS = ('weights', 'sequences', 'nonfinite', 'spike')
LAST = ('learning_rate',)
STEPS = 'steps'
# Steps whose update was skipped (`bad_steps`); means leave their numbers out.
SKIPPED = 'skipped'


# Numbers that a run reads back from its own records.
OWN_NUMBERS = ('loss', 'perplexity', 'accuracy')
# More steps than any run takes; a larger number is damage.
MAX_STEP = 10**15
# A metrics.jsonl with lines that are not records, before a resumed run dropped them.
AS_FOUND = 'metrics.as_found.jsonl'


class CannotWrite(UserError):
    """A file of a run cannot be written: the disk is full, read-only or broken."""


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
    """Means for a reader: sums over tokens divided by `weights`, once; other numbers averaged over steps.

    `loss` is what is minimised; `cross_ent_loss` is `loss` without `z_loss`.
    """
    weights = totals.get('weights', 0.0)
    found = {}
    for name, value in totals.items():
        if name in PER_TOKEN:
            found[PER_TOKEN[name]] = value / weights if weights else math.nan
        elif name not in (*COUNTS, *LAST, STEPS, SKIPPED):
            found[name] = value / totals[STEPS]
    found.setdefault(PER_TOKEN['loss'], math.nan)
    found['cross_ent_loss'] = found['loss'] - found.get('z_loss', 0.0)
    found.update({name: totals[name] for name in (*LAST, SKIPPED) if name in totals})
    return {**found, 'tokens': weights}


def perplexity(loss: float) -> float:
    """exp(loss), infinite if that exceeds float64."""
    return math.exp(loss) if loss < 700 else math.inf


class JsonlWriter:
    """One JSON object per line. Drops lines after `restored_step`, which the resumed run writes again.

    Lines that are not records, which another program or a failing disk wrote, are dropped too; `rejected` lists them
    with the reason, and the file as it was is kept under the name `AS_FOUND`.

    On a disk each line is there once `write` returns, in a bucket once `flush` returns.
    """

    def __init__(self, path: epath.Path, restored_step: int):
        self._path = path
        # Lines that could not be written yet, to a disk.
        self._waiting: list[str] = []
        self._object: GrowingObject | None = None
        with writing(path):
            records, self.rejected = _records(path)
            if self.rejected:
                path.replace(path.parent / AS_FOUND)
            kept = ''.join(json.dumps(record) + '\n' for record in records if record['step'] <= restored_step)
            replace(path, kept)
            if object_store.is_remote(path):
                self._object = GrowingObject(path, kept.encode())

    def write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        record = {
            'kind': kind,
            'step': step,
            **{name: _finite(value) for name, value in numbers.items()},
            'timing': {'clock': time.time(), **{name: _finite(value) for name, value in timing.items()}},
        }
        line = json.dumps(record) + '\n'
        if self._object is not None:
            self._object.add(line.encode())
            self._object.upload_if_due()
            return
        self._waiting.append(line)
        self._write_waiting()

    def _write_waiting(self) -> None:
        before = None
        with writing(self._path):
            try:
                # Opened each time, so that each line is on disk before a checkpoint that follows it.
                with self._path.open('a') as file:
                    before = file.tell()
                    file.write(''.join(self._waiting))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                if before is not None:
                    # Half a line would spoil the line that follows it.
                    with contextlib.suppress(OSError):
                        os.truncate(self._path, before)
                raise
        self._waiting = []

    def flush(self) -> None:
        if self._object is not None:
            with writing(self._path):
                self._object.flush()

    def close(self) -> None:
        self.flush()
        if self._waiting:
            self._write_waiting()


def read(path: epath.Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, in order, without lines that are not records.

    Each has a text `kind`, a whole number `step` from 0, and numbers; a number may be None. Raises UserError if the
    file cannot be read.
    """
    with object_store.reading(path), untrusted_files.user_errors(path, 'give the metrics.jsonl of a run'):
        return _records(path)[0]


def _records(path: epath.Path) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
    """The records, and (number, reason) of the lines that are not records. Raises OSError."""
    records, rejected = [], []
    for line in untrusted_files.json_lines(path) if path.exists() else ():
        reason = line.error or difference_from_record(line.value)
        if reason is None:
            records.append(line.value)
        elif line.ended and not line.is_blank:
            # A run that was killed may leave an unfinished last line, which nobody misses.
            rejected.append((line.number, reason))
    return records, rejected


def difference_from_record(found: Any) -> str | None:
    """Why a JSON value is not a record of a metrics.jsonl; None if it is one."""
    if not isinstance(found, dict):
        return 'it is not a JSON object'
    if not isinstance(found.get('kind'), str):
        return 'it has no text `kind`'
    step, timing = found.get('step'), found.get('timing', {})
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < MAX_STEP:
        return 'it has no `step` that a run can reach'
    if not isinstance(timing, dict):
        return 'its `timing` is not a JSON object'
    odd = [name for name in OWN_NUMBERS if isinstance(found.get(name), bool | str | list | dict)]
    if odd:
        return f'its `{odd[0]}` is not a number'
    return None


def _finite(value: float) -> float | None:
    # JSON has no NaN, and readers other than Python's refuse it.
    return float(value) if math.isfinite(value) else None


@contextlib.contextmanager
def writing(path: epath.Path) -> Iterator[None]:
    """Turns an error of the disk or the store into a UserError that says why `path` cannot be written."""
    try:
        yield
    except object_store.errors() as error:
        advice = 'run' if object_store.is_remote(path) else 'free some space or check the rights of its folder, and run'
        raise CannotWrite(
            f'{path} cannot be written ({object_store.reason(error)}); {advice} the same command again'
        ) from error
