"""Models with kernels lower for a TPU and a GPU without a warning; pytest turns warnings into errors."""

import jax
import pytest
from flax import linen as nn

from remixer_t5x.api.model_building import build_model
from remixer_t5x.data import batch_formats
from remixer_t5x.devices import jax_workarounds
from remixer_t5x.kernels.compile_target import compile_for_platform
from remixer_t5x.models import interface

SMALL = {'EMBED_DIM': 128, 'NUM_ENCODER_LAYERS': 1, 'NUM_DECODER_LAYERS': 1, 'VOCAB_SIZE': 64, 'DTYPE': 'bfloat16'}


TPU, GPU = ('tpu', 'tpu'), ('gpu', 'cuda')


@pytest.mark.parametrize(
    ('name', 'options', 'platform', 'lowering'),
    [
        ('t5_1_1', {}, *TPU),
        ('modern_t5', {'LOGIT_SOFTCAP': None}, *GPU),
        *((name, {}, *target) for name in ('hyper_mixer', 'mixer_enc_dec') for target in (TPU, GPU)),
    ],
)
def test_a_gradient_lowers_without_a_warning(name, options, platform, lowering):
    model = build_model(f'models/{name}.gin', 'sizes/tiny.gin', **SMALL, **options)
    batch = batch_formats.get_abstract_batch(model.model_type, {'inputs': 32, 'targets': 16}, 2, True)
    shapes = {key: array.shape for key, array in batch.items()}
    with compile_for_platform(platform), jax_workarounds.assume_cudnn_version(90800):
        params = nn.unbox(interface.compute_param_shapes(model, shapes))
        traced = jax.jit(jax.grad(lambda params, batch: model.loss(params, batch)[0])).trace(params, batch)
        program = traced.lower(lowering_platforms=(lowering,)).as_text()
    assert 'triton' not in program
    assert ('tpu_custom_call' if platform == 'tpu' else 'cudnn') in program
