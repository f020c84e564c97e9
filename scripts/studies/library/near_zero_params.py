"""Which parameters may start near zero, and how far they have moved: Remixer's H and alpha, gMLP's W."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from remixer_t5x.optim import per_layer


def watched(params: Any, logical_axes: Any) -> dict[str, np.ndarray]:
    """The parameters that may start near zero, by path, without gMLP's bias, which starts at one."""
    chosen = jax.tree.leaves(per_layer.near_zero(logical_axes))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    found = {}
    for (path, leaf), is_chosen in zip(leaves, chosen, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator='/').replace('run_0/layer/', '')
        if is_chosen and not name.endswith(('bias', 'scale')):
            found[name] = np.asarray(leaf, np.float64)
    return found


def movement(start: Mapping[str, np.ndarray], now: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The root mean square of how far each parameter has moved."""
    return {path: float(np.sqrt(np.mean((value - start[path]) ** 2))) for path, value in now.items()}
