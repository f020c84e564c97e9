"""SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 2018): 1.1 as T5 has it, 2.0 with one word for questions without answer.

T5 has no task of 2.0; its name, and 'unanswerable' as target and as prediction of no answer, are ours.
"""

import functools
from collections.abc import Iterator
from typing import Any

from remixer_tasks.benchmarks import answer_metrics, answers, prompts
from remixer_tasks.benchmarks.sources.dataset import TEXT, TEXTS, TRAIN, VALIDATION, Dataset, Download, Example, Layout
from remixer_tasks.benchmarks.text_task import TextTask
from remixer_tasks.files import raw_rows

UNANSWERABLE = 'unanswerable'
_URL = 'https://rajpurkar.github.io/SQuAD-explorer/dataset/{}'
_FILES = {
    'v1.1': {
        'train': '3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955',
        'dev': '95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9',
    },
    'v2.0': {
        'train': '68dcfbb971bd3e96d5b46c7177b16c1a4e7d4bdef19fb204502738552dede002',
        'dev': '80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8',
    },
}


def _read(has_unanswerable: bool, path: str) -> Iterator[Example]:
    for where, context, question in _questions(path, raw_rows.whole_json(path)):
        found = [_field(answer, 'text', str, path, where) for answer in _field(question, 'answers', list, path, where)]
        if not found and not has_unanswerable:
            raise raw_rows.bad(path, 1, f'{where} has no answer, which only SQuAD 2.0 has')
        yield {
            'id': _field(question, 'id', str, path, where),
            'question': _field(question, 'question', str, path, where),
            'context': context,
            'answers/text': found,
        }


def _questions(path: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """(where it is in the file, context, question); the file is one line, so a line number would say nothing."""
    for article, entry in enumerate(_field(value, 'data', list, path, 'the file')):
        for number, paragraph in enumerate(_field(entry, 'paragraphs', list, path, f'article {article}')):
            where = f'article {article} paragraph {number}'
            context = _field(paragraph, 'context', str, path, where)
            for index, question in enumerate(_field(paragraph, 'qas', list, path, where)):
                yield f'{where} question {index}', context, question


def _field(value: Any, name: str, kind: type, path: str, where: str) -> Any:
    found = value.get(name) if isinstance(value, dict) else None
    if not isinstance(found, kind):
        raise raw_rows.bad(path, 1, f'{where} has no {name!r}, or it is not a {kind.__name__}')
    return found


def _dataset(version: str, has_unanswerable: bool) -> Dataset:
    read = functools.partial(_read, has_unanswerable)
    names = {TRAIN: f'train-{version}.json', VALIDATION: f'dev-{version}.json'}
    return Dataset(
        name=f'squad/{version}',
        features={'id': TEXT, 'question': TEXT, 'context': TEXT, 'answers/text': TEXTS},
        splits={split: [Layout((f'squad/{name}',), read)] for split, name in names.items()},
        tfds=f'squad/{version}:3.0.0',
        terms='CC BY-SA 4.0: https://rajpurkar.github.io/SQuAD-explorer',
        downloads=tuple(
            Download(_URL.format(f'{file}-{version}.json'), sha256, 'squad') for file, sha256 in _FILES[version].items()
        ),
    )


TASKS = (
    TextTask(
        'squad_v010_allanswers',
        _dataset('v1.1', has_unanswerable=False),
        prompts.question_answering(),
        answers.any_answer,
        (answer_metrics.squad,),
    ),
    TextTask(
        'squad2_v001_allanswers',
        _dataset('v2.0', has_unanswerable=True),
        prompts.question_answering(UNANSWERABLE),
        answers.any_answer,
        (answer_metrics.squad_2(UNANSWERABLE),),
    ),
)
