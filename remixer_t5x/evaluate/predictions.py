"""Runs a model over any number of examples: generates, scores, ranks, encodes and classifies texts.

Examples of similar length share a batch, in few shapes, because each shape is compiled. Empty rows fill up the last
batch. A result depends only on its example, not on batch size, mesh or number of hosts; keys for sampling are folded
from the index of the example.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from remixer_t5x import ranges
from remixer_t5x.data import batch_formats, task_vocabulary
from remixer_t5x.devices import compiler_options
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.models.decoding import Decoder, Greedy, RowDecoder
from remixer_t5x.models.stop_strings import StopStrings
from remixer_t5x.optim.train_step import CompiledStep

Ids = Sequence[int]
# Number of batches in flight, so that device and host work in parallel.
MAX_PENDING = 2
SHORTEST = 32
# Compiling a shape takes about as long as running this many batches.
FEWEST_BATCHES = 4
# Number of tokens per call when streaming; each call casts the parameters once.
STREAMED_TOKENS = 8


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Settings of predictions.

    `batch_size` counts examples over all devices; `feature_lengths` bounds `inputs` and `targets`, including the end
    token; `seed` is for decoders that sample; generation stops at the first of `stop_strings` (a string or several).
    """

    batch_size: ranges.Count
    feature_lengths: Mapping[str, int]
    decoder: Decoder = Greedy()
    seed: ranges.Whole = 0
    stop_strings: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        ranges.check_fields(self, batch_size='EVAL_BATCH_SIZE')


class Prediction(NamedTuple):
    """The answers to one example, the best first or in the order sampled, and the score of each.

    `ids` end with the end token. A classifier's answers are `texts`, which have no ids.
    """

    ids: list[list[int]]
    scores: list[float]
    texts: list[str] | None = None

    def decoded(self, vocabulary: Any) -> list[str]:
        """Returns the answers as texts."""
        return [vocabulary.decode(ids) for ids in self.ids] if self.texts is None else self.texts


class Predictor:
    """Runs the inference functions of the model on one mesh; each is compiled once per shape.

    `vocabulary` has the end token, which is 1 without a vocabulary, and the text of stop strings. Raises UserError if
    the batch size does not divide over the mesh.
    """

    def __init__(self, model: Any, partitioner: Partitioner, settings: Decoding, vocabulary: Any = None):
        partitioner.check_batch_size(settings.batch_size)
        self._model, self._partitioner, self._settings = model, partitioner, settings
        lengths = batch_formats.text_lengths(settings.feature_lengths)
        self._longest, self._target_length = lengths['inputs'], lengths['targets']
        self._input = batch_formats.input_array_name(model.model_type)

        decoder: Any = settings.decoder
        eos_id = task_vocabulary.end_id(vocabulary)
        stop_strings = compile_stop_strings(settings.stop_strings, vocabulary)

        def keys(batch) -> jax.Array:
            return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(settings.seed), batch['number'])

        def generate(params, batch):
            fields = {name: array for name, array in batch.items() if name not in (self._input, 'number')}
            chosen = dataclasses.replace(decoder, **fields) if fields else decoder
            return model.generate(params, batch, self._target_length, eos_id, chosen, keys(batch), stop_strings)

        def continue_rows(params, batch, rows, limit):
            generation = model.prepare_generation(params, batch, self._target_length, eos_id, stop_strings)
            return decoder.advance(generation, decoder.start(generation) if rows is None else rows, limit, keys(batch))

        self._generate = self._jit(generate, compiler_options.decoding_options())
        self._continue_rows = self._jit(continue_rows, compiler_options.decoding_options())
        self._score = self._jit(lambda params, batch: model.score(params, batch))
        self._score_and_match = self._jit(
            lambda params, batch: jnp.stack(model.score_and_match(params, batch), axis=-1)
        )
        self._encode = self._jit(lambda params, batch: model.encode(params, batch['encoder_input_tokens']))
        self._token_logits = self._jit(lambda params, batch: model.token_logits(params, batch['encoder_input_tokens']))
        self._embed = self._jit(lambda params, batch: model.embed(params, batch['encoder_input_tokens']))
        self._classify = self._jit(lambda params, batch: model.classify(params, batch['encoder_input_tokens']))
        self._outputs = len(getattr(model, 'labels', None) or ' ')
        self._rank = self._jit(lambda params, batch: model.score_choices(params, batch[self._input], batch['choices']))

    def _jit(self, function: Callable[..., Any], options: dict[str, Any] | None = None) -> CompiledStep:
        # Replicated, so that every host can read all results.
        jitted = jax.jit(function, out_shardings=self._partitioner.replicated, compiler_options=options)
        return CompiledStep(jitted, self._partitioner)

    def predict(
        self, params: Any, inputs: Sequence[Ids], first: int = 0, arrays: Mapping[str, np.ndarray] | None = None
    ) -> list[Prediction]:
        """Generates answers to each of `inputs`, whose indices begin at `first`.

        `arrays` [examples] replace fields of the decoder, or the indices (`number`), with a value for each example.
        """
        predictions: list[Any] = [None] * len(inputs)
        for rows, decoded in self._run(self._generate, params, inputs, arrays or {}, first):
            tokens, scores = (np.asarray(part) for part in decoded)
            for row, example in enumerate(rows):
                ids = [_without_padding(sequence) for sequence in tokens[row]]
                predictions[example] = Prediction(ids, [float(score) for score in scores[row]])
        return predictions

    def stream(self, params: Any, ids: Ids) -> Iterator[list[int]]:
        """Generates an answer to one input; yields its ids so far, every STREAMED_TOKENS tokens and at the end."""
        if not isinstance(self._settings.decoder, RowDecoder):
            raise UserError(f'decoder must be Greedy() or Sampling() to stream, got {self._settings.decoder}')
        length = bucket_length(len(ids), self._longest)
        batch = self._place({self._input: pad_ids([ids], length), 'number': np.zeros(1, np.int32)})
        rows, limit, is_done = None, 0, False
        while not is_done:
            limit += STREAMED_TOKENS
            rows = self._continue_rows(params, batch, rows, np.int32(min(limit, self._target_length)))
            is_done = bool(rows.ended[0]) or limit >= self._target_length
            yield _without_padding(np.asarray(rows.tokens[0]))

    def score(self, params: Any, inputs: Sequence[Ids], targets: Sequence[Ids]) -> np.ndarray:
        """Returns log p(targets | inputs) of each example, [examples] float32."""
        arrays = decoder_arrays(targets, batch_formats.text_lengths(self._settings.feature_lengths)['targets'])
        return self._gather(self._score, params, inputs, arrays, ())

    def score_and_match(self, params: Any, inputs: Sequence[Ids], arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the output of the model's `score_and_match` for each example, [examples, 2] float32.

        `arrays` [examples, ...] are its arguments in addition to `inputs`, such as `decoder_arrays`.
        """
        return self._gather(self._score_and_match, params, inputs, arrays, (2,))

    def encode(self, params: Any, inputs: Sequence[Ids]) -> list[np.ndarray]:
        """Returns the encoder's output at the tokens of each of `inputs`, [its length, embed] float32."""
        return self._gather_tokens(self._encode, params, inputs)

    def token_logits(self, params: Any, inputs: Sequence[Ids]) -> list[np.ndarray]:
        """Returns the outputs of a head at the tokens of each of `inputs`, [its length, outputs] float32."""
        return self._gather_tokens(self._token_logits, params, inputs)

    def embed(self, params: Any, inputs: Sequence[Ids]) -> np.ndarray:
        """Returns the embedding of each of `inputs`, [examples, embed] float32."""
        return self._gather(self._embed, params, inputs, {}, (self._model.module.embed_dim,))

    def classify(self, params: Any, inputs: Sequence[Ids]) -> np.ndarray:
        """Returns log p(label) of each label, or one number, for each of `inputs`, [examples, outputs] float32."""
        return self._gather(self._classify, params, inputs, {}, (self._outputs,))

    def predict_labels(
        self, params: Any, inputs: Sequence[Ids], task_labels: Sequence[str] | None = None
    ) -> list[Prediction]:
        """Predicts a classifier's labels of each text, most likely first, with their log-likelihoods.

        `task_labels` are the labels to choose from, None for all. A regression predicts a number, as text and as score.
        """
        labels, outputs = self._model.labels, self.classify(params, inputs)
        if labels is None:
            return [Prediction([], [float(value)], [f'{value:.6g}']) for value in outputs[:, 0]]
        chosen = self._label_indices(labels if task_labels is None else task_labels)
        names, scores = [labels[index] for index in chosen], outputs[:, chosen]
        order = np.argsort(-scores, axis=1, kind='stable')
        return [
            Prediction([], [float(row[index]) for index in best], [names[index] for index in best])
            for row, best in zip(scores, order, strict=True)
        ]

    def score_labels(self, params: Any, inputs: Sequence[Ids], targets: Sequence[str]) -> list[float]:
        """Returns log p(target) of each text. Raises UserError for a regression, or a target that is not a label."""
        if self._model.labels is None:
            raise UserError('LABELS must be set for tasks that are scored by likelihood, got None')
        return self.classify(params, inputs)[np.arange(len(inputs)), self._label_indices(targets)].tolist()

    def _label_indices(self, names: Sequence[str]) -> list[int]:
        labels = self._model.labels
        for name in names:
            if name not in labels:
                raise UserError(f'LABELS must include the target {name!r:.60} of the task, got {tuple(labels)}')
        return [labels.index(name) for name in names]

    def rank(self, params: Any, inputs: Sequence[Ids], choices: Sequence[Ids]) -> np.ndarray:
        """Returns log p(choice | inputs) of every choice for each example, [examples, choices] float32."""
        ids = pad_ids(choices, max(map(len, choices)))
        arrays = {'choices': np.broadcast_to(ids, (len(inputs), *ids.shape))}
        return self._gather(self._rank, params, inputs, arrays, (len(choices),))

    def _gather_tokens(self, function: CompiledStep, params: Any, inputs: Sequence[Ids]) -> list[np.ndarray]:
        outputs: list[Any] = [None] * len(inputs)
        for rows, values in self._run(function, params, inputs, {}):
            values = np.asarray(values, np.float32)
            for row, example in enumerate(rows):
                outputs[example] = values[row, : len(inputs[example])]
        return outputs

    def _gather(self, function, params, inputs, arrays, shape: tuple[int, ...]) -> np.ndarray:
        results: np.ndarray = np.zeros((len(inputs), *shape), np.float32)
        for rows, values in self._run(function, params, inputs, arrays):
            results[rows] = np.asarray(values)[: len(rows)]
        return results

    def _run(
        self,
        function: CompiledStep,
        params: Any,
        inputs: Sequence[Ids],
        arrays: Mapping[str, np.ndarray],
        first: int = 0,
    ) -> Iterator[tuple[np.ndarray, Any]]:
        """Yields (examples, results of their batch) for all of `inputs` with their rows of `arrays`."""
        lengths = [len(ids) for ids in inputs]
        pending: collections.deque = collections.deque()
        for rows in plan_batches(lengths, self._settings.batch_size, self._longest):
            batch = {
                self._input: pad_ids([inputs[row] for row in rows.examples], rows.length),
                'number': (rows.examples + first).astype(np.int32),
                **{name: array[rows.examples] for name, array in arrays.items()},
            }
            pending.append((rows.examples, function(params, self._place(batch))))
            if len(pending) > MAX_PENDING:
                yield pending.popleft()
        yield from pending

    def _place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Puts the batch on the devices, with empty rows at its end. Every host passes its share of the rows."""
        size = self._settings.batch_size
        index, count = self._partitioner.data_shard()
        share = slice(index * (size // count), (index + 1) * (size // count))
        filled = {
            name: np.pad(array, [(0, size - len(array))] + [(0, 0)] * (array.ndim - 1))[share]
            for name, array in batch.items()
        }
        return self._partitioner.shard_batch(filled)


def compile_stop_strings(stop_strings: str | Sequence[str], vocabulary: Any) -> StopStrings | None:
    """Returns the automaton of one or several stop strings; None for none."""
    texts = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    return StopStrings.compile(texts, task_vocabulary.token_texts(vocabulary)) if texts else None


def decoder_arrays(targets: Sequence[Ids], length: int) -> dict[str, np.ndarray]:
    """Returns the decoder's arrays of a batch, [rows, length] int32 each; its inputs are the targets shifted by one."""
    ids = pad_ids(targets, length)
    return {
        'decoder_input_tokens': np.pad(ids, ((0, 0), (1, 0)))[:, :-1],
        'decoder_target_tokens': ids,
        'decoder_loss_weights': (ids > 0).astype(np.int32),
    }


def pad_ids(rows: Sequence[Ids], length: int) -> np.ndarray:
    """Pads rows of ids with 0 to [rows, length] int32."""
    filled: np.ndarray = np.zeros((len(rows), length), np.int32)
    for row, ids in enumerate(rows):
        filled[row, : len(ids)] = ids
    return filled


def _without_padding(tokens: np.ndarray) -> list[int]:
    """Returns the ids up to the last one that is not padding; a model may generate id 0 before its end token."""
    used = np.flatnonzero(tokens)
    return tokens[: used[-1] + 1].tolist() if len(used) else []


class BatchRows(NamedTuple):
    """The indices of a batch's examples, and the length to which they are padded."""

    examples: np.ndarray
    length: int


def bucket_length(length: int, longest: int) -> int:
    """Returns the next power of two, at least SHORTEST and at most `longest`."""
    size = min(SHORTEST, longest)
    while size < min(length, longest):
        size *= 2
    return min(size, longest)


def plan_batches(lengths: Sequence[int], batch_size: int, longest: int) -> list[BatchRows]:
    """Groups the examples into batches, the longest first, so that a lack of memory shows at the start.

    Args:
        lengths: number of tokens of each example, at most `longest`.
        batch_size: rows of a batch; the last batch may have fewer examples.
        longest: the largest shape.
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind='stable')
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    sizes = [bucket_length(lengths[int(rows[0])], longest) for rows in batches]
    # Batch sizes with few batches are merged into the next larger size. `sizes` are descending.
    for size in sorted(set(sizes))[:-1]:
        if sizes.count(size) < FEWEST_BATCHES:
            larger = min(other for other in sizes if other > size)
            sizes = [larger if other == size else other for other in sizes]
    return list(map(BatchRows, batches, sizes))


def is_classifier(model: Any) -> bool:
    """Returns whether the model predicts labels or numbers instead of text."""
    return callable(getattr(model, 'classify', None))
