"""The files of an evaluation: `metrics.jsonl`, TensorBoard files, and predictions next to targets.

`metrics.jsonl` has one object per task and checkpoint: `kind` ('<split>/<task>'), `step`, `checkpoint`, the metrics,
and `timing`. Repeating an evaluation adds another line. `predictions/<task>-<split>-<step>.jsonl` has the rows of
`task_evaluation.Report`.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from remixer_t5x.errors import UserError
from remixer_t5x.evaluation.task_evaluation import Report
from remixer_t5x.run_folder import metrics, model_dir

PREDICTIONS = 'predictions'


class Results:
    """Writes reports into one folder, and creates it if necessary. Raises UserError if it cannot."""

    def __init__(self, folder: str):
        self.folder = model_dir.absolute(folder)
        with metrics.writing(self.folder):
            (self.folder / PREDICTIONS).mkdir(parents=True, exist_ok=True)
        self._tensorboard = metrics.TensorBoardWriter(self.folder / model_dir.TENSORBOARD, 0)

    def write(self, report: Report, step: int, checkpoint: epath.Path) -> epath.Path:
        """Adds the report and returns the file of its predictions."""
        kind = f'{report.split}/{report.task}'
        record = {'kind': kind, 'step': step, 'checkpoint': str(checkpoint)}
        numbers = {name: value if math.isfinite(value) else None for name, value in report.metrics.items()}
        predictions = self.folder / PREDICTIONS / f'{report.task}-{report.split}-{step}.jsonl'
        # Writes predictions first, so that a listed task has them.
        write_jsonl(predictions, report.rows)
        with metrics.writing(self.folder), (self.folder / model_dir.METRICS).open('a') as file:
            file.write(json.dumps({**record, **numbers, 'timing': {'seconds': report.seconds}}) + '\n')
        self._tensorboard.write(kind, step, report.metrics, {'seconds': report.seconds})
        return predictions

    def close(self) -> None:
        self._tensorboard.close()


def done(folder: str, split: str, tasks: Sequence[str]) -> set[int]:
    """Steps for which all these tasks have been evaluated into `folder`."""
    steps: dict[str, set[int]] = {f'{split}/{task}': set() for task in tasks}
    for record in metrics.read(model_dir.absolute(folder) / model_dir.METRICS):
        if record['kind'] in steps:
            steps[record['kind']].add(record['step'])
    return set.intersection(*steps.values())


def write_jsonl(path: epath.Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object per line; the file appears only when it is complete."""
    with metrics.writing(path):
        fresh = path.parent / (path.name + '.new')
        with fresh.open('w') as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + '\n')
        fresh.replace(path)


def read_predictions(path: str) -> list[dict[str, Any]]:
    """The rows of a file that `write_jsonl` or `remixer-t5x infer` wrote.

    Raises UserError, with the line, if it is another kind of file.
    """
    rows = []
    try:
        lines = model_dir.absolute(path).read_text().rstrip('\n').split('\n')
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'the predictions {path} cannot be read: {error}') from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f'{path} line {number} is not JSON ({error}); give a file of predictions') from error
        if not isinstance(row, dict) or not isinstance(row.get('prediction'), str):
            raise UserError(f"{path} line {number} has no text 'prediction'; give a file of predictions")
        rows.append(row)
    return rows
