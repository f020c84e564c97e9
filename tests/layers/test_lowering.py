"""Every mixer lowers for a TPU and a GPU without a warning, which pytest's settings turn into errors."""

import jax
import pytest
from flax import linen as nn

from remixer_t5x.api.building import build_model
from remixer_t5x.data import frames
from remixer_t5x.devices import gpu_targets, jax_workarounds
from remixer_t5x.layers.compile_target import compiling_for
from remixer_t5x.model import interface

# All encoder-decoders of configs/models whose mixers differ.
MODELS = ['t5_1_1', 'remixer', 'mixer_enc_dec', 'hyper_mixer', 'linear_transformer', 'fnet', 'gmlp', 'amlp', 'tim']
SMALL = {'EMBED_DIM': 128, 'NUM_ENCODER_LAYERS': 2, 'NUM_DECODER_LAYERS': 1, 'VOCAB_SIZE': 64, 'DTYPE': 'bfloat16'}


@pytest.mark.parametrize(('platform', 'lowering'), [('tpu', 'tpu'), ('gpu', 'cuda')])
@pytest.mark.parametrize('name', MODELS)
def test_a_gradient_lowers_without_a_warning(name, platform, lowering):
    model = build_model(f'models/{name}.gin', 'sizes/tiny.gin', **SMALL)
    batch = frames.abstract_batch(model.frame, {'inputs': 32, 'targets': 16}, 2)
    shapes = {key: array.shape for key, array in batch.items()}
    with compiling_for(platform, chip='v5e' if platform == 'tpu' else 'h100'):
        with jax_workarounds.cudnn_of_described_gpu(gpu_targets.CUDNN_VERSION):
            params = nn.unbox(interface.param_shapes(model, shapes))
            traced = jax.jit(jax.grad(lambda params, batch: model.loss(params, batch)[0])).trace(params, batch)
            text = traced.lower(lowering_platforms=(lowering,)).as_text()
    # T5's attention is a kernel of either platform; without it the test would not see what it is for.
    if name == 't5_1_1':
        assert {'tpu': 'tpu_custom_call', 'gpu': '__cudnn$fmha'}[platform] in text
