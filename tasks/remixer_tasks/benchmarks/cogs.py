"""COGS (Kim and Linzen 2020): a benchmark that maps English sentences to their logical forms.

The split `gen` tests 21 types of generalization that do not occur in training, with 1,000 sentences each. 18 types are
lexical (a known word in a new grammatical context) and 3 are structural.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from remixer_t5x.base_vocabulary import Vocabulary
from remixer_t5x.errors import UserError
from remixer_t5x.lazy_imports import tf
from remixer_tasks.benchmarks import raw_rows, text_task
from remixer_tasks.benchmarks.text_metrics import Metrics
from remixer_tasks.benchmarks.text_task import (
    TEST,
    TRAIN,
    VALIDATION,
    LabelledDataset,
    PublishedFile,
    TextTask,
    build_single_file_layouts,
    build_text_features,
)
from remixer_tasks.vocabulary.words_and_bytes import WordVocabulary

GENERALIZATION_SPLIT = 'gen'
IN_DISTRIBUTION = 'in_distribution'
STRUCTURAL = ('cp_recursion', 'obj_pp_to_subj_pp', 'pp_recursion')
# fmt: off
LEXICAL = (
    'active_to_passive', 'do_dative_to_pp_dative', 'obj_omitted_transitive_to_transitive', 'obj_to_subj_common',
    'obj_to_subj_proper', 'only_seen_as_transitive_subj_as_unacc_subj',
    'only_seen_as_unacc_subj_as_obj_omitted_transitive_subj', 'only_seen_as_unacc_subj_as_unerg_subj',
    'passive_to_active', 'pp_dative_to_do_dative', 'prim_to_inf_arg', 'prim_to_obj_common', 'prim_to_obj_proper',
    'prim_to_subj_common', 'prim_to_subj_proper', 'subj_to_obj_common', 'subj_to_obj_proper', 'unacc_to_transitive',
)
# fmt: on
_COLUMNS = ('sentence', 'logical_form', 'type')
_URL = 'https://raw.githubusercontent.com/najoungkim/COGS/165a7b669eade971fa47bf568a2e51925360fed8/data/{}.tsv'
_FILES = {
    TRAIN: ('train', '220b3804b562c0156ee986eff1bdd15c27e52142549362a64f57baf86e304c78'),
    VALIDATION: ('dev', 'ab66388a309c7ac1ad210c781a6a0ce12281a9ef24619a12422a752cef61bc21'),
    TEST: ('test', '68f8e51e9f6d9cd22d64efe68dd21d7ea5ba327e9a2359481030161aea757035'),
    GENERALIZATION_SPLIT: ('gen', 'd013d9eee0bafc153f8decc85f42814ac97260f84964d980e1e2b84577b82361'),
}
_read = functools.partial(
    raw_rows.parse_rows, functools.partial(raw_rows.read_tsv, columns=_COLUMNS), lambda row: [row]
)
DATA = LabelledDataset(
    name='cogs',
    features=build_text_features(*_COLUMNS),
    splits=build_single_file_layouts({split: f'cogs/{file}.tsv' for split, (file, _) in _FILES.items()}, _read),
    terms='MIT: https://github.com/najoungkim/COGS',
    downloads=tuple(PublishedFile(_URL.format(file), sha256, 'cogs') for file, sha256 in _FILES.values()),
)


def _format_rows(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset.map(lambda row: {'inputs': row['sentence'], 'targets': row['logical_form'], 'type': row['type']})


def _normalize_logical_form(text: str, example: dict[str, Any] | None = None, is_target: bool = False) -> Any:
    """Normalizes the white space of a logical form; for a target, returns the form and the type of the sentence."""
    form = ' '.join(text.split())
    return (form, example['type'].decode()) if is_target and example is not None else form


def exact_match(targets: Sequence[tuple[str, str]], predictions: Sequence[str]) -> Metrics:
    """Computes the exact match in percent over all examples and, as `exact_match/GROUP`, over groups of examples.

    The groups are each generalization type, `lexical`, `structural`, `generalization` (all of these types), and
    `in_distribution` (all other examples).
    """
    right = collections.defaultdict(list)
    for (form, kind), prediction in zip(targets, predictions, strict=True):
        right[kind].append(form == prediction)
    generalization = LEXICAL + STRUCTURAL
    groups: dict[str, Collection[str]] = {
        '': right.keys(),
        IN_DISTRIBUTION: right.keys() - set(generalization),
        'lexical': LEXICAL,
        'structural': STRUCTURAL,
        'generalization': generalization,
        **{kind: (kind,) for kind in generalization},
    }
    values = {group: [value for kind in kinds for value in right.get(kind, [])] for group, kinds in groups.items()}
    return {
        f'exact_match/{group}'.rstrip('/'): 100 * float(np.mean(matches))
        for group, matches in values.items()
        if matches
    }


TASKS = (TextTask('cogs_v001', DATA, _format_rows, _normalize_logical_form, (exact_match,)),)


def words(data_dir: str | None = None, positions: int = 64) -> Vocabulary:
    """Returns a vocabulary of the words in the training split and of the integers from 0 to `positions` - 1.

    Logical forms refer to words by their position in the sentence. The split `gen` has longer sentences than the
    training split.
    """
    return WordVocabulary('COGS', functools.partial(_read_vocabulary_texts, data_dir, positions))


def _read_vocabulary_texts(data_dir: str | None, positions: int) -> Iterator[str]:
    raw = text_task.find_published_files(DATA, TRAIN, data_dir)
    if raw is None:
        raise UserError(text_task.describe_missing_files(DATA, TRAIN, data_dir))
    yield ' '.join(map(str, range(positions)))
    for example in _read(raw[1][0]):
        yield f'{example["sentence"]} {example["logical_form"]}'
