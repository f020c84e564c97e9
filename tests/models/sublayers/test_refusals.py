"""A sublayer refuses what it does not support in one line that says what to type."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remixer_t5x.context import Memory
from remixer_t5x.errors import UserError
from remixer_t5x.models.layers.positions import LearnedPositions
from remixer_t5x.models.sublayers import (
    attention,
    fnet,
    gmlp,
    hyper_mixer,
    linear_attention,
    mlp_mixer,
    remixer,
    tim,
)
from tests.support.sublayer_inputs import context_of_ids

LENGTH, WIDTH = 9, 8
WITHOUT_ENCODER = {'memory': None}
_tim = 'which is {}: give a number that divides'

REFUSED = {
    'mlp_mixer length': (
        mlp_mixer.MLPMixer(4, 8),
        {},
        'MLPMixer.max_length is 8, got a sequence of 9 tokens: give MLPMixer.max_length = 9 or shorten TASK_FEATURE',
    ),
    'mlp_mixer causal': (
        mlp_mixer.MLPMixer(4, LENGTH),
        {'causal': True},
        'cannot be used in a decoder: give DECODER_MIXER = @mlp_mixer.WindowMixer',
    ),
    'gmlp length': (gmlp.GMLP(10, 8), {}, 'give GMLP.max_length = 9 or shorten TASK_FEATURE_LENGTHS'),
    'gmlp odd width': (gmlp.GMLP(11, LENGTH), {}, 'gmlp.split_gate needs an even GMLP.hidden_dim, got 11: give 12'),
    'remixer length': (remixer.Remixer(10, 8), {}, 'Remixer.max_length is 8, got a sequence of 9 tokens: give'),
    'remixer residual': (
        remixer.Remixer(10, LENGTH, residual=remixer.identity_residual),
        {},
        'model width 8, got 10: use remixer.hidden_residual',
    ),
    'hyper_mixer heads of features': (
        hyper_mixer.HyperMixer(6, 3),
        {},
        'HyperMixer.num_heads is 3, which does not divide the model width 8: use',
    ),
    'hyper_mixer heads of units': (
        hyper_mixer.HyperMixer(9, 2),
        {},
        'HyperMixer.num_heads is 2, which does not divide hidden_dim 9: use',
    ),
    'hyper_mixer positions': (
        hyper_mixer.HyperMixer(6, token_information=functools.partial(LearnedPositions, 8)),
        {},
        'give LearnedPositions.max_length = 9 or',
    ),
    'hyper_mixer cross': (hyper_mixer.HyperMixerCross(6), WITHOUT_ENCODER, 'or HyperMixer here'),
    'linear cross': (linear_attention.LinearCrossAttention(2, 3), WITHOUT_ENCODER, 'or LinearAttention here'),
    'cross': (
        attention.CrossAttention(2, 4),
        WITHOUT_ENCODER,
        'CrossAttention needs the output of an encoder: use it in DECODER_SUBLAYERS, or SelfAttention here',
    ),
    'tim cross': (tim.TimCrossAttention(2, 4, 3), WITHOUT_ENCODER, 'or TimAttention here'),
    'tim width': (tim.InterMechanismAttention(3), {}, f'EMBED_DIM, {_tim.format(8)} 8'),
    'tim none': (tim.InterMechanismAttention(0), {}, f'EMBED_DIM, {_tim.format(8)} 8'),
    'tim heads': (tim.TimAttention(2, 3, 3), {}, f'NUM_HEADS, {_tim.format(3)}'),
    'tim cross heads': (tim.TimCrossAttention(4, 6, 3), {}, f'NUM_HEADS, {_tim.format(6)}'),
    'tim hidden': (tim.TimMLP(4, 6), {}, f'MLP_DIM, {_tim.format(6)}'),
    'fnet causal': (fnet.FNet(), {'causal': True}, 'cannot be used in a decoder: give DECODER_MIXER = @attention.Self'),
    'fnet packed': (
        fnet.FNet(),
        {'packed': True},
        'packed row: give PACK = False, or ENCODER_MIXER = @attention.SelfAttention or @linear_attention.Linear',
    ),
}


@pytest.mark.parametrize('case', REFUSED)
def test_a_refusal_is_one_line_that_says_what_to_type(case):
    module, flags, message = REFUSED[case]
    ids, x = np.ones((1, LENGTH)), jnp.zeros((1, LENGTH, WIDTH))
    ctx = context_of_ids(ids, **{'memory': Memory(x, context_of_ids(ids)), **flags})
    with pytest.raises(UserError) as error:
        jax.eval_shape(module.init, jax.random.key(0), x, ctx)
    assert message in str(error.value) and '\n' not in str(error.value)
