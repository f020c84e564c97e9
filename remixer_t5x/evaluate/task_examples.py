"""The examples of a seqio task's split in memory, as ids and as texts, for evaluation by the task's metrics."""

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
    """`examples` of `split` as the task's preprocessors give them (NumPy values), in the order of the data.

    `notes` tell people what was cut and which targets no generated answer can equal.
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
        """A hash of the ids of all inputs and targets."""
        return hashlib.sha256(repr((self.inputs, self.targets)).encode()).hexdigest()[:16]

    def texts(self, feature: str) -> list[str]:
        """`inputs` or `targets` as the text from before tokenisation."""
        vocabulary = self.task.output_features[feature].vocabulary
        return [_text(example, feature, vocabulary) for example in self.examples]


def tasks_of(
    given: pipeline.Given | Sequence[pipeline.Given], split: str, only: str | None = None
) -> tuple[list[seqio.Task], list[str]]:
    """The given tasks that have the split and metrics, and a note on each task that does not.

    A text may name several tasks or mixtures, separated by commas; `only`, too, names some of their tasks. Raises
    UserError for an unknown name, and if no task is left.
    """
    given = pipeline.made(given) if callable(given) else given
    wanted = given.split(',') if isinstance(given, str) else given
    wanted = wanted if isinstance(wanted, list | tuple) else [wanted]
    providers = [pipeline.named(one.strip() if isinstance(one, str) else one) for one in wanted]
    tasks = list({task.name: task for one in providers for task in seqio.get_subtasks(one)}.values())
    if only is not None:
        tasks = _chosen(tasks, only)
    notes = {task.name: reason for task in tasks if (reason := _reason_to_leave_out(task, split))}
    left = [task for task in tasks if task.name not in notes]
    if not left:
        name = ', '.join(one.name for one in providers)
        raise UserError(f'nothing of {name} can be evaluated: {"; ".join(notes.values())}; give another split or task')
    return left, list(notes.values())


def _chosen(tasks: Sequence[seqio.Task], names: str) -> list[seqio.Task]:
    known = {task.name: task for task in tasks}
    wanted = [name.strip() for name in names.split(',') if name.strip()]
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
            raise UserError(
                f'EVAL_TASKS names {name!r}, which is not in the mixture; the nearest are {", ".join(near)}'
            )
    return [known[name] for name in wanted]


def _reason_to_leave_out(task: seqio.Task, split: str) -> str:
    if split not in task.splits:
        return f'{task.name} has no split {split!r}, its splits are {", ".join(sorted(task.splits))}'
    return '' if task.metric_objs else f'{task.name} has no metrics'


def read(
    task: seqio.Task, split: str, lengths: Mapping[str, int], limit: int | None = None, generated: bool = True
) -> TaskExamples:
    """The first `limit` examples (None takes all), cut to `lengths`. Answers that are not `generated` are labels or
    numbers, for which it does not matter how the vocabulary writes targets.

    Raises UserError if they cannot be read, if there are none, or if they use two vocabularies.
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
    consequence = {'inputs': 'cut', **({'targets': 'cannot be generated'} if generated else {})}
    for feature, what in consequence.items():
        long = sum(_is_cut(task.output_features[feature], example, feature, lengths[feature]) for example in examples)
        if long:
            yield (
                f'{task.name}, {split}: {long:,} of {len(examples):,} {feature} have more than {lengths[feature]} '
                f'tokens: {what}'
            )
    if not generated:
        return
    vocabulary = task.output_features['targets'].vocabulary
    changed = [(row, text, back) for row, text, back in _written_back(examples, vocabulary) if text != back]
    if changed:
        row, text, back = changed[0]
        yield (
            f'{task.name}, {split}: {len(changed):,} of {len(examples):,} targets are other texts once the vocabulary '
            f'has written them, so no answer can equal them, such as row {row}: {text!r:.60} becomes {back!r:.60}'
        )


def _written_back(examples: Sequence[Example], vocabulary: seqio.Vocabulary) -> Iterator[tuple[int, str, str]]:
    """(row, from 1; the target; decode(encode(target))) of the examples whose task keeps the texts of targets."""
    for row, example in enumerate(examples, 1):
        text = example.get('targets_pretokenized')
        # '<unk>' itself is the target where labels are not public.
        if isinstance(text, bytes) and text != b'<unk>':
            target = text.decode(errors='replace')
            yield row, target, vocabulary.decode([int(token) for token in vocabulary.encode(target)])


def _is_cut(feature: seqio.Feature, example: Example, name: str, length: int) -> bool:
    """Only an example of full length can have been cut, so only few texts are tokenised again."""
    text = example.get(f'{name}_pretokenized')
    if len(example[name]) < length or not isinstance(text, bytes):
        return False
    return len(feature.vocabulary.encode(text.decode())) + feature.add_eos > length


def _text(example: Example, feature: str, vocabulary: seqio.Vocabulary) -> str:
    text = example.get(f'{feature}_pretokenized')
    return text.decode() if isinstance(text, bytes) else vocabulary.decode([int(token) for token in example[feature]])
