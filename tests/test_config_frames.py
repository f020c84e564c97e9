"""Every model is also a decoder alone, by one more gin file."""

import pathlib

import jax
import pytest
from flax import linen as nn

from remixer_t5x import build_model
from remixer_t5x.data import frames
from remixer_t5x.errors import UserError
from remixer_t5x.model import interface

CONFIGS = pathlib.Path(__file__).parent.parent / 'configs'
DECODER_ONLY = 'frames/decoder_only.gin'
OTHER_FRAMES = {'bert'}
MODELS = sorted({path.stem for path in (CONFIGS / 'models').glob('*.gin')} - OTHER_FRAMES)
PREFIXES = {'inputs': 24, 'targets': 8}


def trace_loss(model, lengths):
    batch = frames.abstract_batch(model.frame, lengths, batch_size=2, pack=True)
    shapes = {name: array.shape for name, array in batch.items()}
    params = nn.unbox(interface.param_shapes(model, shapes))
    jax.eval_shape(model.loss, params, batch)
    return params


@pytest.mark.parametrize('name', MODELS)
def test_every_model_has_a_decoder_alone(name):
    model = build_model(f'models/{name}.gin', 'sizes/tiny.gin', DECODER_ONLY, NUM_DECODER_LAYERS=1)
    names = str(jax.tree.structure(trace_loss(model, {'targets': 32})))
    assert model.frame == 'decoder_only' and 'cross' not in names and "'encoder'" not in names


@pytest.mark.parametrize('name', ['t5_1_1', 'remixer', 'hyper_mixer', 'linear_transformer', 'tim', 'gpt2'])
def test_these_read_a_prefix_in_both_directions(name):
    trace_loss(build_model(f'models/{name}.gin', 'sizes/tiny.gin', DECODER_ONLY, PREFIX_LM=True), PREFIXES)


@pytest.mark.parametrize('name', ['gmlp', 'gmlp_mixer', 'amlp', 'mixer_enc_dec'])
def test_these_refuse_a_prefix_when_built(name):
    model = build_model(f'models/{name}.gin', 'sizes/tiny.gin', DECODER_ONLY, PREFIX_LM=True)
    with pytest.raises(UserError, match='PREFIX_LM = False'):
        trace_loss(model, PREFIXES)
