"""The data of a run: prepared once, before anything is saved, and then handed to what reads it."""

from collections.abc import Mapping

import jax
import numpy as np

from remixer_t5x.data import pipeline, stream, task_batches
from remixer_t5x.data.prefetch import Position, Prefetcher
from remixer_t5x.devices import collectives
from remixer_t5x.evaluate.task_evaluation import TaskEvaluator
from remixer_t5x.train.settings import Run

# A position is exact at any step; a step between two captures is restored by drawing the batches since the capture.
MOST_BATCHES_DRAWN_AGAIN = 100


class RunData:
    """The task that a run trains on and what it is evaluated on.

    Making it does what the tasks need: it parses text and trains a vocabulary, unless the cache has them. Raises
    UserError if data cannot be read or a vocabulary does not fit the model.

    Attributes:
        vocabulary: of the targets.
        record: what checkpoints say of the data, in JSON, compared by `manager.check_compatible`.
        evaluator: judges the model by the tasks' metrics; None for a run without tasks.
    """

    def __init__(self, run: Run):
        # Done here, before the first TensorFlow op.
        stream.hide_accelerators()
        learner, model = run.learner, run.learner.model
        prepared = pipeline.prepare(run.dataset, model.vocab_size)
        self._dataset, self.vocabulary = prepared.config, prepared.vocabulary
        self.record = {
            **prepared.record,
            'batch_size': run.dataset.batch_size,
            'pack': run.dataset.pack,
            'feature_lengths': dict(run.dataset.task_feature_lengths),
            'seed': run.dataset.seed,
            'hosts': jax.process_count(),
        }
        self._partitioner, self._held_out = learner.partitioner, run.evaluation
        self._capture_period = min(run.periods.checkpoint_period, MOST_BATCHES_DRAWN_AGAIN)
        records = {'training': prepared.record}
        if run.evaluation is not None and run.tasks is None:
            records['evaluation'] = pipeline.prepare(run.evaluation.dataset, model.vocab_size).record
        collectives.check_same(
            {
                f'the {part} for {use}': record[part]
                for use, record in records.items()
                for part in ('vocabulary', 'data')
            }
        )
        # It compares the examples that it reads.
        self.evaluator = TaskEvaluator(run.tasks, model, learner.partitioner) if run.tasks else None
        # A train step on the CPU needs most of the cores.
        self._threads = task_batches.threads_beside(jax.default_backend())

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """A batch of this process's rows on the devices."""
        return self._partitioner.shard_batch(batch)

    def batches(self, start: Position) -> Prefetcher:
        """The batches to train on, on the devices, from `start` on; a context manager."""
        dataset = pipeline.resumed(self._dataset, start.batches)
        share = self._partitioner.data_shard()
        source = task_batches.TrainBatches(dataset, *share, self._threads, len(start.states))
        return Prefetcher(source, self.place, start, capture_period=self._capture_period)

    def held_out(self) -> dict[str, task_batches.EvalBatches]:
        """The batches for the held-out loss by the names of their records: of the whole split, and of each task."""
        whole = self._held_out
        if whole is None:
            return {}
        every = whole.of_tasks(self.evaluator.seqio_tasks) if self.evaluator else (whole, *whole.by_task())
        return {one.name: one.batches(self._partitioner.data_shard(), self._threads) for one in every}
