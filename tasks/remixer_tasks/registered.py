"""Adds this project's tasks to seqio's registry, for those who choose them by name; importing it opens nothing."""

from __future__ import annotations

from remixer_t5x.lazy import seqio
from remixer_tasks import c4, pretraining, python_docs, vocabularies

PYTHON_DOCS_VOCAB_SIZE = 4096

TASKS = (
    pretraining.span_corruption(c4.corpus(), vocabularies.sentencepiece(), name='c4_span_corruption'),
    pretraining.span_corruption(
        python_docs.corpus(),
        vocabularies.trained(python_docs.corpus(), PYTHON_DOCS_VOCAB_SIZE),
        name='python_docs_span_corruption',
    ),
)

for _task in TASKS:
    seqio.TaskRegistry.add_provider(_task.name, _task)
