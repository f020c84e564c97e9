"""T5.1.1 against Hugging Face's T5 v1.1 with the same random weights."""

import jax
import numpy as np
from flax import linen as nn

from tests.models.tiny_models import T5, T5_EMBED, T5_MLP, make_t5, t5_params
from tests.support import references
from tests.support.paths import GOLDEN


def relative_error(ours, theirs) -> float:
    return float(np.max(np.abs(np.asarray(ours) - theirs)) / np.max(np.abs(theirs)))


def check_parity(arrays) -> None:
    model = make_t5(decoder_layers=3)
    weights = {name.removeprefix('weights/'): arrays[name] for name in arrays if name.startswith('weights/')}
    params = t5_params(weights, decoder_layers=3)
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


def test_t5_equals_hugging_face_live():
    references.require('torch', 'transformers')
    from tests.golden import make_t5_tiny

    check_parity(make_t5_tiny.make_v1_1(seed=1))


def test_initial_standard_deviations_equal_those_of_t5x():
    """See T5X's examples/t5/layers.py: query kernels instead of attention logits are divided by sqrt(head_dim)."""
    shapes = {'encoder_input_tokens': (1, 8), 'decoder_target_tokens': (1, 8)}
    params = nn.unbox(jax.jit(lambda key: make_t5(decoder_layers=3).init(key, shapes))(jax.random.key(0)))
    heads, head_dim, buckets = T5['num_heads'], T5['head_dim'], 32
    deviations = {
        'token_embedder/embedding': 1.0,
        'position_bias/embedding': ((heads + buckets) / 2) ** -0.5,
        'query/kernel': (T5_EMBED * head_dim) ** -0.5,
        'out/kernel': (heads * head_dim) ** -0.5,
        'wo/kernel': T5_MLP**-0.5,
    }
    for path, value in jax.tree_util.tree_leaves_with_path(params):
        name = '/'.join(key.key for key in path)
        if name.endswith('scale'):
            np.testing.assert_array_equal(value, 1.0)
            continue
        expected = deviations.get('/'.join(name.split('/')[-2:]), T5_EMBED**-0.5)
        # The tolerance is five standard errors of the sample standard deviation.
        np.testing.assert_allclose(np.std(value), expected, rtol=5 * (2 * value.size) ** -0.5, err_msg=name)
