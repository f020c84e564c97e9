"""Accumulates training and evaluation metrics, and writes them to metrics.jsonl.

Each line of `metrics.jsonl` is a JSON record of a training log or an evaluation. The keys of a record are `kind`
('train' or the name of an evaluation), `step`, the metrics, and `timing`, which contains machine-dependent numbers such
as `clock`, `seconds`, `tokens_per_second` and `host_mib`. Except for `timing`, a killed and resumed run writes the same
records as an uninterrupted run.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from remixer_t5x import untrusted_files
from remixer_t5x.run_folder import object_store

# The `kind` of training records.
TRAIN_KIND = 'train'
# Maps the names of sums returned by a model's `loss` to the names of their means; other sums keep their names.
MEAN_NAMES = {'correct': 'accuracy', 'squared_error': 'mean_squared_error'}
# Metrics of a step that are not sums over targets.
STEP_METRICS = ('grad_norm', 'param_norm', 'non_padding_fraction')
COUNT_METRICS = ('weights', 'sequences', 'nonfinite', 'spike')
LAST_VALUE_METRICS = ('learning_rate',)
NUM_STEPS = 'steps'
# Key for the number of steps whose update was skipped. The metrics of these steps are excluded from the means.
SKIPPED = 'skipped'
# Metrics that commands read from metrics.jsonl.
READ_METRICS = ('loss', 'perplexity', 'accuracy')
# Exclusive upper limit for `step` in a record. A larger value indicates a damaged file.
MAX_STEP = 10**15


class MetricsWindow:
    """Accumulates metrics since the last log.

    `add_step_metrics` stores device arrays without waiting, and `compute_totals` fetches them. Values are added as
    Python floats in the order of the steps, so that a saved and restored MetricsWindow computes bit-identical sums.
    """

    def __init__(self, totals: Mapping[str, float] | None = None):
        self._totals = dict(totals or {})
        self._pending: list[Mapping[str, jax.Array]] = []

    def add_step_metrics(self, metrics: Mapping[str, jax.Array]) -> None:
        self._pending.append(metrics)

    def compute_totals(self) -> dict[str, float]:
        """Waits for the device. Returns the sums of all metrics, the number of `steps` and the last `learning_rate`."""
        for metrics in jax.device_get(self._pending):
            if metrics.get('nonfinite', 0.0) > 0 or metrics.get('spike', 0.0) > 0:
                self._totals[SKIPPED] = self._totals.get(SKIPPED, 0.0) + 1.0
                continue
            for name, value in metrics.items():
                previous = 0.0 if name in LAST_VALUE_METRICS else self._totals.get(name, 0.0)
                self._totals[name] = previous + float(value)
            self._totals[NUM_STEPS] = self._totals.get(NUM_STEPS, 0.0) + 1.0
        self._pending = []
        return dict(self._totals)


def compute_means(totals: Mapping[str, float]) -> dict[str, float]:
    """Divides sums over targets by the number of target tokens, `weights`, and averages STEP_METRICS over steps.

    `loss` is the training loss. `cross_ent_loss` is `loss` minus `z_loss`; it is omitted for regression.
    """
    weights = totals.get('weights', 0.0)
    averages = {}
    for name, value in totals.items():
        if name in STEP_METRICS:
            averages[name] = value / totals.get(NUM_STEPS, 1.0)
        elif name not in (*COUNT_METRICS, *LAST_VALUE_METRICS, NUM_STEPS, SKIPPED):
            averages[MEAN_NAMES.get(name, name)] = value / weights if weights else math.nan
    averages.setdefault('loss', math.nan)
    if 'squared_error' not in totals:
        averages['cross_ent_loss'] = averages['loss'] - averages.get('z_loss', 0.0)
    averages.update({name: totals[name] for name in (*LAST_VALUE_METRICS, SKIPPED) if name in totals})
    return {**averages, 'tokens': weights}


def perplexity(loss: float) -> float:
    """Returns exp(loss), or infinity on overflow."""
    return math.exp(loss) if loss < 700 else math.inf


class JsonlWriter:
    """Writes records to metrics.jsonl, one JSON object per line.

    On a disk, `write` returns once the line is synced. For a bucket, `flush` returns once all lines are uploaded.

    The constructor removes lines that are not records, records of steps after `restored_step` and, unless
    `is_evaluated`, the evaluations of `restored_step`, because the resumed run writes these records again.
    """

    def __init__(self, path: epath.Path, restored_step: int, is_evaluated: bool = True):
        self._path = path
        # Lines that have not been written to disk yet.
        self._unwritten_lines: list[str] = []
        self._object: object_store.GrowingObject | None = None
        with object_store.wrap_write_errors(path):
            records = [
                record
                for record in _iterate_records(path)
                if record['step'] <= restored_step
                and (is_evaluated or record['step'] < restored_step or record['kind'] == TRAIN_KIND)
            ]
            text = ''.join(json.dumps(record) + '\n' for record in records)
            object_store.write_atomically(path, text)
            if object_store.is_remote(path):
                self._object = object_store.GrowingObject(path, text.encode())

    def write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        record = {
            'kind': kind,
            'step': step,
            **{name: _replace_nonfinite(value) for name, value in numbers.items()},
            'timing': {'clock': time.time(), **{name: _replace_nonfinite(value) for name, value in timing.items()}},
        }
        line = json.dumps(record) + '\n'
        if self._object is not None:
            self._object.write(line.encode())
            self._object.upload_if_due()
            return
        self._unwritten_lines.append(line)
        self._write_lines()

    def _write_lines(self) -> None:
        before = None
        with object_store.wrap_write_errors(self._path):
            try:
                # Sync the file after each line, so that the line is on disk before any later checkpoint.
                with self._path.open('a') as file:
                    before = file.tell()
                    file.write(''.join(self._unwritten_lines))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                if before is not None:
                    # Remove the partial line, which would corrupt the next line.
                    with contextlib.suppress(OSError):
                        os.truncate(self._path, before)
                raise
        self._unwritten_lines = []

    def flush(self) -> None:
        if self._object is not None:
            with object_store.wrap_write_errors(self._path):
                self._object.flush()
        if self._unwritten_lines:
            self._write_lines()


def read_records(path: epath.Path) -> list[dict[str, Any]]:
    """Reads the records of a metrics.jsonl file in order, skipping lines that are not records.

    A record has a string `kind`, a non-negative integer `step`, and metrics, whose values are numbers or None. Raises
    UserError if the file cannot be read.
    """
    with (
        object_store.wrap_read_errors(path),
        untrusted_files.convert_to_user_errors(path, 'pass the metrics.jsonl of a run'),
    ):
        return _iterate_records(path)


def _iterate_records(path: epath.Path) -> list[dict[str, Any]]:
    lines = untrusted_files.read_json_lines(path) if path.exists() else ()
    return [line.value for line in lines if line.error is None and _is_record(line.value)]


def _is_record(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get('kind'), str):
        return False
    step, timing = value.get('step'), value.get('timing', {})
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < MAX_STEP or not isinstance(timing, dict):
        return False
    return not any(isinstance(value.get(name), bool | str | list | dict) for name in READ_METRICS)


def _replace_nonfinite(value: float) -> float | None:
    # JSON does not support NaN, and parsers other than Python's reject it.
    return float(value) if math.isfinite(value) else None
