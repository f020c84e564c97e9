"""Checks arrays for NaN and infinity."""

from typing import Any

import jax
import jax.numpy as jnp


@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """Whether all floating arrays of `tree` are finite, as a scalar bool array."""
    found = [jnp.all(jnp.isfinite(leaf)) for leaf in _floating(tree)]
    return jnp.all(jnp.stack(found)) if found else jnp.asarray(True)


def first_nonfinite(tree: Any) -> str | None:
    """The name of the first array that is not finite; None if all are finite."""
    if bool(all_finite(tree)):
        return None
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not bool(all_finite(leaf)):
            return jax.tree_util.keystr(path, simple=True, separator='/')
    return None


def _floating(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
