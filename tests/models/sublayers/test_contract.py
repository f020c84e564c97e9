"""The laws of `remixer_t5x.testing.laws` over every sublayer, in an encoder and in a decoder.

A new sublayer is tested by adding a row to `SUBLAYERS`. `tests/test_docs.py` has the laws on the mixer of the guide.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remixer_t5x.errors import UserError
from remixer_t5x.kernels.attention import decoding as attention_decoding
from remixer_t5x.models.architecture import decoder_only, encoder_only, layer, stack
from remixer_t5x.models.layers.norms import GroupedRMSNorm, LayerNorm
from remixer_t5x.models.layers.positions import AlibiBias, LearnedPositions, RelativePositionBias, RotaryEmbedding
from remixer_t5x.models.sublayers import (
    attention,
    feed_forward,
    fnet,
    gmlp,
    hyper_mixer,
    linear_attention,
    mlp_mixer,
    remixer,
    tim,
)
from remixer_t5x.testing import laws
from remixer_t5x.testing.subject import LENGTH, Subject

BATCH, EMBED, HIDDEN = 2, 16, 24
DROPOUT = 0.5

_self = functools.partial(attention.SelfAttention, num_heads=2, head_dim=8, dropout_rate=DROPOUT)
_cross = functools.partial(attention.CrossAttention, num_heads=2, head_dim=8, dropout_rate=DROPOUT)
_remixer = functools.partial(
    remixer.Remixer, hidden_dim=HIDDEN, max_length=LENGTH + 2, dropout_rate=DROPOUT, mixing_dropout_rate=DROPOUT
)
_identity = functools.partial(hyper_mixer.Identity)
_gated_mlp = functools.partial(feed_forward.GatedMLP, hidden_dim=HIDDEN, dropout_rate=DROPOUT)
_relu_mlp = functools.partial(feed_forward.ReluMLP, hidden_dim=HIDDEN, dropout_rate=DROPOUT)


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
    position_bias: type = RelativePositionBias


SUBLAYERS = {
    't5': Case((_self, _gated_mlp), (_self, _cross, _gated_mlp)),
    'gated_mlp': Case((_identity, _gated_mlp), (_identity, _gated_mlp), reach=1),
    'relu_mlp': Case((_relu_mlp,), (_relu_mlp,), reach=1),
}
# BERT's layer in the encoder, GPT-2's in the decoder.
_scaled = functools.partial(attention.ScaledAttention, num_heads=2, head_dim=8, dropout_rate=DROPOUT)
_gelu_mlp = functools.partial(feed_forward.GeluMLP, hidden_dim=HIDDEN)
_tanh_mlp = functools.partial(_gelu_mlp, approximate=True)
SUBLAYERS['bert'] = Case((_scaled, _gelu_mlp), (), layer.PostNorm, functools.partial(LayerNorm))
SUBLAYERS['gpt2'] = Case((), (_scaled, _tanh_mlp), norm=functools.partial(LayerNorm))
# The options of later models: grouped queries with everything that changes q, k and logits, then a window on each side.
_grouped = {'num_heads': 4, 'head_dim': 4, 'num_kv_heads': 2, 'qk_norm': True, 'logit_softcap': 2.0}
_modern_self = functools.partial(_self, **_grouped, rotary=functools.partial(RotaryEmbedding, fraction=0.5))
_modern_cross = functools.partial(_cross, **_grouped)
_swiglu = functools.partial(_gated_mlp, activation='silu')
_local = functools.partial(_self, num_kv_heads=1, sliding_window=3)
SUBLAYERS['modern'] = Case(
    (_modern_self, _swiglu), (_modern_self, _modern_cross, _swiglu), layer.SandwichNorm, position_bias=AlibiBias
)
SUBLAYERS['sliding_window'] = Case((_local,), (_local,), reach=5, position_bias=AlibiBias)
_relative = functools.partial(attention.RelativeAttention, num_heads=2, head_dim=8, dropout_rate=DROPOUT)
_positional = functools.partial(_relative, content=False)
SUBLAYERS['relative_attention'] = Case((_relative, _gelu_mlp), (_positional, _gelu_mlp))
# Each form of composition and of the residual once, each in another layout.
_gated = functools.partial(_remixer, composition=remixer.GatedAlpha)
_gated_composition = functools.partial(
    _remixer, composition=functools.partial(remixer.GatedComposition, remixer.ElementwiseGate)
)
_vector = functools.partial(
    _remixer, composition=remixer.VectorAlpha, hidden_dim=EMBED, residual=remixer.identity_residual
)
_fixed = functools.partial(_remixer, composition=remixer.FixedAlpha, residual=remixer.no_residual)
_uncomposed = functools.partial(_remixer, composition=remixer.NoComposition)
SUBLAYERS['remixer'] = Case((_remixer,), (_remixer, _cross))
SUBLAYERS['remixer_gated_post'] = Case((_gated,), (_cross, _gated), layer.PostNorm)
SUBLAYERS['remixer_vector_parallel'] = Case((_vector, _relu_mlp), (_cross, _vector), layer.Parallel)
SUBLAYERS['remixer_fixed_rezero'] = Case((_fixed,), (_cross, _fixed), layer.ReZero)
SUBLAYERS['remixer_uncomposed_serialized'] = Case(
    (_uncomposed, _gated_mlp), (_gated_composition, _cross), layer.Serialized
)

_gmlp = functools.partial(gmlp.GMLP, hidden_dim=HIDDEN, max_length=LENGTH + 2, dropout_rate=DROPOUT)
_tiny = functools.partial(gmlp.TinyAttention, head_dim=8)
_amlp = functools.partial(_gmlp, spatial=gmlp.FreeSpatial, attention=_tiny)
_gates = [
    functools.partial(_gmlp, gate=gate) for gate in (gmlp.linear_gate, gmlp.additive_gate, gmlp.multiplicative_gate)
]
SUBLAYERS['gmlp'] = Case((_gmlp,), (_gmlp, _cross))
SUBLAYERS['gmlp_gates'] = Case((), (*_gates, _cross), norm=functools.partial(LayerNorm))
SUBLAYERS['amlp'] = Case((_amlp,), (_amlp, _cross))

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


@functools.cache
def subject(name: str, side: str) -> Subject:
    """The case with what is compiled for it, which all laws share."""
    case = SUBLAYERS[name]
    sublayers = getattr(case, side)
    reads_bias = any(factory.func in READS_POSITION_BIAS for factory in sublayers)
    num_heads = sublayers[0].keywords.get('num_heads', 2)
    bias = functools.partial(case.position_bias, num_heads=num_heads) if reads_bias else None
    return Subject(sublayers, side, case.layout, case.norm, bias, case.reach, EMBED)


@per_example
def test_padding_law(name, side):
    laws.padding(subject(name, side))


@per_example
def test_packing_law(name, side):
    laws.packing(subject(name, side))


@every_decoder
@pytest.mark.parametrize('segments', [(LENGTH,), (5, 4)], ids=['one', 'packed'])
def test_causality_law(name, segments):
    laws.causality(subject(name, 'decoder'), segments)


@every_decoder
def test_decode_law(name):
    laws.decode(subject(name, 'decoder'))


def test_decode_law_with_the_caches_of_a_tpu(monkeypatch):
    monkeypatch.setattr(attention_decoding, 'target_platform', lambda: 'tpu')
    for name in ('t5', 'modern'):
        laws.decode(subject(name, 'decoder'))
        laws.beams(subject(name, 'decoder'))
        laws.prompt(alone(name))


REFUSES_PREFIX = {'gmlp', 'gmlp_gates', 'mlp_mixer'}


@functools.cache
def alone(name: str) -> Subject:
    """The case in a decoder without an encoder."""
    made = subject(name, 'decoder')
    sublayers = tuple(factory for factory in made.sublayers if factory.func not in READS_MEMORY)
    return made if sublayers == made.sublayers else dataclasses.replace(made, sublayers=sublayers)


@every_decoder
def test_prefix_law(name):
    if name in REFUSES_PREFIX:
        with pytest.raises(UserError, match='PREFIX_LM = False') as error:
            laws.prefix(alone(name))
        assert 'SelfAttention' in str(error.value) and '\n' not in str(error.value)
    else:
        laws.prefix(alone(name))


@every_decoder
def test_prompt_law(name):
    laws.prompt(alone(name))
    if name not in REFUSES_PREFIX:
        laws.prompt(alone(name), both_ways=True)


@pytest.mark.parametrize('name', first_readers_of_memory())
def test_beams_share_the_memory(name):
    laws.beams(subject(name, 'decoder'))


@fuller_side
def test_bfloat16_is_close_to_float32(name, side):
    laws.bfloat16(subject(name, side))


@fuller_side
def test_dropout_in_training_only(name, side):
    laws.dropout(subject(name, side))


@both_sides
def test_parameters_have_axes_and_are_not_shared(name, side):
    laws.parameters(subject(name, side))


@both_sides
def test_gradients_are_finite_and_reach_every_parameter(name, side):
    laws.gradients(subject(name, side))


@fuller_side
def test_remat_and_unroll_change_nothing(name, side):
    policies = (stack.full_remat, stack.dots_remat) if name == 't5' else (stack.full_remat,)
    laws.remat(subject(name, side), policies)


@both_sides
def test_every_layout_takes_it(name, side):
    """What a layout computes is tested in test_layer.py, and with Remixer above."""
    laws.layouts(subject(name, side))


def test_remat_recomputes():
    """The policies change what the backward pass keeps, else the test above shows nothing."""
    matmuls = {}
    t5 = subject('t5', 'encoder')
    for policy in (None, stack.dots_remat, stack.full_remat):
        model = t5.stack(remat_policy=policy)
        ctx = t5.context([[LENGTH]] * BATCH)

        def loss(params, x, model=model, ctx=ctx):
            return jnp.sum(model.apply({'params': params}, x, ctx))

        jaxpr = str(jax.make_jaxpr(jax.grad(loss))(t5.params, t5.features(0, rows=BATCH)))
        matmuls[policy] = jaxpr.count('dot_general')
    assert matmuls[None] <= matmuls[stack.dots_remat] < matmuls[stack.full_remat]


EXAMPLES = (5, 4)
# The laws above hold for every sublayer; one with a position bias, one by positions and one with a running sum will do.
in_a_model = pytest.mark.parametrize('name', ['t5', 'remixer', 'hyper_mixer'])


def ids_alone_and_packed() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Two examples in a row of their own each, the same in one row, and the segments and positions of that row."""
    rng, used = np.random.default_rng(0), sum(EXAMPLES)
    alone: np.ndarray = np.zeros((2, LENGTH), np.int32)
    packed, segments, positions = (np.zeros((1, LENGTH), np.int32) for _ in range(3))
    for row, count in enumerate(EXAMPLES):
        alone[row, :count] = rng.integers(1, 20, count)
    packed[0, :used] = np.concatenate([alone[row, :count] for row, count in enumerate(EXAMPLES)])
    segments[0, :used] = np.repeat([1, 2], EXAMPLES)
    positions[0, :used] = np.concatenate([np.arange(count) for count in EXAMPLES])
    return alone, packed, segments, positions


def assert_packed_as_alone(apart, packed):
    wanted = np.concatenate([apart[row, :count] for row, count in enumerate(EXAMPLES)])
    assert laws.difference(packed[0, : len(wanted)], wanted) < laws.TOLERANCE


@in_a_model
def test_an_encoder_alone_predicts_a_packed_example_as_it_does_alone(name):
    """Padding and packing again, from ids to logits: the whole model receives where an example begins and ends."""
    of = subject(name, 'encoder')
    params = {'token_embedder': random_embedding(), 'encoder': of.params}
    module = encoder_only.EncoderOnly(20, EMBED, of.stack)
    alone, row, segments, _ = ids_alone_and_packed()

    @jax.jit
    def both(params):
        def logits(*ids):
            return module.apply({'params': params}, *ids, enable_dropout=False, method='predict_tokens')

        return logits(alone), logits(row, segments)

    assert_packed_as_alone(*map(np.asarray, both(params)))


@in_a_model
def test_a_decoder_alone_predicts_a_packed_example_as_it_does_alone(name):
    """The same for decoders without an encoder, and with more padding behind the tokens."""
    of = alone(name)
    params = {'token_embedder': random_embedding(), 'decoder': of.params}
    module = decoder_only.DecoderOnly(20, EMBED, of.stack, tied=True)
    apart, row, segments, positions = ids_alone_and_packed()
    begun = np.where(positions > 0, np.roll(row, 1, axis=1), 0)
    longest = max(EXAMPLES)

    @jax.jit
    def every(params):
        def logits(inputs, **where):
            return module.apply({'params': params}, inputs, enable_dropout=False, **where)

        shifted = np.pad(apart, ((0, 0), (1, 0)))[:, :-1]
        packed = logits(begun, decoder_segment_ids=segments, decoder_positions=positions)
        return logits(shifted), logits(shifted[:, :longest]), packed

    padded, short, packed = map(np.asarray, every(params))
    assert_packed_as_alone(padded, packed)
    assert_packed_as_alone(short, packed)


def random_embedding() -> dict[str, np.ndarray]:
    return {'embedding': np.random.default_rng(1).standard_normal((20, EMBED), np.float32)}
