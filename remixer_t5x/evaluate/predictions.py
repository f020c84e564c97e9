"""Runs a model over any number of examples: generates texts, and scores given texts.

Examples are put into batches of similar length. Empty rows fill the last batch, and their results are dropped. A result
depends only on its example, so batch size, mesh and number of hosts do not change it; keys of decoders that sample are
folded from the example's number.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from remixer_t5x import ranges
from remixer_t5x.data import frames
from remixer_t5x.devices import compiler_options
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.evaluate import length_buckets
from remixer_t5x.models.decoding import Decoder, Greedy
from remixer_t5x.optim.train_step import Compiled

Ids = Sequence[int]
# Number of batches started before the results of the first are fetched, so that device and host work at the same time.
UNDER_WAY = 2


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Settings of predictions.

    `batch_size` counts examples over all devices; `feature_lengths` bounds `inputs` and `targets`, including the end
    token; `seed` is for decoders that sample.
    """

    batch_size: ranges.Count
    feature_lengths: Mapping[str, int]
    decoder: Decoder = Greedy()
    seed: ranges.Whole = 0

    def __post_init__(self) -> None:
        ranges.check_fields(self, batch_size='EVAL_BATCH_SIZE')


class Prediction(NamedTuple):
    """Generated ids up to and including the end token, best first or in the order sampled, and the score of each; a
    classifier's answers are texts, which have no ids.
    """

    ids: list[list[int]]
    scores: list[float]
    texts: list[str] | None = None

    def decoded(self, vocabulary: Any) -> list[str]:
        """The answers as texts."""
        return [vocabulary.decode(ids) for ids in self.ids] if self.texts is None else self.texts


class Predictor:
    """`predict`, `score`, `rank`, `encode` and `classify` of one model on one mesh, as far as the model has them; each
    is compiled once per shape and kept.

    `eos_id` ends a generated sequence. Raises UserError if the batch size does not divide over the mesh.
    """

    def __init__(self, model: Any, partitioner: Partitioner, settings: Decoding, eos_id: int = 1):
        partitioner.check_batch_size(settings.batch_size)
        self._partitioner, self._settings = partitioner, settings
        lengths = frames.text_lengths(settings.feature_lengths)
        self._longest, length = lengths['inputs'], lengths['targets']
        self._input = frames.input_array(model.frame)

        def generate(params, batch):
            keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(settings.seed), batch['number'])
            return model.generate(params, batch, length, eos_id=eos_id, decoder=settings.decoder, rng=keys)

        self._generate = self._compiled(generate, compiler_options.for_decoding())
        self._score = self._compiled(lambda params, batch: model.score(params, batch))
        self._judge = self._compiled(lambda params, batch: jnp.stack(model.judge(params, batch), axis=-1))
        self._encode = self._compiled(lambda params, batch: model.encode(params, batch['encoder_input_tokens']))
        self._classify = self._compiled(lambda params, batch: model.classify(params, batch['encoder_input_tokens']))
        self._outputs = len(getattr(model, 'labels', None) or ' ')
        self._rank = self._compiled(
            lambda params, batch: model.score_choices(params, batch[self._input], batch['choices'])
        )

    def _compiled(self, function: Callable[[Any, Any], Any], options: dict[str, Any] | None = None) -> Compiled:
        # Replicated, so that every host can read all results.
        jitted = jax.jit(function, out_shardings=self._partitioner.replicated, compiler_options=options)
        return Compiled(jitted, self._partitioner)

    def predict(self, params: Any, inputs: Sequence[Ids], first: int = 0) -> list[Prediction]:
        """The predictions for each of `inputs`, which are numbered from `first`."""
        found: list[Any] = [None] * len(inputs)
        for rows, decoded in self._run(self._generate, params, inputs, {}, first):
            tokens, scores = (np.asarray(part) for part in decoded)
            for row, example in enumerate(rows):
                ids = [_without_padding(sequence) for sequence in tokens[row]]
                found[example] = Prediction(ids, [float(score) for score in scores[row]])
        return found

    def score(self, params: Any, inputs: Sequence[Ids], targets: Sequence[Ids]) -> np.ndarray:
        """log p(targets | inputs) of each example, [examples] float32."""
        arrays = decoder_arrays(targets, frames.text_lengths(self._settings.feature_lengths)['targets'])
        return self._gathered(self._score, params, inputs, arrays, ())

    def judge(self, params: Any, inputs: Sequence[Ids], arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """What the model's `judge` gives for each example, [examples, 2] float32; `arrays` [examples, ...] are what it
        reads in addition to `inputs`, such as `decoder_arrays`.
        """
        return self._gathered(self._judge, params, inputs, arrays, (2,))

    def encode(self, params: Any, inputs: Sequence[Ids]) -> list[np.ndarray]:
        """The encoder's output at the tokens of each of `inputs`, [its length, embed] float32."""
        found: list[Any] = [None] * len(inputs)
        for rows, values in self._run(self._encode, params, inputs, {}):
            hidden = np.asarray(values, np.float32)
            for row, example in enumerate(rows):
                found[example] = hidden[row, : len(inputs[example])]
        return found

    def classify(self, params: Any, inputs: Sequence[Ids]) -> np.ndarray:
        """What a classifier gives for each of `inputs`: log p(label) of each label, or one number, [examples, outputs]
        float32.
        """
        return self._gathered(self._classify, params, inputs, {}, (self._outputs,))

    def rank(self, params: Any, inputs: Sequence[Ids], choices: Sequence[Ids]) -> np.ndarray:
        """log p(choice | inputs) of every choice for each example, [examples, choices] float32."""
        wide = padded(choices, max(map(len, choices)))
        arrays = {'choices': np.broadcast_to(wide, (len(inputs), *wide.shape))}
        return self._gathered(self._rank, params, inputs, arrays, (len(choices),))

    def _gathered(self, function, params, inputs, arrays, shape: tuple[int, ...]) -> np.ndarray:
        found: np.ndarray = np.zeros((len(inputs), *shape), np.float32)
        for rows, values in self._run(function, params, inputs, arrays):
            found[rows] = np.asarray(values)[: len(rows)]
        return found

    def _run(
        self, function: Compiled, params: Any, inputs: Sequence[Ids], arrays: Mapping[str, np.ndarray], first: int = 0
    ) -> Iterator[tuple[np.ndarray, Any]]:
        """(examples, results of their batch) until all of `inputs`, with their rows of `arrays`, are done."""
        lengths = [len(ids) for ids in inputs]
        pending: collections.deque = collections.deque()
        for rows in length_buckets.plan(lengths, self._settings.batch_size, self._longest):
            batch = {
                self._input: padded([inputs[row] for row in rows.examples], rows.length),
                'number': (rows.examples + first).astype(np.int32),
                **{name: array[rows.examples] for name, array in arrays.items()},
            }
            pending.append((rows.examples, function(params, self._place(batch))))
            if len(pending) > UNDER_WAY:
                yield pending.popleft()
        yield from pending

    def _place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """The batch on the devices, filled up with empty rows. Every host has all rows and passes its own part."""
        size = self._settings.batch_size
        index, count = self._partitioner.data_shard()
        own = slice(index * (size // count), (index + 1) * (size // count))
        filled = {
            name: np.pad(array, [(0, size - len(array))] + [(0, 0)] * (array.ndim - 1))[own]
            for name, array in batch.items()
        }
        return self._partitioner.shard_batch(filled)


def decoder_arrays(targets: Sequence[Ids], length: int) -> dict[str, np.ndarray]:
    """The decoder's arrays of a batch, [rows, length] int32 each: it reads the targets one token later."""
    wide = padded(targets, length)
    return {
        'decoder_input_tokens': np.pad(wide, ((0, 0), (1, 0)))[:, :-1],
        'decoder_target_tokens': wide,
        'decoder_loss_weights': (wide > 0).astype(np.int32),
    }


def padded(rows: Sequence[Ids], length: int) -> np.ndarray:
    """Rows of ids as [rows, length] int32, with 0 after the end of each."""
    filled: np.ndarray = np.zeros((len(rows), length), np.int32)
    for row, ids in enumerate(rows):
        filled[row, : len(ids)] = ids
    return filled


def _without_padding(tokens: np.ndarray) -> list[int]:
    """The ids up to the last token that is not padding; a model may generate id 0 before its end token."""
    used = np.flatnonzero(tokens)
    return tokens[: used[-1] + 1].tolist() if len(used) else []
