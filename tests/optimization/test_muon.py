"""Muon against NumPy and against optax on each layer, and what it takes for a matrix."""

import math

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from remixer_t5x import build_model
from remixer_t5x.model import interface
from remixer_t5x.optimization import muon, schedules
from tests.optimization.test_optimizer import assert_same, stacked_problem, train, wave


def orthogonal(matrix):
    """Five Newton-Schulz iterations of Jordan's quintic, in float64."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = (matrix if wide else matrix.T).astype(np.float64)
    x = x / np.linalg.norm(x)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x if wide else x.T


@pytest.mark.parametrize('shape', [(4, 7), (7, 4), (3, 2, 4, 7)], ids=['wide', 'tall', 'layers and groups'])
def test_the_update_is_the_orthogonal_momentum_of_each_matrix(shape):
    """Nesterov's momentum with bias correction as optax has it: b m' + (1 - b) g."""
    spec = P(*('layers', 'heads')[: len(shape) - 2], 'embed', 'mlp')
    tx, beta = muon.muon(0.1, max_grad_norm=None)({'w': spec}), 0.95
    params = {'w': wave(shape, 0.0, 0.5)}
    state, moment = tx.init(params), 0.0
    for step in range(1, 4):
        grad = wave(shape, step, 0.1 * step)
        updates, state = jax.jit(tx.update)({'w': grad}, state, params)
        moment = beta * moment + (1 - beta) * grad
        ahead = beta * moment / (1 - beta ** (step + 1)) + (1 - beta) * grad / (1 - beta**step)
        for place in np.ndindex(shape[:-2]):
            expected = -0.1 * 0.2 * math.sqrt(7) * orthogonal(ahead[place])
            np.testing.assert_allclose(updates['w'][place], expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize('lengths', [(3, 2), (1,)])
def test_stacked_layers_are_optax_on_each_layer(lengths):
    params, axes = stacked_problem(lengths)
    schedule = schedules.linear(0.1, 2, 10)

    def optax_on_each_layer(rule):
        rest = [optax.add_decayed_weights(0.1, mask=mask), optax.scale_by_learning_rate(schedule)]
        tx = optax.chain(optax.clip_by_global_norm(1.0), rule, *rest)
        return train(tx, params, axes, flat=True)[0]

    def mask(tree):
        return {name: leaf.ndim == 2 and name != 'bias' for name, leaf in tree.items()}

    def dimensions(tree):
        return {name: optax.contrib.MuonDimensionNumbers() if 'kernel' in name else None for name in tree}

    # Its own learning rate is -1, and its own Adam is Nesterov's.
    matrices = optax_on_each_layer(
        optax.contrib.muon(-1.0, consistent_rms=0.2, muon_weight_dimension_numbers=dimensions)
    )
    others = optax_on_each_layer(optax.scale_by_adam(b2=0.95))
    ours, state = train(muon.muon(schedule, weight_decay=0.1)(axes), params, axes)
    assert_same(ours, {name: (matrices if 'kernel' in name else others)[name] for name in others}, axes, 1e-5)
    assert all(leaf == 4 for leaf in jax.tree.leaves(state) if leaf.dtype == np.int32)


@pytest.mark.parametrize('model', ['t5_1_1', 'remixer', 'hyper_mixer', 'mixer_enc_dec', 'gmlp', 'tim'])
def test_what_is_a_matrix(model):
    """Kernels between features; neither embeddings, logits and norms nor anything with positions."""
    built = build_model(f'models/{model}.gin', 'sizes/tiny.gin')
    shapes = {'encoder_input_tokens': (1, 8), 'decoder_target_tokens': (1, 8)}
    boxed = interface.param_shapes(built, shapes)
    specs = jax.tree_util.tree_flatten_with_path(
        nn.get_partition_spec(boxed), is_leaf=lambda leaf: isinstance(leaf, P)
    )[0]
    found = {jax.tree_util.keystr(path, simple=True, separator='/'): muon.is_matrix(spec) for path, spec in specs}
    names = {name for name, is_matrix in found.items() if is_matrix}
    assert names and all(name.endswith(('kernel', 'wi', 'wo')) for name in names), names
    others = set(found) - names
    assert {'logits/kernel', 'token_embedder/embedding'} <= others or model != 't5_1_1', others
    for name in others:
        assert not (name.endswith('kernel') and ('attention' in name or '/wi_0/' in name)), name


def test_the_logits_and_positions_are_not_matrices():
    assert muon.is_matrix(P('layers', 'mechanisms', 'embed', 'mlp'))
    for spec in (
        P('embed', 'vocab'), P('vocab', 'embed'), P(None, 'embed'), P('positions_in', 'embed'), P('layers', 'embed'),
        P('layers', 'positions_out', 'positions_in'), P('heads', 'relpos_buckets'), P('heads', 'mlp'), P(), P('layers'),
    ):  # fmt: skip
        assert not muon.is_matrix(spec), spec
