"""Before training, a run checks that custom sublayers ignore padding and later tokens."""

import functools

import jax.numpy as jnp
import pytest
from flax import linen as nn

from remixer_t5x import UserError, axes, build_model
from remixer_t5x.cli.main import main
from remixer_t5x.models.layers.dense import Dense
from remixer_t5x.testing import check_custom_sublayers

SMALL = {'VOCAB_SIZE': 64, 'EMBED_DIM': 16, 'NUM_HEADS': 2, 'HEAD_DIM': 8, 'MLP_DIM': 24}
NO_POSITION_BIAS = {'ENCODER_POSITION_BIAS': None, 'DECODER_POSITION_BIAS': None}


class Sum(nn.Module):
    """Computes the sum over a row, over its tokens, or over earlier tokens."""

    tokens_only: bool = True
    earlier_only: bool = False

    @nn.compact
    def __call__(self, x, ctx):
        tokens = jnp.where(ctx.is_token[..., None], x, 0) if self.tokens_only else x
        sums = jnp.cumsum(tokens, axis=1) if self.earlier_only else jnp.sum(tokens, axis=1, keepdims=True)
        return Dense(x.shape[-1], (axes.EMBED, axes.MLP), name='out')(jnp.broadcast_to(sums, x.shape))


class WithoutAxes(nn.Module):
    @nn.compact
    def __call__(self, x, ctx):
        return nn.Dense(x.shape[-1], dtype=x.dtype)(x)


class TokenWise(nn.Module):
    @nn.compact
    def __call__(self, x, ctx):
        return Dense(x.shape[-1], (axes.EMBED, axes.MLP), name='out')(x)


class RollRows(nn.Module):
    @nn.compact
    def __call__(self, x, ctx):
        return jnp.roll(x, 1, axis=0)


class Fails(nn.Module):
    @nn.compact
    def __call__(self, x, ctx):
        raise ValueError('only for rows of 512 tokens')


def make_model(**macros):
    return build_model('models/t5_1_1.gin', 'sizes/tiny.gin', **SMALL, **macros)


causal_sum = functools.partial(Sum, earlier_only=True)
padding_sum = functools.partial(Sum, tokens_only=False)


def test_shipped_sublayers_are_not_checked():
    assert check_custom_sublayers(make_model()) == []


@pytest.mark.parametrize(
    'macros', [{'DECODER_MIXER': Sum}, {'DECODER_SUBLAYERS': (Sum, causal_sum)}, {'DECODER_RUNS': ((Sum, 1),)}]
)
def test_decoder_that_reads_later_tokens_raises(macros):
    with pytest.raises(UserError, match=r'Sum must not read later tokens in a decoder, but token 0 reads token \d'):
        check_custom_sublayers(make_model(**macros, **NO_POSITION_BIAS))


def test_reading_padding_is_a_warning():
    (line,) = check_custom_sublayers(make_model(ENCODER_MIXER=padding_sum, ENCODER_POSITION_BIAS=None))
    assert line.startswith('Sum in the encoder: warning') and 'padding' in line


def test_mixing_rows_is_a_warning_without_advice_on_padding():
    (line,) = check_custom_sublayers(make_model(ENCODER_MIXER=RollRows, ENCODER_POSITION_BIAS=None))
    assert 'warning: the output of a row in another batch differs' in line and 'is_token' not in line


def test_mixing_packed_examples_is_a_warning():
    model = make_model(ENCODER_MIXER=Sum, DECODER_MIXER=causal_sum, **NO_POSITION_BIAS)
    assert all('no token reads' in line for line in check_custom_sublayers(model))
    for line in check_custom_sublayers(model, packed=True):
        assert 'warning' in line and 'example 1 in a row' in line or 'example 2 in a row' in line
    (line,) = check_custom_sublayers(make_model(ENCODER_MIXER=TokenWise, ENCODER_POSITION_BIAS=None), packed=True)
    assert 'no token reads padding or another example' in line


def test_a_causal_mixer_in_a_prefix_language_model_is_a_warning():
    files = ('models/t5_1_1.gin', 'model_types/decoder_only.gin', 'sizes/tiny.gin')
    model = build_model(*files, **SMALL, DECODER_MIXER=causal_sum, DECODER_POSITION_BIAS=None, PREFIX_LM=True)
    (line,) = check_custom_sublayers(model)
    assert 'warning: token 0 does not read token 1' in line and 'check_no_prefix' in line


def test_parameters_without_logical_axes_are_a_warning():
    (line,) = check_custom_sublayers(make_model(ENCODER_MIXER=WithoutAxes, ENCODER_POSITION_BIAS=None))
    assert line.startswith('WithoutAxes in the encoder: warning: run_0/layer/without_axes/Dense_0/bias has no logical')
    assert 'with_logical_partitioning; test it with' in line and 'is_token' not in line


def test_failing_check_does_not_stop_the_run():
    (line,) = check_custom_sublayers(make_model(ENCODER_MIXER=Fails, **NO_POSITION_BIAS))
    assert 'could not be checked (only for rows of 512 tokens)' in line


def test_run_stops_before_it_reads_data(tmp_path, monkeypatch, capsys):
    (tmp_path / 'leaky_mixers.py').write_text(
        'import jax.numpy as jnp\nfrom flax import linen as nn\n\n\n'
        'class Leaky(nn.Module):\n    @nn.compact\n    def __call__(self, x, ctx):\n'
        '        return jnp.roll(x, -1, axis=1)\n'
    )
    (tmp_path / 'leaky.gin').write_text(
        "from __gin__ import dynamic_registration\nimport leaky_mixers\ninclude 'models/t5_1_1.gin'\n"
        'DECODER_MIXER = @leaky_mixers.Leaky\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / 'text.txt').write_text('some text')
    files = ('leaky.gin', 'sizes/tiny.gin', 'data/own_text.gin', 'optimizers/adamw_rms.gin', 'hardware/cpu.gin')
    gin = [f'--gin_file={file}' for file in (*files, 'runs/pretrain.gin')]
    flags = ('FILES=text.txt', 'MODEL_DIR=run', 'VOCAB_SIZE=384', 'EMBED_DIM=16')
    assert main(['train', *gin, *(f'--gin.{flag}' for flag in flags)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert 'Leaky must not read later tokens in a decoder, but token 0 reads token 1' in line
    assert not (tmp_path / 'run').exists()
