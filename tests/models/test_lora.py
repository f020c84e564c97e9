"""Adapters of dense layers: what they add, where they are, and what a model without them gets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import traverse_util

from remixer_t5x import axes, build_model
from remixer_t5x.config import loading
from remixer_t5x.errors import UserError
from remixer_t5x.models import interface, lora
from remixer_t5x.models.beam_search import BeamSearch
from remixer_t5x.models.layers.dense import Dense, GroupDense
from tests.support import saved_run

SHAPES = {name: (2, 6) for name in ('encoder_input_tokens', 'decoder_target_tokens')}
# Two layers, so that the matrices are stacked.
CONFIG = f'{saved_run.CONFIG}NUM_ENCODER_LAYERS = 2\nNUM_DECODER_LAYERS = 2\n'


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp('models') / 'given.gin'
    path.write_text(CONFIG)
    return build_model(str(path))


def made(model):
    """Random parameters, also where an adapter starts at zero."""

    def init(key):
        flat = traverse_util.flatten_dict(nn.unbox(model.init(key, SHAPES)), sep='/')
        rng = jax.random.split(key, len(flat))
        noise = {n: 0.3 * jax.random.normal(k, flat[n].shape) for n, k in zip(flat, rng, strict=True)}
        return traverse_util.unflatten_dict(
            {n: noise[n] if lora.is_adapter(n) else leaf for n, leaf in flat.items()}, sep='/'
        )

    return jax.jit(init)(jax.random.key(0))


def merge(params):
    flat = traverse_util.flatten_dict(params, sep='/')
    kernels = [name for name in flat if lora.matrices_of(name)[0] in flat and name.endswith('/kernel')]
    result = {name: leaf for name, leaf in flat.items() if not lora.is_adapter(name)}
    for name in kernels:
        first, second = (np.asarray(flat[matrix], np.float64) for matrix in lora.matrices_of(name))
        result[name] = jnp.asarray(np.asarray(flat[name]) + first @ second, jnp.float32)
    return traverse_util.unflatten_dict(result, sep='/')


@pytest.mark.quick
def test_an_adapted_model_computes_what_the_merged_model_computes(plain):
    """The loss, and decoding, where layers are apart."""
    model = lora.adapted(plain, '.', 3)
    params, rng = made(model), np.random.default_rng(0)
    names = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')
    batch = {name: rng.integers(1, 384, (2, 6)).astype(np.int32) for name in names}

    def compute(model, params):
        return model.loss(params, batch)[0], model.generate(params, batch, 5, decoder=BeamSearch(beams=2))

    ours = jax.jit(lambda p: compute(model, p))(params)
    of_plain, whole = jax.jit(lambda p: compute(plain, p)), merge(params)
    theirs = of_plain(whole)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), ours, theirs)
    # Not because the adapters do nothing.
    flat, kept = (traverse_util.flatten_dict(tree, sep='/') for tree in (params, whole))
    base = of_plain(traverse_util.unflatten_dict({name: flat[name] for name in kept}, sep='/'))[0]
    assert abs(base - ours[0]) > 1e-2 * abs(base)


def test_every_dense_layer_of_the_stacks_can_be_adapted_and_starts_as_it_was(plain):
    model = lora.adapted(plain, '.', 3)
    boxed = interface.param_shapes(model, SHAPES)
    flat = traverse_util.flatten_dict(boxed, sep='/')
    kernels = {name for name in flat if name.endswith('/kernel') and name != 'logits/kernel'}
    assert {lora.kernel_of(name) for name in flat if lora.is_adapter(name)} == kernels
    name = 'encoder/run_0/layer/gated_mlp/wo'
    first = flat[f'{name}/lora_in']
    assert first.names == ('layers', 'mlp', 'lora_rank') and first.value.shape == (2, 24, 3)
    assert flat[f'{name}/lora_out'].names == ('layers', 'lora_rank', 'embed')
    params = nn.unbox(jax.jit(lambda key: model.init(key, SHAPES))(jax.random.key(0)))
    layer = params['encoder']['run_0']['layer']['gated_mlp']['wo']
    assert not layer['lora_out'].any() and 0.1 < layer['lora_in'].std() * 24**0.5 < 2
    assert not np.array_equal(layer['lora_in'][0], layer['lora_in'][1])


def test_a_layer_whose_caller_multiplies_by_its_kernel_is_adapted():
    """Those of aMLP's attention: each has an adapter, whose product is part of the kernel that the caller gets."""
    model = lora.adapted(loading.values(loading.Given(['models/amlp.gin', 'sizes/tiny.gin']), 'MODEL')[0], '.', 3)
    names = set(traverse_util.flatten_dict(interface.param_shapes(model, SHAPES), sep='/'))
    layers = [f'encoder/run_0/layer/gmlp/attention/{name}' for name in ('query', 'key', 'value', 'out')]
    assert {f'{layer}/{matrix}' for layer in layers for matrix in ('kernel', 'lora_in', 'lora_out')} <= names

    rng = np.random.default_rng(0)
    kernel, first, second = (rng.standard_normal(shape, np.float32) for shape in ((6, 7), (6, 3), (3, 7)))
    params = {'kernel': kernel, 'lora_in': first, 'lora_out': second}
    ours = Dense(7, (axes.EMBED, axes.MLP)).apply({'params': params}, 6, jnp.float32, method='kernel')
    np.testing.assert_allclose(ours, kernel + first @ second, rtol=1e-5, atol=1e-5)


def test_each_group_of_a_grouped_layer_has_its_own_adapter():
    """TIM's mechanisms: every kernel has one, and a layer computes what it computes with W + A B in its place."""
    files = ['models/tim.gin', 'sizes/tiny.gin']
    model = lora.adapted(loading.values(loading.Given(files), 'MODEL')[0], '.', 3)
    flat = traverse_util.flatten_dict(interface.param_shapes(model, SHAPES), sep='/')
    kernels = {name: leaf for name, leaf in flat.items() if name.endswith('/kernel') and name != 'logits/kernel'}
    assert {lora.kernel_of(name) for name in flat if lora.is_adapter(name)} == set(kernels)
    assert max(leaf.value.ndim for leaf in kernels.values()) == 4, 'no kernel of layers and groups'
    for name, kernel in kernels.items():
        first, second = (flat[matrix] for matrix in lora.matrices_of(name))
        assert first.value.shape == (*kernel.value.shape[:-1], 3) and len(first.names) == kernel.value.ndim
        assert second.value.shape == (*kernel.value.shape[:-2], 3, kernel.value.shape[-1])

    rng = np.random.default_rng(0)
    x, kernel, first, second = (
        rng.standard_normal(shape, np.float32) for shape in ((2, 4, 5, 6), (2, 6, 7), (2, 6, 3), (2, 3, 7))
    )
    module = GroupDense(7, (axes.MECHANISMS, axes.EMBED, axes.MLP))
    ours = module.apply({'params': {'kernel': kernel, 'lora_in': first, 'lora_out': second}}, (x,))[0]
    merged = kernel + np.einsum('gir,gro->gio', first, second)
    np.testing.assert_allclose(ours, np.einsum('g...i,gio->g...o', x, merged), rtol=1e-4, atol=1e-4)


def test_models_with_other_adapters_are_other_models(plain):
    assert lora.adapted(plain, None) is plain
    one, two = lora.adapted(plain, 'query', 2), lora.adapted(plain, 'query', 3)
    assert one != two and isinstance(one, type(plain)) and lora.adapted(plain, 'query', 2) == one


@pytest.mark.parametrize(
    ('modules', 'rank', 'words'),
    [('qery', 2, 'the name of no dense layer; they are .*self_attention/query'), ('(', 2, 'not a regular expression'),
     ('query', 0, 'LORA_RANK is 0; it takes a number, 1 or more')],
)  # fmt: skip
def test_a_wrong_setting_is_one_line(plain, modules, rank, words):
    with pytest.raises(UserError, match=words):
        jax.eval_shape(lambda key: lora.adapted(plain, modules, rank).init(key, SHAPES), jax.random.key(0))
