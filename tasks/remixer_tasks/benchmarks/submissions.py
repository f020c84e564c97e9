"""Writes one file of predictions per task for the leaderboards of GLUE and SuperGLUE, sorted by `idx`.

A prediction that is not a label is counted and written as the first label, because every row must have a label.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from remixer_t5x.errors import UserError, format_count
from remixer_tasks.benchmarks import glue, prompts
from remixer_tasks.benchmarks.super_glue import BOOLEAN_LABELS, CB_LABELS, COPA_LABELS, ENTAILMENT_LABELS

# A prediction written by `remixer-t5x eval`, with the keys 'prediction', 'target' and 'example'. The example has the
# key 'idx' or keys such as 'idx/query'.
Row = Mapping[str, Any]


class SubmissionFile(NamedTuple):
    """A file to submit to a leaderboard. `label` returns the label to write for a row (None: invalid prediction)."""

    name: str
    label: Callable[[Row], Any]
    default: Any
    format_lines: Callable[[Sequence[tuple[Row, Any]]], list[str]]


def write_submission(folder: str, task: str, rows: Sequence[Row]) -> str:
    """Writes the leaderboard file of `task` to `folder`; returns a line that describes the file."""
    if task not in _FILES:
        raise UserError(f'the task of a submission must be one of {", ".join(_FILES)}, got {task}')
    file = _FILES[task]
    labels = [file.label(row) for row in rows]
    invalid = sum(label is None for label in labels)
    pairs = [(row, file.default if label is None else label) for row, label in zip(rows, labels, strict=True)]
    path = os.path.join(os.path.expanduser(folder), file.name)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'w', encoding='utf-8') as out:
            out.write('\n'.join(file.format_lines(pairs)) + '\n')
    except OSError as error:
        raise UserError(f'{path} cannot be written ({error.strerror}); use another SUBMISSION_DIR') from error
    line = f'submission   {path}: {format_count(len(rows), "prediction")}'
    return line + (f', {invalid:,} of them invalid and written as {file.default}' if invalid else '')


def get_file_name(task: str) -> str | None:
    """Returns the name of the leaderboard file of `task`, or None if the task has no leaderboard."""
    return _FILES[task].name if task in _FILES else None


def _build_classification_file(
    name: str, names: Sequence[str], written: Sequence[Any] | None = None, format_lines: Any = None
) -> SubmissionFile:
    """Returns a classification task's submission file, which contains the label names or the values in `written`."""
    texts = dict(zip(names, written or names, strict=True))
    lines = format_lines or (_format_tsv if name.endswith('.tsv') else _format_jsonl)
    return SubmissionFile(name, lambda row: texts.get(row['prediction']), texts[names[0]], lines)


def _format_wsc_label(row: Row) -> str | None:
    """Returns 'True' if the predicted noun is the candidate, 'False' if not, and None if the prediction is empty."""
    referent = prompts.matches_candidate(row['prediction'], example={'targets_pretokenized': row['target']})
    return None if referent == prompts.INVALID else BOOLEAN_LABELS[referent]


def _format_score(row: Row) -> str | None:
    """Formats an STS-B prediction as a number from 0 to 5; returns None if it is not a number."""
    number = prompts.parse_number(row['prediction'])
    return None if number == prompts.INVALID else f'{min(max(number, 0.0), 5.0):.3f}'


def _get_index(row: Row, name: str = 'idx') -> int:
    number = row.get('example', {}).get(name)
    if not isinstance(number, int):
        raise UserError(
            f'each prediction in a submission must have an integer {name!r}, got {number!r}; evaluate the test split'
        )
    return number


def _sort_by_index(pairs: Sequence[tuple[Row, Any]]) -> list[tuple[int, Any]]:
    return sorted(((_get_index(row), label) for row, label in pairs), key=lambda pair: pair[0])


def _format_jsonl(pairs: Sequence[tuple[Row, Any]]) -> list[str]:
    return [json.dumps({'idx': index, 'label': label}) for index, label in _sort_by_index(pairs)]


def _format_tsv(pairs: Sequence[tuple[Row, Any]]) -> list[str]:
    return ['index\tprediction', *(f'{index}\t{label}' for index, label in _sort_by_index(pairs))]


def _format_multirc_answers(pairs: Sequence[tuple[Row, Any]]) -> list[str]:
    """Formats MultiRC's labels as one line per paragraph, in which answers are grouped by question."""
    parts = ('idx/paragraph', 'idx/question', 'idx/answer')
    paragraphs: dict[int, dict[int, list[dict[str, int]]]] = {}
    for row, label in sorted(pairs, key=lambda pair: [_get_index(pair[0], part) for part in parts]):
        paragraph, question, answer = (_get_index(row, part) for part in parts)
        paragraphs.setdefault(paragraph, {}).setdefault(question, []).append({'idx': answer, 'label': label})
    return [
        json.dumps({'idx': paragraph, 'passage': {'questions': [{'idx': q, 'answers': a} for q, a in answers.items()]}})
        for paragraph, answers in paragraphs.items()
    ]


def _format_record_answers(pairs: Sequence[tuple[Row, Any]]) -> list[str]:
    """Formats ReCoRD's predictions as one line per query; labelled data repeats a query for each answer."""
    first: dict[int, str] = {}
    for row, label in pairs:
        first.setdefault(_get_index(row, 'idx/query'), label)
    return [json.dumps({'idx': query, 'label': label}) for query, label in sorted(first.items())]


_LOWER_CASE_BOOLEANS = ('false', 'true')
_FILES_WITH_NAMES = {'qnli': 'QNLI', 'rte': 'RTE', 'ax': 'AX', 'mnli_matched': 'MNLI-m', 'mnli_mismatched': 'MNLI-mm'}
_SUPER_GLUE = {
    'boolq': _build_classification_file('BoolQ.jsonl', BOOLEAN_LABELS, _LOWER_CASE_BOOLEANS),
    'cb': _build_classification_file('CB.jsonl', CB_LABELS),
    'copa': _build_classification_file('COPA.jsonl', COPA_LABELS, (0, 1)),
    'multirc': _build_classification_file('MultiRC.jsonl', BOOLEAN_LABELS, (0, 1), _format_multirc_answers),
    'record': SubmissionFile('ReCoRD.jsonl', lambda row: row['prediction'], '', _format_record_answers),
    'rte': _build_classification_file('RTE.jsonl', ENTAILMENT_LABELS),
    'wic': _build_classification_file('WiC.jsonl', BOOLEAN_LABELS, _LOWER_CASE_BOOLEANS),
    'axb': _build_classification_file('AX-b.jsonl', ENTAILMENT_LABELS),
    'axg': _build_classification_file('AX-g.jsonl', ENTAILMENT_LABELS),
}
_GLUE = {
    **{
        name: _build_classification_file(f'{file}.tsv', glue.LABELS[name], (0, 1))
        for name, file in {'cola': 'CoLA', 'sst2': 'SST-2', 'mrpc': 'MRPC', 'qqp': 'QQP', 'wnli': 'WNLI'}.items()
    },
    **{name: _build_classification_file(f'{file}.tsv', glue.LABELS[name]) for name, file in _FILES_WITH_NAMES.items()},
    'stsb': SubmissionFile('STS-B.tsv', _format_score, '0.000', _format_tsv),
}
_FILES = {
    **{f'super_glue_{name}_v102': file for name, file in _SUPER_GLUE.items()},
    'super_glue_wsc_v102_simple_eval': SubmissionFile('WSC.jsonl', _format_wsc_label, 'False', _format_jsonl),
    **{f'glue_{name}_v002': file for name, file in _GLUE.items()},
}
