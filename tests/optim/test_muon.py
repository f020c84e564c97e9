"""Muon against NumPy and against optax on each layer, and the parameters that it updates."""

import math

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from remixer_t5x.optim import muon, schedules
from tests.optim.test_optimizer import assert_same, stacked_problem, train, wave
from tests.support import shipped_models


def orthogonalize(matrix):
    """Applies five Newton-Schulz iterations with Jordan's quintic polynomial, in float64."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = (matrix if wide else matrix.T).astype(np.float64)
    x = x / np.linalg.norm(x)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x if wide else x.T


@pytest.mark.parametrize('shape', [(4, 7), (7, 4), (3, 2, 4, 7)], ids=['wide', 'tall', 'layers and groups'])
def test_updates_are_the_orthogonalized_momentum_of_each_matrix(shape):
    """Includes optax's Nesterov momentum with bias correction: b m' + (1 - b) g."""
    spec = P(*('layers', 'heads')[: len(shape) - 2], 'embed', 'mlp')
    tx, beta = muon.muon(0.1, max_grad_norm=None).make({'w': spec}), 0.95
    params = {'w': wave(shape, 0.0, 0.5)}
    state, moment = tx.init(params), 0.0
    for step in range(1, 4):
        grad = wave(shape, step, 0.1 * step)
        updates, state = jax.jit(tx.update)({'w': grad}, state, params)
        moment = beta * moment + (1 - beta) * grad
        nesterov = beta * moment / (1 - beta ** (step + 1)) + (1 - beta) * grad / (1 - beta**step)
        for index in np.ndindex(shape[:-2]):
            expected = -0.1 * 0.2 * math.sqrt(7) * orthogonalize(nesterov[index])
            np.testing.assert_allclose(updates['w'][index], expected, rtol=2e-4, atol=2e-5)


def test_stacked_layers_get_the_updates_of_optax_on_each_layer():
    params, axes = stacked_problem((3, 1))
    axes['bias'] = P(None, 'mlp')  # a table with 5 values for each hidden unit
    schedule = schedules.linear(0.1, 2, 10)

    def optax_on_each_layer(rule):
        rest = [optax.add_decayed_weights(0.1, mask=mask), optax.scale_by_learning_rate(schedule)]
        tx = optax.chain(optax.clip_by_global_norm(1.0), rule, *rest)
        return train(tx, params, axes, flat=True)[0]

    def mask(tree):
        return {name: leaf.ndim == 2 for name, leaf in tree.items()}

    def dimensions(tree):
        return {name: optax.contrib.MuonDimensionNumbers() if 'kernel' in name else None for name in tree}

    # With learning rate -1, optax's Muon returns the scaled update; its Adam uses Nesterov momentum, ours does not.
    matrices = optax_on_each_layer(
        optax.contrib.muon(-1.0, consistent_rms=0.2, muon_weight_dimension_numbers=dimensions)
    )
    others = optax_on_each_layer(optax.scale_by_adam(b2=0.95))
    ours, state = train(muon.muon(schedule, weight_decay=0.1).make(axes), params, axes)
    assert_same(ours, {name: (matrices if 'kernel' in name else others)[name] for name in others}, axes)
    assert all(leaf == 4 for leaf in jax.tree.leaves(state) if leaf.dtype == np.int32)


@pytest.mark.parametrize('name', shipped_models.NAMES)
def test_muon_updates_exactly_the_hidden_matrices(name):
    """Checks all parameters of all models; Muon does not update the matrices of adapters."""
    boxes = shipped_models.boxed_shapes(name)
    optimizer = muon.muon(0.1).make(nn.get_partition_spec(boxes))
    params = nn.unbox(boxes)
    state = jax.eval_shape(optimizer.init, params)
    [muon_state] = [leaf for leaf in jax.tree.leaves(state, is_leaf=_is_muon) if _is_muon(leaf)]
    matrices = {path for path in _names(params) if shipped_models.HIDDEN_KERNEL.search(path)}
    message = 'change the axes of the parameters, or shipped_models.HIDDEN_KERNEL if they are hidden matrices'
    assert _names(muon_state.mu) == matrices, message


def _is_muon(state):
    return isinstance(state, optax.contrib.MuonState)


def _names(tree):
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return {jax.tree_util.keystr(path, simple=True, separator='/') for path in paths}
