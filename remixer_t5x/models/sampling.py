"""Sampling from softmax(logits / temperature), optionally restricted to the most likely tokens.

The restrictions top-k (Fan et al. 2018), top-p or nucleus (Holtzman et al. 2019) and min-p (Nguyen et al. 2024) are
applied in this order after the temperature, as in Hugging Face's transformers.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from remixer_t5x import ranges
from remixer_t5x.models.decoding import RowDecoder, select_top_values


@dataclasses.dataclass(frozen=True, repr=False)
class Sampling(RowDecoder):
    """Decoder that draws independent samples for each sequence.

    The scores are the model's log-probabilities, without temperature or restrictions.

    Attributes:
        temperature: divisor of the logits; values below 1 sharpen the distribution, values above 1 flatten it.
        top_k: number of most likely tokens to sample from; None for all tokens.
        top_p: sample from the smallest set of most likely tokens whose total probability is at least this value. Ties
            with the least likely token of the set are included.
        num_samples: number of samples per input sequence.
        min_p: sample from the tokens whose probability is at least this fraction of the largest probability.
    """

    temperature: ranges.Positive = 1.0
    top_k: ranges.Count | None = None
    top_p: ranges.PositiveFraction = 1.0
    num_samples: ranges.Count = 1
    min_p: ranges.Fraction = 0.0

    def __post_init__(self) -> None:
        ranges.check_fields(self, num_samples='SAMPLES')
        super().__post_init__()

    @property
    def rows_per_sequence(self) -> int:
        return self.num_samples

    def build_token_selector(self, rng: jax.Array | None, batch: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Returns a function that samples a token for each row from the processed logits.

        `rng` is a single PRNG key or an array with one key per sequence. With a single key, sequence i of the batch
        uses `fold_in(rng, i)`; with an array, samples do not depend on a sequence's position in the batch.
        """
        if rng is None or not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) or rng.shape not in ((), (batch,)):
            description = None if rng is None else f'{rng.dtype}{list(rng.shape)}'
            raise ValueError(
                f'rng must be one typed key or an array of {batch} keys, got {description}; use jax.random.key(seed)'
            )
        fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        keys = fold(rng, jnp.arange(batch)) if rng.ndim == 0 else rng
        keys = jax.vmap(fold, in_axes=(0, None))(keys, jnp.arange(self.num_samples)).reshape(-1)
        return lambda logits, index: self._sample_tokens(keys, logits, index)

    def _sample_tokens(self, keys: jax.Array, logits: jax.Array, index: jax.Array) -> jax.Array:
        """Samples a token for each row, [rows], from logits [rows, vocab]."""
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, index)
        logits = logits / self.temperature
        if self.top_k is None or self.top_k >= logits.shape[-1]:
            return _sample_each_row(keys, self.exclude_unlikely_tokens(logits))
        largest, tokens = select_top_values(logits, self.top_k)
        sampled = _sample_each_row(keys, self.exclude_unlikely_tokens(largest))
        return jnp.take_along_axis(tokens, sampled[:, None], axis=-1)[:, 0]

    def exclude_unlikely_tokens(self, logits: jax.Array) -> jax.Array:
        """Returns `logits` with tokens excluded by top-p and min-p set to -inf."""
        if self.top_p < 1:
            logits = mask_outside_top_k_and_top_p(logits, self.top_p, logits.shape[-1])
        if self.min_p > 0:
            largest = jnp.max(logits, axis=-1, keepdims=True)
            logits = jnp.where(logits >= largest + math.log(self.min_p), logits, -jnp.inf)
        return logits


def mask_outside_top_k_and_top_p(logits: jax.Array, top_p: float | jax.Array, top_k: int | jax.Array) -> jax.Array:
    """Returns logits [rows, vocab] with -inf outside the top k tokens, and then outside the top-p nucleus.

    `top_p` and `top_k` are numbers or arrays [rows, 1]. Ties with the least likely token of the nucleus are included.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    is_inside = jnp.arange(logits.shape[-1]) < top_k
    probabilities = jax.nn.softmax(jnp.where(is_inside, ordered, -jnp.inf), axis=-1)
    mass_before = jnp.cumsum(probabilities, axis=-1) - probabilities
    is_inside &= (mass_before < top_p) | (top_p >= 1)
    smallest = jnp.min(jnp.where(is_inside, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= smallest, logits, -jnp.inf)


_sample_each_row = jax.vmap(jax.random.categorical)
