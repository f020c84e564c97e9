"""Reads the examples of a seqio task's split into memory, as ids and as texts, for the task's metrics."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from remixer_t5x import tf_data
from remixer_t5x.data import pipeline, stream
from remixer_t5x.data.stream import without_autograph
from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio, tf

Example = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TaskExamples:
    """The NumPy `examples` of `split` after the task's preprocessors, in the order of the data.

    `notes` say what was truncated and which targets no generated answer can equal.
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

    def digest(self) -> str:
        """Hashes the ids of all inputs and targets."""
        return hashlib.sha256(repr((self.inputs, self.targets)).encode()).hexdigest()[:16]

    def texts(self, feature: str) -> list[str]:
        """Returns `inputs` or `targets` as the texts before tokenization."""
        vocabulary = self.task.output_features[feature].vocabulary
        return [_text(example, feature, vocabulary) for example in self.examples]


def find_tasks(
    names: pipeline.TaskOrName | Sequence[pipeline.TaskOrName], split: str, only: str | None = None
) -> tuple[list[seqio.Task], list[str]]:
    """Returns the tasks that have the split and metrics, and a note on each task that does not.

    A text may name several tasks or mixtures, separated by commas; `only` selects some of their tasks by name. Raises
    UserError for an unknown name, and if no task remains.
    """
    names = names() if callable(names) else names
    if isinstance(names, str):
        names = [name.strip() for name in names.split(',')]
    providers = [pipeline.get_task(name) for name in (names if isinstance(names, list | tuple) else [names])]
    tasks = list({task.name: task for provider in providers for task in seqio.get_subtasks(provider)}.values())
    if only is not None:
        tasks = _select_tasks(tasks, only)
    notes = {task.name: reason for task in tasks if (reason := _reason_to_skip(task, split))}
    usable = [task for task in tasks if task.name not in notes]
    if not usable:
        name = ', '.join(provider.name for provider in providers)
        raise UserError(f'nothing of {name} can be evaluated: {"; ".join(notes.values())}; give another split or task')
    return usable, list(notes.values())


def _select_tasks(tasks: Sequence[seqio.Task], names: str) -> list[seqio.Task]:
    known = {task.name: task for task in tasks}
    selected = [name.strip() for name in names.split(',') if name.strip()]
    for name in selected:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
            raise UserError(
                f'EVAL_TASKS names {name!r}, which is not in the mixture; the nearest are {", ".join(near)}'
            )
    return [known[name] for name in selected]


def _reason_to_skip(task: seqio.Task, split: str) -> str:
    if split not in task.splits:
        return f'{task.name} has no split {split!r}, its splits are {", ".join(sorted(task.splits))}'
    return '' if task.metric_objs else f'{task.name} has no metrics'


def read(
    task: seqio.Task, split: str, lengths: Mapping[str, int], limit: int | None = None, generated: bool = True
) -> TaskExamples:
    """Reads the first `limit` examples (None for all), truncated to `lengths`.

    Answers that are not `generated` are labels or numbers, so their targets need not survive the vocabulary. Raises
    UserError if the examples cannot be read, if there are none, or if they use two vocabularies.
    """
    stream.hide_accelerators()
    features = task.output_features
    if features['inputs'].vocabulary != features['targets'].vocabulary:
        raise UserError(f'{task.name} has one vocabulary for inputs and another for targets; give both the same one')
    try:
        dataset = without_autograph(
            lambda: task.get_dataset(dict(lengths), split=split, shuffle=False, num_epochs=1, try_in_mem_cache=False)
        )
        examples = list(tf_data.arrays(dataset.take(-1 if limit is None else limit)))
    except UserError:
        raise
    except (ValueError, OSError, tf.errors.OpError) as error:
        raise UserError(f'{task.name} cannot be read: {stream.one_line(error)}') from error
    if not examples:
        raise UserError(f'{task.name} has no examples in split {split!r}; give another split')
    return TaskExamples(task, split, examples, tuple(_notes(task, split, examples, lengths, generated)))


def _notes(
    task: seqio.Task, split: str, examples: Sequence[Example], lengths: Mapping[str, int], generated: bool
) -> Iterator[str]:
    consequences = {'inputs': 'truncated', **({'targets': 'cannot be generated'} if generated else {})}
    for feature, consequence in consequences.items():
        long = sum(
            _is_truncated(task.output_features[feature], example, feature, lengths[feature]) for example in examples
        )
        if long:
            yield (
                f'{task.name}, {split}: {long:,} of {len(examples):,} {feature} have more than {lengths[feature]} '
                f'tokens: {consequence}'
            )
    if not generated:
        return
    vocabulary = task.output_features['targets'].vocabulary
    changed = [(row, text, decoded) for row, text, decoded in _round_trips(examples, vocabulary) if text != decoded]
    if changed:
        row, text, decoded = changed[0]
        yield (
            f'{task.name}, {split}: the vocabulary changes {len(changed):,} of {len(examples):,} targets, so no answer '
            f'can equal them, such as row {row}: {text!r:.60} becomes {decoded!r:.60}'
        )


def _round_trips(examples: Sequence[Example], vocabulary: seqio.Vocabulary) -> Iterator[tuple[int, str, str]]:
    """Yields (row, from 1; target; decode(encode(target))) for examples with the texts of their targets."""
    for row, example in enumerate(examples, 1):
        text = example.get('targets_pretokenized')
        # '<unk>' is the target of test sets whose labels are not public.
        if isinstance(text, bytes) and text != b'<unk>':
            target = text.decode(errors='replace')
            yield row, target, vocabulary.decode([int(token) for token in vocabulary.encode(target)])


def _is_truncated(feature: seqio.Feature, example: Example, name: str, length: int) -> bool:
    """Tokenizes the text again only if the example has full length, because only then it can be truncated."""
    text = example.get(f'{name}_pretokenized')
    if len(example[name]) < length or not isinstance(text, bytes):
        return False
    return len(feature.vocabulary.encode(text.decode())) + feature.add_eos > length


def _text(example: Example, feature: str, vocabulary: seqio.Vocabulary) -> str:
    text = example.get(f'{feature}_pretokenized')
    return text.decode() if isinstance(text, bytes) else vocabulary.decode([int(token) for token in example[feature]])
