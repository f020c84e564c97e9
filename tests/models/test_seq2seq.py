"""Encoder-decoders: decoding against teacher forcing, packing, positions and dtypes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import remixer_t5x
from remixer_t5x.data import batch_formats
from remixer_t5x.errors import UserError
from remixer_t5x.models import decoding, interface
from remixer_t5x.models.architecture.encoder_decoder import EncoderDecoder
from remixer_t5x.models.layers.embedding import Embed
from remixer_t5x.models.seq2seq import Seq2Seq
from tests.models.sublayers.test_sublayer_contract import EMBED, SUBLAYERS
from tests.models.tiny_models import make_seq2seq, make_stack

VOCAB = 40


def shift(targets):
    return jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))


def make_batch(inputs, targets):
    inputs, targets = jnp.asarray(inputs, jnp.int32), jnp.asarray(targets, jnp.int32)
    return {'encoder_input_tokens': inputs, 'decoder_input_tokens': shift(targets), 'decoder_target_tokens': targets}


def teacher_forced(model, params, inputs, decoder_inputs):
    """Returns logits; one compiled program is faster than compiling each operation."""
    apply = jax.jit(functools.partial(model.module.apply, enable_dropout=False))
    return np.asarray(apply({'params': params}, inputs, decoder_inputs))


def test_logits_processors_receive_the_start_token():
    model, params = make_seq2seq('t5', VOCAB)
    model = dataclasses.replace(model, module=model.module.clone(begin_id=2))
    forbid = lambda logits, tokens, step: jnp.where(jnp.any(tokens == 2, 1, keepdims=True), logits, -jnp.inf)  # noqa: E731
    batch = {'encoder_input_tokens': jnp.asarray([[5, 6, 1]], jnp.int32)}
    decoders = [decoding.Greedy(logits_processor=processors) for processors in ((), (forbid,))]
    generate = jax.jit(lambda params: [model.generate(params, batch, 3, 1, decoder).tokens for decoder in decoders])
    plain, processed = generate(params)
    np.testing.assert_array_equal(processed, plain)


def make_model_of_all_sublayers(dtype='float32'):
    """Returns a model whose encoder and decoder contain all sublayers that they support, and its parameters."""
    stacks = []
    for side in ('encoder', 'decoder'):
        # One factory of each class, from the first case that contains it.
        factories = {factory.func: factory for case in reversed(SUBLAYERS.values()) for factory in getattr(case, side)}
        stacks.append(make_stack(*factories.values(), layers=(1,), num_heads=2))
    model = Seq2Seq(EncoderDecoder(VOCAB, EMBED, *stacks, dtype))
    shapes = {'encoder_input_tokens': (1, 5), 'decoder_target_tokens': (1, 3)}
    rng, leaves = np.random.default_rng(0), nn.unbox(interface.compute_param_shapes(model, shapes))
    return model, jax.tree.map(lambda leaf: rng.normal(size=leaf.shape, scale=0.5).astype(leaf.dtype), leaves)


def test_greedy_tokens_are_the_argmax_of_teacher_forcing():
    model, params = make_model_of_all_sublayers()
    inputs = jax.random.randint(jax.random.key(1), (4, 9), 1, VOCAB).at[1, 5:].set(0)
    eos = 3
    tokens = jax.jit(lambda params, batch: model.generate(params, batch, 12, eos).tokens[:, 0])(
        params, {'encoder_input_tokens': inputs}
    )
    best = np.argmax(teacher_forced(model, params, inputs, shift(tokens)), axis=-1)
    for row, expected in zip(np.asarray(tokens), best, strict=True):
        ended = np.flatnonzero(row == eos)
        count = ended[0] + 1 if len(ended) else len(row)
        np.testing.assert_array_equal(row[:count], expected[:count])
        assert np.all(row[count:] == 0)


def test_packing_keeps_losses_and_counts():
    model, params = make_seq2seq('remixer', VOCAB)
    rng = np.random.default_rng(0)
    inputs, targets = rng.integers(1, VOCAB, (2, 6)), rng.integers(1, VOCAB, (2, 4))
    inputs[1, 4:], targets[1, 3:] = 0, 0
    separate = make_batch(inputs, targets)

    def pack(rows, length):
        tokens = [row[row > 0] for row in np.asarray(rows)]
        ids = [np.full(len(t), i + 1) for i, t in enumerate(tokens)]
        positions = [np.arange(len(t)) for t in tokens]
        joined = [np.concatenate(rows) for rows in (tokens, ids, positions)]
        return [jnp.asarray(np.pad(row, (0, length - len(row))))[None].astype(jnp.int32) for row in joined]

    packed = {}
    packed['encoder_input_tokens'], packed['encoder_segment_ids'], packed['encoder_positions'] = pack(inputs, 12)
    packed['decoder_target_tokens'], packed['decoder_segment_ids'], packed['decoder_positions'] = pack(targets, 9)
    packed['decoder_input_tokens'] = jnp.where(
        packed['decoder_positions'] == 0, 0, shift(packed['decoder_target_tokens'])
    )
    compute = jax.jit(model.loss)
    loss, sums = compute(params, packed)
    expected, expected_sums = compute(params, separate)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for name, value in expected_sums.items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-5, err_msg=name)
    derived = {name: value for name, value in packed.items() if 'positions' not in name}
    np.testing.assert_allclose(compute(params, derived)[0], loss, rtol=1e-6)


def test_float16_is_rejected():
    with pytest.raises(UserError, match="^DTYPE must be .* got 'float16'"):
        make_seq2seq('t5', VOCAB, dtype='float16')


def test_one_hot_embedding_equals_the_gather():
    tokens = jnp.asarray([[0, 3, 7]])
    variables = Embed(8, 5).init(jax.random.key(0), tokens)
    np.testing.assert_allclose(Embed(8, 5, one_hot=True).apply(variables, tokens), Embed(8, 5).apply(variables, tokens))


@pytest.mark.parametrize('name', ['amlp', 'gpt2', 'modern_t5', None])
def test_bfloat16_parameters_have_a_float32_loss_and_generate_the_same(name):
    """`None` selects the model of all sublayers. The other models have options that it lacks."""
    if name:
        sizes = {'VOCAB_SIZE': VOCAB, 'NUM_ENCODER_LAYERS': 1, 'NUM_DECODER_LAYERS': 1}
        model = remixer_t5x.build_model(f'models/{name}.gin', 'sizes/tiny.gin', **sizes, DTYPE='bfloat16')
    else:
        model, _ = make_model_of_all_sublayers('bfloat16')
    lengths = dict.fromkeys(batch_formats.get_batch_formats(model.model_type)[0].features, 8)
    batch = batch_formats.get_abstract_batch(model.model_type, lengths)
    shapes = nn.unbox(interface.compute_param_shapes(model, {k: v.shape for k, v in batch.items()}))
    low = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), shapes)
    assert jax.eval_shape(model.loss, low, batch)[0].dtype == jnp.float32
    inputs = {batch_formats.get_input_array_name(model.model_type): jax.ShapeDtypeStruct((1, 8), jnp.int32)}
    assert jax.eval_shape(lambda *args: model.generate(*args, 4), low, inputs).tokens.shape == (1, 1, 4)
    # Parameters that a sublayer uses in float32 are not cast before decoding.
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape, scale=0.3).astype(leaf.dtype), shapes)
    tokens = np.arange(2, 10, dtype=np.int32)[None]
    batch = dict.fromkeys(('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens'), tokens)
    hidden = jax.jit(lambda params: model._compute_hidden(params, batch, None))
    np.testing.assert_array_equal(hidden(params), hidden(decoding.cast_kernels(jnp.bfloat16, params)))
