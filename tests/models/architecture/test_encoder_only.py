"""Encoder-only models: parameter counts against the papers, and unused parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from remixer_t5x import build_model
from remixer_t5x.cli.info import model as papers
from remixer_t5x.context import make_sequence_context
from remixer_t5x.data import batch_formats
from remixer_t5x.errors import UserError
from remixer_t5x.models import interface
from remixer_t5x.models.architecture import encoder_only
from tests.support import parameters

LENGTHS = {'inputs': 8, 'targets': 8}


def params_of(model):
    shapes = batch_formats.get_batch_shapes(model.model_type, LENGTHS)
    return nn.unbox(interface.compute_param_shapes(model, shapes))


@functools.cache
def count(name, size, **macros):
    model = build_model(f'models/{name}.gin', f'sizes/{size}.gin', 'model_types/encoder_only.gin', **macros)
    return sum(leaf.size for leaf in jax.tree.leaves(params_of(model)))


def test_mlp_mixer_with_250_tokens_has_11_million_parameters():
    """See appendix B.2 of the HyperMixer paper: at this length, its size equals that of the other models."""
    assert count('mixer_enc', 'hyper_mixer_paper', MAX_INPUT_LENGTH=250) == 11_339_996


@pytest.mark.parametrize(
    'figure',
    [f for f in papers.PUBLISHED_COSTS if f.part == papers.ENCODER_PART],
    ids=lambda f: f'{f.model}-{f.size}',
)
def test_parameter_counts_are_close_to_those_of_the_papers(figure):
    """The papers count an encoder with its embedding."""
    assert count(figure.model, figure.size) == pytest.approx(figure.parameters, rel=0.035)


@pytest.mark.parametrize(('name', 'model_type'), [('modern_t5', 'encoder_only'), ('t5_1_1', 'classifier')])
def test_a_model_uses_all_parameters(name, model_type):
    """`test_configs` tests the mixers of all models."""
    files = f'models/{name}.gin', 'sizes/tiny.gin', f'model_types/{model_type}.gin'
    model = build_model(*files, NUM_ENCODER_LAYERS=1)
    assert model.model_type == model_type
    params, batch = params_of(model), batch_formats.get_abstract_batch(model_type, LENGTHS)
    assert parameters.unread_params(model, params, batch) == []
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    assert not [path for path in paths if 'cross' in path]


def test_any_encoder_can_have_the_head_and_the_input_layer_of_bert():
    files = ('models/t5_1_1.gin', 'sizes/tiny.gin', 'model_types/encoder_only.gin')
    layers = {'TOKEN_HEAD': '@encoder_only.BertHead', 'INPUT_LAYER': '@encoder_only.BertInput', 'MAX_INPUT_LENGTH': 24}
    params = params_of(build_model(*files, VOCAB_SIZE=40, **layers))
    assert params['head']['bias'].shape == (40,) and params['input']['positions']['table'].shape[0] == 24


def test_positions_without_segments_are_rejected():
    tokens = jnp.asarray([[5, 3, 6, 3]])
    with pytest.raises(UserError, match='segment_ids'):
        make_sequence_context(tokens, None, tokens)


def test_a_single_token_type_is_used_for_all_tokens():
    layer, x = encoder_only.BertInput(max_length=4, token_types=1), jnp.ones((1, 4, 8))
    ctx = make_sequence_context(jnp.asarray([[5, 3, 6, 3]]))
    params = layer.init(jax.random.key(0), x, ctx)
    output = np.asarray(layer.apply(params, x, ctx, jnp.asarray([[0, 0, 1, 1]])))
    np.testing.assert_array_equal(output, layer.apply(params, x, ctx))
