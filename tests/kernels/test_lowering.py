"""Models with kernels lower for a TPU and a GPU without a warning; pytest turns warnings into errors."""

import functools
import pathlib

import jax
import pytest
from flax import linen as nn

from remixer_t5x import kernels
from remixer_t5x.api.model_building import build_model
from remixer_t5x.cli.info import self_check
from remixer_t5x.data import batch_formats
from remixer_t5x.devices import jax_workarounds
from remixer_t5x.kernels.compile_target import compile_for_platform
from remixer_t5x.models import interface

SMALL = {'EMBED_DIM': 128, 'NUM_ENCODER_LAYERS': 1, 'NUM_DECODER_LAYERS': 1, 'VOCAB_SIZE': 64, 'DTYPE': 'bfloat16'}
KERNELS = pathlib.Path(kernels.__file__).parent


@functools.cache
def lower_gradient(name, platform, **options):
    model = build_model(f'models/{name}.gin', 'sizes/tiny.gin', **SMALL, **options)
    batch = batch_formats.get_abstract_batch(model.model_type, {'inputs': 32, 'targets': 16}, 2, True)
    shapes = {key: array.shape for key, array in batch.items()}
    with compile_for_platform(platform), jax_workarounds.assume_cudnn_version(90800):
        params = nn.unbox(interface.compute_param_shapes(model, shapes))
        traced = jax.jit(jax.grad(lambda params, batch: model.loss(params, batch)[0])).trace(params, batch)
        return traced.lower(lowering_platforms=({'gpu': 'cuda'}.get(platform, platform),)).as_text()


@pytest.mark.parametrize(
    'options',
    [{'name': 'modern_t5', 'LOGIT_SOFTCAP': None}, *({'name': name} for name in ('hyper_mixer', 'mixer_enc_dec'))],
    ids=str,
)
def test_a_gradient_lowers_for_a_gpu(options):
    program = lower_gradient(platform='gpu', **options)
    assert 'triton' not in program and 'cudnn' in program


@pytest.mark.parametrize('kernel', sorted(path.stem.removesuffix('_tpu') for path in KERNELS.glob('*_tpu.py')))
def test_a_model_of_the_self_check_uses_each_tpu_kernel(kernel):
    programs = [lower_gradient(name, 'tpu') for name in self_check.MODELS_WITH_KERNELS]
    users = [program for program in programs if f'{kernel}_backward' in program]
    assert users, f'add a model that uses the kernel {kernel}_backward to MODELS_WITH_KERNELS in {self_check.__file__}'
