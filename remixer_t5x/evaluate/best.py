"""Saves the best parameters of each task apart from the rotating checkpoints.

`MODEL_DIR/best/<task>/<step>` has the items `state` (only parameters) and `run` of a checkpoint, so it can be used as a
checkpoint. `run` also records the metric and its value.

Scores are those of T5's `eval_utils`: the mean of a task's metrics, and for a mixture the mean over its tasks; the
matched and the mismatched examples of MNLI are one task.
"""

import contextlib
import math
import re
import statistics
from collections.abc import Mapping
from typing import Any

from etils import epath

from remixer_t5x.checkpoints import manager, saved_params
from remixer_t5x.devices import collectives
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate.task_evaluation import Report
from remixer_t5x.run_folder import model_dir, object_store

BEST = 'best'
# BEST_METRICS = 'mean' scores each task by the mean of its metrics.
MEAN = 'mean'
# Name of the average over the tasks of a mixture in records and folders.
AVERAGE = 'average'
BestMetrics = Mapping[str, str] | str | None
# Metrics for which lower is better, matched by the last words of their names.
_LOWER = re.compile(r'-.*|([^/]*_)?(error|loss|perplexity|distance|error_rate|wer|cer|ter)(/.*)?')


def rank(name: str, value: float) -> float:
    """Negates an error, a loss, or a metric that BEST_METRICS names `-NAME`, so that higher is better."""
    return -value if _LOWER.fullmatch(name) else value


def score(task: str, metrics: Mapping[str, float], best_metrics: BestMetrics = None) -> tuple[str, float] | None:
    """Returns the metric by which checkpoints of a task are compared, and its value; None without metrics.

    `best_metrics` is a mapping from task to metric name (`-NAME` if lower is better), `MEAN`, or None for the first
    metric of each task. `MEAN` excludes metrics whose lower values are better, unless there are no others. Raises
    UserError if the task does not have the metric.
    """
    if task == AVERAGE:
        return next(iter(metrics.items()), None)
    if isinstance(best_metrics, str) and best_metrics != MEAN:
        raise UserError(
            f"BEST_METRICS must be '{MEAN}', or a metric by task, as in {{'cogs_v001': 'exact_match'}}, got "
            f'{best_metrics!r}'
        )
    if best_metrics == MEAN:
        higher = [value for name, value in metrics.items() if not _LOWER.fullmatch(name)]
        values = higher or [-value for value in metrics.values()]
        return (MEAN, statistics.fmean(values)) if values else None
    name = best_metrics.get(task) if isinstance(best_metrics, Mapping) else None
    if name is not None and name.removeprefix('-') not in metrics:
        raise UserError(f'BEST_METRICS of {task} must be one of {", ".join(metrics) or "no metrics"}, got {name!r}')
    name = name or next(iter(metrics), None)
    return None if name is None else (name, metrics[name.removeprefix('-')])


def average(scores: Mapping[str, float]) -> float:
    """Returns the mean of the tasks' scores (see `rank`)."""
    parts: dict[str, list[float]] = {}
    for task, value in scores.items():
        parts.setdefault(re.sub(r'_(mis)?matched(?=_|$)', '', task), []).append(value)
    return statistics.fmean(map(statistics.fmean, parts.values()))


class BestCheckpoints:
    """Keeps the parameters with the best value of one metric of each task: the highest, or the lowest error.

    `metrics` are the `best_metrics` of `score`. `record` is the record of the run in its checkpoints.
    """

    def __init__(self, folder: epath.Path, record: Mapping[str, Any], metrics: BestMetrics = None):
        self._folder, self._record, self._metrics = folder / BEST, record, metrics

    def keep(self, report: Report, step: int, params: Any) -> bool:
        """Saves `params` if they are better than those saved before, and returns whether it did.

        NaN is never better. Raises UserError if the task does not have the metric, and CannotWrite if the parameters
        cannot be written.
        """
        metric = self.score(report)
        if metric is None or math.isnan(metric[1]):
            return False
        (name, value), folder = metric, self._folder / report.task
        known = collectives.broadcast(self.known(report.task))
        # A resumed run may reach the same step again.
        if known and (known['metric'] == name and rank(name, known['value']) >= rank(name, value)):
            return False
        record = {**self._record, BEST: {'task': report.task, 'metric': name, 'value': value, 'step': step}}
        others = collectives.broadcast([other for other in saved_params.list_steps(folder) if other != step])
        try:
            manager.check_disk_space(self._folder.parent, params, 'the best parameters take')
            manager.write_params(folder, step, params, record, others)
        except UserError as error:
            raise object_store.CannotWrite(str(error)) from error
        return True

    def score(self, report: Report) -> tuple[str, float] | None:
        """Returns the metric of a report's task, and its value; see `score`."""
        return score(report.task, report.metrics, self._metrics)

    def known(self, task: str) -> Mapping[str, Any] | None:
        """Returns `metric`, `value` and `step` of the parameters saved for `task`."""
        steps = saved_params.list_steps(self._folder / task)
        return read_best(self._folder / task / str(steps[-1])) if steps else None


def best_checkpoints(folder: str) -> dict[str, Mapping[str, Any]]:
    """Lists the best checkpoints in MODEL_DIR by task: `metric`, `value`, `step`, and `path`."""
    checkpoints: dict[str, Mapping[str, Any]] = {}
    best = model_dir.absolute_path(folder) / BEST
    for task in sorted(best.iterdir()) if best.is_dir() else []:
        steps = saved_params.list_steps(task)
        with contextlib.suppress(UserError):
            if steps:
                path = task / str(steps[-1])
                checkpoints[task.name] = {**read_best(path), 'path': str(path)}
    return checkpoints


def read_best(step: epath.Path) -> dict[str, Any]:
    """Reads `metric`, `value` and `step` of the checkpoint at `step`. Raises UserError if its record lacks them."""
    record = saved_params.read_record(step).get(BEST)
    kinds = {'metric': str, 'value': int | float, 'step': int}
    if not isinstance(record, dict) or not all(isinstance(record.get(name), kind) for name, kind in kinds.items()):
        raise UserError(f'{step} has no record of the best metric; move it away, and the next best is saved')
    return record
