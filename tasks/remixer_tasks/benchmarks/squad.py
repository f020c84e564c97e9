"""SQuAD 1.1 as T5 has it, and 2.0 (Rajpurkar et al. 2016, 2018).

T5 has no task of 2.0; its name, and 'unanswerable' as the target of questions without an answer, are ours.
"""

import functools
import itertools
from collections.abc import Iterator

from remixer_tasks.benchmarks import answers, prompts, raw_rows, text_metrics
from remixer_tasks.benchmarks.dataset import TEXTS, TRAIN, VALIDATION, Dataset, Download, Example, one_layout, texts
from remixer_tasks.benchmarks.text_task import TextTask

UNANSWERABLE = 'unanswerable'
_URL = 'https://rajpurkar.github.io/SQuAD-explorer/dataset/{}'
_SHA256 = {
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
    file = raw_rows.Row({'file': raw_rows.whole_json(path)}, path, 1).object('file')
    paragraphs = itertools.chain.from_iterable(article.objects('paragraphs') for article in file.objects('data'))
    for paragraph in paragraphs:
        for question in paragraph.objects('qas'):
            right = [answer.text('text') for answer in question.objects('answers')]
            if not right and not has_unanswerable:
                raise question.error('it has no answer, which only SQuAD 2.0 allows')
            yield {**question.texts(('id', 'question')), 'context': paragraph.text('context'), 'answers/text': right}


def _dataset(version: str, has_unanswerable: bool) -> Dataset:
    files = {TRAIN: f'squad/train-{version}.json', VALIDATION: f'squad/dev-{version}.json'}
    return Dataset(
        name=f'squad/{version}',
        features=texts('id', 'question', 'context', **{'answers/text': TEXTS}),
        splits=one_layout(files, functools.partial(_read, has_unanswerable)),
        tfds=f'squad/{version}:3.0.0',
        terms='CC BY-SA 4.0: https://rajpurkar.github.io/SQuAD-explorer',
        downloads=tuple(
            Download(_URL.format(f'{file}-{version}.json'), sha256, 'squad')
            for file, sha256 in _SHA256[version].items()
        ),
    )


TASKS = (
    TextTask(
        'squad_v010_allanswers',
        _dataset('v1.1', has_unanswerable=False),
        prompts.question_answering(),
        answers.any_answer,
        (text_metrics.squad,),
    ),
    TextTask(
        'squad2_v001_allanswers',
        _dataset('v2.0', has_unanswerable=True),
        prompts.question_answering(UNANSWERABLE),
        answers.any_answer,
        (text_metrics.squad_2(UNANSWERABLE),),
    ),
)
