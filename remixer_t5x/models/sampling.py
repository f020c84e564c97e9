"""Sampling: tokens drawn from softmax(logits / temperature), restricted to the most likely ones.

Restrictions are those of Fan et al. 2018 (top-k) and Holtzman et al. 2019 (top-p, the nucleus), in the usual order:
temperature, the k largest, then the nucleus.
"""

import dataclasses

import jax
import jax.numpy as jnp

from remixer_t5x import ranges
from remixer_t5x.models.decoding import Decoded, Generation, generate_rows, top_values


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Independent samples of each sequence, in the order they were drawn.

    Scores are log-probabilities under the model itself, without temperature and restrictions.

    Attributes:
        temperature: divides the logits; below 1 sharpens, above 1 flattens.
        top_k: sample from this many tokens with the largest logits; None for all.
        top_p: sample from the fewest tokens whose probabilities sum to at least this, and from tokens as likely as the
            last of them.
        num_samples: number of samples per sequence.
    """

    temperature: ranges.Positive = 1.0
    top_k: ranges.Count | None = None
    top_p: ranges.PositiveShare = 1.0
    num_samples: ranges.Count = 1

    def __post_init__(self) -> None:
        ranges.check_fields(self, num_samples='SAMPLES')

    def __call__(self, generation: Generation, rng: jax.Array | None = None) -> Decoded:
        """Draws `num_samples` rows of each sequence.

        Args:
            generation: model and batch.
            rng: one key, from which sequence i of the batch uses `fold_in(rng, i)`; or a key for each sequence,
                [batch], so that samples do not depend on the batch size or the place in the batch.
        """
        keys = self._row_keys(rng, generation.has_input.shape[0])
        return generate_rows(generation, self.num_samples, lambda logits, index: self._draw(keys, logits, index))

    def _row_keys(self, rng: jax.Array | None, batch: int) -> jax.Array:
        """A key for each row, [batch * num_samples]."""
        if rng is None:
            raise ValueError('Sampling needs rng: give jax.random.key(seed), or one such key for each sequence')
        if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) or rng.shape not in ((), (batch,)):
            raise ValueError(
                f'rng is {rng.dtype}{list(rng.shape)}, wanted one typed key or {batch}: jax.random.key(seed)'
            )
        fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        keys = fold(rng, jnp.arange(batch)) if rng.ndim == 0 else rng
        return jax.vmap(fold, in_axes=(0, None))(keys, jnp.arange(self.num_samples)).reshape(-1)

    def _draw(self, keys: jax.Array, logits: jax.Array, index: jax.Array) -> jax.Array:
        """A token for each row, [rows], of [rows, vocab] logits."""
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, index)
        logits = logits / self.temperature
        if self.top_k is None or self.top_k >= logits.shape[-1]:
            return _categorical(keys, self._nucleus(logits))
        largest, tokens = top_values(logits, self.top_k)
        drawn = _categorical(keys, self._nucleus(largest))
        return jnp.take_along_axis(tokens, drawn[:, None], axis=-1)[:, 0]

    def _nucleus(self, logits: jax.Array) -> jax.Array:
        """`logits` with -inf outside of the nucleus."""
        if self.top_p == 1.0:
            return logits
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        mass_before = jnp.cumsum(probabilities, axis=-1) - probabilities
        is_inside = (mass_before < self.top_p).at[:, 0].set(True)
        smallest = jnp.min(jnp.where(is_inside, ordered, jnp.inf), axis=-1, keepdims=True)
        return jnp.where(logits >= smallest, logits, -jnp.inf)


_categorical = jax.vmap(jax.random.categorical)
