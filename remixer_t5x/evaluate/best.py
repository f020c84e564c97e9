"""The best parameters of each task, kept apart from the checkpoints that rotate.

`MODEL_DIR/best/<task>/<step>` has the items `state` (only parameters) and `run` of a checkpoint, so it can be
evaluated, run and finetuned like a checkpoint. `run` also says which metric was best, and its value.
"""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from etils import epath

from remixer_t5x.checkpoints import manager, saved_params
from remixer_t5x.devices import collectives
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import averages
from remixer_t5x.evaluate.task_evaluation import Report
from remixer_t5x.run_folder import metrics, model_dir

BEST = 'best'


class BestCheckpoints:
    """Keeps, for each task, the parameters with the best value of one metric: the highest, or of an error the lowest.

    `metrics` names the metric of each task (see `averages.score`). `record` is the record of the run in
    its checkpoints.
    """

    def __init__(self, folder: epath.Path, record: Mapping[str, Any], metrics: averages.BestMetrics = None):
        self._folder, self._record, self._metrics = folder / BEST, record, metrics

    def keep(self, report: Report, step: int, params: Any) -> bool:
        """Saves `params` if they are better than the kept ones. Returns whether it did, once they are on disk. A metric
        that is NaN is never better.

        Raises UserError if the task does not have the metric, metrics.CannotWrite if the parameters cannot be written.
        """
        found = self.score(report)
        if found is None or math.isnan(found[1]):
            return False
        (name, value), folder = found, self._folder / report.task
        known = collectives.broadcast(self.known(report.task))
        # A run that was killed reaches the same step again, with the same value.
        if known and (known['metric'] == name and averages.rank(name, known['value']) >= averages.rank(name, value)):
            return False
        record = {**self._record, BEST: {'task': report.task, 'metric': name, 'value': value, 'step': step}}
        self._save(folder, step, params, record)
        return True

    def score(self, report: Report) -> tuple[str, float] | None:
        """The metric that decides, and its value; see `averages.score`."""
        return averages.score(report.task, report.metrics, self._metrics)

    def known(self, task: str) -> Mapping[str, Any] | None:
        """`metric`, `value` and `step` of the parameters kept for `task`."""
        steps = saved_params.steps_in(self._folder / task)
        return read_best(self._folder / task / str(steps[-1])) if steps else None

    def _save(self, folder: epath.Path, step: int, params: Any, record: Mapping[str, Any]) -> None:
        others = collectives.broadcast([other for other in saved_params.steps_in(folder) if other != step])
        try:
            manager.check_space(self._folder.parent, params, 'the best parameters take')
            manager.write_params(folder, step, params, record, others)
        except UserError as error:
            raise metrics.CannotWrite(str(error)) from error


def kept_in(folder: str) -> dict[str, Mapping[str, Any]]:
    """The best checkpoints in MODEL_DIR, by task: `metric`, `value`, `step`, and `path`."""
    found: dict[str, Mapping[str, Any]] = {}
    best = model_dir.absolute(folder) / BEST
    for task in sorted(best.iterdir()) if best.is_dir() else []:
        steps = saved_params.steps_in(task)
        with contextlib.suppress(UserError):
            if steps:
                path = task / str(steps[-1])
                found[task.name] = {**read_best(path), 'path': str(path)}
    return found


def read_best(step: epath.Path) -> dict[str, Any]:
    """`metric`, `value` and `step` in the record of the checkpoint at `step`. Raises UserError if it lacks them."""
    found = saved_params.read_record(step).get(BEST)
    kinds = {'metric': str, 'value': int | float, 'step': int}
    if not isinstance(found, dict) or not all(isinstance(found.get(name), kind) for name, kind in kinds.items()):
        raise UserError(f'{step} does not say which metric was best there; move it away, and the next best is kept')
    return found
