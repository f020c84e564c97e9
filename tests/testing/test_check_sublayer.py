"""`check_sublayer` finds each way of breaking a law, and accepts what keeps them."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from remixer_t5x import axes
from remixer_t5x.errors import UserError
from remixer_t5x.models.layers.dense import Dense
from remixer_t5x.models.sublayers.feed_forward import GatedMLP
from remixer_t5x.testing import BrokenLaw, check_sublayer
from remixer_t5x.testing.check import LAWS


def out(x):
    return Dense(x.shape[-1], (axes.EMBED, axes.MLP), name='out')(x)


class ReadsTheNextToken(nn.Module):
    @nn.compact
    def __call__(self, x, ctx):
        return out(x + 0.01 * jnp.roll(jnp.where(ctx.is_token[..., None], x, 0), -1, axis=1))


class ReadsPadding(nn.Module):
    @nn.compact
    def __call__(self, x, ctx):
        return out(x + jnp.mean(x, axis=1, keepdims=True))


class ReadsWhatPaddingHolds(nn.Module):
    """Padding at one position, so that its length does not matter."""

    @nn.compact
    def __call__(self, x, ctx):
        return out(x.at[:, 0].add(1e-6 * x[:, 6] if x.shape[1] < 12 else 1e-6 * x[:, 7]))


class MixesPackedRows(nn.Module):
    @nn.compact
    def __call__(self, x, ctx):
        return out(jnp.cumsum(jnp.where(ctx.is_token[..., None], x, 0), axis=1))


class KeepsTheLastTokenAlone(nn.Module):
    """A sum over tokens whose cache has one token in place of the sum."""

    @nn.compact
    def __call__(self, x, ctx):
        if ctx.decode:
            last = self.variable('cache', 'last', jnp.zeros_like, x[:, :1])
            if ctx.step is not None:
                x, last.value = x + last.value, x
                return out(x)
        return out(jnp.cumsum(x, axis=1))


class KeepsNothingOfAPrompt(nn.Module):
    """A sum over tokens, for caches that start empty, and for no prefix."""

    @nn.compact
    def __call__(self, x, ctx):
        if ctx.decode:
            total = self.variable('cache', 'sum', jnp.zeros_like, x[:, :1])
            if ctx.step is not None:
                total.value += x
                return out(total.value)
        return out(jnp.cumsum(x, axis=1))


class HasACacheWithoutRows(nn.Module):
    @nn.compact
    def __call__(self, x, ctx):
        if ctx.decode:
            self.variable('cache', 'sum', jnp.zeros, (3, 5))
        return out(x)


class RepeatsMemoryInTheWrongOrder(nn.Module):
    @nn.compact
    def __call__(self, x, ctx):
        def read():
            return jnp.mean(jnp.where(ctx.memory.context.is_token[..., None], ctx.memory.hidden, 0), 1, keepdims=True)

        memory = self.variable('cache', 'memory', read).value if ctx.decode else read()
        return out(x + jnp.tile(memory, (x.shape[0] // memory.shape[0], 1, 1)))


class AddsALargeNumber(nn.Module):
    @nn.compact
    def __call__(self, x, ctx):
        return out((x + 1000) - 1000)


class ReturnsFloat32(nn.Module):
    @nn.compact
    def __call__(self, x, ctx):
        return out(x).astype(jnp.float32)


class DropsAlways(nn.Module):
    @nn.compact
    def __call__(self, x, ctx):
        return nn.Dropout(0.5, deterministic=False)(out(x))


class DropsNever(nn.Module):
    dropout_rate: float = 0.5

    @nn.compact
    def __call__(self, x, ctx):
        return out(x)


class HasNoAxes(nn.Module):
    @nn.compact
    def __call__(self, x, ctx):
        return x * self.param('scale', nn.initializers.ones, x.shape[-1:], jnp.float32)


class HasAParameterForNothing(nn.Module):
    @nn.compact
    def __call__(self, x, ctx):
        init = nn.with_logical_partitioning(nn.initializers.ones, (axes.EMBED,))
        return out(x) + 0 * self.param('scale', init, x.shape[-1:], jnp.float32).astype(x.dtype)


class HasAnInfiniteGradient(nn.Module):
    @nn.compact
    def __call__(self, x, ctx):
        y = out(x)
        return jnp.sqrt(jnp.where(y > 0, 0 * y, 0))


class ChangesWhenTracedAgain(nn.Module):
    @nn.compact
    def __call__(self, x, ctx):
        return out(x * np.random.default_rng().uniform(0.5, 2.0))


class IsForEncoders(nn.Module):
    @nn.compact
    def __call__(self, x, ctx):
        if ctx.causal:
            raise UserError('IsForEncoders does not work in a decoder; use attention')
        return out(x)


BROKEN = [
    ('causality', 'decoder', ReadsTheNextToken, 'token 0 reads token 1'),
    ('padding', 'encoder', ReadsPadding, 'positions of padding the output at'),
    ('padding', 'encoder', ReadsWhatPaddingHolds, 'token 0 reads padding at position 7'),
    ('packing', 'decoder', MixesPackedRows, 'example 2 of a row'),
    ('decode', 'decoder', KeepsTheLastTokenAlone, 'step 2 with the cache is'),
    ('prefix', 'decoder', KeepsNothingOfAPrompt, 'token 0 does not read token 1'),
    ('prompt', 'decoder', KeepsNothingOfAPrompt, 'step 0 after prompts is'),
    ('decode', 'decoder', HasACacheWithoutRows, 'has shape (3, 5)'),
    ('beams', 'decoder', RepeatsMemoryInTheWrongOrder, 'two beams of a sequence is'),
    ('bfloat16', 'encoder', AddsALargeNumber, 'off float32'),
    ('bfloat16', 'encoder', ReturnsFloat32, 'bfloat16 in gives float32 out'),
    ('dropout', 'encoder', DropsAlways, 'it asks for a key'),
    ('dropout', 'encoder', DropsNever, 'another key gives the same output'),
    ('parameters', 'encoder', HasNoAxes, 'has_no_axes/scale has no logical axes'),
    ('gradients', 'encoder', HasAParameterForNothing, 'scale is zero'),
    ('gradients', 'encoder', HasAnInfiniteGradient, 'not finite'),
    ('remat', 'encoder', ChangesWhenTracedAgain, 'with full_remat is'),
]


@pytest.mark.parametrize(
    ('law', 'side', 'sublayer', 'how'), BROKEN, ids=[f'{case[0]}-{case[2].__name__}' for case in BROKEN]
)
def test_a_broken_law_is_named_in_one_line(law, side, sublayer, how, capsys):
    others = tuple(name for name in LAWS if name != law)
    with pytest.raises(BrokenLaw) as error:
        check_sublayer(sublayer, sides=(side,), without=others)
    said = str(error.value)
    assert said.startswith(f'{sublayer.__name__} breaks {law} in the {side}: ') and how in said
    assert '\n' not in said
    assert 'BROKEN' in capsys.readouterr().out


def test_every_law_is_broken_by_something():
    assert {case[0] for case in BROKEN} == set(LAWS) - {'layouts'}


def test_a_sublayer_that_keeps_them_all(capsys):
    report = check_sublayer(GatedMLP(hidden_dim=8, dropout_rate=0.5), sides=('decoder',))
    assert {row.result for row in report.rows} == {'holds'}
    assert [row.law for row in report.rows] == [law for law in LAWS if law != 'beams']
    assert capsys.readouterr().out == f'{report}\n'
    assert str(report).splitlines()[0] == 'GatedMLP: 12 checks'


def test_what_it_refuses_is_said(capsys):
    laws = tuple(law for law in LAWS if law != 'parameters')
    report = check_sublayer(functools.partial(IsForEncoders), without=laws, show=False)
    assert [(row.side, row.law) for row in report.rows if row.result == 'holds'] == [('encoder', 'parameters')]
    assert report.rows[-1].result == 'refused' and 'use attention' in report.rows[-1].why
    assert capsys.readouterr().out == ''
    with pytest.raises(UserError, match='IsForEncoders was not checked'):
        check_sublayer(IsForEncoders, sides=('decoder',))


@pytest.mark.parametrize('options', [{'sides': ('middle',)}, {'without': ('paddin',)}, {'sides': 'encoder'}])
def test_an_unknown_name_is_refused(options):
    with pytest.raises(UserError, match='must be a tuple of names'):
        check_sublayer(GatedMLP, **options)


def test_an_error_of_the_sublayer_is_the_reason():
    def wrong(x, ctx):
        return x if ctx.deterministic else jnp.zeros(3) + jnp.zeros(4)

    class Fails(nn.Module):
        @nn.compact
        def __call__(self, x, ctx):
            return wrong(out(x), ctx)

    with pytest.raises(BrokenLaw, match='dropout in the encoder: .*Error'):
        check_sublayer(Fails, sides=('encoder',), without=tuple(law for law in LAWS if law != 'dropout'))
