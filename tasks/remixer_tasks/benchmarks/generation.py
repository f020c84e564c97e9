"""Text generation tasks with T5's names and prompts: SQuAD, CNN/DailyMail and WMT.

SQuAD is read from the published JSON files or from TFDS; the other datasets are read only from TFDS.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from remixer_t5x.lazy_imports import tf
from remixer_tasks.benchmarks import prompts, raw_rows, text_metrics
from remixer_tasks.benchmarks.text_task import (
    TEST,
    TEXT,
    TEXTS,
    TRAIN,
    VALIDATION,
    Example,
    LabelledDataset,
    Preprocessor,
    PublishedFile,
    TextTask,
    build_single_file_layouts,
    build_text_features,
)

_LANGUAGES = {'de': 'German', 'fr': 'French', 'ro': 'Romanian'}
_SPLITS = (TRAIN, VALIDATION, TEST)
_SQUAD_URL = 'https://rajpurkar.github.io/SQuAD-explorer/dataset/{}'
_SQUAD_FILES = {
    TRAIN: ('train-v1.1.json', '3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955'),
    VALIDATION: ('dev-v1.1.json', '95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9'),
}


def _parse_squad_file(file: Any) -> Iterator[Example]:
    for article in file['data']:
        for paragraph in article['paragraphs']:
            for question in paragraph['qas']:
                answers = [answer['text'] for answer in question['answers']]
                yield {
                    **raw_rows.get_texts(question, ('id', 'question')),
                    'context': paragraph['context'],
                    'answers/text': answers,
                }


def _read_squad(path: str) -> Iterator[Example]:
    return raw_rows.parse_rows(lambda path: iter([(1, raw_rows.parse_json_file(path))]), _parse_squad_file, path)


_SQUAD = LabelledDataset(
    name='squad/v1.1',
    features=build_text_features('id', 'question', 'context', **{'answers/text': TEXTS}),
    splits=build_single_file_layouts(
        {split: f'squad/{name}' for split, (name, _) in _SQUAD_FILES.items()}, _read_squad
    ),
    tfds='squad/v1.1:3.0.0',
    terms='CC BY-SA 4.0: https://rajpurkar.github.io/SQuAD-explorer',
    downloads=tuple(PublishedFile(_SQUAD_URL.format(name), sha256, 'squad') for name, sha256 in _SQUAD_FILES.values()),
)


def _build_prompt_preprocessor(prompt: str, source: str, target: str) -> Preprocessor:
    """Returns a preprocessor that prepends `prompt` to the feature `source` and uses the feature `target` as target."""

    def format_example(example):
        return {'inputs': tf.strings.join([prompt, example[source]], separator=' '), 'targets': example[target]}

    return lambda dataset: dataset.map(format_example)


def _build_translation_task(name: str, builder: str, language: str, splits: tuple[str, ...] = _SPLITS) -> TextTask:
    """Returns a task that translates English to `language`, with data from the TFDS dataset `builder`."""
    terms = 'see https://www.statmt.org/wmt19/translation-task.html and the pages of the other years'
    to_text = _build_prompt_preprocessor(f'translate English to {_LANGUAGES[language]}:', 'en', language)
    tfds = f'{builder}/{language}-en'
    data = LabelledDataset(tfds, {'en': TEXT, language: TEXT}, {split: [] for split in splits}, f'{tfds}:1.0.0', terms)
    return TextTask(name, data, to_text, metrics=(text_metrics.bleu,))


_CNN_DAILYMAIL = LabelledDataset(
    'cnn_dailymail',
    build_text_features('article', 'highlights'),
    {split: [] for split in _SPLITS},
    'cnn_dailymail:3.4.0',
    terms='see https://github.com/abisee/cnn-dailymail',
)
TASKS = (
    TextTask(
        'squad_v010_allanswers',
        _SQUAD,
        prompts.format_squad,
        prompts.postprocess_squad,
        (text_metrics.squad_em_and_f1,),
    ),
    TextTask(
        'cnn_dailymail_v002',
        _CNN_DAILYMAIL,
        _build_prompt_preprocessor('summarize:', 'article', 'highlights'),
        metrics=(text_metrics.rouge,),
    ),
    _build_translation_task('wmt14_ende_v003', 'wmt14_translate', 'de'),
    _build_translation_task('wmt14_enfr_v003', 'wmt14_translate', 'fr'),
    _build_translation_task('wmt16_enro_v003', 'wmt16_translate', 'ro'),
    _build_translation_task('wmt15_enfr_v003', 'wmt15_translate', 'fr'),
    _build_translation_task('wmt19_ende_v003', 'wmt19_translate', 'de', (TRAIN, VALIDATION)),
    _build_translation_task('wmt_t2t_ende_v003', 'wmt_t2t_translate', 'de'),
)
