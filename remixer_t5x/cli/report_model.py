"""The model of a run, made again from the configuration in its MODEL_DIR (configs/runs/report_model.gin)."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import numpy as np

from remixer_t5x.checkpoints import saved_params, watch
from remixer_t5x.cli import vocab
from remixer_t5x.config import loading
from remixer_t5x.data import pipeline
from remixer_t5x.devices import partition
from remixer_t5x.errors import UserError
from remixer_t5x.evaluation import best
from remixer_t5x.run_folder import model_dir


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run's configuration makes: its model, the data it was trained on, and INITIAL_CHECKPOINT_PATH."""

    model: Any
    dataset: pipeline.DatasetConfig
    initial: str | None


def parts(model: Any, dataset: pipeline.DatasetConfig, initial: str | None = None) -> Parts:
    """Called with what gin binds to it."""
    return Parts(model, dataset, initial)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model with the parameters of its newest checkpoint, and its vocabulary.

    `lengths` are those it was trained on; `before` are the parameters it began with, None where it began with random
    ones or where they are not here any more.
    """

    model: Any
    params: Any
    vocabulary: Any
    lengths: dict[str, int]
    checkpoint: str
    before: Any = None

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text, cut to the longest input, with the end token; [length] int32."""
        end = [] if self.vocabulary.eos_id is None else [int(self.vocabulary.eos_id)]
        ids = [int(token) for token in self.vocabulary.encode(text)][: self.lengths['inputs'] - len(end)]
        return np.asarray(ids + end, np.int32)

    def answer(self, inputs: np.ndarray, most: int) -> np.ndarray:
        """What the model writes for the inputs, greedily, at most so many tokens and at least one; [length] int32."""
        eos = 1 if self.vocabulary.eos_id is None else int(self.vocabulary.eos_id)
        length = min(most, self.lengths['targets'])
        predict = jax.jit(lambda params, ids: self.model.predict(params, {'encoder_input_tokens': ids}, length, eos))
        made = np.asarray(predict(self.params, inputs[None]))[0]
        used = np.flatnonzero(made)
        return made[: used[-1] + 1] if len(used) else np.asarray([eos], np.int32)

    def pieces(self, ids: np.ndarray) -> list[str]:
        """The piece of each id."""
        return [vocab.piece(self.vocabulary, int(token)) for token in ids]


def load(folder: str) -> Trained:
    """The newest checkpoint of the run in `folder`, or the best of a task where no other is left.

    gin's configuration is replaced. Raises UserError where something is missing: a module, data, the checkpoint.
    """
    config = os.path.join(folder, model_dir.CONFIG)
    made = loading.build(f'{__name__}.parts', [config], base=['runs/report_model.gin'])
    vocabulary = pipeline.vocabulary(made.dataset)
    # This machine's devices, which need not be those of the run.
    partitioner = partition.Partitioner()
    lengths = dict(made.dataset.task_feature_lengths)
    shapes = {'encoder_input_tokens': (1, lengths['inputs']), 'decoder_target_tokens': (1, lengths['targets'])}
    abstract = saved_params.abstract_params(made.model, shapes, partitioner)

    def restore(path: str) -> Any:
        return saved_params.restore_params(path, abstract, pipeline.vocabulary_record(vocabulary), watch.SETTING)

    checkpoint = _newest(folder)
    return Trained(made.model, restore(checkpoint), vocabulary, lengths, checkpoint, _before(made.initial, restore))


def _newest(folder: str) -> str:
    try:
        return str(saved_params.find_step(folder, watch.SETTING))
    except UserError:
        kept = best.kept_in(folder)
        if not kept:
            raise
        return str(next(iter(kept.values()))['path'])


def _before(initial: str | None, restore: Any) -> Any:
    if not initial:
        return None
    try:
        return restore(initial)
    except UserError:
        return None
