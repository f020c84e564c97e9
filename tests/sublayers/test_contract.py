"""The laws that every sublayer obeys in an encoder and in a decoder, checked over all of them at once.

A new sublayer is tested by adding a row to `SUBLAYERS`.
"""

import functools
import importlib.util
import pathlib
import re
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x import axes
from remixer_t5x.architecture import layer, stack
from remixer_t5x.context import Memory, SequenceContext
from remixer_t5x.layers.norms import GroupedRMSNorm, LayerNorm
from remixer_t5x.layers.positions import LearnedPositions, RelativePositionBias
from remixer_t5x.sublayers import (
    attention,
    fnet,
    gated_mlp,
    gmlp,
    hyper_mixer,
    linear_attention,
    mlp_mixer,
    relu_mlp,
    remixer,
    tim,
    tiny_attention,
)

BATCH, LENGTH, EMBED, HIDDEN, MEMORY = 2, 12, 16, 24, 6
DROPOUT = 0.5

_self = functools.partial(attention.SelfAttention, num_heads=2, head_dim=8, dropout_rate=DROPOUT)
_cross = functools.partial(attention.CrossAttention, num_heads=2, head_dim=8, dropout_rate=DROPOUT)
_remixer = functools.partial(
    remixer.Remixer, hidden_dim=HIDDEN, max_length=LENGTH + 2, dropout_rate=DROPOUT, mixing_dropout_rate=DROPOUT
)
_gated_mlp = functools.partial(gated_mlp.GatedMLP, hidden_dim=HIDDEN, dropout_rate=DROPOUT)
_relu_mlp = functools.partial(relu_mlp.ReluMLP, hidden_dim=HIDDEN, dropout_rate=DROPOUT)


class Case(NamedTuple):
    """Sublayers of a layer on each side; an empty tuple where a side is not for them.

    `reach` is how many tokens, itself included, an output of the two decoder layers depends on. `whole_rows` are for a
    sublayer that refuses packed rows and whose outputs depend on the padded length: the first two laws are not for it.
    """

    encoder: tuple = ()
    decoder: tuple = ()
    layout: type = layer.PreNorm
    norm: functools.partial | None = None
    reach: int = LENGTH
    whole_rows: bool = False


SUBLAYERS = {
    't5': Case((_self, _gated_mlp), (_self, _cross, _gated_mlp)),
    'gated_mlp': Case((_gated_mlp,), (_gated_mlp,), reach=1),
    'relu_mlp': Case((_relu_mlp,), (_relu_mlp,), reach=1),
}
# Each form of composition and of the residual once, each in another layout.
_gated = functools.partial(_remixer, composition=remixer.GatedAlpha)
_vector = functools.partial(
    _remixer, composition=remixer.VectorAlpha, hidden_dim=EMBED, residual=remixer.identity_residual
)
_fixed = functools.partial(_remixer, composition=remixer.FixedAlpha, residual=remixer.no_residual)
_uncomposed = functools.partial(_remixer, composition=remixer.NoComposition)
SUBLAYERS['remixer'] = Case((_remixer,), (_remixer, _cross))
SUBLAYERS['remixer_gated_post'] = Case((_self, _gated), (_self, _cross, _gated), layer.PostNorm)
SUBLAYERS['remixer_vector_parallel'] = Case((_self, _vector), (_self, _cross, _vector), layer.Parallel)
SUBLAYERS['remixer_fixed_rezero'] = Case((_self, _fixed), (_self, _cross, _fixed), layer.ReZero)
SUBLAYERS['remixer_uncomposed_serialized'] = Case((_uncomposed, _gated_mlp), (_uncomposed, _cross), layer.Serialized)

_gmlp = functools.partial(gmlp.GMLP, hidden_dim=HIDDEN, max_length=LENGTH + 2, dropout_rate=DROPOUT)
_tiny = functools.partial(tiny_attention.TinyAttention, head_dim=8)
_amlp = functools.partial(_gmlp, spatial=gmlp.FreeSpatial, attention=_tiny)
_gates = [
    functools.partial(_gmlp, gate=gate) for gate in (gmlp.linear_gate, gmlp.additive_gate, gmlp.multiplicative_gate)
]
SUBLAYERS['gmlp'] = Case((_gmlp,), (_gmlp, _cross))
SUBLAYERS['gmlp_gates'] = Case((), (*_gates, _cross), norm=functools.partial(LayerNorm))
SUBLAYERS['amlp_with_gated_mlp'] = Case((_amlp, _gated_mlp), (_amlp, _cross, _gated_mlp))

_tim_self = functools.partial(tim.TimAttention, 2, num_heads=2, head_dim=8, dropout_rate=DROPOUT)
_tim_cross = functools.partial(tim.TimCrossAttention, 2, num_heads=2, head_dim=8, dropout_rate=DROPOUT)
_tim_inter = functools.partial(tim.InterMechanismAttention, 2, head_dim=4)
_tim_mlp = functools.partial(tim.TimMLP, 2, hidden_dim=HIDDEN, dropout_rate=DROPOUT)
_tim_norm = functools.partial(GroupedRMSNorm, 2)
_encoder, _decoder = (_tim_self, _tim_inter, _tim_mlp), (_tim_self, _tim_cross, _tim_inter, _tim_mlp)
SUBLAYERS['tim'] = Case(_encoder, _decoder, norm=_tim_norm)
_variant = functools.partial(_tim_self, competition=None)
SUBLAYERS['tim_no_competition'] = Case((_variant, _tim_inter, _tim_mlp), (), layer.PostNorm, _tim_norm)

_hyper_tied = functools.partial(hyper_mixer.HyperMixer, HIDDEN, num_heads=2, dropout_rate=DROPOUT)
_hyper_options = {'length_scale': True, 'norm': None, 'token_information': functools.partial(LearnedPositions, LENGTH)}
_biased = functools.partial(hyper_mixer.GeneratedWeights, use_bias=True)
_hyper = functools.partial(hyper_mixer.HyperMixer, HIDDEN, tied=False, weights=_biased, **_hyper_options)
_hyper_cross = functools.partial(hyper_mixer.HyperMixerCross, HIDDEN, num_heads=2, dropout_rate=DROPOUT)
_hyper_cross_scaled = functools.partial(hyper_mixer.HyperMixerCross, HIDDEN, **_hyper_options)
_hyper_shared = functools.partial(_hyper_tied, tied=False, weights=hyper_mixer.SharedWeightVector)
SUBLAYERS['hyper_mixer'] = Case((_hyper_tied,), (_hyper_tied, _hyper_cross))
SUBLAYERS['hyper_mixer_variants'] = Case((_hyper, _hyper_shared), (_hyper, _hyper_shared, _hyper_cross_scaled))

_linear = functools.partial(linear_attention.LinearAttention, num_heads=2, head_dim=8, dropout_rate=DROPOUT)
_linear_cross = functools.partial(linear_attention.LinearCrossAttention, num_heads=2, head_dim=8, dropout_rate=DROPOUT)
_mlp_mixer = functools.partial(mlp_mixer.MLPMixer, HIDDEN, max_length=LENGTH + 2, dropout_rate=DROPOUT)
_window = functools.partial(mlp_mixer.WindowMixer, HIDDEN, window=3, dropout_rate=DROPOUT)
SUBLAYERS['linear_attention'] = Case((_linear,), (_linear, _linear_cross))
SUBLAYERS['mlp_mixer'] = Case((_mlp_mixer,), (_window, _cross), reach=5)
SUBLAYERS['fnet'] = Case((functools.partial(fnet.FNet), _gated_mlp), whole_rows=True)


def _from_the_guide():
    """The mixer of docs/guide/new_mixer.md, as it stands there."""
    page = (pathlib.Path(__file__).parents[2] / 'docs/guide/new_mixer.md').read_text()
    text = re.search(r"^cat > my_mixers.py <<'END'\n(.*?)^END$", page, re.DOTALL | re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, 'guide_mixers.py')
        path.write_text(text)
        spec = importlib.util.spec_from_file_location('guide_mixers', path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return functools.partial(module.MovingAverage)


_average = _from_the_guide()
SUBLAYERS['guide'] = Case((_average, _gated_mlp), (_average, _cross))

READS_POSITION_BIAS = {attention.SelfAttention, tim.TimAttention}

ENCODERS = [name for name, case in SUBLAYERS.items() if case.encoder]
DECODERS = [name for name, case in SUBLAYERS.items() if case.decoder]
both_sides = pytest.mark.parametrize(
    ('name', 'side'), [(name, 'encoder') for name in ENCODERS] + [(name, 'decoder') for name in DECODERS]
)
per_example = pytest.mark.parametrize(
    ('name', 'side'), [pair for pair in both_sides.args[1] if not SUBLAYERS[pair[0]].whole_rows]
)
every_decoder = pytest.mark.parametrize('name', DECODERS)
# Where a test compiles much, the side that has more in it will do.
fuller_side = pytest.mark.parametrize(
    ('name', 'side'), [(name, 'decoder' if case.decoder else 'encoder') for name, case in SUBLAYERS.items()]
)
READS_MEMORY = {
    attention.CrossAttention,
    tim.TimCrossAttention,
    hyper_mixer.HyperMixerCross,
    linear_attention.LinearCrossAttention,
}


def first_readers_of_memory() -> list[str]:
    """A decoder for each sublayer that reads the memory; other rows would repeat it."""
    names = {}
    for name, case in SUBLAYERS.items():
        for factory in case.decoder:
            if factory.func in READS_MEMORY:
                names.setdefault(factory.func, name)
    assert set(names) == READS_MEMORY
    return list(names.values())


few_examples = settings(max_examples=8, deadline=None, derandomize=True, database=None)


@functools.cache
def make_stack(name: str, side: str, **options) -> stack.Stack:
    case = SUBLAYERS[name]
    sublayers = getattr(case, side)
    make_layer = functools.partial(layer.make_layer, sublayers, case.layout, DROPOUT, case.norm)
    reads_bias = any(factory.func in READS_POSITION_BIAS for factory in sublayers)
    bias = functools.partial(RelativePositionBias, num_heads=2) if reads_bias else None
    return stack.Stack(runs=((make_layer, 2),), position_bias=bias, dropout_rate=DROPOUT, **options)


def make_context(side: str, segments, memory=None, memory_segments=None, **flags) -> SequenceContext:
    """Context of rows given as lists of example lengths, e.g. [[3, 4], [5]]; several examples mean packing."""
    packed = any(len(row) > 1 for row in segments)
    ids, positions = layout_rows(segments, flags.pop('length', LENGTH))
    ctx = SequenceContext(ids, positions, causal=side == 'decoder', packed=packed, **flags)
    if side == 'decoder':
        memory_ids, memory_positions = layout_rows(memory_segments or [[MEMORY]] * len(memory), memory.shape[1])
        ctx = ctx.replace(memory=Memory(memory, SequenceContext(memory_ids, memory_positions, packed=packed)))
    return ctx


def layout_rows(segments, length):
    ids = np.zeros((len(segments), length), np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (len(segments), 1))
    for row, lengths in enumerate(segments):
        start = 0
        for index, count in enumerate(lengths):
            ids[row, start : start + count] = index + 1
            positions[row, start : start + count] = np.arange(count)
            start += count
    return ids, positions


@functools.cache
def make_parameters(name: str, side: str):
    """Random parameters away from their initial values, so that nothing is zero or one by default."""
    boxed = boxed_parameters(name, side)
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: x + 0.3 * rng.standard_normal(x.shape, np.float32), jax.device_get(nn.unbox(boxed)))


@functools.cache
def boxed_parameters(name: str, side: str):
    ctx = make_context(side, [[LENGTH]] * BATCH, memory=features(9, MEMORY))
    return jax.jit(make_stack(name, side).init)(jax.random.key(0), features(0), ctx)['params']


# Arrays are NumPy's outside of compiled functions: JAX would compile a program for each slice and shape.
def features(seed: int, length: int = LENGTH, batch: int = BATCH) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((batch, length, EMBED), np.float32)


@functools.cache
def compiled(name: str, side: str, **options):
    model = make_stack(name, side, **options)
    return jax.jit(lambda params, x, ctx: model.apply({'params': params}, x, ctx))


def run(name: str, side: str, x, ctx, **options):
    return np.asarray(compiled(name, side, **options)(make_parameters(name, side), x, ctx))


def assert_close(actual, wanted, tolerance=1e-4):
    # A planted bug is off by a hundredth or more; rounding, in layers this sharp, by less than the tolerance.
    scale = np.max(np.abs(np.asarray(wanted))) + 1e-6
    np.testing.assert_allclose(np.asarray(actual) / scale, np.asarray(wanted) / scale, atol=tolerance, rtol=0)


@per_example
def test_padding_law(name, side):
    short = 7

    @few_examples
    @given(st.lists(st.integers(1, short), min_size=BATCH, max_size=BATCH), st.integers(0, 99))
    def law(lengths, seed):
        x, memory = features(seed), features(seed + 100, MEMORY)
        segments = [[n] for n in lengths]
        padded = run(name, side, x, make_context(side, segments, memory))
        cut = run(name, side, x[:, :short], make_context(side, segments, memory, length=short))
        for row, n in enumerate(lengths):
            assert_close(padded[row, :n], cut[row, :n])

    law()


@per_example
def test_packing_law(name, side):
    @few_examples
    @given(st.integers(1, LENGTH - 1), st.integers(1, LENGTH), st.integers(1, MEMORY - 1), st.integers(0, 99))
    def law(first, second, memory_first, seed):
        second = min(second, LENGTH - first)
        x, memory = features(seed, batch=1), features(seed + 100, MEMORY, batch=1)
        memory_lengths = [memory_first, MEMORY - memory_first]
        ctx = make_context(side, [[first, second]], memory, [memory_lengths])
        packed = run(name, side, x, ctx)[0]
        alone_x = np.stack([at_front(x[0, :first], LENGTH), at_front(x[0, first : first + second], LENGTH)])
        alone_memory = np.stack(
            [at_front(memory[0, :memory_first], MEMORY), at_front(memory[0, memory_first:], MEMORY)]
        )
        ctx = make_context(side, [[first], [second]], alone_memory, [[n] for n in memory_lengths])
        alone = run(name, side, alone_x, ctx)
        assert_close(packed[:first], alone[0, :first])
        assert_close(packed[first : first + second], alone[1, :second])

    law()


def at_front(x, length):
    return np.pad(x, ((0, length - x.shape[0]), (0, 0)))


@every_decoder
@pytest.mark.parametrize('segments', [[[LENGTH]], [[5, 4]]], ids=['one', 'packed'])
def test_causality_law(name, segments):
    model, params = make_stack(name, 'decoder'), make_parameters(name, 'decoder')
    ctx = make_context('decoder', segments, features(3, MEMORY, batch=1), [[3] * len(segments[0])])
    direction = jax.random.normal(jax.random.key(5), (EMBED,))

    def outputs(x):
        return model.apply({'params': params}, x, ctx)[0] @ direction

    jacobian = jax.jit(jax.jacrev(outputs))(features(2, batch=1))[:, 0]  # [output, input, embed]
    influence = np.max(np.abs(np.asarray(jacobian)), axis=-1)
    ids = np.asarray(ctx.segment_ids[0])
    may_see = (ids[:, None] == ids[None, :]) & np.tri(LENGTH, dtype=bool)
    real = ids > 0
    assert np.all(influence[real][:, real][~may_see[real][:, real]] == 0.0)
    assert np.all(np.diagonal(influence)[real] > 0.0)
    should_see = may_see & ~np.tri(LENGTH, k=-SUBLAYERS[name].reach, dtype=bool)
    assert np.all((influence > 0.0)[real][:, real] == should_see[real][:, real])


@every_decoder
def test_decode_law(name):
    model, params = make_stack(name, 'decoder'), make_parameters(name, 'decoder')
    x, memory = features(4), features(5, MEMORY)
    lengths = [[MEMORY], [MEMORY - 2]]
    taught = run(name, 'decoder', x, make_context('decoder', [[LENGTH]] * BATCH, memory, lengths))

    def decode(variables, x, ctx):
        return model.apply(variables, x, ctx, LENGTH, mutable=['cache'])

    ctx = make_context('decoder', [[LENGTH]] * BATCH, memory, lengths, decode=True)
    decode = jax.jit(decode)
    _, allocated = decode({'params': params}, np.zeros_like(x), ctx)
    for path, leaf in jax.tree_util.tree_leaves_with_path(allocated['cache']):
        assert leaf.shape[:1] == (BATCH,) or (leaf.ndim == 0 and path[-1].key == 'cache_index'), path
    # The memory is not read again: its features may be gone by the first step.
    ctx = make_context('decoder', [[1]] * BATCH, np.full_like(memory, np.nan), lengths, length=1, decode=True)
    cache = allocated['cache']
    for t in range(LENGTH):
        y, variables = decode({'params': params, 'cache': cache}, x[:, t : t + 1], ctx)
        cache = variables['cache']
        assert_close(np.asarray(y)[:, 0], taught[:, t])


@pytest.mark.parametrize('name', first_readers_of_memory())
def test_beams_share_the_memory(name):
    """Two beams of each sequence decode as two sequences with the same memory do."""
    model, params = make_stack(name, 'decoder'), make_parameters(name, 'decoder')
    x, memory = features(4, batch=2 * BATCH), features(5, MEMORY)
    lengths = [[MEMORY], [MEMORY - 2]]
    steps = 2

    def decode(memory, memory_lengths):
        ctx = make_context('decoder', [[LENGTH]] * 2 * BATCH, memory, memory_lengths, decode=True)
        _, variables = model.apply({'params': params}, jnp.zeros_like(x), ctx, LENGTH, mutable=['cache'])
        ctx = make_context('decoder', [[1]] * 2 * BATCH, memory, memory_lengths, length=1, decode=True)
        outputs = []
        for t in range(steps):
            variables = {'params': params, 'cache': variables['cache']}
            y, variables = model.apply(variables, x[:, t : t + 1], ctx, LENGTH, mutable=['cache'])
            outputs.append(y)
        return jnp.stack(outputs)

    shared = jax.jit(lambda memory: decode(memory, lengths))(memory)
    repeated = jax.jit(lambda memory: decode(memory, [row for row in lengths for _ in range(2)]))
    assert_close(shared, repeated(np.repeat(memory, 2, axis=0)))


@fuller_side
def test_bfloat16_is_close_to_float32(name, side):
    # Initial parameters: larger random ones make attention so sharp that rounding changes which token it picks.
    apply, params = compiled(name, side), nn.unbox(boxed_parameters(name, side))
    x, memory = features(6), features(7, MEMORY)
    wanted = apply(params, x, make_context(side, [[LENGTH]] * BATCH, memory))
    low_context = make_context(side, [[LENGTH]] * BATCH, memory.astype(jnp.bfloat16))
    low = apply(params, x.astype(jnp.bfloat16), low_context)
    assert low.dtype == jnp.bfloat16
    assert_close(low.astype(jnp.float32), wanted, tolerance=0.05)
    assert np.mean(np.abs(low.astype(jnp.float32) - wanted)) < 0.02 * np.max(np.abs(wanted))


@fuller_side
def test_dropout_in_training_only(name, side):
    model, params = make_stack(name, side), make_parameters(name, side)
    x, memory = features(8), features(9, MEMORY)
    ctx = make_context(side, [[LENGTH]] * BATCH, memory)
    # No key is given: asking for one would fail.
    evaluated = run(name, side, x, ctx)
    train = jax.jit(
        lambda key: model.apply({'params': params}, x, ctx.replace(deterministic=False), rngs={'dropout': key})
    )
    trained = [train(jax.random.key(seed)) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(trained[0], trained[1])
    assert not np.allclose(trained[0], trained[2])
    assert not np.allclose(trained[0], evaluated)


@both_sides
def test_parameters_have_axes_and_are_not_shared(name, side):
    glossary = {value for key, value in vars(axes).items() if key.isupper()} | {None}
    is_box = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)  # noqa: E731
    for path, leaf in jax.tree_util.tree_leaves_with_path(boxed_parameters(name, side), is_leaf=is_box):
        assert is_box(leaf), f'{path} has no logical axes'
        assert len(leaf.names) == leaf.value.ndim, path
        assert set(leaf.names) <= glossary, path
        assert leaf.value.dtype == jnp.float32, path
        in_run = any(getattr(key, 'key', None) == 'run_0' for key in path)
        assert (leaf.names[:1] == (axes.LAYERS,)) == in_run, path
        if in_run and np.ptp(leaf.value) > 0:
            assert not np.array_equal(leaf.value[0], leaf.value[1]), f'{path} starts equal in both layers'


@both_sides
def test_gradients_are_finite_and_reach_every_parameter(name, side):
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients(name, side)):
        assert np.all(np.isfinite(gradient)), path
        assert np.any(gradient != 0), f'{path} gets no gradient'


@functools.cache
def gradients(name, side, **options):
    model = make_stack(name, side, **options)
    x = features(10)
    ctx = make_context(side, [[LENGTH], [8]], features(11, MEMORY))

    def loss(params):
        out = model.apply({'params': params}, x, ctx)
        return jnp.sum(jnp.sin(out) * ctx.is_token[..., None])

    return jax.jit(jax.grad(loss))(make_parameters(name, side))


@fuller_side
def test_remat_and_unroll_change_nothing(name, side):
    wanted = gradients(name, side)
    jax.tree.map(assert_close, gradients(name, side, remat_policy=stack.full_remat, unroll=2), wanted)
    if name == 't5':
        jax.tree.map(assert_close, gradients(name, side, remat_policy=stack.dots_remat), wanted)


@both_sides
def test_every_layout_takes_it(name, side):
    """Shapes only: what a layout computes is tested in test_layer.py, and with Remixer above."""
    case, ctx = SUBLAYERS[name], make_context(side, [[LENGTH]] * BATCH, features(14, MEMORY))
    for layout in (layer.PreNorm, layer.PostNorm, layer.ReZero, layer.Parallel, layer.Serialized):
        norm = None if layout is layer.ReZero else case.norm
        make_layer = layer.make_layer(getattr(case, side), layout, norm=norm)
        out, _ = jax.eval_shape(make_layer.init_with_output, jax.random.key(0), features(15), ctx)
        assert out.shape == (BATCH, LENGTH, EMBED) and out.dtype == jnp.float32, layout


def test_remat_recomputes():
    """The policies change what the backward pass keeps, else the test above shows nothing."""
    model_memory = {}
    for policy in (None, stack.dots_remat, stack.full_remat):
        model = make_stack('t5', 'encoder', remat_policy=policy)
        ctx = make_context('encoder', [[LENGTH]] * BATCH)

        def loss(params, x, model=model, ctx=ctx):
            return jnp.sum(model.apply({'params': params}, x, ctx))

        jaxpr = str(jax.make_jaxpr(jax.grad(loss))(make_parameters('t5', 'encoder'), features(0)))
        model_memory[policy] = jaxpr.count('dot_general')
    assert model_memory[None] <= model_memory[stack.dots_remat] < model_memory[stack.full_remat]
