"""T5.1.1 built from our parts computes what Hugging Face's T5 v1.1 computes, with the same random weights."""

import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from remixer_t5x.models.architecture.encoder_decoder import EncoderDecoder
from remixer_t5x.models.architecture.layer import PreNorm
from remixer_t5x.models.architecture.stack import Stack
from remixer_t5x.models.layers.positions import RelativePositionBias
from remixer_t5x.models.losses import CrossEntropy
from remixer_t5x.models.seq2seq import Seq2Seq
from remixer_t5x.models.sublayers.attention import CrossAttention, SelfAttention
from remixer_t5x.models.sublayers.feed_forward import GatedMLP
from tests.support import references

GOLDEN = pathlib.Path(__file__).parent.parent / 'golden'
HEADS, HEAD_DIM, MLP, EMBED, VOCAB = 4, 8, 48, 32, 96
LAYERS = {'encoder': 2, 'decoder': 3}


def make_model() -> Seq2Seq:
    self_attention = functools.partial(SelfAttention, num_heads=HEADS, head_dim=HEAD_DIM)
    cross_attention = functools.partial(CrossAttention, num_heads=HEADS, head_dim=HEAD_DIM)
    mlp = functools.partial(GatedMLP, hidden_dim=MLP)

    def stack(count, *sublayers):
        layer = functools.partial(PreNorm, sublayers=sublayers)
        bias = functools.partial(RelativePositionBias, num_heads=HEADS)
        return functools.partial(Stack, runs=((layer, count),), position_bias=bias)

    module = EncoderDecoder(
        vocab_size=VOCAB,
        embed_dim=EMBED,
        encoder_stack=stack(LAYERS['encoder'], self_attention, mlp),
        decoder_stack=stack(LAYERS['decoder'], self_attention, cross_attention, mlp),
    )
    return Seq2Seq(module, CrossEntropy(z_loss=0.0, chunk_length=4))


def our_parameters(weights: dict[str, np.ndarray]) -> dict:
    """Parameters of `make_model` from a Hugging Face state dict."""

    def attention(stack, sublayer, kind):
        names = {'query': 'q', 'key': 'k', 'value': 'v', 'out': 'o'}
        return {ours: {'kernel': stacked(stack, f'layer.{sublayer}.{kind}.{hf}')} for ours, hf in names.items()}

    def stacked(stack, name):
        return np.stack([weights[f'{stack}.block.{i}.{name}.weight'].T for i in range(LAYERS[stack])])

    def parameters(stack):
        last = 1 if stack == 'encoder' else 2
        layer = {
            'self_attention': attention(stack, 0, 'SelfAttention'),
            'self_attention_norm': {'scale': stacked(stack, 'layer.0.layer_norm')},
            'gated_mlp': {
                name: {'kernel': stacked(stack, f'layer.{last}.DenseReluDense.{name}')}
                for name in ('wi_0', 'wi_1', 'wo')
            },
            'gated_mlp_norm': {'scale': stacked(stack, f'layer.{last}.layer_norm')},
        }
        if stack == 'decoder':
            layer['cross_attention'] = attention(stack, 1, 'EncDecAttention')
            layer['cross_attention_norm'] = {'scale': stacked(stack, 'layer.1.layer_norm')}
        bias = weights[f'{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight'].T
        return {
            'run_0': {'layer': layer},
            'position_bias': {'embedding': bias},
            'final_norm': {'scale': weights[f'{stack}.final_layer_norm.weight']},
        }

    tree = {
        'token_embedder': {'embedding': weights['shared.weight']},
        'logits': {'kernel': weights['lm_head.weight'].T},
        'encoder': parameters('encoder'),
        'decoder': parameters('decoder'),
    }
    return jax.tree.map(jnp.asarray, tree)


def relative_error(ours, theirs) -> float:
    return float(np.max(np.abs(np.asarray(ours) - theirs)) / np.max(np.abs(theirs)))


def check_parity(arrays) -> None:
    model = make_model()
    weights = {name.removeprefix('weights/'): arrays[name] for name in arrays if name.startswith('weights/')}
    params = our_parameters(weights)
    expected = jax.eval_shape(
        lambda key: model.init(key, {'encoder_input_tokens': (1, 4), 'decoder_target_tokens': (1, 4)}),
        jax.random.key(0),
    )
    assert sum(x.size for x in jax.tree.leaves(expected)) == sum(x.size for x in jax.tree.leaves(params))

    inputs, targets = arrays['inputs'], arrays['targets']
    shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    batch = {'encoder_input_tokens': inputs, 'decoder_input_tokens': shifted, 'decoder_target_tokens': targets}

    @jax.jit
    def compute(params):
        encoded = model.module.apply({'params': params}, inputs, enable_dropout=False, method='encode')
        logits = model.module.apply({'params': params}, inputs, shifted, enable_dropout=False)
        return encoded, logits, model.loss(params, batch), model.score(params, batch)

    encoded, logits, (loss, sums), scores = jax.device_get(compute(params))
    is_token, is_target = inputs > 0, targets > 0
    assert relative_error(encoded[is_token], arrays['encoded'][is_token]) < 1e-5
    assert relative_error(logits[is_target], arrays['logits'][is_target]) < 1e-5
    assert relative_error(loss / sums['weights'], arrays['loss']) < 1e-5
    assert relative_error(-np.sum(scores) / sums['weights'], arrays['loss']) < 1e-5


def test_equals_recorded_hugging_face_outputs_on_a_padded_batch():
    with np.load(GOLDEN / 't5_v1_1_tiny.npz') as arrays:
        check_parity(dict(arrays))


@pytest.mark.parametrize('seed', [1, 2])
def test_equals_hugging_face_live(seed):
    references.need('torch', 'transformers')
    spec = importlib.util.spec_from_file_location('make_t5_v1_1_tiny', GOLDEN / 'make_t5_v1_1_tiny.py')
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    check_parity(maker.make_arrays(seed))


def test_initial_deviations_are_those_of_t5x():
    """T5X's examples/t5/layers.py: queries are divided by sqrt(head_dim), because their products with keys are not."""
    shapes = {'encoder_input_tokens': (1, 8), 'decoder_target_tokens': (1, 8)}
    params = nn.unbox(jax.jit(lambda key: make_model().init(key, shapes))(jax.random.key(0)))
    buckets = 32
    special = {
        'token_embedder/embedding': 1.0,
        'position_bias/embedding': ((HEADS + buckets) / 2) ** -0.5,
        'query/kernel': (EMBED * HEAD_DIM) ** -0.5,
        'out/kernel': (HEADS * HEAD_DIM) ** -0.5,
        'wo/kernel': MLP**-0.5,
    }
    for path, value in jax.tree_util.tree_leaves_with_path(params):
        name = '/'.join(key.key for key in path)
        if name.endswith('scale'):
            np.testing.assert_array_equal(value, 1.0)
            continue
        expected = special.get('/'.join(name.split('/')[-2:]), EMBED**-0.5)
        # Five standard errors of a normal's standard deviation.
        np.testing.assert_allclose(np.std(value), expected, rtol=5 * (2 * value.size) ** -0.5, err_msg=name)
