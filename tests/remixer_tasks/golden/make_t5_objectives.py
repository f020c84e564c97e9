"""Writes t5_objectives.json: the outputs of t5's preprocessors for fixed tokens and seeds.

Needs t5 0.9.4 (pip install t5==0.9.4):
    python tests/remixer_tasks/golden/make_t5_objectives.py
"""

import functools
import json
import pathlib

import numpy as np
import seqio
import tensorflow as tf
from t5.data import preprocessors

HERE = pathlib.Path(__file__).parent
VOCABULARY = seqio.ByteVocabulary(extra_ids=100)
FEATURES = {name: seqio.Feature(VOCABULARY, add_eos=True) for name in ('inputs', 'targets')}
SIZES = (2, 3, 17, 64, 200)
SPANS = ((0.15, 3.0), (0.15, 8.0), (0.5, 3.0), (0.5, 8.0), (0.15, 64.0), (0.5, 64.0))


def random_tokens(size):
    return np.random.default_rng(size).integers(3, 259, size, dtype=np.int32)


def denoise(size, seed, **options):
    """Returns a segment denoised by t5, as lists."""
    features = preprocessors.single_example_denoise(
        {'targets': tf.constant(random_tokens(size))}, tf.constant(seed), output_features=FEATURES, **options
    )
    return {name: value.numpy().tolist() for name, value in features.items()}


def denoise_with_prefix(size, seed, density):
    return denoise(
        size,
        seed,
        noise_density=density,
        noise_mask_fn=preprocessors.random_prefix_noise_mask,
        inputs_fn=preprocessors.drop_nonnoise_tokens,
        targets_fn=preprocessors.drop_noise_tokens,
    )


def denoise_with_sentinels(size, seed, density, mask_fn):
    return denoise(
        size,
        seed,
        noise_density=density,
        noise_mask_fn=mask_fn,
        inputs_fn=preprocessors.noise_span_to_unique_sentinel,
        targets_fn=preprocessors.nonnoise_span_to_unique_sentinel,
    )


def preprocess(preprocessor, documents, lengths, **options):
    """Returns the examples that a preprocessor of t5 makes from documents."""
    ragged = tf.ragged.constant(documents, dtype=tf.int32)
    dataset = tf.data.Dataset.from_tensor_slices(ragged).map(lambda tokens: {'targets': tokens})
    with seqio.map_seed_manager(5):
        examples = preprocessor(dataset, sequence_length=lengths, output_features=FEATURES, **options)
    return [{name: value.tolist() for name, value in example.items()} for example in examples.as_numpy_iterator()]


def main():
    seeds = [[1, 2], [7, -3]]
    documents = [random_tokens(size).tolist() for size in (200, 1, 17, 64)]
    outputs = {
        'prefix_lm': [
            {'size': size, 'seed': seed, 'density': density, **denoise_with_prefix(size, seed, density)}
            for size in (1, *SIZES)
            for seed in seeds
            for density in (0.5, 0.25)
        ],
        'span_corruption': [
            {
                'size': size,
                'density': density,
                'mean_span': span,
                **denoise_with_sentinels(
                    size,
                    seeds[0],
                    density,
                    functools.partial(preprocessors.random_spans_noise_mask, mean_noise_span_length=span),
                ),
            }
            for size in SIZES
            for density, span in SPANS
        ],
        'full_lm': preprocess(preprocessors.full_lm, documents, {'targets': 24}),
        'prefix_segments': [
            len(example['inputs']) + len(example['targets'])
            for example in preprocess(preprocessors.prefix_lm, documents, {'inputs': 32, 'targets': 32})
        ],
        'helper': [
            [inputs, density, span, *preprocessors.random_spans_helper(inputs, density, span, 1, 1)]
            for inputs in (64, 512)
            for density, span in SPANS
        ],
    }
    (HERE / 't5_objectives.json').write_text(json.dumps(outputs) + '\n')


if __name__ == '__main__':
    main()
