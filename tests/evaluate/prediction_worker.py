"""Evaluates a model on one device and on a mesh, with different batch sizes.

test_predictions runs it in a separate process with eight virtual CPU devices. It writes the predictions, scores and
metrics of each run to a JSON file.
"""

import json
import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import jax
import numpy as np
import seqio
import tensorflow as tf

from remixer_t5x.api.model_building import build_model
from remixer_t5x.devices.partition import Partitioner, unbox
from remixer_t5x.evaluate.predictions import Decoding
from remixer_t5x.evaluate.task_evaluation import TaskEvaluation, TaskEvaluator
from remixer_t5x.models import interface
from remixer_t5x.models.sampling import Sampling

VOCAB = seqio.ByteVocabulary(extra_ids=0)
LENGTHS = {'inputs': 40, 'targets': 8}
NUM_EXAMPLES = 19


def texts():
    """Returns texts of different lengths, so that rows are padded and batches have several shapes."""
    rng = np.random.default_rng(0)
    return [''.join(chr(97 + c) for c in rng.integers(0, 26, rng.integers(1, 37))) for _ in range(NUM_EXAMPLES)]


def task():
    def read(split, shuffle_files, seed=None):
        return tf.data.Dataset.from_tensor_slices({'inputs': texts(), 'targets': [text[:3] for text in texts()]})

    def spelling(targets, predictions):
        sums = [sum(text.encode()) * (i + 1) for i, text in enumerate(predictions)]
        return {'sum': float(sum(sums)), 'equal': float(np.mean(np.array(targets) == predictions))}

    def likelihood(targets, scores):
        return {'likelihood': float(np.mean(scores))}

    feature = seqio.Feature(VOCAB, add_eos=True)
    return seqio.Task(
        'texts',
        source=seqio.FunctionDataSource(read, ['validation']),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
        output_features={'inputs': feature, 'targets': feature},
        metric_fns=[spelling, likelihood],
    )


def evaluate(partitioner, batch_size, decoder):
    """Returns the predictions, scores and metrics of a `TaskEvaluator`."""
    sizes = {'EMBED_DIM': 16, 'MLP_DIM': 32, 'NUM_HEADS': 2, 'NUM_ENCODER_LAYERS': 1, 'NUM_DECODER_LAYERS': 1}
    model = build_model('models/t5_1_1.gin', 'sizes/tiny.gin', VOCAB_SIZE=264, **sizes)
    shapes = {'encoder_input_tokens': (1, 40), 'decoder_target_tokens': (1, 8)}
    boxed = interface.compute_param_shapes(model, shapes)
    params = jax.jit(lambda: unbox(model.init(jax.random.key(1), shapes)))()
    # Sharpens the distribution, so that answers differ and some end early.
    params['logits']['kernel'] = 8 * params['logits']['kernel'].at[:, 1].multiply(1.5)
    params = jax.device_put(jax.device_get(params), partitioner.param_shardings(boxed))
    settings = Decoding(batch_size, LENGTHS, decoder, seed=3)
    (report,) = TaskEvaluator(TaskEvaluation(task(), settings), model, partitioner)(params)
    return {
        'predictions': [row['predictions'] for row in report.rows],
        'scores': [row['scores'] for row in report.rows],
        'metrics': report.metrics,
    }


def main(path):
    sampling = Sampling(num_samples=2, top_k=20)
    runs = {
        'single 4': evaluate(Partitioner(devices=jax.devices()[:1]), 4, sampling),
        'mesh 8': evaluate(Partitioner(data=2, fsdp=2, tensor=2), 8, sampling),
    }
    path.write_text(json.dumps(runs))
