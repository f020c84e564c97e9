"""Contexts and random parameters for tests of single sublayers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from remixer_t5x.context import SequenceContext


def context_of_ids(ids: Any, **flags: Any) -> SequenceContext:
    """Returns a context for rows of example ids, 0 for padding; positions restart at each example."""
    ids = np.asarray(ids, np.int32)
    index = np.arange(ids.shape[1])
    starts = np.where(np.diff(ids, axis=1, prepend=-1) != 0, index, 0)
    positions = index - np.maximum.accumulate(starts, axis=1)
    return SequenceContext(jnp.asarray(ids), jnp.asarray(positions, jnp.int32), **flags)


def context_of_lengths(lengths: Any, length: int, **flags: Any) -> SequenceContext:
    """Returns a context for rows with one example each, of the given lengths, padded to `length`."""
    positions = np.tile(np.arange(length, dtype=np.int32), (len(lengths), 1))
    ids = (positions < np.asarray(lengths)[:, None]).astype(np.int32)
    return SequenceContext(jnp.asarray(ids), jnp.asarray(positions), **flags)


def random_params(module: nn.Module, *args: Any, scale: float = 1.0) -> Any:
    """Returns normally distributed parameters, so that none has its initial value."""
    shapes = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), *args)['params'])
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return tree.unflatten([scale * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)])
