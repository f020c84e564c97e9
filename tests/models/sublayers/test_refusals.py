"""Sublayers raise a one-line error for unsupported settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remixer_t5x.context import EncoderMemory
from remixer_t5x.errors import UserError
from remixer_t5x.models.sublayers import (
    attention,
    fnet,
    gmlp,
    hyper_mixer,
    mlp_mixer,
    remixer,
    tim,
)
from tests.models.sublayers.sublayer_inputs import context_of_ids

LENGTH, WIDTH = 9, 8
WITHOUT_ENCODER = {'memory': None}
TOO_LONG = ('max_length', '9 tokens', 'got 8', 'MAX_INPUT_LENGTH', 'to 9', 'TASK_FEATURE_LENGTHS')

# The sublayer, changes to the context, and words of the message.
UNSUPPORTED = {
    'mlp_mixer length': (mlp_mixer.MLPMixer(4, 8), {}, ('MLPMixer', *TOO_LONG)),
    'mlp_mixer causal': (mlp_mixer.MLPMixer(4, LENGTH), {'causal': True}, ('decoder', '@mlp_mixer.WindowMixer')),
    'gmlp odd width': (gmlp.GMLP(11, LENGTH), {}, ('GMLP.hidden_dim', 'gmlp.split_gate', 'got 11', '12')),
    'remixer residual': (
        remixer.Remixer(10, LENGTH, residual=remixer.identity_residual),
        {},
        ('Remixer.hidden_dim', '8', 'got 10', 'remixer.hidden_residual'),
    ),
    'hyper_mixer heads of features': (
        hyper_mixer.HyperMixer(6, 3),
        {},
        ('HyperMixer.num_heads', 'EMBED_DIM', '8', 'got 3'),
    ),
    'cross': (
        attention.CrossAttention(2, 4),
        WITHOUT_ENCODER,
        ('CrossAttention', 'encoder', 'DECODER_SUBLAYERS', 'SelfAttention instead'),
    ),
    'tim width': (tim.InterMechanismAttention(3), {}, ('num_mechanisms', 'EMBED_DIM', '8', 'got 3')),
    'tim heads': (tim.TimAttention(2, 3, 3), {}, ('num_mechanisms', 'NUM_HEADS', '3', 'got 2')),
    'fnet causal': (fnet.FNet(), {'causal': True}, ('decoder', 'DECODER_MIXER = @attention.SelfAttention')),
    'fnet packed': (
        fnet.FNet(),
        {'packed': True},
        ('packed', 'PACK = False', 'ENCODER_MIXER = @attention.SelfAttention'),
    ),
}


@pytest.mark.parametrize('case', UNSUPPORTED)
def test_unsupported_setting_raises_a_one_line_error_with_advice(case):
    module, flags, words = UNSUPPORTED[case]
    ids, x = np.ones((1, LENGTH)), jnp.zeros((1, LENGTH, WIDTH))
    ctx = context_of_ids(ids, **{'memory': EncoderMemory(x, context_of_ids(ids)), **flags})
    with pytest.raises(UserError) as error:
        jax.eval_shape(module.init, jax.random.key(0), x, ctx)
    message = str(error.value)
    assert all(word in message for word in words) and '\n' not in message, message
