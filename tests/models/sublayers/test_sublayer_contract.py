"""Checks the contract of `remixer_t5x.testing.sublayer_contract` for every sublayer, in an encoder and in a decoder.

To test a new sublayer, add a case to `SUBLAYERS`.
"""

import functools
import importlib
import inspect
import pkgutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from remixer_t5x.errors import UserError
from remixer_t5x.models import sublayers as sublayer_package
from remixer_t5x.models.architecture import encoder_only, layer, stack
from remixer_t5x.models.layers import cached_attention
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
from remixer_t5x.testing import CHECKS, sublayer_contract
from remixer_t5x.testing.sublayer_fixture import LENGTH, SublayerFixture
from tests.support.paths import CONFIGS

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
    """The sublayers of an encoder layer and of a decoder layer; an empty tuple if a side is not tested.

    `reach` is the number of tokens that an output of two decoder layers depends on. `whole_rows` marks a sublayer that
    rejects packed rows and whose outputs depend on the padded length, so the padding and packing checks do not apply.
    `prefix` is False if a sublayer of the decoder rejects bidirectional prefixes.
    """

    encoder: tuple = ()
    decoder: tuple = ()
    layout: type = layer.PreNorm
    norm: functools.partial | None = None
    reach: int = LENGTH
    whole_rows: bool = False
    position_bias: type = RelativePositionBias
    prefix: bool = True


SUBLAYERS = {'t5': Case((_self, _gated_mlp), (_self, _cross, _gated_mlp))}
# BERT's layer in the encoder, GPT-2's in the decoder, each with a relative variant of its attention.
_scaled = functools.partial(attention.ScaledAttention, num_heads=2, head_dim=8, dropout_rate=DROPOUT)
_gelu_mlp = functools.partial(feed_forward.GeluMLP, hidden_dim=HIDDEN)
_tanh_mlp = functools.partial(_gelu_mlp, approximate=True)
_relative = functools.partial(attention.RelativeAttention, num_heads=2, head_dim=8, dropout_rate=DROPOUT)
_positional = functools.partial(_relative, content=False)
SUBLAYERS['scaled_attention'] = Case(
    (_scaled, _relative, _gelu_mlp), (_scaled, _positional, _tanh_mlp), layer.PostNorm, functools.partial(LayerNorm)
)
# Options of later models: grouped queries with all options for queries, keys and logits, and a sliding window.
_grouped = {'num_heads': 4, 'head_dim': 4, 'num_kv_heads': 2, 'qk_norm': True, 'logit_softcap': 2.0}
_modern_self = functools.partial(_self, **_grouped, rotary=functools.partial(RotaryEmbedding, fraction=0.5))
_modern_cross = functools.partial(_cross, **_grouped)
_swiglu = functools.partial(_gated_mlp, activation='silu')
_local = functools.partial(_self, num_heads=4, head_dim=4, num_kv_heads=1, sliding_window=3)
SUBLAYERS['modern'] = Case(
    *((_modern_self, _local, _swiglu), (_modern_self, _local, _modern_cross, _swiglu)),
    *(layer.SandwichNorm, None, LENGTH, False, AlibiBias),
)
# Compositions and residuals, which compute each token separately.
_gated = functools.partial(_remixer, composition=remixer.GatedAlpha)
_gated_composition = functools.partial(
    _remixer, composition=functools.partial(remixer.GatedComposition, remixer.ElementwiseGate)
)
_vector = functools.partial(
    _remixer, composition=remixer.VectorAlpha, hidden_dim=EMBED, residual=remixer.identity_residual
)
_fixed = functools.partial(_remixer, composition=remixer.FixedAlpha, residual=remixer.no_residual)
SUBLAYERS['remixer'] = Case((_remixer, _gated, _fixed), (_remixer, _gated_composition, _vector), layer.Serialized)

_gmlp = functools.partial(gmlp.GMLP, hidden_dim=HIDDEN, max_length=LENGTH + 2, dropout_rate=DROPOUT)
_tiny = functools.partial(gmlp.TinyAttention, head_dim=8)
_amlp = functools.partial(_gmlp, spatial=gmlp.FreeSpatial, attention=_tiny)
_additive = functools.partial(_gmlp, gate=gmlp.additive_gate)
_mlp_mixer = functools.partial(mlp_mixer.MLPMixer, HIDDEN, max_length=LENGTH + 2, dropout_rate=DROPOUT)
SUBLAYERS['gmlp'] = Case((_gmlp, _mlp_mixer), (_gmlp, _additive), prefix=False)
SUBLAYERS['amlp'] = Case((_amlp,), (_amlp, _cross), layer.Parallel)

_tim_self = functools.partial(tim.TimAttention, 2, num_heads=2, head_dim=8, dropout_rate=DROPOUT)
_tim_cross = functools.partial(tim.TimCrossAttention, 2, num_heads=2, head_dim=8, dropout_rate=DROPOUT)
_tim_inter = functools.partial(tim.InterMechanismAttention, 2, head_dim=4)
_tim_mlp = functools.partial(tim.TimMLP, 2, hidden_dim=HIDDEN, dropout_rate=DROPOUT)
_tim_norm = functools.partial(GroupedRMSNorm, 2)
_no_competition = functools.partial(_tim_self, competition=None)
SUBLAYERS['tim'] = Case(
    (_no_competition, _tim_inter, _tim_mlp), (_tim_self, _tim_cross, _tim_inter, _tim_mlp), norm=_tim_norm
)

_hyper_tied = functools.partial(hyper_mixer.HyperMixer, HIDDEN, num_heads=2, dropout_rate=DROPOUT)
_hyper_options = {'length_scale': True, 'norm': None, 'token_information': functools.partial(LearnedPositions, LENGTH)}
_biased = functools.partial(hyper_mixer.GeneratedWeights, use_bias=True)
_hyper = functools.partial(hyper_mixer.HyperMixer, HIDDEN, tied=False, weights=_biased, **_hyper_options)
_hyper_cross = functools.partial(hyper_mixer.HyperMixerCross, HIDDEN, 2, dropout_rate=DROPOUT, **_hyper_options)
_hyper_shared = functools.partial(_hyper_tied, tied=False, weights=hyper_mixer.SharedWeightVector)
_hyper_mixers = (_hyper_tied, _hyper, _hyper_shared)
SUBLAYERS['hyper_mixer'] = Case(_hyper_mixers, (*_hyper_mixers, _hyper_cross))

_linear = functools.partial(linear_attention.LinearAttention, num_heads=2, head_dim=8, dropout_rate=DROPOUT)
_linear_cross = functools.partial(linear_attention.LinearCrossAttention, num_heads=2, head_dim=8, dropout_rate=DROPOUT)
_window = functools.partial(mlp_mixer.WindowMixer, HIDDEN, window=3, dropout_rate=DROPOUT)
SUBLAYERS['linear_attention'] = Case((_linear, _gated_mlp), (_linear, _linear_cross), layer.ReZero)
# Sublayers that compute each token separately do not change the reach.
SUBLAYERS['window_mixer'] = Case((), (_window, _identity, _relu_mlp), reach=5, prefix=False)
SUBLAYERS['fnet'] = Case((functools.partial(fnet.FNet), _gated_mlp), whole_rows=True)


READS_POSITION_BIAS = {attention.SelfAttention, tim.TimAttention}


def sublayer_classes(factory):
    """Returns the sublayer classes of a factory and of the factories among its arguments."""
    arguments = [value for value in factory.keywords.values() if isinstance(value, functools.partial)]
    classes = [factory.func] if factory.func.__module__.startswith('remixer_t5x.models.sublayers.') else []
    return [*classes, *(cls for argument in arguments for cls in sublayer_classes(argument))]


@functools.cache
def covering_cases() -> list[tuple[str, str]]:
    """Returns pairs (name, side), decoders first, that contain every sublayer at least once."""
    seen, pairs = set(), []
    for side in ('decoder', 'encoder'):
        for name, case in SUBLAYERS.items():
            new = {cls for factory in getattr(case, side) for cls in sublayer_classes(factory)} - seen
            if new:
                seen |= new
                pairs.append((name, side))
    return pairs


def test_every_sublayer_has_a_case():
    """Ignores classes that no shipped gin file mentions, because they may be internal to a sublayer."""
    settings, classes = ''.join(path.read_text() for path in CONFIGS.rglob('*.gin')), set()
    for info in pkgutil.iter_modules(sublayer_package.__path__, f'{sublayer_package.__name__}.'):
        members = vars(importlib.import_module(info.name)).values()
        modules = [kind for kind in members if isinstance(kind, type) and issubclass(kind, nn.Module)]
        classes |= {kind for kind in modules if [*inspect.signature(kind.__call__).parameters][1:3] == ['x', 'ctx']}
    factories = [factory for case in SUBLAYERS.values() for factory in (*case.encoder, *case.decoder)]
    missing = classes - {cls for factory in factories for cls in sublayer_classes(factory)}
    assert {kind for kind in missing if f'.{kind.__name__}' in settings} == set(), 'add to SUBLAYERS'


@functools.cache
def make_fixture(name: str, side: str) -> SublayerFixture:
    """Builds the fixture of a case once, because all checks share its compiled programs."""
    case = SUBLAYERS[name]
    sublayers = getattr(case, side)
    reads_bias = any(factory.func in READS_POSITION_BIAS for factory in sublayers)
    num_heads = sublayers[0].keywords.get('num_heads', 2)
    bias = functools.partial(case.position_bias, num_heads=num_heads) if reads_bias else None
    return SublayerFixture(sublayers, side, case.layout, case.norm, bias, case.reach, EMBED)


BOTH_SIDES = [(name, side) for side in ('encoder', 'decoder') for name in SUBLAYERS if getattr(SUBLAYERS[name], side)]
PER_EXAMPLE = [case for case in BOTH_SIDES if not SUBLAYERS[case[0]].whole_rows]
DECODERS = [case for case in BOTH_SIDES if case[1] == 'decoder']
PREFIX_DECODERS = [case for case in DECODERS if SUBLAYERS[case[0]].prefix]
# Only the larger side, for tests that compile large programs.
LARGER_SIDE = [(name, 'decoder' if case.decoder else 'encoder') for name, case in SUBLAYERS.items()]
READS_MEMORY = {
    attention.CrossAttention,
    tim.TimCrossAttention,
    hyper_mixer.HyperMixerCross,
    linear_attention.LinearCrossAttention,
}
# The first decoder with each sublayer that reads the memory.
MEMORY_DECODERS = {
    factory.func: (name, 'decoder')
    for name, case in reversed(SUBLAYERS.items())
    for factory in case.decoder
    if factory.func in READS_MEMORY
}
assert set(MEMORY_DECODERS) == READS_MEMORY
CONTRACT_CHECKS = {**CHECKS, 'packed_causality': functools.partial(sublayer_contract.check_causality, segments=(5, 4))}
CASES = {
    **dict.fromkeys(('padding', 'packing'), PER_EXAMPLE),
    **dict.fromkeys(('causality', 'packed_causality', 'decode', 'prompt'), DECODERS),
    **dict.fromkeys(('prefix', 'prefix_lm'), PREFIX_DECODERS),
    'beams': list(MEMORY_DECODERS.values()),
    **dict.fromkeys(('bfloat16', 'dropout'), LARGER_SIDE),
    **dict.fromkeys(('rows', 'parameters', 'gradients'), BOTH_SIDES),
    'remat': covering_cases(),
}


@pytest.mark.parametrize(
    ('name', 'side', 'check'),
    [
        pytest.param(*case, check, marks=[pytest.mark.quick] * (case in covering_cases()))
        for check in CONTRACT_CHECKS
        for case in CASES[check]
    ],
)
def test_sublayer_fulfils_its_contract(name, side, check):
    CONTRACT_CHECKS[check](make_fixture(name, side))


@pytest.mark.quick
def test_decoding_with_tpu_caches_equals_all_tokens_at_once(monkeypatch):
    monkeypatch.setattr(cached_attention, 'get_target_platform', lambda: 'tpu')
    fixture = make_fixture('modern', 'decoder')
    for name in ('allocate', 'decode'):
        monkeypatch.delitem(vars(fixture), name, raising=False)  # compiled for a CPU before
    for check in ('decode', 'beams', 'prompt'):
        CHECKS[check](fixture)


@pytest.mark.parametrize('name', [name for name, case in SUBLAYERS.items() if not case.prefix])
def test_unsupported_prefix_raises_a_one_line_error(name):
    with pytest.raises(UserError, match='PREFIX_LM = False') as error:
        CHECKS['prefix'](make_fixture(name, 'decoder'))
    assert 'SelfAttention' in str(error.value) and '\n' not in str(error.value)


@pytest.mark.quick
def test_remat_recomputes():
    matmuls = {}
    t5 = make_fixture('t5', 'encoder')
    sublayer_contract.check_remat(make_fixture('t5', 'decoder'), (stack.dots_remat,))
    for policy in (None, stack.dots_remat, stack.full_remat):
        model = t5.build_stack(remat_policy=policy)
        ctx = t5.make_context([[LENGTH]] * BATCH)

        def loss(params, x, model=model, ctx=ctx):
            return jnp.sum(model.apply({'params': params}, x, ctx))

        gradient = jax.jit(jax.grad(loss)).lower(t5.params, t5.make_random_features(0, rows=BATCH))
        matmuls[policy] = gradient.compile().as_text().count(' dot(')
    assert matmuls[None] <= matmuls[stack.dots_remat] < matmuls[stack.full_remat], matmuls


@pytest.mark.quick
def test_encoder_only_logits_do_not_depend_on_packing():
    fixture, counts = make_fixture('t5', 'encoder'), (5, 4)
    module = encoder_only.EncoderOnly(20, EMBED, fixture.build_stack)
    embedding = np.random.default_rng(1).standard_normal((20, EMBED), np.float32)
    params = {'token_embedder': {'embedding': embedding}, 'encoder': fixture.params}
    ids = np.random.default_rng(0).integers(1, 20, sum(counts))
    separate: np.ndarray = np.zeros((2, LENGTH), np.int32)
    for row, example in enumerate(np.split(ids, [counts[0]])):
        separate[row, : len(example)] = example
    packed, segments = (np.pad(x, (0, LENGTH - len(ids)))[None] for x in (ids, np.repeat([1, 2], counts)))

    @jax.jit
    def compute(params):
        def logits(*ids):
            return module.apply({'params': params}, *ids, enable_dropout=False, method='predict_tokens')

        return logits(separate), logits(packed, segments)

    separate_logits, packed_logits = map(np.asarray, compute(params))
    expected = np.concatenate([separate_logits[row, :count] for row, count in enumerate(counts)])
    assert sublayer_contract.relative_difference(packed_logits[0, : len(ids)], expected) < sublayer_contract.TOLERANCE
