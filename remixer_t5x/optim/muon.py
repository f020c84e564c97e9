"""Muon optimizer, which orthogonalizes the momentum of each matrix (Jordan et al. 2024, github.com/KellerJordan/Muon).

optax implements the update rule; the logical axes of a parameter determine whether Muon updates it. If a parameter has
leading axes, such as layers or groups of features, each of its matrices is orthogonalized separately.
"""

import math

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from remixer_t5x import axes, ranges
from remixer_t5x.optim.optimizer import Optimizer, build_optimizer_with_decay
from remixer_t5x.optim.schedules import Schedule

# Typical RMS of AdamW's updates, as measured by Liu et al. (2025).
_TYPICAL_ADAMW_UPDATE_RMS = 0.2


@ranges.validate_arguments
def muon(
    learning_rate: ranges.Positive | Schedule,
    beta: ranges.Rate = 0.95,
    ns_steps: ranges.Count = 5,
    b1: ranges.Rate = 0.9,
    b2: ranges.Rate = 0.95,
    weight_decay: ranges.NonNegative = 0.0,
    max_grad_norm: ranges.Positive | None = 1.0,
    momentum_dtype: ranges.FloatDtype = 'float32',
) -> Optimizer:
    """Creates an optimizer that updates hidden matrices with Muon and all other parameters with AdamW.

    `axes.is_hidden_matrix` selects the matrices, and `b1` and `b2` are settings of AdamW. AdamW also updates position
    embeddings (which have no gradient at unused positions), Remixer's H (logits), and LoRA adapters (whose two matrices
    are factors of one matrix).

    The Nesterov momentum (decay `beta`) of each matrix [in, out] is orthogonalized by `ns_steps` Newton-Schulz
    iterations and scaled by 0.2 sqrt(max(in, out)) (Liu et al. 2025, arXiv:2502.16982, equation 4). The RMS of these
    updates then equals that of AdamW's updates, so both can share a learning rate and `weight_decay`. Gradient clipping
    and `weight_decay` work as in `optimizer.adamw_rms`; orthogonalized updates do not depend on the gradient norm.
    """
    dtype = jnp.dtype(momentum_dtype)

    def build_update_rule(logical_axes):
        labels = jax.tree.map(lambda spec: 'muon' if axes.is_hidden_matrix(tuple(spec)) else 'adam', logical_axes)

        def get_matrix_dimensions(params):
            # `params` contains only the matrices, because `optax.partition` masks other parameters.
            return jax.tree.map(lambda leaf: MuonDimensionNumbers(-2, -1), params)

        orthogonal = optax.chain(
            scale_by_muon(ns_steps=ns_steps, beta=beta, mu_dtype=dtype, weight_dimension_numbers=get_matrix_dimensions),
            optax.stateless_with_tree_map(
                lambda step, _: _TYPICAL_ADAMW_UPDATE_RMS * math.sqrt(max(step.shape[-2:])) * step
            ),
        )
        adam = optax.scale_by_adam(b1=b1, b2=b2, mu_dtype=dtype)
        return optax.partition({'muon': orthogonal, 'adam': adam}, labels)

    return build_optimizer_with_decay(build_update_rule, learning_rate, weight_decay, max_grad_norm)
