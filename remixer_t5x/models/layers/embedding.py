"""Token embedding, and the scale of an output projection that shares its table."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges


class Embed(nn.Module):
    """[batch, length] int32 token ids -> [batch, length, features] in `dtype`.

    Attributes:
        num_embeddings: size of the vocabulary.
        features: width of an embedding.
        dtype: dtype of the output, in which the model computes.
        one_hot: whether to look up with a matmul of one-hot rows, which partitions well if the vocabulary is sharded
            over a TPU. It costs 2 * num_embeddings * features FLOPs per token, half the FLOPs of a small model; the
            default is a gather.
        stddev: standard deviation of the initial embeddings; 1 is T5's.
        scale: factor of the embeddings that the model reads, `features ** 0.5` in Gemma; `attend` does not apply it.
    """

    num_embeddings: int
    features: int
    dtype: jax.typing.DTypeLike = jnp.float32
    one_hot: bool = False
    stddev: ranges.Positive = 1.0
    scale: ranges.Positive = 1.0

    def setup(self) -> None:
        self.embedding = self.param(
            'embedding',
            nn.with_logical_partitioning(nn.initializers.normal(stddev=self.stddev), (axes.VOCAB, axes.EMBED)),
            (self.num_embeddings, self.features),
            jnp.float32,
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        rows = self._look_up(tokens)
        return rows if self.scale == 1.0 else rows * self.scale

    def _look_up(self, tokens: jax.Array) -> jax.Array:
        table = self.embedding
        if self.one_hot:
            rows = jax.nn.one_hot(tokens, self.num_embeddings, dtype=self.dtype)
            return rows @ table.astype(self.dtype)
        # Gather from a table that is not sharded along its width; otherwise the partitioner would gather the result.
        table = nn.with_logical_constraint(table, (axes.VOCAB, axes.ACTIVATION_EMBED))
        return jnp.take(table, tokens, axis=0).astype(self.dtype)

    def attend(self, x: jax.Array) -> jax.Array:
        """Computes inner products with all embeddings, [..., features] -> [..., num_embeddings], in x's dtype."""
        return x @ self.embedding.astype(x.dtype).T


def output_scale(width: int, scaled: bool, base_width: int | None) -> float:
    """Returns the factor for the input of a tied output projection: T5's `width ** -0.5` if `scaled`, otherwise 1.

    With the base width of muP (`optim.mup`), logits have the scale that they would have at that width.
    """
    scale = width**-0.5 if scaled else 1.0
    return scale if base_width is None else scale * (base_width / width) ** (0.5 if scaled else 1.0)
