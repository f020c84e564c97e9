"""Pretraining tasks: text from a corpus, ids from a vocabulary, T5's span corruption."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from remixer_t5x.lazy import seqio, tf
from remixer_tasks.text import span_corruption as spans
from remixer_tasks.text.text_corpus import Corpus


def span_corruption(
    corpus: Corpus,
    vocabulary: seqio.Vocabulary,
    name: str = 'span_corruption',
    noise_density: float = 0.15,
    mean_noise_span_length: float = 3.0,
    shuffle_buffer_size: int = 128,
) -> seqio.Task:
    """A seqio task with splits train and validation and features inputs and targets (int32 ids, EOS at the end).

    Opens and trains nothing before its first dataset. `shuffle_buffer_size` counts examples. Stored text is in random
    order already, so the buffer need only part the neighbours of one document; it is kept small because TensorFlow
    saves it in every position (2 kB an example) and fills it in quadratic time where an epoch has few examples.
    Raises UserError for a noise out of range; lengths and vocabulary are checked when a dataset is made.
    """
    noise = spans.Noise(noise_density, mean_noise_span_length)
    feature = seqio.Feature(vocabulary, add_eos=True)
    return seqio.Task(
        name,
        source=corpus.source(),
        preprocessors=[
            text_as_targets,
            functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
            seqio.CacheDatasetPlaceholder(),
            functools.partial(spans.span_corruption, noise=noise),
        ],
        output_features={'inputs': feature, 'targets': feature},
        shuffle_buffer_size=shuffle_buffer_size,
    )


def text_as_targets(dataset: tf.data.Dataset, output_features: Mapping[str, seqio.Feature]) -> tf.data.Dataset:
    """{'text', ...} to {'targets'}, the feature whose vocabulary tokenises it; loads or trains that vocabulary.

    Loading it here, and not where the first graph that tokenises is traced, keeps its errors one line long.
    """
    for feature in output_features.values():
        feature.vocabulary.vocab_size  # noqa: B018 (the property loads)

    def pick(example):
        return {'targets': example['text']}

    return dataset.map(pick)
