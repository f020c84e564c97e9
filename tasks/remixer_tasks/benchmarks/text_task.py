"""A text-to-text task as data (a data set, its prompt, its metrics), from which a seqio task is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from remixer_t5x.lazy import seqio
from remixer_tasks.benchmarks.class_metrics import Metric
from remixer_tasks.benchmarks.dataset import Dataset
from remixer_tasks.benchmarks.prompts import Preprocessor
from remixer_tasks.benchmarks.sources import LabelledSource
from remixer_tasks.vocabularies import load_vocabulary


@dataclasses.dataclass(frozen=True)
class TextTask:
    """A text-to-text task.

    Attributes:
        name: T5's if T5 has the task.
        to_text: maps examples of `dataset` to inputs and targets.
        postprocess: maps predicted and target texts to what `metrics` compare (see `answers`); None keeps the texts.
        splits: the splits of the data set to use; None is all of them.
    """

    name: str
    dataset: Dataset
    to_text: Preprocessor
    postprocess: Callable[..., Any] | None = None
    metrics: Sequence[Metric] = ()
    splits: tuple[str, ...] | None = None

    def source(self, data_dir: str | None = None) -> LabelledSource:
        """The source of its examples; opens no file."""
        return LabelledSource(self.dataset, self.splits or tuple(self.dataset.splits), data_dir)

    def build(self, vocabulary: seqio.Vocabulary, data_dir: str | None = None) -> seqio.Task:
        """The seqio task, features inputs and targets with EOS; opens no file before its first dataset."""
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
