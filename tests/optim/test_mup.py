"""muP against the authors' package and table 3 of Yang et al. 2022, and activations at several widths."""

import importlib.util
import json
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.models import interface
from remixer_t5x.models.layers.embedding import scale_projection_input
from remixer_t5x.models.sublayers import remixer
from remixer_t5x.optim import muon, mup, optimizer, parameter_averages, train_state, trainable
from tests.support.paths import SCRIPTS

_SPEC = importlib.util.spec_from_file_location('width_transfer', SCRIPTS / 'benchmarks' / 'width_transfer.py')
width_transfer = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(width_transfer)
SHAPES = {'encoder_input_tokens': (2, 16), 'decoder_input_tokens': (2, 8), 'decoder_target_tokens': (2, 8)}
GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / 'golden' / 'mup.json').read_text())
# Returns the factors instead of a gradient transformation.
FACTORS_ONLY = optimizer.Optimizer(None, lambda logical_axes, factors: factors, supports_mup=True)


def by_name(tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: not isinstance(leaf, dict))[0]
    return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}


def parameter_kinds(name):
    specs = nn.get_partition_spec(
        interface.compute_param_shapes(width_transfer.build_scaled_model(name, 64, None), SHAPES)
    )
    return {name: mup.classify_parameter(spec) for name, spec in by_name(specs).items()}


def test_factors_equal_those_of_the_mup_package():
    """Compares factors of initial values and of Adam's learning rate in T5's decoder, except for position biases."""
    boxed = interface.compute_param_shapes(width_transfer.build_scaled_model('t5_1_1', GOLDEN['width'], None), SHAPES)
    scaled = mup.scale_by_width(FACTORS_ONLY, GOLDEN['width'], GOLDEN['base_width'])
    rates = by_name(scaled.make(nn.get_partition_spec(boxed)))
    compared = set()
    for name, initial in by_name(scaled.initial(boxed)).items():
        keys = [key for key in GOLDEN['factors'] if any(part.startswith(key) for part in name.split('/')[-2:])]
        if keys and not name.startswith('encoder') and 'position_bias' not in name:
            assert [initial, rates[name]] == GOLDEN['factors'][keys[0]], name
            compared.update(keys)
    assert compared == set(GOLDEN['factors'])


def test_parameters_are_classified_as_in_the_paper():
    t5, remixer, tim = map(parameter_kinds, ('t5_1_1', 'remixer', 'tim'))
    assert t5['token_embedder/embedding'] == 'other' and t5['logits/kernel'] == 'output'
    hidden = {name for name, kind in t5.items() if kind == 'hidden'}
    assert hidden == {name for name in t5 if name.endswith('/kernel') and name != 'logits/kernel'}
    assert {kind for name, kind in remixer.items() if 'mixing' in name} == {'other'}
    assert {kind for name, kind in tim.items() if 'score' in name} == {'output'}


def test_the_matrix_of_remixers_gate_is_hidden():
    boxed = jax.eval_shape(remixer.DenseGate().init, jax.random.key(0), np.ones((1, 2, 4), np.float32))
    [spec] = by_name(nn.get_partition_spec(boxed)).values()
    assert mup.classify_parameter(spec) == 'hidden'


def test_position_weights_of_gmlp_keep_their_initial_values():
    boxed = {'kernel': nn.LogicallyPartitioned(np.ones((2, 15)), ('layers', 'relpos_buckets'))}
    assert mup.scale_by_width(FACTORS_ONLY, 256, 64).initial(boxed) == {'kernel': 1.0}


@pytest.mark.parametrize('name', width_transfer.MODELS)
def test_the_coordinate_check_scales_all_hidden_widths(name):
    models = [width_transfer.build_scaled_model(name, width, None) for width in (64, 128)]
    narrow, wide = (by_name(interface.compute_param_shapes(model, SHAPES)) for model in models)
    for path, box in narrow.items():
        for axis, size, scaled in zip(box.names, box.value.shape, wide[path].value.shape, strict=True):
            advice = 'add the width to width_transfer.build_scaled_model'
            assert axis not in ('embed', 'mlp') or scaled == 2 * size, f'{path}: {advice}'


def adamw_of_trained_average(rate):
    return trainable.restrict_to_trainable(
        parameter_averages.average_params(optimizer.adamw(rate), 0.9), 'wo|logits|emb'
    )


@pytest.mark.parametrize('make', [optimizer.adamw, optimizer.adafactor, adamw_of_trained_average])
def test_updates_and_initial_values_scale_with_the_width(make):
    """From width 32 to 128, updates of matrices are divided by 4, and initial values of output matrices by 2."""
    axes = {'wo': ('mlp', 'embed'), 'logits': ('embed', 'vocab'), 'embedding': ('vocab', 'embed')}
    boxed = {name: nn.LogicallyPartitioned(jnp.full((128, 128), 0.3), names) for name, names in axes.items()}
    model, results = SimpleNamespace(init=lambda rng, shapes: boxed), []
    for rule in (make(0.01), mup.scale_by_width(make(0.01), 128, 32)):
        plan = train_state.plan_train_state(model, rule, None, Partitioner())
        state = plan.create(jax.random.key(0))
        ones = jax.tree.map(jnp.ones_like, state.params)
        results.append((state.params, jax.jit(plan.tx.update)(ones, state.opt_state, state.params)[0]))
    (plain, plain_updates), (scaled, updates) = results
    # Relative updates of a hidden matrix are already halved by its fan-in initialization, and those of the logits'
    # matrix by its initial factor.
    matrix = 0.5 if make is optimizer.adafactor else 0.25
    expected = {'wo': (1.0, matrix), 'logits': (0.5, matrix), 'embedding': (1.0, 1.0)}
    for name, (initial, update) in expected.items():
        assert np.all(plain_updates[name])
        np.testing.assert_allclose(scaled[name], initial * plain[name], rtol=1e-6)
        np.testing.assert_allclose(updates[name], update * plain_updates[name], rtol=1e-5)


def test_activations_are_independent_of_width():
    """The coordinate check. Without muP, all slopes are between 0.20 and 0.23."""
    slopes = width_transfer.compute_rms_slopes('t5_1_1', (32, 128), 32, 2**-8, steps=3)
    assert slopes.pop('logits') < 0
    assert max(map(abs, slopes.values())) < 0.1


def test_tied_logits_have_the_scale_of_the_base_width():
    """Logits of aligned features do not grow with the width, for the scaling of T5 and that of BERT and GPT-2."""
    for scaled in (True, False):
        aligned = [np.sum(scale_projection_input(np.ones(width), scaled, 64)) for width in (64, 256, 1024)]
        np.testing.assert_allclose(aligned, np.sum(scale_projection_input(np.ones(64), scaled, None)), rtol=1e-12)


def test_optimizers_without_factors_and_parameters_without_axes_are_rejected():
    with pytest.raises(UserError, match='MUP_BASE_WIDTH requires .*optimizers/adamw_rms.gin'):
        mup.scale_by_width(muon.muon(0.01), 256, 64)
    with pytest.raises(UserError, match='parameters with logical axes, but dense/bias has none; use nn.with_logical'):
        mup.scale_by_width(FACTORS_ONLY, 256, 64).initial({'dense': {'bias': np.ones(2)}})
