"""Writes predictions as files for the leaderboards of GLUE and SuperGLUE, one per task, in the order of `idx`.

File names and labels are those of the leaderboards. A prediction that is not a label is counted and written as the
first label, because every row must have a label.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from remixer_t5x.errors import UserError
from remixer_tasks.benchmarks import glue, prompts
from remixer_tasks.benchmarks.super_glue import BOOLEAN, CHOICES, COMMITMENT, ENTAILMENT

# A row of predictions of `remixer-t5x eval`: 'prediction', 'target' and, in 'example', 'idx' or 'idx/...'.
Row = Mapping[str, Any]


class File(NamedTuple):
    """A file of a leaderboard.

    Attributes:
        name: file name required by the leaderboard.
        label: returns the value to write for a row, or None if its prediction is not a label.
        default: the value for predictions that are not a label.
        arrange: converts (row, label) pairs to lines.
    """

    name: str
    label: Callable[[Row], Any]
    default: Any
    arrange: Callable[[Sequence[tuple[Row, Any]]], list[str]]


def write(folder: str, task: str, rows: Sequence[Row]) -> str:
    """Writes the file of `task` into `folder`; returns a line with its path and the number of invalid predictions.

    Raises UserError for a task without a leaderboard, rows without `idx`, and if the file cannot be written.
    """
    if not has_leaderboard(task):
        raise UserError(f'the task of a submission must be one of {", ".join(_FILES)}, got {task}')
    file = _FILES[task]
    labels = [file.label(row) for row in rows]
    invalid = sum(label is None for label in labels)
    pairs = [(row, file.default if label is None else label) for row, label in zip(rows, labels, strict=True)]
    path = os.path.join(os.path.expanduser(folder), file.name)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'w', encoding='utf-8') as out:
            out.write('\n'.join(file.arrange(pairs)) + '\n')
    except OSError as error:
        raise UserError(f'{path} cannot be written ({error.strerror}); use another SUBMISSION_DIR') from error
    line = f'submission   {path}: {len(rows):,} predictions'
    return line + (f', {invalid:,} of them invalid and written as {file.default}' if invalid else '')


def has_leaderboard(task: str) -> bool:
    """Returns whether the task has a leaderboard."""
    return task in _FILES


def _class_file(name: str, names: Sequence[str], written: Sequence[Any] | None = None, arrange: Any = None) -> File:
    """Returns the file of a classification; a label is `written` as its name by default."""
    texts = dict(zip(names, written or names, strict=True))
    lines = arrange or (_tsv if name.endswith('.tsv') else _jsonl)
    return File(name, lambda row: texts.get(row['prediction']), texts[names[0]], lines)


def _reference_file(name: str, written: Sequence[Any]) -> File:
    """Returns the file of Winograd schemas: whether the generated noun is the candidate; see `prompts.refers`."""

    def label(row: Row) -> Any:
        referent = prompts.refers(row['prediction'], example={'targets_pretokenized': row['target']})
        return None if referent == prompts.INVALID else written[referent]

    return File(name, label, written[0], _tsv if name.endswith('.tsv') else _jsonl)


def _score(row: Row) -> str | None:
    """STS-B's number between 0 and 5."""
    number = prompts.number(row['prediction'])
    return None if number == prompts.INVALID else f'{min(max(number, 0.0), 5.0):.3f}'


def _index(row: Row, name: str = 'idx') -> int:
    number = row.get('example', {}).get(name)
    if not isinstance(number, int):
        raise UserError(f'predictions of a submission must have {name!r}, got {number!r}; predict the test split')
    return number


def _in_order(pairs: Sequence[tuple[Row, Any]]) -> list[tuple[int, Any]]:
    return sorted(((_index(row), label) for row, label in pairs), key=lambda pair: pair[0])


def _jsonl(pairs: Sequence[tuple[Row, Any]]) -> list[str]:
    return [json.dumps({'idx': index, 'label': label}) for index, label in _in_order(pairs)]


def _tsv(pairs: Sequence[tuple[Row, Any]]) -> list[str]:
    return ['index\tprediction', *(f'{index}\t{label}' for index, label in _in_order(pairs))]


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
_NAMED_LABELS = {'qnli': 'QNLI', 'rte': 'RTE', 'ax': 'AX', 'mnli_matched': 'MNLI-m', 'mnli_mismatched': 'MNLI-mm'}
_SUPER_GLUE = {
    'boolq': _class_file('BoolQ.jsonl', BOOLEAN, _LOWER),
    'cb': _class_file('CB.jsonl', COMMITMENT),
    'copa': _class_file('COPA.jsonl', CHOICES, (0, 1)),
    'multirc': _class_file('MultiRC.jsonl', BOOLEAN, (0, 1), _multirc),
    'record': File('ReCoRD.jsonl', lambda row: row['prediction'], '', _record),
    'rte': _class_file('RTE.jsonl', ENTAILMENT),
    'wic': _class_file('WiC.jsonl', BOOLEAN, _LOWER),
    'axb': _class_file('AX-b.jsonl', ENTAILMENT),
    'axg': _class_file('AX-g.jsonl', ENTAILMENT),
}
_GLUE = {
    **{
        name: _class_file(f'{file}.tsv', glue.LABELS[name], (0, 1))
        for name, file in {'cola': 'CoLA', 'sst2': 'SST-2', 'mrpc': 'MRPC', 'qqp': 'QQP', 'wnli': 'WNLI'}.items()
    },
    **{name: _class_file(f'{file}.tsv', glue.LABELS[name]) for name, file in _NAMED_LABELS.items()},
    'stsb': File('STS-B.tsv', _score, '0.000', _tsv),
}
_FILES = {
    **{f'super_glue_{name}_v102': file for name, file in _SUPER_GLUE.items()},
    'super_glue_wsc_v102_simple_eval': _reference_file('WSC.jsonl', BOOLEAN),
    **{f'glue_{name}_v002': file for name, file in _GLUE.items()},
    'glue_wnli_v002_simple_eval': _reference_file('WNLI.tsv', (0, 1)),
}
