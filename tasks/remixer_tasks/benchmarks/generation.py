"""CNN/DailyMail and WMT, named and worded as T5 has them, read from TFDS."""

from __future__ import annotations

from remixer_t5x.lazy import tf
from remixer_tasks.benchmarks import text_metrics
from remixer_tasks.benchmarks.dataset import TEST, TEXT, TRAIN, VALIDATION, Dataset, Layout, texts
from remixer_tasks.benchmarks.text_task import TextTask

_LANGUAGES = {'de': 'German', 'fr': 'French', 'ro': 'Romanian'}
_SPLITS = (TRAIN, VALIDATION, TEST)


def _summarize(dataset: tf.data.Dataset) -> tf.data.Dataset:
    def as_text(example):
        inputs = tf.strings.join(['summarize:', example['article']], separator=' ')
        return {'inputs': inputs, 'targets': example['highlights']}

    return dataset.map(as_text)


def _from_tfds(splits: tuple[str, ...]) -> dict[str, list[Layout]]:
    """Splits without published files."""
    return {split: [] for split in splits}


def _translation(name: str, builder: str, language: str, splits: tuple[str, ...] = _SPLITS) -> TextTask:
    """A task from English into `language`, of TFDS's `builder`."""
    tfds = f'{builder}/{language}-en:1.0.0'
    terms = 'see https://www.statmt.org/wmt19/translation-task.html and the pages of the other years'

    def translate(dataset: tf.data.Dataset) -> tf.data.Dataset:
        prompt = f'translate English to {_LANGUAGES[language]}: '

        def as_text(example):
            return {'inputs': tf.strings.join([prompt, example['en']]), 'targets': example[language]}

        return dataset.map(as_text)

    data = Dataset(tfds.partition(':')[0], {'en': TEXT, language: TEXT}, _from_tfds(splits), tfds, terms=terms)
    return TextTask(name, data, translate, metrics=(text_metrics.bleu,))


TASKS = (
    TextTask(
        'cnn_dailymail_v002',
        Dataset(
            'cnn_dailymail',
            texts('article', 'highlights'),
            _from_tfds(_SPLITS),
            'cnn_dailymail:3.4.0',
            terms='see https://github.com/abisee/cnn-dailymail',
        ),
        _summarize,
        metrics=(text_metrics.rouge,),
    ),
    _translation('wmt14_ende_v003', 'wmt14_translate', 'de'),
    _translation('wmt14_enfr_v003', 'wmt14_translate', 'fr'),
    _translation('wmt16_enro_v003', 'wmt16_translate', 'ro'),
    _translation('wmt15_enfr_v003', 'wmt15_translate', 'fr'),
    _translation('wmt19_ende_v003', 'wmt19_translate', 'de', (TRAIN, VALIDATION)),
    _translation('wmt_t2t_ende_v003', 'wmt_t2t_translate', 'de'),
)
