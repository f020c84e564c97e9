"""The decoder interface, greedy decoding and stop strings.

A decoder is a frozen dataclass that implements `(generation, rng) -> DecodingResult`: `Greedy`, `sampling.Sampling` or
`beam_search.BeamSearch`. The samples or beams of a sequence are adjacent rows, which share the encoder output. Decoders
that do not use `rng` set `is_deterministic`, so that the seed is not recorded with their predictions.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from remixer_t5x.errors import UserError
from remixer_t5x.models.logits_processors import LogitsOptions, LogitsProcessor

Cache = Any


class DecodingResult(NamedTuple):
    """Generated tokens and their scores.

    Attributes:
        tokens: token ids [batch, n, length] int32; 0 after the end token.
        scores: [batch, n] float32, the sum of the log-probabilities of the tokens, including the end token. Logits
            processors affect scores only in beam search, which also divides the sum by the length penalty, as in
            Hugging Face's transformers. As in T5X, `scores` include tokens with id 0, but the results of
            `GenerativeModel.score` do not.
    """

    tokens: jax.Array
    scores: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class StopStrings:
    """Automaton that detects stop strings in a sequence of token ids.

    Stop strings end generation as soon as they occur in the output, as in Hugging Face's `StopStringCriteria`.

    Stop strings are compiled into an automaton over tokens (Aho and Corasick 1975), so a stop string may begin and end
    within a token. Each state represents the longest suffix of the text that is a proper prefix of a stop string.

    Attributes:
        next_state: [states, vocab] int32, the next state for each current state and token id. In state 0, the text does
            not end with the beginning of a stop string.
        completes: [states, vocab] bool, whether a token id completes a stop string in a state.
    """

    next_state: np.ndarray
    completes: np.ndarray

    @classmethod
    def compile_automaton(cls, stop_strings: Sequence[str], token_texts: Sequence[bytes]) -> 'StopStrings':
        """Builds the automaton for `stop_strings`; `token_texts` contains the UTF-8 text of each token id."""
        if not all(isinstance(stop, str) and stop for stop in stop_strings):
            raise UserError(f'STOP_STRINGS must be texts with at least 1 character, got {list(stop_strings)}')
        stops = tuple(text.encode() for text in stop_strings)
        states = sorted({stop[:length] for stop in stops for length in range(len(stop))})
        by_byte: np.ndarray = np.zeros((len(states), 256), np.int32)
        ends_at_byte: np.ndarray = np.zeros((len(states), 256), bool)
        for state, beginning in enumerate(states):
            for byte in range(256):
                text = beginning + bytes([byte])
                suffixes = (text[start:] for start in range(len(text) + 1))
                by_byte[state, byte] = states.index(next(suffix for suffix in suffixes if suffix in states))
                ends_at_byte[state, byte] = text.endswith(stops)
        next_state = np.repeat(np.arange(len(states), dtype=np.int32)[:, None], len(token_texts), axis=1)
        completes = np.zeros(next_state.shape, bool)
        for position in range(max(map(len, token_texts))):
            ids = [index for index, text in enumerate(token_texts) if len(text) > position]
            values = [token_texts[index][position] for index in ids]
            completes[:, ids] |= ends_at_byte[next_state[:, ids], values]
            next_state[:, ids] = by_byte[next_state[:, ids], values]
        return cls(next_state, completes)

    def advance_states(self, states: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the state after each token, and whether the token completes a stop string.

        All arrays have the same shape. Token ids without text, such as padding, do not change the state.
        """
        is_known = (tokens >= 0) & (tokens < self.next_state.shape[1])
        next_states = jnp.where(is_known, jnp.asarray(self.next_state)[states, tokens], states)
        return next_states, is_known & jnp.asarray(self.completes)[states, tokens]

    def compute_states_after(self, tokens: jax.Array) -> jax.Array:
        """Returns the state after all tokens of each row, [rows], for tokens [rows, length]."""
        states = jnp.zeros(tokens.shape[:1], jnp.int32)
        return jax.lax.scan(lambda states, column: (self.advance_states(states, column)[0], None), states, tokens.T)[0]


@dataclasses.dataclass(frozen=True)
class GenerationInputs:
    """The inputs of a decoder: the model's decoding functions for a batch of inputs, and the stopping criteria.

    Attributes:
        allocate: function that takes the number of rows per sequence and returns a cache for `max_length` new tokens.
        step: function (tokens [rows], cache) -> (logits of the next token [rows, vocab] float32, cache).
        max_length: maximum number of tokens to generate, including the end token.
        last: [batch] int32, the last token of each prompt; None for T5's start token, id 0.
        prompt: [batch, length] int32, all tokens before the generated tokens, left-padded with -1; None if `last`
            is the only such token.
    """

    batch: int
    allocate: Callable[[int], Cache]
    step: Callable[[jax.Array, Cache], tuple[jax.Array, Cache]]
    max_length: int
    eos_id: int
    last: jax.Array | None = None
    prompt: jax.Array | None = None
    stop_strings: StopStrings | None = None

    def make_first_tokens(self, rows_per_sequence: int) -> jax.Array:
        """Returns the input tokens of the first step, [rows] int32."""
        if self.last is None:
            return jnp.zeros((self.batch * rows_per_sequence,), jnp.int32)
        return jnp.repeat(self.last, rows_per_sequence)

    def compute_first_stop_states(self, rows_per_sequence: int) -> jax.Array | None:
        """Returns the states of the stop-string automaton before the first step, [rows] int32."""
        if self.stop_strings is None:
            return None
        return self.stop_strings.compute_states_after(self._repeat_prompts(rows_per_sequence))

    def process_logits(
        self, processors: Sequence[LogitsProcessor], logits: jax.Array, generated: jax.Array, step: jax.Array
    ) -> jax.Array:
        """Applies `processors` to logits [rows, vocab] that follow the first `step` tokens of `generated`."""
        if not processors:
            return logits
        prompts = self._repeat_prompts(generated.shape[0] // self.batch)
        tokens = jnp.concatenate([jnp.full_like(generated, -1), prompts, generated], axis=1)
        tokens = jax.lax.dynamic_slice_in_dim(tokens, step, prompts.shape[1] + self.max_length, axis=1)
        for processor in processors:
            logits = processor(logits, tokens, step)
        return logits

    def _repeat_prompts(self, rows_per_sequence: int) -> jax.Array:
        if self.prompt is None:
            return self.make_first_tokens(rows_per_sequence)[:, None]
        return jnp.repeat(self.prompt, rows_per_sequence, axis=0)


# Function (generation, rng) -> DecodingResult; only sampling decoders use the PRNG key `rng`.
Decoder = Callable[[GenerationInputs, jax.Array | None], DecodingResult]


class DecodingState(NamedTuple):
    """State of a `RowDecoder` between two decoding steps."""

    index: jax.Array  # int32 scalar, the number of generated tokens
    tokens: jax.Array  # [rows, max_length] int32, the generated tokens, padded with 0
    last: jax.Array  # [rows] int32, the input of the next step
    scores: jax.Array  # [rows] float32, sums of log-probabilities
    finished: jax.Array  # [rows] bool, whether the sequence has finished
    cache: Cache
    stop_states: jax.Array | None  # [rows] int32, states of the stop-string automaton


@dataclasses.dataclass(frozen=True, repr=False)
class RowDecoder(LogitsOptions):
    """Base class of decoders that generate each row independently; subclasses define how to select tokens."""

    @property
    def rows_per_sequence(self) -> int:
        return 1

    def build_token_selector(self, rng: jax.Array | None, batch: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Returns a function (processed logits [rows, vocab], index of the next token) -> next tokens [rows]."""
        raise NotImplementedError

    def __call__(self, generation: GenerationInputs, rng: jax.Array | None = None) -> DecodingResult:
        rows = self.generate_until(generation, self.create_decoding_state(generation), generation.max_length, rng)
        shape = generation.batch, self.rows_per_sequence
        return DecodingResult(rows.tokens.reshape(*shape, generation.max_length), rows.scores.reshape(shape))

    def create_decoding_state(self, generation: GenerationInputs) -> DecodingState:
        """Returns the initial decoding state, with an allocated cache."""
        count = generation.batch * self.rows_per_sequence
        return DecodingState(
            jnp.zeros((), jnp.int32),
            jnp.zeros((count, generation.max_length), jnp.int32),
            generation.make_first_tokens(self.rows_per_sequence),
            jnp.zeros((count,), jnp.float32),
            jnp.zeros((count,), bool),
            generation.allocate(self.rows_per_sequence),
            generation.compute_first_stop_states(self.rows_per_sequence),
        )

    def generate_until(
        self, generation: GenerationInputs, rows: DecodingState, limit: int | jax.Array, rng: jax.Array | None
    ) -> DecodingState:
        """Generates tokens until each row contains `limit` tokens or all rows have finished."""
        select_tokens = self.build_token_selector(rng, generation.batch)
        processors = self.build_processors(generation.eos_id)

        def should_continue(rows: DecodingState) -> jax.Array:
            return (rows.index < limit) & ~jnp.all(rows.finished)

        def generate_token(rows: DecodingState) -> DecodingState:
            index, tokens, last, scores, finished, cache, stop_states = rows
            logits, cache = generation.step(last, cache)
            processed = generation.process_logits(processors, logits, tokens, index)
            token = jnp.where(finished, 0, select_tokens(processed, index).astype(jnp.int32))
            scores += jnp.where(finished, 0.0, compute_log_probability(logits, token))
            tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], index, axis=1)
            finished |= token == generation.eos_id
            if generation.stop_strings is not None:
                stop_states, is_complete = generation.stop_strings.advance_states(stop_states, token)
                finished |= is_complete
            return DecodingState(index + 1, tokens, token, scores, finished, cache, stop_states)

        return jax.lax.while_loop(should_continue, generate_token, rows)


@dataclasses.dataclass(frozen=True, repr=False)
class Greedy(RowDecoder):
    """Generates the most likely token at each step, one row per sequence."""

    is_deterministic: ClassVar[bool] = True

    def build_token_selector(self, rng: jax.Array | None, batch: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
        return lambda logits, index: jnp.argmax(logits, axis=-1)


def select_top_values(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the `count` largest values along the last axis in descending order, and their indices.

    Uses a sort if the number of rows is symbolic, because TensorFlow cannot run JAX's top_k with symbolic shapes.
    """
    if all(isinstance(size, int) for size in values.shape):
        return jax.lax.top_k(values, count)
    order = jnp.argsort(values, axis=-1, stable=True, descending=True)[..., :count]
    return jnp.take_along_axis(values, order, axis=-1), order


def compute_log_probability(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the log-probabilities of tokens [rows] under logits [rows, vocab]."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def cast_kernels(dtype: jnp.dtype, params: Any) -> Any:
    """Casts kernels and token embeddings to `dtype` once, so that decoding steps need not cast them."""

    def cast_leaf(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        names = [entry.key for entry in path]
        is_cast = names[-1] == 'kernel' or names[0] in ('token_embedder', 'decoder_token_embedder')
        return leaf.astype(dtype) if is_cast else leaf

    return jax.tree_util.tree_map_with_path(cast_leaf, params)
