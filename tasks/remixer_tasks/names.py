"""Builds tasks and mixtures by name. T5's tasks keep their names.

This module does not register names with seqio, so that `import t5.data.mixtures` still works. Tasks in seqio's registry
take precedence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from remixer_t5x import ranges
from remixer_t5x.errors import UserError, suggest_similar_name
from remixer_t5x.lazy_imports import seqio
from remixer_tasks import c4, catalogue, mixtures, pretraining, vocabularies

Provider: TypeAlias = 'seqio.Task | seqio.Mixture'
# A function that maps a vocabulary and a data folder to a task or mixture.
Builder: TypeAlias = 'Callable[[Any, str | None], Provider]'

UNSUPERVISED = 'c4_v020_unsupervised'


def _create_text_task_builder(
    objective: Callable[..., Provider], tfds: str, name: str | None = None, data: str = ''
) -> Builder:
    """Returns a function that builds a pretraining task, which applies `objective` to the TFDS dataset `tfds`."""
    names = {'name': name} if name else {'data': data}
    return lambda vocabulary, data_dir: objective(c4.corpus(tfds, data_dir), vocabulary, **names)


def _build_en_mix(vocabulary: seqio.Vocabulary, data_dir: str | None) -> seqio.Mixture:
    unsupervised = BUILDERS[UNSUPERVISED](vocabulary, data_dir)
    return mixtures.multi_task(unsupervised, vocabulary=vocabulary, data_dir=data_dir, name='en_mix')


# Maps the name of each mixture of labelled tasks to its rates.
_RATES: dict[str, Mapping[str, float]] = {
    'glue_v002_proportional': mixtures.GLUE,
    'super_glue_v102_proportional': mixtures.SUPER_GLUE,
    'entailment_v001_proportional': mixtures.ENTAILMENT,
    'glue_mnli_and_dev_v002': {name: 1.0 for name in mixtures.GLUE if 'mnli' in name},
    'wsc_dpr_simple_proportional': {
        name: rate for name, rate in mixtures.SUPER_GLUE.items() if 'wsc' in name or 'dpr' in name
    },
}
_C4 = 'c4/en:2.2.0'
BUILDERS: dict[str, Builder] = {
    'c4_v220_span_corruption': _create_text_task_builder(pretraining.span_corruption, _C4, data='c4_v220'),
    'c4_v220_prefix_lm': _create_text_task_builder(pretraining.prefix_lm, _C4, data='c4_v220'),
    'c4_v220_full_lm': _create_text_task_builder(pretraining.causal_lm, _C4, 'c4_v220_full_lm'),
    # T5 sets the objective of these tasks in gin; the gin files of the T5 paper select span corruption.
    **{
        name: _create_text_task_builder(pretraining.span_corruption, tfds, name)
        for name, tfds in {
            UNSUPERVISED: _C4,
            'c4_noclean_v020_unsupervised': 'c4/en.noclean:2.2.0',
            'c4_realnewslike_v020_unsupervised': 'c4/en.realnewslike:2.2.0',
            'c4_webtextlike_v020_unsupervised': 'c4/en.webtextlike:2.2.0',
            'wikipedia_20190301.en_v003_unsupervised': 'wikipedia/20190301.en:1.0.0',
        }.items()
    },
    'c4_v310_span_corruption': _create_text_task_builder(pretraining.span_corruption, 'c4/en:3.1.0', data='c4_v310'),
    **{name: functools.partial(catalogue.task, name) for name in catalogue.TASKS},
    **{name: functools.partial(mixtures.build_mixture, name, rates) for name, rates in _RATES.items()},
    'en_mix': _build_en_mix,
}


def find_task(name: str, vocabulary: seqio.Vocabulary | None = None, data_dir: str | None = None) -> Provider:
    """Returns the task or mixture with this name, without opening a file. Raises UserError for an unknown name.

    If `vocabulary` is None, T5's vocabulary is used. If `data_dir` is None, the default folders are searched.
    """
    if name not in BUILDERS:
        known = sorted({*BUILDERS, *seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})
        raise UserError(
            f'MIXTURE_OR_TASK_NAME must be a known task or mixture, got {name!r}{suggest_similar_name(name, known)}; '
            'to register your own tasks, set MIXTURE_OR_TASK_MODULE to their module'
        )
    return BUILDERS[name](vocabulary or vocabularies.sentencepiece(), data_dir)


def find_provider(
    name: str, vocabulary: seqio.Vocabulary | None = None, data_dir: str | None = None
) -> str | seqio.Task | seqio.Mixture:
    """Returns `name` if seqio's registry contains it, otherwise the task or mixture `find_task(name)`."""
    if name in seqio.TaskRegistry.names() or name in seqio.MixtureRegistry.names():
        return name
    return find_task(name, vocabulary, data_dir)


def find_providers(
    names: str | Sequence[str], vocabulary: seqio.Vocabulary | None = None, data_dir: str | None = None
) -> list[str | seqio.Task | seqio.Mixture]:
    """Applies `find_provider` to each name in a list or a comma-separated string."""
    names = names.split(',') if isinstance(names, str) else names
    return [find_provider(name.strip(), vocabulary, data_dir) for name in names]


def mixture(
    tasks: Sequence[str | seqio.Task],
    vocabulary: seqio.Vocabulary | None = None,
    data_dir: str | None = None,
    rates: Mapping[str, float] | None = None,
    maximum: ranges.Positive | None = None,
    temperature: ranges.Positive = 1.0,
    name: str = 'mixture',
) -> seqio.Mixture:
    """Mixes tasks in proportion to their training set sizes, like seqio's `mixing_rate_num_examples`.

    Args:
        tasks: tasks, or names of tasks and mixtures; a mixture adds those of its tasks that are not in the list yet.
        rates: maps task names to mixing rates, to be used instead of the numbers of examples.
        maximum: upper limit on the number of examples of each task.
        temperature: each number of examples is raised to the power 1 / temperature; values above 1 equalize rates.
    """
    by_name: dict[str, seqio.Task] = {}
    is_list = isinstance(tasks, list | tuple) and all(
        isinstance(task, str | seqio.Task | seqio.Mixture) for task in tasks
    )
    if not is_list or not tasks:
        raise UserError(f"TASKS must be a list of names, got {tasks!r}; set TASKS = ['super_glue_rte_v102']")
    task_names = [task if isinstance(task, str) else task.name for task in tasks]
    if len(set(task_names)) < len(task_names):
        raise UserError(f'TASKS must have different names, got {", ".join(task_names)}; list each task once')
    for task in tasks:
        resolved = find_provider(task, vocabulary, data_dir) if isinstance(task, str) else task
        resolved = seqio.get_mixture_or_task(resolved) if isinstance(resolved, str) else resolved
        by_name.update((subtask.name, subtask) for subtask in seqio.get_subtasks(resolved))
    fixed_rates = dict(rates or {})
    if unknown := sorted(set(fixed_rates) - set(by_name)):
        raise UserError(f'RATES must contain only tasks in TASKS ({", ".join(by_name)}), got {", ".join(unknown)}')
    for key, rate in fixed_rates.items():
        ranges.check_setting(f'RATES[{key!r}]', rate, ranges.NonNegative)
    if len(fixed_rates) == len(by_name) and not any(fixed_rates.values()):
        raise UserError(f'RATES must contain a number above 0, got {fixed_rates}; omit a task to use its size')

    def compute_rate(task: seqio.Task) -> float:
        if task.name in fixed_rates:
            return float(fixed_rates[task.name])
        return min(mixtures.count_examples(task), maximum or math.inf) ** (1 / temperature)

    return seqio.Mixture(name, [(task, compute_rate) for task in by_name.values()])


def vocabulary_of(task: str | seqio.Task | seqio.Mixture) -> seqio.Vocabulary:
    """Returns the target vocabulary of a task or mixture, given as an object or as a name in seqio's registry."""
    resolved = seqio.get_mixture_or_task(task) if isinstance(task, str) else task
    return resolved.output_features['targets'].vocabulary
