"""Computes the held-out loss, perplexity and token accuracy from sums over one pass through the data.

`constant_loss` is the entropy of the frequencies of the evaluated target tokens. A model that predicts the same
distribution at every position cannot reach a lower loss on these tokens. Constantly predicting the token frequencies of
the training data results in a higher loss.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from remixer_t5x import ranges
from remixer_t5x.data import pipeline, task_batches
from remixer_t5x.errors import UserError
from remixer_t5x.lazy_imports import seqio
from remixer_t5x.optim.train_step import TARGET_COUNTS
from remixer_t5x.run_folder import metrics

# Maximum number of batches in flight, so that the device does not wait for the host.
MAX_PENDING = 2
EvalStep = Callable[[Any, Any], Mapping[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A held-out evaluation on the first `steps` batches of `dataset`, or on all batches if `steps` is None.

    `name` is written to the `kind` field of the evaluation's records in metrics.jsonl.
    """

    dataset: pipeline.DatasetConfig
    steps: ranges.NonNegativeInt | None = None
    name: str = 'eval'

    def __post_init__(self) -> None:
        ranges.check_fields(self, steps='EVAL_STEPS')

    def open_batches(self, share: tuple[int, int] = (0, 1), threads: int | None = None) -> task_batches.EvalBatches:
        """Returns batches that each contain one of `count` equal shares of the rows; `share` is (index, count)."""
        return task_batches.EvalBatches(self.dataset, *share, self.steps, threads)

    def split_by_task(self) -> tuple['Evaluation', ...]:
        """Returns an evaluation, named NAME/TASK, for each task with this split; () if only one task has the split."""
        tasks = seqio.get_subtasks(pipeline.get_configured_task(self.dataset))
        tasks = [task for task in tasks if self.dataset.split in task.splits]
        return self.create_task_evaluations(tasks) if len(tasks) > 1 else ()

    def create_task_evaluations(self, tasks: Sequence[Any]) -> tuple['Evaluation', ...]:
        """Returns an evaluation named NAME/TASK for each of the given seqio tasks."""
        return tuple(
            dataclasses.replace(
                self,
                dataset=dataclasses.replace(self.dataset, mixture_or_task_name=task),
                name=f'{self.name}/{task.name}',
            )
            for task in tasks
        )


def evaluate_loss(
    params: Any, batches: Iterable[Any], eval_step: EvalStep, place: Callable[[Any], Any], name: str = 'eval'
) -> dict[str, float]:
    """Returns `loss`, `cross_ent_loss` (without z-loss), `perplexity`, `accuracy` and `tokens` for `params`.

    For regression, returns `mean_squared_error` instead of `cross_ent_loss`, `perplexity` and `accuracy`.
    Also returns `bits_per_byte` if the sums contain `bytes` (the bytes of the target texts), and `constant_loss` in
    nats per token if the sums contain the count of each target token. `eval_step(params, batch)` returns the sums over
    a batch, and `place` transfers a batch to the devices. Raises UserError if no batch has a target token.
    """
    totals: dict[str, float] = {}
    counts: np.ndarray = np.zeros(1)
    for sums in _run_eval_steps(params, batches, eval_step, place):
        for key, value in sums.items():
            if key == TARGET_COUNTS:
                counts = counts + np.asarray(value, np.float64)
            else:
                totals[key] = totals.get(key, 0.0) + float(value)
    if not totals.get('weights'):
        raise UserError(
            f'the {name} split must contain target tokens, got none; use another split, or set EVAL_PERIOD = None'
        )
    text_bytes = totals.pop('bytes', 0.0)
    averages = metrics.compute_means(totals)
    if text_bytes:
        averages['bits_per_byte'] = (totals['loss'] - totals.get('z_loss', 0.0)) / math.log(2) / text_bytes
    if counts.any():
        # Compute the entropy of the token frequencies.
        probabilities = counts[counts > 0] / counts.sum()
        averages['constant_loss'] = float(np.sum(probabilities * np.log(1 / probabilities)))
    if 'cross_ent_loss' in averages:
        averages['perplexity'] = metrics.perplexity(averages['cross_ent_loss'])
    return averages


def _run_eval_steps(
    params: Any, batches: Iterable[Any], eval_step: EvalStep, place: Callable[[Any], Any]
) -> Iterator[Mapping[str, Any]]:
    """Yields the sums over each batch."""
    pending: collections.deque = collections.deque()
    for batch in batches:
        pending.append(eval_step(params, place(batch)))
        if len(pending) > MAX_PENDING:
            yield jax.device_get(pending.popleft())
    yield from map(jax.device_get, pending)
