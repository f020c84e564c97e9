"""Parameter counts against published models, and FLOPs against XLA's counts and closed forms."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from remixer_t5x import build_model
from remixer_t5x.context import make_sequence_context
from remixer_t5x.costs import model_counts
from remixer_t5x.data import batch_formats
from remixer_t5x.models import interface
from remixer_t5x.models.sublayers import attention, hyper_mixer, mlp_mixer

LENGTHS = {'inputs': 24, 'targets': 10}


def t5_flops(embed, hidden, heads, head_dim, layers, vocab, inputs, targets):
    """Counts a forward pass of T5.1.1 from the paper's shapes: a multiply and an add per weight and token."""
    joined = heads * head_dim

    def attention(queries, keys):
        return 2 * (2 * queries * embed * joined + 2 * keys * embed * joined + 2 * queries * keys * joined)

    def mlp(tokens):
        return 2 * 3 * tokens * embed * hidden

    encoder = attention(inputs, inputs) + mlp(inputs)
    decoder = attention(targets, targets) + attention(targets, inputs) + mlp(targets)
    return layers * (encoder + decoder) + 2 * targets * embed * vocab


def test_t5_1_1_has_the_published_parameters_and_expected_flops():
    model = build_model('models/t5_1_1.gin', 'sizes/base.gin')
    counted = model_counts.count_model_costs(model, {'inputs': 512, 'targets': 114})
    # Hugging Face's google/t5-v1_1-base.
    assert counted.total_parameters == 247_577_856
    assert counted.total_forward_flops == t5_flops(768, 2048, 12, 64, 12, 32128, 512, 114)
    assert counted.training_flops == 3 * counted.total_forward_flops


# Other FLOPs are those of two outputs per token, of cosines, and of the logits of a quarter of the tokens.
@pytest.mark.parametrize(
    ('model_type', 'texts', 'other_flops'),
    [('span', 1, 2 * 24 * 128 * 2), ('embedding', 2, 2 * 128), ('encoder_only', 1, 2 * 6 * 128 * 32128)],
)
def test_costs_of_encoder_models(model_type, texts, other_flops):
    files = 'models/t5_1_1.gin', 'sizes/mini.gin', f'model_types/{model_type}.gin'
    counted = model_counts.count_model_costs(build_model(*files, NUM_ENCODER_LAYERS=1), LENGTHS)
    attention, mlp = 2 * (4 * 24 * 128 * 128 + 2 * 24 * 24 * 128), 2 * 3 * 24 * 128 * 256
    assert counted.total_forward_flops == texts * (attention + mlp) + other_flops
    assert counted.tokens == texts * 24


def test_flops_equal_xlas_except_for_elementwise_operations():
    # XLA counts the body of a loop once, so each stack has one layer.
    model = build_model('models/t5_1_1.gin', 'sizes/small.gin', NUM_ENCODER_LAYERS=1, NUM_DECODER_LAYERS=1)
    batch = batch_formats.get_abstract_batch(model.model_type, LENGTHS)
    shapes = {name: array.shape for name, array in batch.items()}
    params = nn.unbox(interface.compute_param_shapes(model, shapes))
    forward = jax.jit(lambda p, b: model.loss(p, b)[0])
    xla = forward.lower(params, batch).compile().cost_analysis()['flops']
    assert 0.93 < sum(model_counts.count_flops_per_module(model.loss, params, batch).values()) / xla <= 1.0


def convolve(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1,), 'VALID', dimension_numbers=('NWC', 'WIO', 'NWC'))


def convolve_groups(x, kernel):
    """Computes 6 features of two examples from two groups of two examples, like the gradient of a grouped kernel."""
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), 'VALID', dimension_numbers=('NWC', 'WIO', 'NWC'), batch_group_count=2
    )


def control_flow(x):
    """Runs 4 iterations of a scan over a jitted, rematerialized product, and one of two branches."""
    step = jax.jit(jax.checkpoint(lambda x: x @ x))
    x, _ = jax.lax.scan(lambda x, _: (step(x), None), x, None, length=4)
    return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x, x)


@jax.custom_vjp
def square(x):
    return x @ x


square.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))


@pytest.mark.parametrize(
    ('function', 'shapes', 'expected'),
    [
        (jnp.matmul, [(3, 5, 4), (3, 4, 6)], 2 * 3 * 5 * 4 * 6),
        (convolve, [(2, 9, 4), (3, 4, 5)], 2 * 2 * 7 * 3 * 4 * 5),
        (convolve_groups, [(4, 1, 8), (1, 8, 6)], 2 * 2 * 6 * 8),
        (control_flow, [(5, 5)], (4 + 2) * 2 * 5**3),
        (square, [(3, 3)], 2 * 3**3),
        (jnp.fft.fft, [(2, 64)], 5.0 * 2 * 64 * 6),
        (jnp.fft.rfft, [(2, 64)], 2.5 * 2 * 64 * 6),
    ],
)
def test_an_operation_has_the_flops_of_its_closed_form(function, shapes, expected):
    assert sum(model_counts.count_flops_per_module(function, *map(jnp.ones, shapes)).values()) == expected


class _Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, use_bias=False, name='dense')(x)


class _Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(nn.remat(_Scanned), variable_axes={'params': 0}, split_rngs={'params': True}, length=3)
        x, _ = scanned(name='run')(x, None)
        return _Inner(name='last')(x) @ jnp.ones((4, 4))


class _Scanned(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return _Inner(name='inner')(x), None


@pytest.mark.parametrize('n', [16, 64])
def test_mixers_have_the_flops_of_the_papers_formulas(n):
    """HyperMixer's formulas (Mai et al. 2023, appendix D) without GELU, and attention with an output projection."""
    x, ctx = jnp.zeros((1, n, 32)), make_sequence_context(jnp.ones((1, n), jnp.int32))
    for module, expected in (
        (hyper_mixer.HyperMixer(hidden_dim=48), 4 * n * 48 * 32 + n * (2 * 32 * 32 + 2 * 32 * 48)),
        (attention.SelfAttention(4, 8), 8 * n * 32 * 32 + 4 * n * n * 32),
        (mlp_mixer.MLPMixer(hidden_dim=48, max_length=n), 4 * n * 48 * 32),
    ):
        variables = module.init(jax.random.key(0), x, ctx)
        flops = model_counts.count_flops_per_module(lambda v, x, m=module: m.apply(v, x, ctx), variables, x)
        assert sum(flops.values()) == expected


def test_flops_are_counted_by_module_inside_scan_and_remat():
    module, x = _Outer(), jnp.ones((2, 4))
    variables = module.init(jax.random.key(0), x)
    counted = {path: n for path, n in model_counts.count_flops_per_module(module.apply, variables, x).items() if n}
    product = 2 * 2 * 4 * 4
    assert counted == {('run', 'inner', 'dense'): 3 * product, ('last', 'dense'): product, (): product}
    assert model_counts.count_parameters(variables['params']) == {
        ('run', 'inner', 'dense', 'kernel'): 3 * 16,
        ('last', 'dense', 'kernel'): 16,
    }
