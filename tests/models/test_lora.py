"""LoRA adapters: outputs, names, shapes, and invalid settings."""

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
from remixer_t5x.models.layers.dense import Dense, GroupDense
from tests.support import saved_run

SHAPES = {name: (2, 6) for name in ('encoder_input_tokens', 'decoder_target_tokens')}
# Two layers, so that the matrices are stacked.
CONFIG = f'{saved_run.CONFIG}NUM_ENCODER_LAYERS = 2\nNUM_DECODER_LAYERS = 2\n'


@pytest.fixture(scope='module')
def base_model(tmp_path_factory):
    path = tmp_path_factory.mktemp('models') / 'base.gin'
    path.write_text(CONFIG)
    return build_model(str(path))


def flatten(params):
    return traverse_util.flatten_dict(params, sep='/')


def unflatten(flat):
    return traverse_util.unflatten_dict(flat, sep='/')


def random_params(model):
    """Returns initial parameters, with random numbers instead of zeros in the adapters."""

    def init(key):
        flat = flatten(nn.unbox(model.init(key, SHAPES)))
        keys = dict(zip(flat, jax.random.split(key, len(flat)), strict=True))
        noise = {name: 0.3 * jax.random.normal(keys[name], leaf.shape) for name, leaf in flat.items()}
        return unflatten({name: noise[name] if lora.is_adapter(name) else leaf for name, leaf in flat.items()})

    return jax.jit(init)(jax.random.key(0))


def merge(params):
    flat = flatten(params)
    merged = {name: leaf for name, leaf in flat.items() if not lora.is_adapter(name)}
    for name, kernel in merged.items():
        if name.endswith('/kernel') and lora.get_adapter_names(name)[0] in flat:
            first, second = (np.asarray(flat[matrix], np.float64) for matrix in lora.get_adapter_names(name))
            merged[name] = jnp.asarray(np.asarray(kernel) + first @ second, jnp.float32)
    return unflatten(merged)


def adapted_shapes(*files):
    """Returns the boxed shapes of a shipped model with adapters for all dense layers."""
    model = lora.with_adapters(loading.load_macro_values(loading.ConfigSources(list(files)), 'MODEL')[0], '.', 3)
    return flatten(interface.compute_param_shapes(model, SHAPES))


def assert_all_kernels_are_adapted(flat):
    kernels = {name: leaf for name, leaf in flat.items() if name.endswith('/kernel') and name != 'logits/kernel'}
    assert {lora.get_adapted_kernel_name(name) for name in flat if lora.is_adapter(name)} == set(kernels)
    for name, kernel in kernels.items():
        first, second = (flat[matrix] for matrix in lora.get_adapter_names(name))
        assert first.value.shape == (*kernel.value.shape[:-1], 3) and len(first.names) == kernel.value.ndim
        assert second.value.shape == (*kernel.value.shape[:-2], 3, kernel.value.shape[-1])
    return kernels


@pytest.mark.quick
def test_adapted_model_equals_merged_model(base_model):
    """Compares the loss, and decoding, which unstacks the layers."""
    model = lora.with_adapters(base_model, '.', 3)
    params, rng = random_params(model), np.random.default_rng(0)
    names = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')
    batch = {name: rng.integers(1, 384, (2, 6)).astype(np.int32) for name in names}

    def compute(model, params):
        return model.loss(params, batch)[0], model.generate(params, batch, 5).tokens[:, 0]

    adapted_outputs = jax.jit(lambda p: compute(model, p))(params)
    run_base, merged = jax.jit(lambda p: compute(base_model, p)), merge(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), adapted_outputs, run_base(merged))
    # The adapters have an effect.
    flat = flatten(params)
    base_loss = run_base(unflatten({name: flat[name] for name in flatten(merged)}))[0]
    assert abs(base_loss - adapted_outputs[0]) > 1e-2 * abs(base_loss)


def test_every_dense_layer_is_adapted_and_starts_at_zero(base_model):
    model = lora.with_adapters(base_model, '.', 3)
    flat = flatten(interface.compute_param_shapes(model, SHAPES))
    assert_all_kernels_are_adapted(flat)
    name = 'encoder/run_0/layer/gated_mlp/wo'
    assert flat[f'{name}/lora_in'].names == ('layers', 'mlp', 'lora_rank')
    assert flat[f'{name}/lora_out'].names == ('layers', 'lora_rank', 'embed')
    params = flatten(nn.unbox(jax.jit(lambda key: model.init(key, SHAPES))(jax.random.key(0))))
    first, second = (params[matrix] for matrix in lora.get_adapter_names(f'{name}/kernel'))
    assert not second.any() and 0.1 < first.std() * 24**0.5 < 2
    assert not np.array_equal(first[0], first[1])


def test_adapter_of_a_kernel_that_the_caller_multiplies():
    """In aMLP, the attention itself multiplies by the kernels of its dense layers."""
    names = {*adapted_shapes('models/amlp.gin', 'sizes/tiny.gin')}
    layers = [f'encoder/run_0/layer/gmlp/attention/{name}' for name in ('query', 'key', 'value', 'out')]
    assert {f'{layer}/{matrix}' for layer in layers for matrix in ('kernel', 'lora_in', 'lora_out')} <= names
    rng = np.random.default_rng(0)
    kernel, first, second = (rng.standard_normal(shape, np.float32) for shape in ((6, 7), (6, 3), (3, 7)))
    params = {'kernel': kernel, 'lora_in': first, 'lora_out': second}
    merged = Dense(7, (axes.EMBED, axes.MLP)).apply({'params': params}, 6, jnp.float32, method='get_merged_kernel')
    np.testing.assert_allclose(merged, kernel + first @ second, rtol=1e-5, atol=1e-5)


def test_each_group_of_a_grouped_layer_has_an_adapter():
    kernels = assert_all_kernels_are_adapted(adapted_shapes('models/tim.gin', 'sizes/tiny.gin'))
    assert max(leaf.value.ndim for leaf in kernels.values()) == 4
    rng = np.random.default_rng(0)
    x, kernel, first, second = (
        rng.standard_normal(shape, np.float32) for shape in ((2, 4, 5, 6), (2, 6, 7), (2, 6, 3), (2, 3, 7))
    )
    module = GroupDense(7, (axes.MECHANISMS, axes.EMBED, axes.MLP))
    outputs = module.apply({'params': {'kernel': kernel, 'lora_in': first, 'lora_out': second}}, (x,))[0]
    merged = kernel + np.einsum('gir,gro->gio', first, second)
    np.testing.assert_allclose(outputs, np.einsum('g...i,gio->g...o', x, merged), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ('modules', 'rank', 'message'),
    [('qery', 2, "LORA must match the name of a dense layer, got 'qery'; .*self_attention/query"),
     ('(', 2, r"LORA must be a regular expression, got '\('"), ('query', 0, 'LORA_RANK .* 0')],
)  # fmt: skip
def test_invalid_settings_raise(base_model, modules, rank, message):
    with pytest.raises(UserError, match=message):
        jax.eval_shape(lambda key: lora.with_adapters(base_model, modules, rank).init(key, SHAPES), jax.random.key(0))
