"""What the pictures of a run need of its model: ids and pieces of texts, an answer, and its first parameters."""

from typing import Any

import jax
import numpy as np

from remixer_t5x.api import saved_models
from remixer_t5x.api.trained_model import TrainedModel
from remixer_t5x.cli.data import vocab
from remixer_t5x.config import loading
from remixer_t5x.devices import compiler_options
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate.text_inference import Texts
from remixer_t5x.models.generating import Generating

INITIAL = 'INITIAL_CHECKPOINT_PATH'


def encode(trained: TrainedModel, text: str) -> np.ndarray:
    """Ids of the text, cut to the longest input, with the end token; [length] int32."""
    ids, _ = Texts(trained.vocabulary, trained.lengths['inputs']).encode(text, 0)
    return np.asarray(ids, np.int32)


def answer(trained: TrainedModel, inputs: np.ndarray, most: int) -> np.ndarray:
    """The greedy answer of the model to the inputs, from one to `most` tokens; [length] int32."""
    model = trained.model
    assert isinstance(model, Generating)
    eos = 1 if trained.vocabulary.eos_id is None else int(trained.vocabulary.eos_id)
    length = min(most, trained.lengths['targets'])
    predict = jax.jit(
        lambda params, ids: model.predict(params, {'encoder_input_tokens': ids}, length, eos),
        compiler_options=compiler_options.for_decoding(),
    )
    made = np.asarray(predict(trained.params, inputs[None]))[0]
    used = np.flatnonzero(made)
    return made[: used[-1] + 1] if len(used) else np.asarray([eos], np.int32)


def pieces(trained: TrainedModel, ids: np.ndarray) -> list[str]:
    """The piece of each id."""
    return [vocab.piece(trained.vocabulary, int(token)) for token in ids]


def initial_params(trained: TrainedModel) -> Any:
    """The parameters that the run began with; None for random parameters, or if they are not there any more."""
    with saved_models.saved_gin(trained.source) as gin_file:
        (initial,) = loading.values(loading.Given([gin_file], defaults={INITIAL: None}), INITIAL)
    if not initial:
        return None
    try:
        return saved_models.restore(initial, trained.model, trained.vocabulary, trained.partitioner)
    except UserError:
        return None
