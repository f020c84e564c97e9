"""A bias that depends on distance alone, spread over a block of logits and summed back, inside a TPU kernel.

The kernel holds logits as [key, query]. Their bias is `b[c, r] = values[r - c]`: each row is its successor shifted by
one. Eight shifted copies of the values fill the eight sublanes of a register; from them, each doubling of the rows is
one shift of all rows so far, so that a block of 512 rows takes six shifts. The gradient takes the same steps backwards.
No [query, key] array exists outside the kernel's own memory, whatever the length.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

SUBLANES = 8


def shifted_copies(values: jax.Array, num_queries: int, num_keys: int) -> jax.Array:
    """[heads, 2 * length - 1] by `key - query` -> [heads, 8, num_queries + num_keys], which `spread` reads by block.

    Args:
        values: the bias for each distance from -(length - 1) to length - 1.
        num_queries, num_keys: the length, rounded up to whole blocks of queries and of keys.
    """
    length = (values.shape[1] + 1) // 2
    by_query = values[:, ::-1]  # by `query - key`
    total = num_queries + num_keys
    padded = jnp.pad(by_query, ((0, 0), (num_keys - length, total + SUBLANES)))
    return jnp.stack([padded[:, SUBLANES - 1 - i :][:, :total] for i in range(SUBLANES)], axis=1)


def spread(window: jax.Array, num_keys: int, num_queries: int) -> jax.Array:
    """[8, num_keys + num_queries] of `shifted_copies` -> [num_keys, num_queries]: `out[c, r]` is for distance r - c."""
    width = window.shape[1]
    rows = window
    while rows.shape[0] < num_keys:
        rows = jnp.concatenate([pltpu.roll(rows, width - rows.shape[0], 1), rows], axis=0)
    return rows[rows.shape[0] - num_keys :, :num_queries]


def sum_over_diagonals(block: jax.Array) -> jax.Array:
    """The transpose of `spread`: [num_keys, num_queries] -> [8, num_keys + num_queries]."""
    num_keys, num_queries = block.shape
    rows = jnp.concatenate([block, jnp.zeros((num_keys, num_keys), block.dtype)], axis=1)
    missing = pl.next_power_of_2(num_keys) - num_keys
    if missing:
        rows = jnp.concatenate([jnp.zeros((missing, num_keys + num_queries), block.dtype), rows], axis=0)
    while rows.shape[0] > SUBLANES:
        half = rows.shape[0] // 2
        rows = pltpu.roll(rows[:half], half, 1) + rows[half:]
    return rows
