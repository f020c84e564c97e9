"""Operations of one HyperMixing layer, by the formula of the paper's appendix D and by XLA's count of our layer."""

import jax
import jax.numpy as jnp

from remixer_t5x.context import describe_tokens
from remixer_t5x.models.sublayers.hyper_mixer import HyperMixer


def paper_operations(length: int, embed: int, hidden: int) -> int:
    """`d (4 N d' + 9 d') + N (2 d^2 + 2 d' d + 9 d)`: tied, one head, one example, nine operations for a GELU."""
    return embed * (4 * length * hidden + 9 * hidden) + length * (2 * embed**2 + 2 * hidden * embed + 9 * embed)


def xla_operations(length: int, embed: int, hidden: int) -> float:
    """XLA's count for the compiled forward pass of the same layer, without its final norm."""
    layer = HyperMixer(hidden, norm=None)
    ctx = describe_tokens(jnp.ones((1, length), jnp.int32))
    x = jax.ShapeDtypeStruct((1, length, embed), jnp.float32)
    variables = jax.eval_shape(lambda key: layer.init(key, jnp.zeros(x.shape), ctx), jax.random.key(0))
    return (
        jax.jit(lambda variables, x: layer.apply(variables, x, ctx))
        .lower(variables, x)
        .compile()
        .cost_analysis()['flops']
    )
