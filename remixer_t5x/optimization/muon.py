"""Muon: momentum whose matrices are made orthogonal (Jordan et al. 2024, github.com/KellerJordan/Muon).

optax has the rule; this module says which parameters are matrices of it. A stack's layers, the heads of a generated MLP
and groups of features are leading axes, and each of their matrices is orthogonalised by itself.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from remixer_t5x import axes
from remixer_t5x.optimization.optimizer import Optimizer, check_range, with_decay
from remixer_t5x.optimization.schedules import Schedule

# The two ends of a matrix between features or hidden units. None is the axis of a small matrix that nothing splits.
_FEATURES = {axes.EMBED, axes.MLP, axes.JOINED_KV, axes.TOKEN_MLP, None}
_GROUPS = {axes.LAYERS, axes.HEADS, axes.MECHANISMS}
# [types, embed] is a table of embeddings.
_EMBEDDING = (None, axes.EMBED)
# The RMS of AdamW's updates, by measurement of Liu et al.
_ADAMW_RMS = 0.2


def muon(
    learning_rate: float | Schedule,
    beta: float = 0.95,
    ns_steps: int = 5,
    b1: float = 0.9,
    b2: float = 0.95,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = 1.0,
    momentum_dtype: str = 'float32',
) -> Optimizer:
    """Muon for matrices between features, AdamW with `b1` and `b2` for all others (`is_matrix`).

    The momentum with decay `beta`, Nesterov's, of each matrix [in, out] is made orthogonal by `ns_steps` Newton-Schulz
    iterations, and multiplied by 0.2 sqrt(max(in, out)) (Liu et al. 2025, arXiv:2502.16982, equation 4). It then has
    the RMS of AdamW's updates, so that both take one learning rate and one `weight_decay`. Clipping and decay are
    as in `optimizer.adamw_rms`; an orthogonal update does not depend on the gradient's norm.
    """
    check_range('beta', beta, 0.0, 1.0)
    check_range('b1', b1, 0.0, 1.0)
    check_range('b2', b2, 0.0, 1.0)
    dtype = jnp.dtype(momentum_dtype)

    def rule(logical_axes):
        labels = jax.tree.map(lambda spec: 'muon' if is_matrix(spec) else 'adam', logical_axes, is_leaf=_is_spec)

        def dimensions(params):
            # Called with the matrices alone; the others are masked.
            return jax.tree.map(lambda leaf: MuonDimensionNumbers(-2, -1), params)

        orthogonal = optax.chain(
            scale_by_muon(ns_steps=ns_steps, beta=beta, mu_dtype=dtype, weight_dimension_numbers=dimensions),
            optax.stateless_with_tree_map(lambda step, _: _ADAMW_RMS * math.sqrt(max(step.shape[-2:])) * step),
        )
        adam = optax.scale_by_adam(b1=b1, b2=b2, mu_dtype=dtype)
        return optax.partition({'muon': orthogonal, 'adam': adam}, labels)

    return with_decay(rule, learning_rate, weight_decay, max_grad_norm)


def is_matrix(spec: PartitionSpec) -> bool:
    """Whether Muon takes a parameter of these logical axes: its last two map features or hidden units to others, and
    all before them are layers or groups.

    Embeddings, logits, vectors, and everything with an axis of positions or distances are AdamW's: a position that the
    inputs do not reach has no gradient, and Remixer's H are logits.
    """
    names = tuple(spec)
    groups, ends = names[:-2], names[-2:]
    return len(ends) == 2 and {*ends} <= _FEATURES and ends != _EMBEDDING and {*groups} <= _GROUPS


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)
