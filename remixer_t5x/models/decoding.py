"""Decoding with a cache, one token of every row per step: the code that decoders share, and greedy decoding.

A decoder is a frozen dataclass `(generation, rng) -> Decoded`, so that gin selects it by class: `Greedy`,
`sampling.Sampling` or `beam_search.BeamSearch`. Rows of one sequence (samples, beams) are adjacent and share its
encoder output and everything computed from it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

Cache = Any


class Decoded(NamedTuple):
    """What a decoder returns.

    Attributes:
        tokens: [batch, n, length] int32, 0 after the end token.
        scores: [batch, n] float32, the sum of the log-probabilities of a row's tokens, the end token included, under
            the model; beam search divides it by its length penalty.
    """

    tokens: jax.Array
    scores: jax.Array


@dataclasses.dataclass(frozen=True)
class Generation:
    """A model and a batch, as functions for a decoder.

    Attributes:
        allocate: number of rows per sequence -> an empty cache for `max_length` tokens of each row.
        step: (tokens [rows], cache) -> (logits of the next token [rows, vocab] float32, cache).
        has_input: [batch] bool, False for a sequence that only pads the batch; its tokens are 0.
        max_length: maximum number of tokens to generate, including the end token.
        eos_id: the token that ends a sequence.
        last: [batch] int32, the input of the first step, the last token of each prompt; None is the padding id, with
            which T5 starts a sequence.
    """

    allocate: Callable[[int], Cache]
    step: Callable[[jax.Array, Cache], tuple[jax.Array, Cache]]
    has_input: jax.Array
    max_length: int
    eos_id: int
    last: jax.Array | None = None

    def first_tokens(self, rows_per_sequence: int) -> jax.Array:
        """The input tokens of the first step, [rows] int32."""
        if self.last is None:
            return jnp.zeros((self.has_input.shape[0] * rows_per_sequence,), jnp.int32)
        return jnp.repeat(self.last, rows_per_sequence)


class Decoder(Protocol):
    """Generates from a fresh `Generation`. Decoders that sample read `rng`; for others it is None."""

    def __call__(self, generation: Generation, rng: jax.Array | None = None) -> Decoded: ...


@dataclasses.dataclass(frozen=True)
class Greedy:
    """The most likely token at each step, one row per sequence."""

    def __call__(self, generation: Generation, rng: jax.Array | None = None) -> Decoded:
        return generate_rows(generation, 1, lambda logits, index: jnp.argmax(logits, axis=-1))


def generate_rows(
    generation: Generation, rows_per_sequence: int, choose: Callable[[jax.Array, jax.Array], jax.Array]
) -> Decoded:
    """Generates independent rows until all have ended.

    Args:
        generation: model and batch.
        rows_per_sequence: number of rows of each sequence, n of the result.
        choose: (logits [rows, vocab], index of the token) -> tokens [rows].
    """
    max_length = generation.max_length
    batch = generation.has_input.shape[0]
    rows = batch * rows_per_sequence

    def keep_going(state) -> jax.Array:
        index, _, _, _, ended, _ = state
        return (index < max_length) & ~jnp.all(ended)

    def body(state):
        index, tokens, last, scores, ended, cache = state
        logits, cache = generation.step(last, cache)
        token = jnp.where(ended, 0, choose(logits, index).astype(jnp.int32))
        scores += jnp.where(ended, 0.0, log_probability(logits, token))
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], index, axis=1)
        return index + 1, tokens, token, scores, ended | (token == generation.eos_id), cache

    start = (
        jnp.zeros((), jnp.int32),
        jnp.zeros((rows, max_length), jnp.int32),
        generation.first_tokens(rows_per_sequence),
        jnp.zeros((rows,), jnp.float32),
        jnp.repeat(~generation.has_input, rows_per_sequence),
        generation.allocate(rows_per_sequence),
    )
    _, tokens, _, scores, _, _ = jax.lax.while_loop(keep_going, body, start)
    return Decoded(tokens.reshape(batch, rows_per_sequence, max_length), scores.reshape(batch, rows_per_sequence))


def top_values(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest along the last axis, largest first, and their indices, like `jax.lax.top_k`.

    Sorts in a program that is exported for any number of rows, because TensorFlow cannot run JAX's operation there.
    """
    if all(isinstance(size, int) for size in values.shape):
        return jax.lax.top_k(values, count)
    order = jnp.argsort(values, axis=-1, stable=True, descending=True)[..., :count]
    return jnp.take_along_axis(values, order, axis=-1), order


def log_probability(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """log softmax(logits)[tokens], [rows], of [rows, vocab] and [rows]."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def score_choices(generation: Generation, choices: jax.Array) -> jax.Array:
    """Sum of the log-probabilities of each choice's tokens, [batch, choices] float32.

    Args:
        generation: model and batch.
        choices: [batch, choices, length] int32, each with its end token and 0 after it; a choice of only padding has
            the score 0.
    """
    batch, count, length = choices.shape

    def body(carry, tokens):
        previous, cache = carry
        logits, cache = generation.step(previous, cache)
        return (tokens, cache), jnp.where(tokens > 0, log_probability(logits, tokens), 0.0)

    by_position = jnp.moveaxis(choices.reshape(batch * count, length), 1, 0)
    start = (generation.first_tokens(count), generation.allocate(count))
    _, scores = jax.lax.scan(body, start, by_position)
    return jnp.sum(scores, axis=0).reshape(batch, count)


def kernels_in(dtype: jnp.dtype, params: Any) -> Any:
    """Casts the parameters that a matmul or a lookup would cast to `dtype`: kernels and token embeddings."""

    def cast(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        names = [entry.key for entry in path]
        return leaf.astype(dtype) if names[-1] == 'kernel' or 'token_embedder' in names else leaf

    return jax.tree_util.tree_map_with_path(cast, params)
