"""Runs a model on one device and on a mesh, with different batch sizes.

test_predictions runs it in a separate process with eight virtual CPU devices. It writes the predictions and scores of
each run to a JSON file.
"""

import json

import jax
import numpy as np
import seqio

from remixer_t5x.api.model_building import build_model
from remixer_t5x.devices.partition import Partitioner, unbox
from remixer_t5x.evaluate.predictions import Decoding, Predictor
from remixer_t5x.models import interface
from remixer_t5x.models.sampling import Sampling

LENGTHS = {'inputs': 40, 'targets': 8}
NUM_EXAMPLES = 19


def evaluate(partitioner, batch_size):
    """Returns two sampled answers to each text, their scores, and the likelihoods of targets."""
    sizes = {'EMBED_DIM': 16, 'MLP_DIM': 32, 'NUM_HEADS': 2, 'NUM_ENCODER_LAYERS': 1, 'NUM_DECODER_LAYERS': 1}
    model = build_model('models/t5_1_1.gin', 'sizes/tiny.gin', VOCAB_SIZE=264, **sizes)
    shapes = {'encoder_input_tokens': (1, 40), 'decoder_target_tokens': (1, 8)}
    boxed = interface.compute_param_shapes(model, shapes)
    params = jax.jit(lambda: unbox(model.init(jax.random.key(1), shapes)))()
    # Sharpens the distribution, so that answers differ and some end early.
    params['logits']['kernel'] = 8 * params['logits']['kernel'].at[:, 1].multiply(1.5)
    params = jax.device_put(jax.device_get(params), partitioner.param_shardings(boxed))
    # Texts have different lengths, so that rows are padded and batches have several shapes.
    rng = np.random.default_rng(0)
    inputs = [[*rng.integers(100, 126, rng.integers(1, 37)).tolist(), 1] for _ in range(NUM_EXAMPLES)]
    settings = Decoding(batch_size, LENGTHS, Sampling(num_samples=2, top_k=20), seed=3)
    predictor = Predictor(model, partitioner, settings, seqio.ByteVocabulary(extra_ids=0))
    answers = predictor.predict(params, inputs)
    return {
        'predictions': [answer.ids for answer in answers],
        'scores': [answer.scores for answer in answers],
        'likelihoods': predictor.score(params, inputs, [ids[:4] for ids in inputs]).tolist(),
    }


def main(path):
    runs = {
        'single 4': evaluate(Partitioner(devices=jax.devices()[:1]), 4),
        'mesh 8': evaluate(Partitioner(data=2, fsdp=2, tensor=2), 8),
    }
    path.write_text(json.dumps(runs))
