"""Writes the results of an evaluation: `metrics.jsonl`, TensorBoard files, and predictions with targets.

`metrics.jsonl` contains one object per task and checkpoint: `kind` ('<split>/<task>'), `step`, `checkpoint`,
`examples_hash`, the metrics, and `timing`. Repeated evaluations append lines. `predictions/<task>-<split>-<step>.jsonl`
contains the rows of a `TaskReport`. If the run or an earlier evaluation used different examples, the beginning of the
examples' hash is appended to the task name, as in `own_pairs@1a2b3c4d`.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate.task_evaluation import TaskReport
from remixer_t5x.run_folder import metrics, model_dir, object_store

PREDICTIONS = 'predictions'


class Results:
    """Writes task reports to a folder, which is created if it does not exist. Raises UserError if writing fails.

    `examples_hashes` contains the hashes of the examples that the training run evaluated (`TaskEvaluator`). `notes`
    lists the results that were renamed because their examples differ.
    """

    def __init__(self, folder: str, examples_hashes: Mapping[str, str] | None = None):
        self.folder, self.notes = model_dir.absolute_path(folder), list[str]()
        with object_store.wrap_write_errors(self.folder):
            (self.folder / PREDICTIONS).mkdir(parents=True, exist_ok=True)
        # The first record of each kind determines which examples keep the original name.
        records = metrics.read_records(self.folder / model_dir.METRICS)[::-1]
        self._hashes: dict[str, str] = {record['kind']: record.get('examples_hash', '') for record in records}
        self._hashes.update(examples_hashes or {})
        # Import lazily, because importing tensorboardX takes half a second.
        from remixer_t5x.run_folder import tensorboard

        self._tensorboard = tensorboard.TensorBoardWriter(self.folder / model_dir.TENSORBOARD, None)

    def write(self, report: TaskReport, step: int, checkpoint: epath.Path) -> epath.Path:
        """Writes a report and returns the path of the file with its predictions."""
        name, digest = report.task, report.examples_hash
        if (self._hashes.setdefault(f'{report.split}/{name}', digest) or digest) != digest:
            name = f'{name}@{digest[:8]}'
            self.notes.append(f'{report.task} has other examples than the run or an earlier result: stored as {name}')
        kind = f'{report.split}/{name}'
        record = {'kind': kind, 'step': step, 'checkpoint': str(checkpoint), 'examples_hash': digest}
        numbers = {metric: value if math.isfinite(value) else None for metric, value in report.metrics.items()}
        predictions = self.folder / PREDICTIONS / f'{name}-{report.split}-{step}.jsonl'
        # Write predictions first, so that every task listed in metrics.jsonl has predictions.
        write_jsonl(predictions, report.rows)
        path = self.folder / model_dir.METRICS
        with object_store.wrap_write_errors(self.folder):
            # A killed evaluation may have left an incomplete last line. Start a new line after it.
            start = '\n' if path.exists() and path.read_bytes()[-1:] not in (b'', b'\n') else ''
            with path.open('a') as file:
                file.write(start + json.dumps({**record, **numbers, 'timing': {'seconds': report.seconds}}) + '\n')
        self._tensorboard.write(kind, step, report.metrics, {'seconds': report.seconds})
        return predictions

    def close(self) -> None:
        self._tensorboard.close()


def evaluated_steps(folder: str, examples_hashes: Mapping[str, str]) -> set[int]:
    """Returns the steps for which `folder` contains results on all examples with these hashes."""
    steps: dict[str, set[int]] = {kind: set() for kind in examples_hashes}
    for record in metrics.read_records(model_dir.absolute_path(folder) / model_dir.METRICS):
        kind = record['kind'].partition('@')[0]
        if kind in steps and record.get('examples_hash') in (None, examples_hashes[kind]):
            steps[kind].add(record['step'])
    return set.intersection(*steps.values())


def write_jsonl(path: epath.Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Atomically writes a file with one JSON object per line."""
    with object_store.wrap_write_errors(path):
        object_store.write_atomically(path, ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows))


def read_predictions(path: str) -> list[dict[str, Any]]:
    """Reads predictions written by `write_jsonl` or `remixer-t5x infer`.

    Raises UserError with the line number if a line is not a prediction.
    """
    advice = 'use a file that evaluate or infer has written'
    rows = []
    with untrusted_files.raise_user_errors(path, advice):
        # Accept the score -inf of an impossible text, although -inf is not valid JSON.
        for line in untrusted_files.read_json_lines(model_dir.absolute_path(path), odd_numbers=True):
            row, reason = line.value, line.error
            if not reason and not (isinstance(row, dict) and isinstance(row.get('prediction'), str)):
                reason = "it has no string 'prediction'"
            elif not reason and not isinstance(row.get('input', ''), str):
                reason = "its 'input' is not a string"
            elif not reason and not isinstance(row.get('score'), int | float | None):
                reason = "its 'score' is not a number"
            if not reason:
                rows.append(row)
            elif not line.is_blank:
                raise UserError(f'{path} line {line.number}: {reason}; {advice}')
    return rows
