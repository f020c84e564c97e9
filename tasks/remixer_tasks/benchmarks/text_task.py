"""A text-to-text task as data: a data set, its prompt, and how predictions are judged; made into a seqio task."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remixer_t5x.lazy import seqio, tf
from remixer_tasks.benchmarks.class_metrics import Metric
from remixer_tasks.benchmarks.prompts import Preprocessor
from remixer_tasks.benchmarks.sources.dataset import Dataset
from remixer_tasks.benchmarks.sources.sources import LabelledSource


@dataclasses.dataclass(frozen=True)
class TextTask:
    """name: T5's where T5 has the task. to_text: examples of `dataset` to inputs and targets.

    postprocess: predicted and target text to what `metrics` compare (see `answers`), None leaves them texts.
    splits: the splits of the data set that the task has, None for all of them.
    """

    name: str
    dataset: Dataset
    to_text: Preprocessor
    postprocess: Callable[..., Any] | None = None
    metrics: Sequence[Metric] = ()
    splits: tuple[str, ...] | None = None

    def source(self, data_dir: str | None = None) -> LabelledSource:
        """Where its examples come from; opens nothing."""
        return LabelledSource(self.dataset, self.splits or tuple(self.dataset.splits), data_dir)

    def build(self, vocabulary: seqio.Vocabulary, data_dir: str | None = None) -> seqio.Task:
        """The seqio task, features inputs and targets with EOS; opens nothing before its first dataset."""
        feature = seqio.Feature(vocabulary, add_eos=True)
        return seqio.Task(
            self.name,
            source=self.source(data_dir),
            preprocessors=[
                self.to_text,
                load_vocabulary,
                seqio.preprocessors.tokenize,
                seqio.CacheDatasetPlaceholder(),
                seqio.preprocessors.append_eos_after_trim,
            ],
            output_features={'inputs': feature, 'targets': feature},
            postprocess_fn=self.postprocess,
            metric_fns=list(self.metrics),
            # A buffer here would mix epochs; the source shuffles.
            shuffle_buffer_size=None,
        )


def load_vocabulary(dataset: tf.data.Dataset, output_features: Mapping[str, seqio.Feature]) -> tf.data.Dataset:
    """Loads or trains the vocabulary before a graph is traced, which keeps its errors one line long."""
    for feature in output_features.values():
        feature.vocabulary.vocab_size  # noqa: B018 (the property loads)
    return dataset
