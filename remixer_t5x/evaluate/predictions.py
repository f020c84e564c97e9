"""Runs a model on any number of examples to generate, score, rank, encode or classify texts.

Examples of similar length share a batch. Batches have only a few shapes, because each shape requires a compilation.
The last batch is padded with copies of its last example. The prediction for an example does not depend on the batch
size, the mesh or the number of hosts; the sampling key is derived from the index of the example.
"""

import collections
import dataclasses
import re
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
from remixer_t5x.models import interface
from remixer_t5x.models.decoding import Decoder, Greedy, RowDecoder, StopStrings
from remixer_t5x.optim.train_step import CompiledStep

TokenIds = Sequence[int]
# Maximum number of batches in flight. More than one lets the device and the host work in parallel.
MAX_PENDING = 2
# Minimum padded length of a batch.
MIN_PADDED_LENGTH = 32
# Minimum number of batches per shape. Compiling a shape takes about as long as running this number of batches.
MIN_BATCHES_PER_SHAPE = 4
# Number of tokens to generate per call when streaming. More tokens per call save time, because each call casts all
# parameters.
STREAMED_TOKENS = 8


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Settings for generating predictions.

    `batch_size` is the number of examples in a batch over all devices. `feature_lengths` limits the lengths of `inputs`
    and `targets`, including the end token. `seed` is used for sampling. Generation stops at the first match of a string
    in `stop_strings`, a string or a sequence of strings.
    """

    batch_size: ranges.Count
    feature_lengths: Mapping[str, int]
    decoder: Decoder = Greedy()
    seed: ranges.NonNegativeInt = 0
    stop_strings: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        ranges.check_fields(self, batch_size='EVAL_BATCH_SIZE')

    def build_record(self) -> dict[str, Any]:
        """Returns the settings that affect answers: the `decoder` with stop strings, `lengths`, and sampling `seed`."""
        name = format_decoder_name(self.decoder) + (f' until {self.stop_strings!r}' if self.stop_strings else '')
        seed = {} if getattr(self.decoder, 'is_deterministic', False) else {'seed': self.seed}
        return {'decoder': name, 'lengths': dict(self.feature_lengths), **seed}


def format_decoder_name(decoder: Any) -> str:
    """Returns a string that identifies a decoder and its settings. The string is the same in every process."""
    # Remove the addresses of functions and of objects without a repr, such as logits processors.
    return re.sub(r'<(?:function )?(\S+)(?: object)? at 0x[0-9a-f]+>', r'\1', repr(decoder))


class Prediction(NamedTuple):
    """The answers to one example and their scores, sorted by score or, with sampling, in the order of generation.

    A score is the log-likelihood of the answer, summed over its tokens. Beam search divides it by the length penalty;
    the score of a regression model is the predicted number; for other models with a head, see `head_predictions`. The
    `ids` of a complete answer end with the end token. A classifier sets `texts` instead of `ids`.
    """

    ids: list[list[int]]
    scores: list[float]
    texts: list[str] | None = None

    def decode_texts(self, vocabulary: Any) -> list[str]:
        """Returns the text of each answer."""
        return [vocabulary.decode(ids) for ids in self.ids] if self.texts is None else self.texts


class Predictor:
    """Runs the inference functions of a model on a mesh. Each function is compiled once per batch shape.

    `vocabulary` defines the end token and is used to match stop strings. If `vocabulary` is None, the end token has id
    1. `before_batch` is called before each batch, unless it is None. `shortest` is the minimum padded length of inputs.
    Raises UserError if the batch size is not divisible by the number of batch shards.
    """

    def __init__(self, model: Any, partitioner: Partitioner, settings: Decoding, vocabulary: Any = None):
        partitioner.check_batch_size(settings.batch_size)
        self._model, self._partitioner, self._settings = model, partitioner, settings
        lengths = batch_formats.get_max_inference_lengths(settings.feature_lengths)
        self._longest, self._target_length = lengths['inputs'], lengths['targets']
        self.shortest = self._longest if interface.requires_fixed_length(model) else MIN_PADDED_LENGTH
        self._input = batch_formats.get_input_array_name(model.model_type)
        self.before_batch: Callable[[], None] | None = None

        decoder: Any = settings.decoder
        eos_id = task_vocabulary.get_end_id(vocabulary)
        stop_strings = compile_stop_strings(settings.stop_strings, vocabulary)

        def make_sampling_keys(batch) -> jax.Array:
            return jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(batch['seed']), batch['number'])

        def generate(params, batch):
            fields = {name: array for name, array in batch.items() if name not in (self._input, 'number', 'seed')}
            chosen = dataclasses.replace(decoder, **fields) if fields else decoder
            return model.generate(
                params, batch, self._target_length, eos_id, chosen, make_sampling_keys(batch), stop_strings
            )

        def continue_rows(params, batch, rows, limit):
            generation = model.prepare_generation(params, batch, self._target_length, eos_id, stop_strings)
            rows = decoder.create_decoding_state(generation) if rows is None else rows
            return decoder.generate_until(generation, rows, limit, make_sampling_keys(batch))

        self._generate = self._jit_replicated(generate, compiler_options.get_decoding_options())
        self._continue_rows = self._jit_replicated(continue_rows, compiler_options.get_decoding_options())
        self._score = self._jit_replicated(lambda params, batch: model.score(params, batch))
        self._score_and_match = self._jit_replicated(
            lambda params, batch: jnp.stack(model.score_and_match_targets(params, batch), axis=-1)
        )
        self._encode = self._jit_replicated(lambda params, batch: model.encode(params, batch['encoder_input_tokens']))
        self._token_logits = self._jit_replicated(
            lambda params, batch: model.compute_head_outputs(params, batch['encoder_input_tokens'])
        )
        self._embed = self._jit_replicated(lambda params, batch: model.embed(params, batch['encoder_input_tokens']))
        self._classify = self._jit_replicated(
            lambda params, batch: model.classify(params, batch['encoder_input_tokens'])
        )
        self._rank = self._jit_replicated(
            lambda params, batch: model.score_choices(params, batch[self._input], batch['choices'])
        )

    def _jit_replicated(self, function: Callable[..., Any], options: dict[str, Any] | None = None) -> CompiledStep:
        # Replicate the outputs, so that every host can read all results.
        jitted = jax.jit(function, out_shardings=self._partitioner.replicated_sharding, compiler_options=options)
        return CompiledStep(jitted, self._partitioner)

    def predict(
        self,
        params: Any,
        inputs: Sequence[TokenIds],
        first: int = 0,
        arrays: Mapping[str, np.ndarray] | None = None,
        seed: int | None = None,
    ) -> list[Prediction]:
        """Generates answers to each of `inputs`. `first` is the index of the first example.

        `arrays` maps names to [examples] arrays that override fields of the decoder or the example indices (`number`).
        `seed` overrides `Decoding.seed`.
        """
        predictions: list[Any] = [None] * len(inputs)
        arrays = {'seed': self._make_row_seeds(len(inputs), seed), **(arrays or {})}
        for rows, decoded in self._run_batches(self._generate, params, inputs, arrays, first):
            tokens, scores = (np.asarray(part) for part in decoded)
            for row, example in enumerate(rows):
                ids = [_strip_padding(sequence) for sequence in tokens[row]]
                predictions[example] = Prediction(ids, [float(score) for score in scores[row]])
        return predictions

    def stream_predictions(self, params: Any, ids: TokenIds, seed: int | None = None) -> Iterator[list[int]]:
        """Generates an answer to one input. Yields all ids so far, every STREAMED_TOKENS tokens and at the end.

        `seed` overrides `Decoding.seed`.
        """
        if not isinstance(self._settings.decoder, RowDecoder):
            name = format_decoder_name(self._settings.decoder)
            raise UserError(f'decoder must be Greedy() or Sampling() to stream, got {name}')
        length = round_up_length(len(ids), self._longest, self.shortest)
        batch = self._transfer_batch(
            {
                self._input: pad_ids([ids], length),
                'number': np.zeros(1, np.int32),
                'seed': self._make_row_seeds(1, seed),
            }
        )
        rows, limit, is_done = None, 0, False
        while not is_done:
            limit += STREAMED_TOKENS
            rows = self._continue_rows(params, batch, rows, np.int32(min(limit, self._target_length)))
            is_done = bool(rows.finished[0]) or limit >= self._target_length
            yield _strip_padding(np.asarray(rows.tokens[0]))

    def score(self, params: Any, inputs: Sequence[TokenIds], targets: Sequence[TokenIds]) -> np.ndarray:
        """Returns log p(targets | inputs) of each example as an [examples] float32 array."""
        arrays = make_decoder_arrays(
            targets, batch_formats.get_max_inference_lengths(self._settings.feature_lengths)['targets']
        )
        return self._collect_outputs(self._score, params, inputs, arrays, ())

    def score_and_match(self, params: Any, inputs: Sequence[TokenIds], arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Runs the model's `score_and_match_targets`, and returns the outputs as an [examples, 2] float32 array.

        `arrays` contains [examples, ...] arrays to add to the batch, such as those returned by `make_decoder_arrays`.
        """
        return self._collect_outputs(self._score_and_match, params, inputs, arrays, (2,))

    def encode(self, params: Any, inputs: Sequence[TokenIds]) -> list[np.ndarray]:
        """Returns the encoder outputs for each input as an [input length, embed] float32 array."""
        return self._collect_token_outputs(self._encode, params, inputs)

    def compute_token_logits(self, params: Any, inputs: Sequence[TokenIds]) -> list[np.ndarray]:
        """Returns the head's outputs for the tokens of each input as an [input length, outputs] float32 array."""
        return self._collect_token_outputs(self._token_logits, params, inputs)

    def embed(self, params: Any, inputs: Sequence[TokenIds]) -> np.ndarray:
        """Returns the embeddings of `inputs` as an [examples, embed] float32 array."""
        return self._collect_outputs(self._embed, params, inputs, {}, (self._model.module.embed_dim,))

    def classify(self, params: Any, inputs: Sequence[TokenIds]) -> np.ndarray:
        """Returns log p(label) for each input and label, or the regression outputs, as an [examples, outputs] array."""
        return self._collect_outputs(self._classify, params, inputs, {}, (len(self._model.labels or ' '),))

    def score_choices(self, params: Any, inputs: Sequence[TokenIds], choices: Sequence[TokenIds]) -> np.ndarray:
        """Returns log p(choice | inputs) for each example and choice as an [examples, choices] float32 array."""
        ids = pad_ids(choices, max(map(len, choices)))
        arrays = {'choices': np.broadcast_to(ids, (len(inputs), *ids.shape))}
        return self._collect_outputs(self._rank, params, inputs, arrays, (len(choices),))

    def _collect_token_outputs(
        self, function: CompiledStep, params: Any, inputs: Sequence[TokenIds]
    ) -> list[np.ndarray]:
        outputs: list[Any] = [None] * len(inputs)
        for rows, values in self._run_batches(function, params, inputs, {}):
            values = np.asarray(values, np.float32)
            for row, example in enumerate(rows):
                outputs[example] = values[row, : len(inputs[example])]
        return outputs

    def _collect_outputs(self, function, params, inputs, arrays, shape: tuple[int, ...]) -> np.ndarray:
        results: np.ndarray = np.zeros((len(inputs), *shape), np.float32)
        for rows, values in self._run_batches(function, params, inputs, arrays):
            results[rows] = np.asarray(values)[: len(rows)]
        return results

    def _run_batches(
        self,
        function: CompiledStep,
        params: Any,
        inputs: Sequence[TokenIds],
        arrays: Mapping[str, np.ndarray],
        first: int = 0,
    ) -> Iterator[tuple[np.ndarray, Any]]:
        """Runs `function` on `inputs` and `arrays` in batches. Yields (example indices, outputs) for each batch."""
        lengths = [len(ids) for ids in inputs]
        pending: collections.deque = collections.deque()
        for rows in plan_batches(lengths, self._settings.batch_size, self._longest, self.shortest):
            batch = {
                self._input: pad_ids([inputs[row] for row in rows.examples], rows.length),
                'number': (rows.examples + first).astype(np.int32),
                **{name: array[rows.examples] for name, array in arrays.items()},
            }
            pending.append((rows.examples, function(params, self._transfer_batch(batch))))
            if len(pending) > MAX_PENDING:
                yield pending.popleft()
        yield from pending

    def _make_row_seeds(self, count: int, seed: int | None) -> np.ndarray:
        """Returns the seed of each row, an argument of the compiled functions, as a [count] int32 array."""
        seed = self._settings.seed if seed is None else seed
        ranges.check_setting('seed', seed, ranges.NonNegativeInt)
        # Use only the lower 32 bits of the seed, as `jax.random.key` does.
        return np.full(count, seed % 2**32, np.uint32).astype(np.int32)

    def _transfer_batch(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Pads a batch with copies of its last row and transfers it to the devices. Each host transfers its share."""
        if self.before_batch is not None:
            self.before_batch()
        size = self._settings.batch_size
        index, count = self._partitioner.get_data_shard()
        share = slice(index * (size // count), (index + 1) * (size // count))
        padded = {
            name: np.pad(array, [(0, size - len(array))] + [(0, 0)] * (array.ndim - 1), 'edge')[share]
            for name, array in batch.items()
        }
        return self._partitioner.shard_batch(padded)


def compile_stop_strings(stop_strings: str | Sequence[str], vocabulary: Any) -> StopStrings | None:
    """Compiles stop strings into an automaton. Returns None if there are no stop strings."""
    texts = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    return StopStrings.compile_automaton(texts, task_vocabulary.get_token_texts(vocabulary)) if texts else None


def make_decoder_arrays(targets: Sequence[TokenIds], length: int) -> dict[str, np.ndarray]:
    """Returns the decoder arrays for `targets`, each [rows, length] int32. The inputs are shifted right by one."""
    ids = pad_ids(targets, length)
    return {
        'decoder_input_tokens': np.pad(ids, ((0, 0), (1, 0)))[:, :-1],
        'decoder_target_tokens': ids,
        'decoder_loss_weights': (ids > 0).astype(np.int32),
    }


def pad_ids(rows: Sequence[TokenIds], length: int) -> np.ndarray:
    """Pads rows of ids with zeros to a [rows, length] int32 array."""
    padded: np.ndarray = np.zeros((len(rows), length), np.int32)
    for row, ids in enumerate(rows):
        padded[row, : len(ids)] = ids
    return padded


def _strip_padding(tokens: np.ndarray) -> list[int]:
    """Removes trailing zeros (padding), but not zeros between other ids, because a model may generate id 0."""
    used = np.flatnonzero(tokens)
    return tokens[: used[-1] + 1].tolist() if len(used) else []


class BatchRows(NamedTuple):
    """The indices of the examples in a batch, and the length to which the examples are padded."""

    examples: np.ndarray
    length: int


def round_up_length(length: int, longest: int, shortest: int = MIN_PADDED_LENGTH) -> int:
    """Rounds a length up to `shortest` times a power of two, or to `longest` if that is smaller."""
    size = min(shortest, longest)
    while size < min(length, longest):
        size *= 2
    return min(size, longest)


def plan_batches(
    lengths: Sequence[int], batch_size: int, longest: int, shortest: int = MIN_PADDED_LENGTH
) -> list[BatchRows]:
    """Groups examples into batches, with the longest examples first, so that out-of-memory errors occur at the start.

    `lengths` contains the number of tokens in each example. `longest` and `shortest` are the maximum and minimum padded
    lengths of a batch; no example may be longer.
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind='stable')
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    padded = [round_up_length(lengths[int(rows[0])], longest, shortest) for rows in batches]
    # If a padded length has few batches, merge it into the next larger padded length.
    for length in sorted(set(padded))[:-1]:
        if padded.count(length) < MIN_BATCHES_PER_SHAPE:
            larger = min(other for other in padded if other > length)
            padded = [larger if other == length else other for other in padded]
    return list(map(BatchRows, batches, padded))
