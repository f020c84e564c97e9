"""Held-out loss, perplexity and token accuracy: sums over one pass, divided once.

Next to the loss there is the loss of the best constant answer: the one distribution over the vocabulary that fits the
targets best, whatever the input. It is the entropy of their frequencies. What a model is below it, it has learned from
its inputs; a model that only knows which tokens are frequent is not below it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from remixer_t5x import ranges
from remixer_t5x.data import pipeline, task_batches
from remixer_t5x.errors import UserError
from remixer_t5x.optim.train_step import TARGET_COUNTS
from remixer_t5x.run_folder import metrics

EvalStep = Callable[[Any, Any], Mapping[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Evaluates on at most `steps` batches of `dataset` (None takes all, 0 evaluates nothing). `name` is the `kind` of
    its records.
    """

    dataset: pipeline.DatasetConfig
    steps: ranges.Whole | None = None
    name: str = 'eval'

    def __post_init__(self) -> None:
        ranges.check_fields(self, steps='EVAL_STEPS')

    def batches(self, share: tuple[int, int] = (0, 1), threads: int | None = None) -> task_batches.EvalBatches:
        """The rows of `share` = (index, count); iterate over it once for every evaluation."""
        return task_batches.EvalBatches(self.dataset, *share, self.steps, threads)

    def by_task(self) -> tuple['Evaluation', ...]:
        """The same for each task of a mixture that has the split, named NAME/TASK; none for a single task."""
        tasks = [task for task in pipeline.tasks(self.dataset) if self.dataset.split in task.splits]
        return self.of_tasks(tasks) if len(tasks) > 1 else ()

    def of_tasks(self, tasks: Sequence[Any]) -> tuple['Evaluation', ...]:
        """The same for each of these seqio tasks instead, named NAME/TASK."""
        datasets = [(task.name, dataclasses.replace(self.dataset, mixture_or_task_name=task)) for task in tasks]
        return tuple(dataclasses.replace(self, dataset=one, name=f'{self.name}/{name}') for name, one in datasets)


def evaluate(
    params: Any, batches: Iterable[Any], eval_step: EvalStep, place: Callable[[Any], Any], name: str = 'eval'
) -> dict[str, float]:
    """`loss`, `cross_ent_loss` (without z-loss) and its `perplexity`, `accuracy`, `tokens` of `params`; if the sums
    have `bytes`, the bytes of the targets' text, also `bits_per_byte`, and if they have counts of the targets,
    `constant_loss`, in nats per token like `cross_ent_loss`. `eval_step(params, batch)` returns sums; `place` puts a
    batch on the devices.

    Raises UserError if there is no target token at all.
    """
    totals: dict[str, float] = {}
    counts: np.ndarray = np.zeros(1)
    batches = iter(batches)
    while chunk := list(itertools.islice(batches, 16)):
        # Starts some steps before it fetches their sums, so that the device does not wait for the host.
        pending = [eval_step(params, place(batch)) for batch in chunk]
        for found_sums in jax.device_get(pending):
            sums = dict(found_sums)
            counts = counts + np.asarray(sums.pop(TARGET_COUNTS, 0.0), np.float64)
            for key, value in sums.items():
                totals[key] = totals.get(key, 0.0) + float(value)
    if not totals.get('weights'):
        raise UserError(f'the {name} split has no target token; give a split with text, or EVAL_PERIOD = None')
    totals.setdefault(metrics.STEPS, 1.0)
    text_bytes = totals.pop('bytes', 0.0)
    found = metrics.means(totals)
    if text_bytes:
        found['bits_per_byte'] = (totals['loss'] - totals.get('z_loss', 0.0)) / math.log(2) / text_bytes
    if counts.any():
        found['constant_loss'] = entropy(counts)
    return {**found, 'perplexity': metrics.perplexity(found['cross_ent_loss'])}


def entropy(counts: np.ndarray) -> float:
    """Entropy in nats of the frequencies that these counts give."""
    shares = counts[counts > 0] / counts.sum()
    return float(-np.sum(shares * np.log(shares)))
