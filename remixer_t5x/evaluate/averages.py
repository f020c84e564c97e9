"""One number for a task and for a mixture of tasks, as T5 reports them.

T5 (its `eval_utils`): a task with several metrics counts with their mean, a mixture with the mean of its tasks, each
task once; the matched and the mismatched examples of MNLI are one task.
"""

import re
from collections.abc import Iterable, Mapping

from remixer_t5x.errors import UserError

# BEST_METRICS = 'mean': the mean of the metrics of each task.
MEAN = 'mean'
# What the average over the tasks of a mixture is called in records and folders.
AVERAGE = 'average'
BestMetrics = Mapping[str, str] | str | None


# Metrics whose lower values are better, by the last words of their names.
_LOWER = re.compile(r'-.*|([^/]*_)?(error|loss|perplexity|distance|error_rate|wer|cer|ter)(/.*)?')


def rank(name: str, value: float) -> float:
    """The value as a number that is better when higher: an error, a loss, or a metric that BEST_METRICS gives as
    `-NAME`, counts negative.
    """
    return -value if _LOWER.fullmatch(name) else value


def score(task: str, metrics: Mapping[str, float], wanted: BestMetrics = None) -> tuple[str, float] | None:
    """The metric that decides which checkpoint is best for the task, and its value; None if the task has no metrics.

    wanted: the names of metrics by task, `-NAME` if a lower value is better, `MEAN` for all tasks, or None for each
    task's first metric. `MEAN` leaves out metrics whose lower values are better, unless there are no others. Raises
    UserError if the task does not have the metric.
    """
    if task == AVERAGE:
        return next(iter(metrics.items()), None)
    if isinstance(wanted, str) and wanted != MEAN:
        raise UserError(
            f"BEST_METRICS is {wanted!r}; it takes '{MEAN}', or a metric by task, as in {{'cogs_v001': 'exact_match'}}"
        )
    if wanted == MEAN:
        higher = [value for name, value in metrics.items() if not _LOWER.fullmatch(name)]
        values = higher or [-value for value in metrics.values()]
        return (MEAN, mean(values)) if values else None
    name = wanted.get(task) if isinstance(wanted, Mapping) else None
    if name is not None and name.removeprefix('-') not in metrics:
        raise UserError(f'BEST_METRICS names {name!r} for {task}, which has {", ".join(metrics) or "none"}')
    name = name or next(iter(metrics), None)
    return None if name is None else (name, metrics[name.removeprefix('-')])


def average(scores: Mapping[str, float]) -> float:
    """The mean of the tasks' scores (see `rank`), by the tasks' names."""
    parts: dict[str, list[float]] = {}
    for task, value in scores.items():
        parts.setdefault(re.sub(r'_(mis)?matched(?=_|$)', '', task), []).append(value)
    return mean(mean(values) for values in parts.values())


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
