"""The identity as a token mixer: HyperMixer's ablation "feature mixing only" (Mai et al. 2023, appendix C.2).

The layout adds a norm and the residual around it, so that a layer gives `x + N(x)` where the mixer was.
"""

import jax
from flax import linen as nn

from remixer_t5x.context import SequenceContext


class Identity(nn.Module):
    """[batch, length, embed], unchanged: tokens do not mix. It has no parameters and serves encoders and decoders."""

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        return x
