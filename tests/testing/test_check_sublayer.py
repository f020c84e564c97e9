"""`check_sublayer` detects each violation of the contract, and accepts sublayers without violations."""

import functools
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from remixer_t5x import axes
from remixer_t5x.errors import UserError
from remixer_t5x.models.layers import cache
from remixer_t5x.models.layers.dense import Dense
from remixer_t5x.models.sublayers.feed_forward import GatedMLP
from remixer_t5x.testing import CHECKS, ContractViolation, check_sublayer
from tests.support.paths import ROOT


def out(x):
    return Dense(x.shape[-1], (axes.EMBED, axes.MLP), name='out')(x)


def mask(x, ctx):
    # Only JAX arrays have the property `at`.
    return jnp.where((ctx.segment_ids.at[:].get() > 0)[..., None], x, 0)


def cumsum_with_last_token_cache(self, x, ctx):
    if ctx.decode:
        last = self.variable('cache', 'last', jnp.zeros_like, x[:, :1])
        if ctx.step is not None:
            x, last.value = x + last.value, x
            return out(x)
    return out(jnp.cumsum(x, axis=1))


def cumsum_without_prompts(self, x, ctx):
    if ctx.decode:
        total = self.variable('cache', 'sum', jnp.zeros_like, x[:, :1])
        if ctx.step is not None:
            total.value += x
            return out(total.value)
    return out(jnp.cumsum(x, axis=1))


def prompts_without_prefixes(self, x, ctx):
    sums = jnp.cumsum(mask(x, ctx), axis=1)
    if ctx.decode:
        total = self.variable('cache', 'sum', cache.values_at_prompt_end, sums, ctx)
        if ctx.step is not None:
            total.value += x
            return out(total.value)
    elif ctx.prefix is not None:
        is_prefix = ctx.prefix[..., None]
        sums = jnp.where(is_prefix, jnp.sum(jnp.where(is_prefix, x, 0), 1, keepdims=True), sums)
    return out(sums)


def tiled_memory(self, x, ctx):
    def read():
        return jnp.mean(mask(ctx.memory.hidden, ctx.memory.context), 1, keepdims=True)

    memory = self.variable('cache', 'memory', read).value if ctx.decode else read()
    return out(x + jnp.tile(memory, (x.shape[0] // memory.shape[0], 1, 1)))


def unused_parameter(self, x, ctx):
    init = nn.with_logical_partitioning(nn.initializers.ones, (axes.EMBED,))
    return out(x) + 0 * self.param('scale', init, x.shape[-1:], jnp.float32).astype(x.dtype)


def no_decoder(self, x, ctx):
    if ctx.causal:
        raise UserError('this sublayer does not work in a decoder; use attention')
    return out(x)


def auxiliary_loss(self, x, ctx):
    self.sow('losses', 'balance', jnp.sum(x))
    return out(x)


def make_sublayer(call):
    """Creates a sublayer class `Broken` with the function `call` (self, x, ctx) -> y."""
    fields = {'dropout_rate': 0.5, '__annotations__': {'dropout_rate': float}}
    return type('Broken', (nn.Module,), {'__call__': nn.compact(call), '__module__': __name__, **fields})


def causal_mean_with_shift(_, x, ctx):
    """Subtracts the maximum over the row and adds it again, which changes only the rounding."""
    tokens = mask(x, ctx)
    shift = jax.lax.stop_gradient(jnp.max(tokens, axis=1, keepdims=True))
    return out(jnp.cumsum(tokens - shift, axis=1) / jnp.arange(1, x.shape[1] + 1)[:, None] + shift)


VIOLATIONS = [
    ('causality', 'decoder', lambda _, x, ctx: out(x + 0.01 * jnp.roll(mask(x, ctx), -1, 1)), 'token 0 reads token 1'),
    # Reads the next token without a gradient.
    ('causality', 'decoder', lambda _, x, ctx: out(x + 0.01 * jnp.sign(jnp.roll(mask(x, ctx), -1, 1))),
     'token 0 reads token 1'),
    ('rows', 'encoder', lambda _, x, ctx: out(x + 0.1 * jnp.roll(x, 1, 0)), 'a row in another batch differs'),
    ('padding', 'encoder', lambda _, x, ctx: out(x + jnp.mean(x, 1, keepdims=True)), 'positions of padding differs by'),
    # Reads padding at one position, so the output does not depend on the padded length.
    ('padding', 'encoder', lambda _, x, ctx: out(x.at[:, 0].add(1e-6 * x[:, 6 if x.shape[1] < 12 else 7])),
     'token 0 reads padding at position 7'),
    ('packing', 'decoder', lambda _, x, ctx: out(jnp.cumsum(mask(x, ctx), axis=1)), 'example 2 in a row'),
    ('decode', 'decoder', cumsum_with_last_token_cache, 'step 2 with the cache differs'),
    ('decode', 'decoder', lambda _, x, ctx: out(x + jnp.mean(ctx.memory.hidden, (1, 2), keepdims=True)), 'ctx.memory'),
    ('prefix', 'decoder', cumsum_without_prompts, 'token 0 does not read token 1'),
    ('prefix', 'decoder', lambda _, x, ctx: out(x * (1 + ctx.packed)), 'the output with a prefix differs'),
    ('prompt', 'decoder', cumsum_without_prompts, 'step 0 after prompts differs'),
    ('prefix_lm', 'decoder', prompts_without_prefixes, 'step 0 after bidirectional prompts differs'),
    ('beams', 'decoder', tiled_memory, 'two beams of a sequence differs'),
    ('bfloat16', 'encoder', lambda _, x, ctx: out((x + 1000) - 1000), 'from float32'),
    ('bfloat16', 'encoder', lambda _, x, ctx: out(x).astype(jnp.float32), 'compute in x.dtype'),
    ('dropout', 'encoder', lambda _, x, ctx: out(mask(x, ctx)), 'different keys give the same output'),
    ('dropout', 'encoder', lambda _, x, ctx: nn.Dropout(0.5)(x, deterministic=False), 'only if ctx.deterministic is'),
    ('padding', 'encoder', lambda _, x, ctx: out(jnp.sqrt(x)), 'contains NaN'),
    ('parameters', 'encoder', lambda self, x, ctx: x * self.param('scale', nn.initializers.ones, x.shape[-1:]),
     'broken/scale has no logical axes'),
    ('parameters', 'encoder', lambda _, x, ctx: Dense(x.shape[-1], (axes.EMBED, axes.EMBED), name='out')(x),
     'out/kernel has a repeated axis'),
    ('gradients', 'encoder', unused_parameter, 'scale is zero'),
    ('remat', 'encoder', lambda _, x, ctx: out(x * np.random.default_rng().uniform(0.5, 2)), 'with full_remat differs'),
]  # fmt: skip


@pytest.mark.parametrize(('check', 'side', 'call', 'words'), VIOLATIONS)
def test_violation_is_reported_in_one_line(check, side, call, words, capsys):
    with pytest.raises(ContractViolation) as error:
        check_sublayer(make_sublayer(call), sides=(side,), without=tuple(name for name in CHECKS if name != check))
    message = str(error.value)
    assert message.startswith(f'Broken fails {check} in the {side}: ') and words in message
    assert '\n' not in message and 'FAILED' in capsys.readouterr().out


def test_rounding_is_not_a_violation():
    without = [name for name in CHECKS if name != 'causality']
    check_sublayer(make_sublayer(causal_mean_with_shift), sides=('decoder',), without=without)


def test_cause_of_a_violation_is_the_exception_of_the_sublayer():
    with pytest.raises(ContractViolation, match='ZeroDivisionError') as error:
        # Only the padding check also uses rows of fewer than 8 tokens.
        sublayer = make_sublayer(lambda _, x, ctx: out(x * (1 // (x.shape[1] // 8))))
        check_sublayer(sublayer, without=[name for name in CHECKS if name != 'padding'])
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_every_check_has_a_violation():
    assert {case[0] for case in VIOLATIONS} == set(CHECKS)


def test_mixer_of_the_guide_passes_all_checks_but_prefixes(tmp_path, capsys):
    """A causal convolution rejects bidirectional prefixes."""
    page = (ROOT / 'docs/guide/new_mixer.md').read_text()
    (code,) = re.findall(r"^cat > my_convolutions.py <<'END'\n(.*?)^END$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / 'my_convolutions.py').write_text(code)
    mixer = runpy.run_path(str(tmp_path / 'my_convolutions.py'))['CausalConvolution']
    report = check_sublayer(mixer, sides=('decoder',))
    assert [row.check for row in report.rows] == list(CHECKS)
    assert [row.check for row in report.rows if row.result != 'passed'] == ['prefix', 'prefix_lm']
    assert capsys.readouterr().out == f'{report}\n'


def test_refused_side_is_reported(capsys):
    skipped = tuple(name for name in CHECKS if name != 'parameters')
    sublayer = make_sublayer(no_decoder)
    report = check_sublayer(functools.partial(sublayer), without=skipped, show=False)
    assert [(row.side, row.check) for row in report.rows if row.result == 'passed'] == [('encoder', 'parameters')]
    assert report.rows[-1].result == 'refused' and 'use attention' in report.rows[-1].reason
    assert capsys.readouterr().out == ''
    with pytest.raises(UserError, match='Broken was not checked'):
        check_sublayer(sublayer, sides=('decoder',))


def without_context(self, x):
    return x


@pytest.mark.parametrize(
    ('sublayer', 'options', 'error', 'words'),
    [
        (GatedMLP, {'sides': ('middle',)}, UserError, 'must be a tuple of names'),
        (GatedMLP, {'sides': 'encoder'}, UserError, 'must be a tuple of names'),
        (make_sublayer(unused_parameter), {'without': tuple(CHECKS)}, UserError, 'not checked: named by without'),
        ('GatedMLP', {}, UserError, "'GatedMLP' was not checked: a sublayer must be a class or factory"),
        (make_sublayer(auxiliary_loss), {}, ContractViolation, 'training would discard the variables in losses'),
        (make_sublayer(without_context), {}, ContractViolation, 'fails all in the encoder: TypeError: .* takes 2'),
    ],
)
def test_invalid_argument_raises(sublayer, options, error, words):
    with pytest.raises(error, match=words):
        check_sublayer(sublayer, show=False, **options)
