"""All shipped models and model types at a tiny size, and a pattern for the names of their hidden kernels."""

import functools
import re

from remixer_t5x import build_model
from remixer_t5x.data import batch_formats
from remixer_t5x.models import interface, lora
from tests.support.paths import CONFIGS

_SIZES = {'remixer_scaled': 'scaled_base'}
_FILES = {path.stem: [f'models/{path.stem}.gin'] for path in sorted((CONFIGS / 'models').glob('*.gin'))}
_COMPOSITIONS = {
    'remixer_gated_composition': '@remixer.GatedComposition',
    'remixer_gated_alpha': '@remixer.GatedAlpha',
}
_FILES |= dict.fromkeys(_COMPOSITIONS, ['models/remixer.gin'])
_FILES |= {'decoder_only': ['models/t5_1_1.gin', 'model_types/decoder_only.gin']}
_FILES |= {'classifier': ['models/bert.gin', 'model_types/classifier.gin']}
ADAPTED = {'t5_1_1_with_adapters': 't5_1_1', 'tim_with_adapters': 'tim'}
NAMES = (*_FILES, *ADAPTED)
# Kernels of dense layers between features or hidden units, without embeddings and logits.
HIDDEN_KERNEL = re.compile(r'/(query|key|value|out|wi|wi_0|wi_1|wo|gate|dense)/kernel$')


@functools.cache
def model(name):
    files = _FILES[ADAPTED.get(name, name)]
    size = _SIZES.get(name, 'tiny')
    macros = {'VOCAB_SIZE': 512, 'NUM_ENCODER_LAYERS': 2, 'NUM_DECODER_LAYERS': 2}
    macros |= {'COMPOSITION': _COMPOSITIONS[name]} if name in _COMPOSITIONS else {}
    built = build_model(*files, f'sizes/{size}.gin', **macros)
    return lora.with_adapters(built, '.', 8) if name in ADAPTED else built


@functools.cache
def boxed_shapes(name):
    """Returns the parameters as boxed shapes."""
    return interface.compute_param_shapes(model(name), batch_formats.get_smallest_batch_shapes(model(name).model_type))
