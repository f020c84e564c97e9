"""Reads the examples in a split of a seqio task into memory, as token ids and as texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from remixer_t5x import tf_data
from remixer_t5x.data import fingerprint, pipeline, resumable_iterator, task_vocabulary
from remixer_t5x.errors import UserError, suggest_similar_name
from remixer_t5x.lazy_imports import seqio

Example = Mapping[str, Any]
# Number of examples whose hash identifies the data of a task.
_HASHED_EXAMPLES = 4
# Share of unknown input tokens from which a note is printed; T5's vocabulary lacks a few characters of most tasks.
_REPORTED_UNKNOWN_SHARE = 0.01


@dataclasses.dataclass(frozen=True)
class TaskExamples:
    """The preprocessed examples of a split as NumPy arrays, in the order of the data.

    `notes` contains warnings about truncated texts, unknown tokens, and targets that the model cannot generate.
    """

    task: seqio.Task
    split: str
    examples: Sequence[Example]
    notes: tuple[str, ...] = ()

    @property
    def inputs(self) -> list[list[int]]:
        return [example['inputs'].tolist() for example in self.examples]

    @property
    def targets(self) -> list[list[int]]:
        return [example['targets'].tolist() for example in self.examples]

    def hash_ids(self) -> str:
        """Returns a hash of the ids of all inputs and targets."""
        return fingerprint.compute_short_hash(repr((self.inputs, self.targets)))

    def hash_first_texts(self) -> str:
        """Returns a hash of the first texts, which does not depend on the maximum lengths or the number of examples."""
        first = dataclasses.replace(self, examples=self.examples[:_HASHED_EXAMPLES])
        return fingerprint.compute_short_hash(repr((first.get_texts('inputs'), first.get_texts('targets'))))

    def get_texts(self, feature: str) -> list[str]:
        """Returns the texts of `feature` (`inputs` or `targets`) before tokenization."""
        vocabulary = self.task.output_features[feature].vocabulary
        return [
            vocabulary.decode(example[feature].tolist()) if text is None else text
            for example, text in zip(self.examples, _get_original_texts(self.examples, feature), strict=True)
        ]


def find_tasks(
    names: pipeline.TaskOrName | Sequence[pipeline.TaskOrName], split: str, only: str | None = None
) -> tuple[list[seqio.Task], list[str]]:
    """Returns the tasks that have metrics and this split, and a note about each skipped task.

    `names` may contain comma-separated tasks or mixtures. `only` contains the comma-separated names of the tasks to
    select; None selects all. Raises UserError if a name is unknown, or if no task remains.
    """
    names = names() if callable(names) else names
    if isinstance(names, str):
        names = [name.strip() for name in names.split(',')]
    providers = [pipeline.get_task(name) for name in (names if isinstance(names, list | tuple) else [names])]
    tasks = {task.name: task for provider in providers for task in seqio.get_subtasks(provider)}
    if only is not None:
        selected = [name.strip() for name in only.split(',') if name.strip()]
        for name in selected:
            if name not in tasks:
                raise UserError(
                    f'EVAL_TASKS must contain only {", ".join(tasks)}, got {name!r}'
                    f'{suggest_similar_name(name, tasks)}; use another task'
                )
        tasks = {name: tasks[name] for name in selected}
    notes, usable = [], []
    for task in tasks.values():
        if split not in task.splits:
            notes.append(f'{task.name} has no split {split!r}, only {", ".join(sorted(task.splits))}')
        elif not task.metric_objs:
            notes.append(f'{task.name} has no metrics')
        else:
            usable.append(task)
    if not usable:
        name = ', '.join(provider.name for provider in providers)
        advice = 'set EVAL_SPLIT (SUBMISSION_SPLIT for leaderboard files), or use another task'
        if all(split in task.splits for task in tasks.values()):
            advice = 'use a task with metrics; `report MODEL_DIR` shows the held-out loss of a pretraining task'
        raise UserError(f'no task of {name} can be evaluated: {"; ".join(notes)}; {advice}')
    return usable, notes


def read_examples(
    task: seqio.Task, split: str, lengths: Mapping[str, int], limit: int | None = None, generated: bool = True
) -> TaskExamples:
    """Reads the first `limit` examples (None for all), truncated to `lengths` tokens.

    `generated` states whether the model generates answers; if so, `notes` also reports targets that the model cannot
    generate. Raises UserError if there are no examples, if they cannot be read, or if inputs and targets use different
    vocabularies.
    """
    vocabulary = task_vocabulary.get_vocabulary(task)
    with resumable_iterator.wrap_task_errors(task.name):
        dataset = resumable_iterator.call_without_autograph(
            lambda: task.get_dataset(dict(lengths), split=split, shuffle=False, num_epochs=1, try_in_mem_cache=False)
        )
        examples = list(tf_data.iterate_as_numpy(dataset.take(-1 if limit is None else limit)))
    if not examples:
        raise UserError(f'{task.name} has no examples in split {split!r}; use another split')
    notes = [
        *_describe_truncated_texts(task, examples, lengths, generated),
        *_describe_unknown_tokens(examples, vocabulary),
        *(_describe_changed_targets(examples, vocabulary) if generated else ()),
    ]
    return TaskExamples(task, split, examples, tuple(f'{task.name}, {split}: {note}' for note in notes))


def _describe_truncated_texts(
    task: seqio.Task, examples: Sequence[Example], lengths: Mapping[str, int], generated: bool
) -> Iterator[str]:
    consequences = {'inputs': 'truncated', **({'targets': 'cannot be generated'} if generated else {})}
    for name, consequence in consequences.items():
        feature, length = task.output_features[name], lengths[name]
        count = sum(
            len(feature.vocabulary.encode(text)) + feature.add_eos > length
            for example, text in zip(examples, _get_original_texts(examples, name), strict=True)
            # Check only examples of maximum length, because shorter examples were not truncated.
            if len(example[name]) >= length and text is not None
        )
        if count:
            yield f'{count:,} of {len(examples):,} {name} have more than {length} tokens: {consequence}'


def _describe_unknown_tokens(examples: Sequence[Example], vocabulary: seqio.Vocabulary) -> Iterator[str]:
    ids = np.concatenate([example['inputs'] for example in examples])
    share = np.count_nonzero(ids == vocabulary.unk_id) / max(ids.size, 1)
    # A vocabulary without an unknown token, such as GPT-2's, uses the end token instead.
    if share >= _REPORTED_UNKNOWN_SHARE and vocabulary.unk_id != vocabulary.eos_id:
        yield f'warning: {share:.1%} of the input tokens are unknown to the vocabulary; use one trained on such text'


def _describe_changed_targets(examples: Sequence[Example], vocabulary: seqio.Vocabulary) -> Iterator[str]:
    """Yields a note about targets that the vocabulary cannot represent. Ignores '<unk>', which marks hidden labels."""
    changed = [
        (row, text, decoded)
        for row, text in enumerate(_get_original_texts(examples, 'targets'), 1)
        if text not in (None, '<unk>') and (decoded := vocabulary.decode(vocabulary.encode(text))) != text
    ]
    if changed:
        row, text, decoded = changed[0]
        yield (
            f'the vocabulary cannot represent {len(changed):,} of {len(examples):,} targets, so no answer can match '
            f'them: for example, {text!r:.60} in row {row} becomes {decoded!r:.60}'
        )


def _get_original_texts(examples: Sequence[Example], feature: str) -> list[str | None]:
    texts = [example.get(f'{feature}_pretokenized') for example in examples]
    return [text.decode(errors='replace') if isinstance(text, bytes) else None for text in texts]
