"""The model of a run as its pictures need it: with the parameters it began with, and the pieces of a text."""

import dataclasses
from typing import Any

import jax
import numpy as np

from remixer_t5x.api import saved_models
from remixer_t5x.api.trained_model import TrainedModel
from remixer_t5x.cli.data import vocab
from remixer_t5x.config import resolved
from remixer_t5x.errors import UserError

INITIAL = 'INITIAL_CHECKPOINT_PATH'


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
        """The greedy answer of the model to the inputs, from one to `most` tokens; [length] int32."""
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
    trained = saved_models.load(folder)
    return Trained(
        trained.model, trained.params, trained.vocabulary, dict(trained.lengths), trained.source, _before(trained)
    )


def _before(trained: TrainedModel) -> Any:
    initial = resolved.macro(INITIAL) if resolved.has_macro(INITIAL) else None
    if not initial:
        return None
    try:
        return saved_models.restore(initial, trained.model, trained.vocabulary, trained.partitioner)
    except UserError:
        return None
