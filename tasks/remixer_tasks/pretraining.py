"""Builds pretraining tasks from a corpus, a vocabulary and an objective.

Unless `name` is set, a task is named after its data and objective, as in `own_text_prefix_lm`.

`shuffle_buffer_size` is the number of examples in the shuffle buffer. Documents are already in random order, so the
buffer only separates the segments of one document. The buffer is small, because TensorFlow saves the buffered examples
(2 kB each) with the position of the input pipeline.

No file is opened and no vocabulary is trained before the first dataset is created. Features are int32 token ids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from remixer_t5x import ranges
from remixer_t5x.errors import UserError
from remixer_t5x.lazy_imports import seqio, tf
from remixer_tasks import language_modeling
from remixer_tasks import span_corruption as spans
from remixer_tasks.benchmarks.text_task import check_task_name
from remixer_tasks.corpora.text_corpus import Corpus
from remixer_tasks.vocabularies import load_vocabulary

SHUFFLE_BUFFER = 128
INPUTS_AND_TARGETS = ('inputs', 'targets')


def span_corruption(
    corpus: Corpus,
    vocabulary: seqio.Vocabulary,
    data: str = 'text',
    noise_density: float = 0.15,
    mean_noise_span_length: float = 3.0,
    shuffle_buffer_size: int = SHUFFLE_BUFFER,
    name: str | None = None,
) -> seqio.Task:
    """Returns a span corruption task, whose inputs and targets end with EOS; see `span_corruption.py`."""
    noise = spans.NoiseSettings(noise_density, mean_noise_span_length)
    objective = functools.partial(spans.span_corruption, noise=noise)
    return _build_task(name or f'{data}_span_corruption', corpus, vocabulary, objective, shuffle_buffer_size)


def prefix_lm(
    corpus: Corpus,
    vocabulary: seqio.Vocabulary,
    data: str = 'text',
    density: float = 0.5,
    join_documents: bool = False,
    shuffle_buffer_size: int = SHUFFLE_BUFFER,
) -> seqio.Task:
    """Returns a prefix LM task, whose inputs and targets end with EOS; see `language_modeling.py`."""
    objective = functools.partial(
        language_modeling.prefix_lm, prefix=language_modeling.PrefixSettings(density, join_documents)
    )
    return _build_task(f'{data}_prefix_lm', corpus, vocabulary, objective, shuffle_buffer_size)


def causal_lm(
    corpus: Corpus,
    vocabulary: seqio.Vocabulary,
    data: str = 'text',
    shuffle_buffer_size: int = SHUFFLE_BUFFER,
    name: str | None = None,
) -> seqio.Task:
    """Returns a causal LM task, which has targets but no inputs; see `language_modeling.py`."""
    return _build_task(
        name or f'{data}_causal_lm', corpus, vocabulary, language_modeling.causal_lm, shuffle_buffer_size, ('targets',)
    )


@ranges.validate_arguments
def masked_lm(
    corpus: Corpus,
    vocabulary: seqio.Vocabulary,
    data: str = 'text',
    rate: ranges.OpenFraction = 0.15,
    masked_share: ranges.Fraction = 0.8,
    random_share: ranges.Fraction = 0.1,
    whole_words: bool = False,
    shuffle_buffer_size: int = SHUFFLE_BUFFER,
) -> seqio.Task:
    """Returns a masked LM task, in which inputs and targets are aligned; see `language_modeling.py`."""
    objective = functools.partial(
        language_modeling.masked_lm,
        rate=rate,
        masked_share=masked_share,
        random_share=random_share,
        whole_words=whole_words,
    )
    return _build_task(f'{data}_masked_lm', corpus, vocabulary, objective, shuffle_buffer_size, eos=False)


def ul2(
    corpus: Corpus,
    vocabulary: seqio.Vocabulary,
    data: str = 'text',
    denoisers: Any = None,
    prompts: Mapping[str, str] | None = None,
    shuffle_buffer_size: int = SHUFFLE_BUFFER,
) -> seqio.Mixture:
    """Returns UL2's mixture, which has a task for each denoiser; see `span_corruption.py`.

    `denoisers` is 'ul2', 'ul2r', or a list of rows (see `span_corruption.build_denoisers`). `prompts` maps 'r', 'x' and
    's' to prompts; UL2's prompts are the defaults. Each denoiser reads the corpus in a different order.
    """
    chosen = spans.build_denoisers(denoisers)
    if unknown := sorted(set(prompts or {}) - set(spans.PROMPTS)):
        raise UserError(
            f'PROMPTS must map only {", ".join(spans.PROMPTS)} to prompts, got {unknown[0]!r}; '
            "set PROMPTS = {'r': '[R]', 'x': '[X]', 's': '[S]'}"
        )
    prompts = {**spans.PROMPTS, **(prompts or {})}
    tasks = []
    for order, denoiser in enumerate(chosen):
        name, prompt = f'{data}_ul2_{denoiser.name}', prompts[denoiser.kind]
        objective: Callable[..., tf.data.Dataset] = (
            functools.partial(language_modeling.prefix_lm, prefix=denoiser.settings, prompt=prompt)
            if isinstance(denoiser.settings, language_modeling.PrefixSettings)
            else functools.partial(spans.span_corruption, noise=denoiser.settings, prompt=prompt)
        )
        task = _build_task(name, corpus, vocabulary, objective, shuffle_buffer_size, order=order)
        tasks.append((task, denoiser.rate))
    return seqio.Mixture(f'{data}_ul2r' if denoisers == 'ul2r' else f'{data}_ul2', tasks)


def _build_task(
    name: str,
    corpus: Corpus,
    vocabulary: seqio.Vocabulary,
    objective: Callable[..., tf.data.Dataset],
    shuffle_buffer_size: int,
    features: tuple[str, ...] = INPUTS_AND_TARGETS,
    eos: bool = True,
    order: int = 0,
) -> seqio.Task:
    """Returns a task that applies `objective` to tokenized documents {'targets': ids}."""
    # Imported lazily, because `sources` imports seqio.
    from remixer_tasks.corpora.sources import CorpusTask

    feature = seqio.Feature(vocabulary, add_eos=eos)
    return CorpusTask(
        check_task_name(name),
        order=order,
        source=corpus.create_source(order),
        preprocessors=[
            rename_text_to_targets,
            functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
            seqio.CacheDatasetPlaceholder(),
            objective,
        ],
        output_features=dict.fromkeys(features, feature),
        shuffle_buffer_size=shuffle_buffer_size,
    )


def rename_text_to_targets(dataset: tf.data.Dataset, output_features: Mapping[str, seqio.Feature]) -> tf.data.Dataset:
    """Renames 'text' to 'targets', to be tokenized with the targets' vocabulary, and loads this vocabulary."""
    return load_vocabulary(dataset, output_features).map(lambda example: {'targets': example['text']})
