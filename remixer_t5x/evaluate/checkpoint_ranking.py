"""Ranks checkpoints by a metric, and saves the best parameters of each task separately from the regular checkpoints.

`MODEL_DIR/best/<task>/<step>` contains the checkpoint items `state` (only parameters) and `run`, so the folder can be
used as a checkpoint. The item `run` also records the name and value of the metric that ranks the checkpoints.

The score of a mixture is the mean score of its tasks, as in T5's `eval_utils`; MNLI matched and MNLI mismatched count
as one task. `BEST_METRICS = 'mean'` scores a task as T5 does, by the mean of its metrics.
"""

import contextlib
import math
import re
import statistics
from collections.abc import Mapping
from typing import Any

from etils import epath

from remixer_t5x.checkpoints import checkpoint_manager, checkpoint_paths, saved_params
from remixer_t5x.devices import collectives
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate.task_evaluation import TaskReport
from remixer_t5x.run_folder import model_dir, object_store

BEST_FOLDER = 'best'
# The value of BEST_METRICS that scores each task by the mean of its metrics.
MEAN = 'mean'
# Name of the average over a mixture's tasks in records and folders.
AVERAGE_TASK = 'average'
BestMetrics = Mapping[str, str] | str | None
# Name suffixes of metrics for which lower is better.
_LOWER_IS_BETTER = re.compile(
    r'-.*|([^/]*_)?(error|loss|perplexity|ppl|nll|distance|error_rate|wer|cer|ter|mse|rmse|mae|ece|brier|brier_score|'
    r'bits_per_\w+)(/.*)?'
)


def compute_signed_score(name: str, value: float) -> float:
    """Returns `value`, negated if lower is better for the metric (errors, losses, and `-NAME` in BEST_METRICS)."""
    return -value if _LOWER_IS_BETTER.fullmatch(name) else value


def select_ranking_metric(
    task: str, metrics: Mapping[str, float], best_metrics: BestMetrics = None
) -> tuple[str, float] | None:
    """Returns the name and value of the metric that ranks a task's checkpoints; None if there are no metrics.

    `best_metrics` maps a task to the name of its metric (`-NAME` if lower is better). None selects the first metric of
    each task. `MEAN` averages all metrics for which higher is better; if there are none, it averages all metrics, and
    the name is `-mean`. Values of groups (`accuracy/easy`) are not averaged, as `accuracy` already contains them.
    Raises UserError if the task does not have the selected metric.
    """
    if task == AVERAGE_TASK:
        return next(iter(metrics.items()), None)
    if isinstance(best_metrics, str) and best_metrics != MEAN:
        raise UserError(
            f"BEST_METRICS must be '{MEAN}', or map tasks to metrics, as in {{'cogs_v001': 'exact_match'}}, got "
            f'{best_metrics!r}'
        )
    if best_metrics == MEAN:
        # The metric `accuracy/hard` is that of a group of examples if there is a metric `accuracy`.
        whole = {
            name: value for name, value in metrics.items() if '/' not in name or name.partition('/')[0] not in metrics
        }
        higher = [value for name, value in whole.items() if not _LOWER_IS_BETTER.fullmatch(name)]
        values = higher or list(whole.values())
        return (MEAN if higher else f'-{MEAN}', statistics.fmean(values)) if values else None
    name = best_metrics.get(task) if isinstance(best_metrics, Mapping) else None
    if name is not None and name.removeprefix('-') not in metrics:
        raise UserError(f'BEST_METRICS of {task} must be one of its metrics ({", ".join(metrics)}), got {name!r}')
    name = name or next(iter(metrics), None)
    return None if name is None else (name, metrics[name.removeprefix('-')])


def compute_mean_score(scores: Mapping[str, float]) -> float:
    """Returns the mean of the tasks' scores, for which higher is better."""
    parts: dict[str, list[float]] = {}
    for task, value in scores.items():
        parts.setdefault(re.sub(r'_(mis)?matched(?=_|$)', '', task), []).append(value)
    return statistics.fmean(map(statistics.fmean, parts.values()))


class BestCheckpoints:
    """Saves, for each task, the parameters with the best value of the metric that `select_ranking_metric` selects.

    `record` is a description of the run that each checkpoint stores. If `is_new` is true, the run starts from step 0,
    because MODEL_DIR has no checkpoint to resume from; the first evaluation then replaces any best checkpoints left in
    MODEL_DIR by an earlier run.
    """

    def __init__(
        self, folder: epath.Path, record: Mapping[str, Any], metrics: BestMetrics = None, is_new: bool = False
    ):
        self._folder, self._record, self._metrics = folder / BEST_FOLDER, record, metrics
        self._is_new = is_new
        self._saved_tasks: set[str] = set()

    def save_if_best(self, report: TaskReport, step: int, params: Any) -> bool:
        """Saves `params` if their score is the best so far, and returns whether they were saved.

        A non-finite value is never the best. Earlier values are ignored if the metric, the examples or the decoding
        settings differ. Raises UserError if the task does not have the selected metric, and WriteError if the
        parameters cannot be written.
        """
        metric = self.select_metric(report)
        if metric is None or not math.isfinite(metric[1]):
            return False
        (name, value), folder = metric, self._folder / report.task
        known = None
        if not self._is_new or report.task in self._saved_tasks:
            steps = checkpoint_paths.list_steps(folder)
            known = collectives.broadcast(read_best_record(folder / str(steps[-1])) if steps else None)
        best = {'task': report.task, 'metric': name, 'value': value, 'step': step, 'evaluated': report.settings_hash}
        # Do not save on equal values, because a resumed run may evaluate the same step again.
        if (
            known
            and all(known.get(key, best[key]) == best[key] for key in ('metric', 'evaluated'))
            and compute_signed_score(name, known['value']) >= compute_signed_score(name, value)
        ):
            return False
        record = {**self._record, BEST_FOLDER: best}
        others = collectives.broadcast([other for other in checkpoint_paths.list_steps(folder) if other != step])
        try:
            checkpoint_manager.write_params(folder, step, params, record, others)
        except UserError as error:
            raise object_store.WriteError(str(error)) from error
        self._saved_tasks.add(report.task)
        return True

    def select_metric(self, report: TaskReport) -> tuple[str, float] | None:
        """Returns the name and value of the metric that ranks `report`, or None if the report has no metrics."""
        return select_ranking_metric(report.task, report.metrics, self._metrics)


def find_best_checkpoints(folder: str) -> dict[str, Mapping[str, Any]]:
    """Maps each task to the `metric`, `value`, `step` and `path` of its best checkpoint in the MODEL_DIR `folder`."""
    checkpoints: dict[str, Mapping[str, Any]] = {}
    best = model_dir.to_absolute_path(folder) / BEST_FOLDER
    for task in sorted(best.iterdir()) if best.is_dir() else []:
        steps = checkpoint_paths.list_steps(task)
        with contextlib.suppress(UserError):
            if steps:
                path = task / str(steps[-1])
                checkpoints[task.name] = {**read_best_record(path), 'path': str(path)}
    return checkpoints


def read_best_record(step: epath.Path) -> dict[str, Any]:
    """Reads `metric`, `value` and `step` from a checkpoint's record. Raises UserError if a key is missing."""
    record = saved_params.read_record(step).get(BEST_FOLDER)
    expected = {'metric': str, 'value': int | float, 'step': int}
    if not isinstance(record, dict) or not all(isinstance(record.get(name), type_) for name, type_ in expected.items()):
        raise UserError(
            f'{step} has no record of the best metric; move this folder so that the next best checkpoint can be saved'
        )
    return record
