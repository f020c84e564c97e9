"""Writes a MODEL_DIR with random parameters, without training."""

import jax
from flax import linen as nn

import remixer_t5x
from remixer_t5x.data import task_vocabulary
from remixer_t5x.interop import converted_checkpoint
from remixer_tasks import vocabularies

CONFIG = """from __gin__ import dynamic_registration
from remixer_tasks import vocabularies

include 'models/t5_1_1.gin'
include 'sizes/tiny.gin'
VOCABULARY = @vocabularies.byte()
TASK_FEATURE_LENGTHS = {'inputs': 40, 'targets': 12}
VOCAB_SIZE = 384
NUM_ENCODER_LAYERS = 1
NUM_DECODER_LAYERS = 1
EMBED_DIM = 16
MLP_DIM = 24
NUM_HEADS = 2
HEAD_DIM = 8
DTYPE = 'float32'
"""
VOCABULARY = vocabularies.byte()


def write_run(folder, config=CONFIG, steps=(1, 2), vocabulary=VOCABULARY):
    """Writes a MODEL_DIR with a checkpoint of random parameters for each step."""
    config_file = folder.parent / 'saved_run.gin'
    config_file.write_text(config)
    model = remixer_t5x.build_model(str(config_file))
    shapes = {'encoder_input_tokens': (1, 2), 'decoder_target_tokens': (1, 2)}
    claimed = converted_checkpoint.create_model_dir(folder)
    for step in steps:
        params = jax.jit(lambda rng: nn.unbox(model.init(rng, shapes)))(jax.random.key(step))
        record = converted_checkpoint.build_checkpoint_record(
            task_vocabulary.get_vocabulary_record(vocabulary), config, 'a test'
        )
        converted_checkpoint.write_checkpoint(claimed, jax.device_get(params), step, record)
    (folder / 'config.gin').write_text(config)
    return folder
