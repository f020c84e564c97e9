"""Optimizers against T5X, optax and NumPy, for stacked and unstacked layers."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.optim import optimizer, parameter_averages, schedules, train_state
from tests.optim.optimizer_worker import Layers

GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'adafactor_t5x.json'


def wave(shape, phase, scale):
    """Returns deterministic float32 data, as in the script that wrote the golden numbers."""
    return (scale * np.sin(np.arange(np.prod(shape)) * 1.7 + phase)).reshape(shape).astype(np.float32)


def unstack(tree, axes):
    """Returns a flat dict with one entry per layer of each parameter."""
    out = {}
    for name, value in tree.items():
        if 'layers' in axes[name]:
            out |= {f'{name}_{i}': layer for i, layer in enumerate(value)}
        else:
            out[name] = value
    return out


def train(tx, params, axes, steps=4, flat=False):
    """Returns `params` after a few updates, whose gradients differ in scale between parameters and steps."""
    gradients = [
        {name: wave(value.shape, step + i, 3.0 ** (i - step)) for i, (name, value) in enumerate(params.items())}
        for step in range(steps)
    ]
    split = (lambda tree: unstack(tree, axes)) if flat else (lambda tree: tree)

    @jax.jit
    def update(gradient, state, params):
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.asarray, split(params))
    state = jax.jit(tx.init)(params)
    for gradient in gradients:
        params, state = update(split(gradient), state, params)
    return params, state


def stacked_problem(lengths):
    """Returns parameters of stacked layers (matrices, vectors and scalars) and other parameters, and their axes."""
    axes = {'embedding': P('vocab', 'embed'), 'bias': P('heads', 'relpos_buckets'), 'norm': P('embed')}
    shapes = {'embedding': (9, 6), 'bias': (5, 2), 'norm': (6,)}
    for run, length in enumerate(lengths):
        axes |= {
            f'run{run}_kernel': P('layers', 'embed', 'mlp'),
            f'run{run}_norm': P('layers', 'embed'),
            f'run{run}_gate': P('layers'),
        }
        shapes |= {
            f'run{run}_kernel': (length, 6, 7),
            f'run{run}_norm': (length, 6),
            f'run{run}_gate': (length,),
        }
    params = {}
    for i, (name, shape) in enumerate(shapes.items()):
        params[name] = wave(shape, i / 7, 0.5)
        if 'layers' in axes[name]:
            # Layers of very different scale, so that mixing them would be detected.
            params[name] *= (10.0 ** -np.arange(shape[0], dtype=np.float32)).reshape(-1, *[1] * (len(shape) - 1))
    return params, axes


def assert_same(stacked, single, axes):
    stacked = unstack(stacked, axes)
    assert set(stacked) == set(single)
    for name, value in single.items():
        # Rounding errors are relative to the largest entry, because factors are multiplied in another order.
        atol = 1e-5 * np.abs(value).max()
        np.testing.assert_allclose(stacked[name], value, rtol=1e-5, atol=atol, err_msg=name)


WARMUP = schedules.constant(2e-2, 2)
RSQRT = schedules.rsqrt(2**-0.5, constant_steps=2)
DECAY_MASK = lambda tree: {name: leaf.ndim == 2 and name != 'bias' for name, leaf in tree.items()}  # noqa: E731
DECAY = optax.add_decayed_weights(0.1, mask=DECAY_MASK)


def chain(*rule):
    """Adds the clipping, decay and learning rate of our optimizers to a rule of optax."""
    return optax.chain(optax.clip_by_global_norm(1.0), *rule, DECAY, optax.scale_by_learning_rate(WARMUP))


SCHEDULE_FREE = optax.scale_by_rms(decay=0.999, eps=1e-8, eps_in_sqrt=False, bias_correction=True)
# Our optimizer, and its counterpart in optax.
PAIRS = {
    'adafactor': (
        optimizer.adafactor(RSQRT, min_dim_size_to_factor=4, min_rms_near_zero=1e-3),
        optax.adafactor(RSQRT, min_dim_size_to_factor=4),
    ),
    'adamw_rms': (
        optimizer.adamw_rms(WARMUP, weight_decay=0.1, min_rms_near_zero=1e-3),
        chain(optax.scale_by_adam(eps=1e-6), optax.scale_by_param_block_rms(1e-3)),
    ),
    'adamw': (optimizer.adamw(WARMUP, weight_decay=0.1), chain(optax.scale_by_adam())),
    'lion': (optimizer.lion(WARMUP, weight_decay=0.1), chain(optax.scale_by_lion())),
    'schedule_free': (
        parameter_averages.schedule_free_adamw(WARMUP, weight_decay=0.1),
        optax.contrib.schedule_free(chain(SCHEDULE_FREE), WARMUP),
    ),
}


@pytest.mark.parametrize('name', PAIRS)
def test_stacked_layers_get_the_updates_of_optax_on_each_layer(name):
    params, axes = stacked_problem((3, 1))
    ours, reference = PAIRS[name]
    updated, state = train(ours.make(axes), params, axes)
    assert_same(updated, train(reference, params, axes, flat=True)[0], axes)
    counters = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == np.int32]
    assert counters and all(leaf.shape == () for leaf in counters)
    # Schedule-free counts from 1.
    assert {int(leaf) for leaf in counters} == ({4, 5} if name == 'schedule_free' else {4})
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {np.dtype('float32'), np.dtype('int32')}


@pytest.mark.parametrize(
    ('spec', 'decays'),
    [
        (P('vocab', 'embed'), True),
        (P('layers', 'heads', 'embed', 'mlp'), True),
        (P('layers', 'positions_out', 'positions_in'), True),
        (P('layers', 'embed', 'heads'), True),
        (P('layers', 'embed'), False),
        (P('heads', 'relpos_buckets'), False),
        # The biases and the shared weight vector of HyperMixer's hypernetworks.
        (P('layers', 'heads', 'mlp'), False),
        (P('layers', 'heads', 'token_mlp'), False),
    ],
)
def test_only_matrices_have_weight_decay(spec, decays):
    assert optimizer.build_weight_decay_mask({'parameter': spec}) == {'parameter': decays}


def test_adafactor_equals_t5x():
    """Golden parameters after four updates by T5X's `adafactor.Adafactor` (commit cc342d4, jax 0.10.2).

    Settings: `min_dim_size_to_factor=4`, learning rate 1/sqrt(max(step, 2)), the initial values and gradients below in
    sorted order of names, and for 'stacked' a factor_map of (BATCH, ROW, COLUMN) for the kernel and (BATCH, NONE) for
    the scale. `t5x.utils` was replaced by the only function that the optimizer calls.
    """
    golden = json.loads(GOLDEN.read_text())
    problems = {
        'single': (
            {
                'kernel': wave((4, 6), 0.1, 0.5),
                'scale': wave((5,), 0.2, 1.0),
                'tall': wave((6, 2), 0.3, 1e-4),
            },
            {'kernel': P('embed', 'mlp'), 'scale': P('embed'), 'tall': P('embed', 'heads')},
        ),
        'stacked': (
            {'kernel': wave((3, 4, 6), 0.4, 0.5), 'scale': wave((3, 5), 0.5, 1.0)},
            {'kernel': P('layers', 'embed', 'mlp'), 'scale': P('layers', 'embed')},
        ),
    }
    for problem, (params, axes) in problems.items():
        tx = optimizer.adafactor(schedules.rsqrt(2**-0.5, constant_steps=2), min_dim_size_to_factor=4).make(axes)
        state = tx.init(params)
        for step in range(4):
            grads = {
                name: wave(leaf.shape, step + i, 10.0 ** (i - step))
                for i, (name, leaf) in enumerate(sorted(params.items()))
            }
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        for name, expected in golden[problem].items():
            np.testing.assert_allclose(np.ravel(params[name]), expected, rtol=1e-5, atol=1e-8, err_msg=name)


@pytest.mark.parametrize('name', ['adafactor', 'adamw_rms'])
def test_parameters_near_zero_have_a_different_minimum_rms(name):
    """In the first step, both optimizers change every element by learning rate x RMS."""
    axes = {
        'h': P('layers', 'positions_out', 'positions_in'),
        'toeplitz': P('relpos_buckets'),
        'alpha': P('layers'),
        'alpha_vector': P(None),
        'bias': P('mlp'),
        'norm': P('embed'),
        'kernel': P('embed', 'mlp'),
        'position_bias': P('heads', 'relpos_buckets'),
    }
    params = {key: 1e-5 * np.ones(np.arange(2, 2 + len(spec)), np.float32) for key, spec in axes.items()}
    make = getattr(optimizer, name)
    options = {'clipping_threshold': None} if name == 'adafactor' else {'max_grad_norm': None}
    tx = make(0.1, min_rms_near_zero=0.25, **options).make(axes)
    updates, _ = tx.update(jax.tree.map(np.ones_like, params), tx.init(params), params)
    moved = {key: float(np.max(np.abs(leaf))) for key, leaf in updates.items()}
    near_zero = {'h', 'toeplitz', 'alpha', 'alpha_vector'}
    expected = {key: 0.1 * (0.25 if key in near_zero else 1e-3) for key in axes}
    assert moved == pytest.approx(expected, rel=1e-3)


def test_optax_transformations_are_wrapped_without_a_learning_rate():
    tx, params = optax.adamw(1e-3), {'w': jnp.ones(2)}
    wrapped = optimizer.as_optimizer(tx)
    jax.tree.map(np.testing.assert_array_equal, wrapped.make(None).init(params), tx.init(params))
    assert wrapped.learning_rate is None and optimizer.as_optimizer(wrapped) is wrapped
    for invalid, message in (
        (optax.adamw, r'got adamw; add \(\) after'),
        (optax.MultiSteps(optax.sgd(1.0), 2), r'got .*MultiSteps.*; pass .*\.gradient_transformation\(\)'),
        (0.1, 'got 0.1; set OPTIMIZER'),
        (optax.chain(optax.clip(1.0), optax.contrib.schedule_free_sgd(0.1)), 'got a chain .* pass the other'),
    ):
        with pytest.raises(UserError, match=f'OPTIMIZER must be .* {message}'):
            optimizer.as_optimizer(invalid)


@pytest.mark.parametrize(
    ('tx', 'words'),
    [
        (optax.flatten(optax.adam(0.1)), 'ShardingTypeError: This reshape is not supported'),
        (optax.lookahead(optax.sgd(0.1), 3, 0.5), "AttributeError: 'dict' object has no attribute 'fast'"),
        (optax.lbfgs(0.1), "TypeError: .* missing 2 required keyword-only arguments: 'grad' and 'value_fn'"),
        (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)), "TypeError: .* unexpected keyword argument 'value'"),
    ],
    ids=['flatten', 'lookahead', 'lbfgs', 'sam'],
)
@pytest.mark.filterwarnings('ignore:Specifying a key')
def test_an_optax_transformation_that_does_not_fit_raises(tx, words):
    with pytest.raises(UserError, match=f'OPTIMIZER must compute updates .* {words}.*; use another optimizer') as error:
        plan = train_state.plan_train_state(Layers(), tx, None, Partitioner())
        jax.eval_shape(
            functools.partial(plan.tx.update, value=0.0),
            plan.abstract.params,
            plan.abstract.opt_state,
            plan.abstract.params,
        )
    assert '\n' not in str(error.value)
