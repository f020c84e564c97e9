"""Token embeddings, and the scaling of a tied output projection's input."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.models.layers.dense import create_param


class Embed(nn.Module):
    """Embedding layer that maps token ids [batch, length] to vectors [batch, length, features] in `dtype`.

    Attributes:
        one_hot: whether to use a matmul of one-hot vectors instead of a gather. XLA partitions the matmul well on TPUs
            if the vocabulary is sharded, but the matmul takes half of a small model's FLOPs.
        stddev: standard deviation of the initial embeddings; 1 in T5.
        scale: factor of the looked-up embeddings, `features ** 0.5` in Gemma; not applied by `attend`.
    """

    num_embeddings: int
    features: int
    dtype: jax.typing.DTypeLike = jnp.float32
    one_hot: bool = False
    stddev: ranges.Positive = 1.0
    scale: ranges.Positive = 1.0

    def setup(self) -> None:
        init, shape = nn.initializers.normal(stddev=self.stddev), (self.num_embeddings, self.features)
        self.embedding = create_param(self, 'embedding', init, (axes.VOCAB, axes.EMBED), shape)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        if self.one_hot:
            rows = jax.nn.one_hot(tokens, self.num_embeddings, dtype=self.dtype) @ self.embedding.astype(self.dtype)
        else:
            # Gather the table along its width first; otherwise the partitioner would gather the larger result.
            table = nn.with_logical_constraint(self.embedding, (axes.VOCAB, axes.ACTIVATION_EMBED))
            rows = jnp.take(table, tokens, axis=0).astype(self.dtype)
        return rows if self.scale == 1.0 else rows * self.scale

    def attend(self, x: jax.Array) -> jax.Array:
        """Computes inner products of x [..., features] with all embeddings, [..., num_embeddings]."""
        return x @ self.embedding.astype(x.dtype).T


def scale_projection_input(hidden: jax.Array, scaled: bool, base_width: int | None) -> jax.Array:
    """Multiplies the input of a tied output projection, [..., width], by T5's `width ** -0.5` if `scaled`.

    If the base width of muP is set (`optim.mup`), the logits have the same scale as in a model of the base width.
    """
    width = hidden.shape[-1]
    scale = width**-0.5 if scaled else 1.0
    if base_width is not None:
        scale *= (base_width / width) ** (0.5 if scaled else 1.0)
    return hidden if scale == 1.0 else hidden * scale
