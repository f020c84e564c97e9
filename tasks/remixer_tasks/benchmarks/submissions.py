"""Writes predictions as files for the leaderboards of GLUE and SuperGLUE, one per task, in the order of `idx`.

File names and labels are the leaderboards'. A prediction that is not a label is written as the first label, since every
row must have one, and counted.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remixer_t5x.errors import UserError
from remixer_tasks.benchmarks import answers, glue
from remixer_tasks.benchmarks.super_glue import BOOLEAN, CHOICES, COMMITMENT, ENTAILMENT

# What `remixer-t5x eval` wrote of an example: 'prediction', 'target' and, under 'example', 'idx' and its like.
Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Labels:
    """`of(row)` is the text to write for a prediction, or None if it is not a label; then `first` is written."""

    of: Callable[[Row], Any]
    first: Any


@dataclasses.dataclass(frozen=True)
class File:
    """`name` on the leaderboard; `arrange` makes its lines of (row, label) pairs."""

    name: str
    labels: Labels
    arrange: Callable[[Sequence[tuple[Row, Any]]], list[str]]


def write(folder: str, task: str, rows: Sequence[Row]) -> str:
    """Writes the file of `task` into `folder`; returns a line with its path and the number of invalid predictions.

    Raises UserError for a task without a leaderboard, for rows without their number, and if it cannot be written.
    """
    if not knows(task):
        raise UserError(f'{task} has no leaderboard; tasks with one are {", ".join(_FILES)}')
    file = _FILES[task]
    labels = [file.labels.of(row) for row in rows]
    invalid = sum(label is None for label in labels)
    pairs = [(row, file.labels.first if label is None else label) for row, label in zip(rows, labels, strict=True)]
    path = os.path.join(os.path.expanduser(folder), file.name)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'w', encoding='utf-8') as out:
            out.write('\n'.join(file.arrange(pairs)) + '\n')
    except OSError as error:
        raise UserError(f'{path} cannot be written ({error.strerror}); give another SUBMISSION_DIR') from error
    line = f'submission   {path}: {len(rows):,} predictions'
    return line + (f', {invalid:,} of them no label and written as {file.labels.first}' if invalid else '')


def knows(task: str) -> bool:
    """Whether the task has a leaderboard."""
    return task in _FILES


def _named(names: Sequence[str], written: Sequence[Any] | None = None) -> Labels:
    """The name itself, or what is written for it."""
    shown = dict(zip(names, written or names, strict=True))
    return Labels(lambda row: shown.get(row['prediction']), shown[names[0]])


def _refers(written: Sequence[Any]) -> Labels:
    """Whether the noun that was generated is the candidate; see `answers.refers`."""

    def label(row: Row) -> Any:
        referent = answers.refers(row['prediction'], example={'targets_pretokenized': row['target']})
        return None if referent == answers.INVALID else written[referent]

    return Labels(label, written[0])


def _score(row: Row) -> str | None:
    """STS-B's number between 0 and 5."""
    number = answers.number(row['prediction'])
    return None if number == answers.INVALID else f'{min(max(number, 0.0), 5.0):.3f}'


def _index(row: Row, name: str = 'idx') -> int:
    number = row.get('example', {}).get(name)
    if not isinstance(number, int):
        raise UserError(f'the predictions have no {name!r}, which says whose they are; make them from the test split')
    return number


def _jsonl(pairs: Sequence[tuple[Row, Any]]) -> list[str]:
    ordered = sorted(pairs, key=lambda pair: _index(pair[0]))
    return [json.dumps({'idx': _index(row), 'label': label}) for row, label in ordered]


def _tsv(pairs: Sequence[tuple[Row, Any]]) -> list[str]:
    ordered = sorted(pairs, key=lambda pair: _index(pair[0]))
    return ['index\tprediction', *(f'{_index(row)}\t{label}' for row, label in ordered)]


def _multirc(pairs: Sequence[tuple[Row, Any]]) -> list[str]:
    """Answers within questions within paragraphs."""
    parts = ('idx/paragraph', 'idx/question', 'idx/answer')
    paragraphs: dict[int, dict[int, list[dict[str, int]]]] = {}
    for row, label in sorted(pairs, key=lambda pair: [_index(pair[0], part) for part in parts]):
        paragraph, question, answer = (_index(row, part) for part in parts)
        paragraphs.setdefault(paragraph, {}).setdefault(question, []).append({'idx': answer, 'label': label})
    return [
        json.dumps({'idx': paragraph, 'passage': {'questions': [{'idx': q, 'answers': a} for q, a in answers.items()]}})
        for paragraph, answers in paragraphs.items()
    ]


def _record(pairs: Sequence[tuple[Row, Any]]) -> list[str]:
    """One line per query: the data has it once per answer where answers are given."""
    first: dict[int, str] = {}
    for row, label in pairs:
        first.setdefault(_index(row, 'idx/query'), label)
    return [json.dumps({'idx': query, 'label': label}) for query, label in sorted(first.items())]


_LOWER = ('false', 'true')
_FILES = {
    'super_glue_boolq_v102': File('BoolQ.jsonl', _named(BOOLEAN, _LOWER), _jsonl),
    'super_glue_cb_v102': File('CB.jsonl', _named(COMMITMENT), _jsonl),
    'super_glue_copa_v102': File('COPA.jsonl', _named(CHOICES, (0, 1)), _jsonl),
    'super_glue_multirc_v102': File('MultiRC.jsonl', _named(BOOLEAN, (0, 1)), _multirc),
    'super_glue_record_v102': File('ReCoRD.jsonl', Labels(lambda row: row['prediction'], ''), _record),
    'super_glue_rte_v102': File('RTE.jsonl', _named(ENTAILMENT), _jsonl),
    'super_glue_wic_v102': File('WiC.jsonl', _named(BOOLEAN, _LOWER), _jsonl),
    'super_glue_wsc_v102_simple_eval': File('WSC.jsonl', _refers(BOOLEAN), _jsonl),
    'super_glue_axb_v102': File('AX-b.jsonl', _named(ENTAILMENT), _jsonl),
    'super_glue_axg_v102': File('AX-g.jsonl', _named(ENTAILMENT), _jsonl),
    **{
        f'glue_{task}_v002': File(f'{name}.tsv', _named(glue.LABELS[task], written), _tsv)
        for task, name, written in (
            ('cola', 'CoLA', (0, 1)),
            ('sst2', 'SST-2', (0, 1)),
            ('mrpc', 'MRPC', (0, 1)),
            ('qqp', 'QQP', (0, 1)),
            ('qnli', 'QNLI', None),
            ('rte', 'RTE', None),
            ('wnli', 'WNLI', (0, 1)),
            ('ax', 'AX', None),
        )
    },
    'glue_stsb_v002': File('STS-B.tsv', Labels(_score, '0.000'), _tsv),
    'glue_mnli_matched_v002': File('MNLI-m.tsv', _named(glue.MNLI), _tsv),
    'glue_mnli_mismatched_v002': File('MNLI-mm.tsv', _named(glue.MNLI), _tsv),
    'glue_wnli_v002_simple_eval': File('WNLI.tsv', _refers((0, 1)), _tsv),
}
