"""SuperGLUE (Wang et al. 2019) with T5's task names and prompts, read from the published JSON lines or TFDS.

WSC's tasks are in `winograd`. The diagnostic data sets AX-b and AX-g use RTE's prompt; T5 has no metrics for them.
FewGLUE (Schick and Schuetze 2021) has the same format, with 32 training and 32 validation examples of each task.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

from remixer_tasks.benchmarks import prompts, raw_rows, text_metrics
from remixer_tasks.benchmarks.text_task import (
    INTEGER,
    TEST,
    TEXT,
    TEXTS,
    TRAIN,
    VALIDATION,
    Example,
    LabelledDataset,
    PublishedFile,
    Reader,
    TextTask,
    build_single_file_layouts,
    build_text_features,
)

BOOLEAN_LABELS = ('False', 'True')
ENTAILMENT_LABELS = ('entailment', 'not_entailment')
CB_LABELS = ('entailment', 'contradiction', 'neutral')
COPA_LABELS = ('choice1', 'choice2')
_URL = 'https://dl.fbaipublicfiles.com/glue/superglue/data/v2/{}.zip'
# SHA-256 of the archives under _URL, as published by TFDS.
_SHA256 = {
    'AX-b': '43b45c55a273575c58a33cd68f10a971f83daa3aa223bfbc4077b92fbdf960b3',
    'AX-g': '2d4e00d3a7d23d2c3787ee4c1382cc81a72cb05a76fc9d78d142949247ed61b9',
    'BoolQ': '853fbe7922f70c59629f06a39e8d9ca440c3d740e760fd3b87a5ddf3dcba2436',
    'CB': '8d641383298d54554066ba1c93f56ae7410af75df621b90c63028806bbbbb535',
    'COPA': '405906cddac74bc1e1ce8220f1107d1025b66a25ef10149d91b10bb30651125f',
    'MultiRC': 'b3cd440856e72eb166b2edcd37b798455f1ebd51f2c3de64c0c2a4e1971d2737',
    'RTE': '6310aab3f000424c9d0318a1ff20692e07c7f4aa15e8f17a5972ea0a35c398b9',
    'ReCoRD': '30c7b651ab21b8bf8fab986495cd1084333010e040548f861b839eec0044ac18',
    'WSC': '2ed6dfa94556b4a128ff0441efe365b2e883124e7e6aa00fb8d3a6cb1fd520a9',
    'WiC': 'ee7e67f4ae9eafbf533780faa198e62167f3cda54256cdf261877be3c0e90900',
}
_TFDS_CONFIGS = {'AX-b': 'axb', 'AX-g': 'axg', 'WSC': 'wsc.fixed'}
# For tasks with one example per line: the text columns, in the order of T5's prompts, and the label names.
_CLASSIFICATION = {
    'BoolQ': (('passage', 'question'), BOOLEAN_LABELS),
    'CB': (('hypothesis', 'premise'), CB_LABELS),
    'COPA': (('choice1', 'choice2', 'premise', 'question'), COPA_LABELS),
    'RTE': (('hypothesis', 'premise'), ENTAILMENT_LABELS),
    'WiC': (('sentence1', 'sentence2', 'word'), BOOLEAN_LABELS),
    'AX-b': (('sentence1', 'sentence2'), ENTAILMENT_LABELS),
    'AX-g': (('hypothesis', 'premise'), ENTAILMENT_LABELS),
}


def _read_rows(columns: Sequence[str], names: Sequence[str], path: str) -> Iterator[Example]:
    for row in raw_rows.read_jsonl(path):
        yield {**row.parse_texts(columns), 'idx': row.parse_integer('idx'), 'label': row.parse_label(names)}


def _read_multirc(path: str) -> Iterator[Example]:
    """Yields an example for each answer to each question about a paragraph."""
    for row in raw_rows.read_jsonl(path):
        passage = row.parse_object('passage')
        for question in passage.parse_objects('questions'):
            for answer in question.parse_objects('answers'):
                yield {
                    'paragraph': passage.parse_text('text'),
                    'question': question.parse_text('question'),
                    'answer': answer.parse_text('text'),
                    'idx/paragraph': row.parse_integer('idx'),
                    'idx/question': question.parse_integer('idx'),
                    'idx/answer': answer.parse_integer('idx'),
                    'label': answer.parse_label(BOOLEAN_LABELS),
                }


def _read_record_queries(path: str) -> Iterator[Example]:
    """Yields an example for each query; entities and correct answers are distinct and sorted, as in TFDS."""
    for row in raw_rows.read_jsonl(path):
        passage = row.parse_object('passage')
        text = passage.parse_text('text')
        spans = [
            (entity.parse_integer('start'), entity.parse_integer('end')) for entity in passage.parse_objects('entities')
        ]
        for query in row.parse_objects('qas'):
            right = query.parse_objects('answers') if 'answers' in query else []
            yield {
                'passage': text,
                'query': query.parse_text('query'),
                'entities': sorted({text[start : end + 1] for start, end in spans}),
                'answers': sorted({answer.parse_text('text') for answer in right}),
                'idx/passage': row.parse_integer('idx'),
                'idx/query': query.parse_integer('idx'),
            }


def _read_wsc(path: str) -> Iterator[Example]:
    """Yields WSC's examples; like TFDS's `wsc.fixed`, corrects the case, line breaks and final periods of spans."""
    for row in raw_rows.read_jsonl(path):
        text, target = row.parse_text('text'), row.parse_object('target')
        example: Example = {'text': text, 'idx': row.parse_integer('idx'), 'label': row.parse_label(BOOLEAN_LABELS)}
        for span in ('span1', 'span2'):
            index = target.parse_integer(f'{span}_index')
            example[f'{span}_index'] = index
            if not 0 <= index < len(text.split()):
                raise row.build_error(f'{span}_index is {index}, but the text has {len(text.split())} words')
            example[f'{span}_text'] = _correct_span(target.parse_text(f'{span}_text'), index, text)
        _check_pronoun(example, row)
        yield example


# Two published texts in which span2_index is not the index of the pronoun.
TEXTS_WITH_WRONG_INDEX = (
    'The boy continued to whip the pony , and eventually the pony threw him over. John laughed out quite loud. '
    '"Good for him," he said. ',
    'When they had eventually calmed down a bit , and had gotten home, Mr. Farley put the magic pebble in an iron safe '
    '. Some day they might want to use it , but really for now, what more could they wish for?',
)
# Published spans that list several people who are not adjacent in the text, so no index would be correct.
_SCATTERED = ('Kamenev and Zinoviev', 'Kamenev, Zinoviev, and Stalin')


def _check_pronoun(example: Example, row: raw_rows.RawRow) -> None:
    """Raises UserError for rows that T5 rejects: the pronoun is the first word, or is not at `span2_index`."""
    index, text, words = example['span2_index'], example['text'], example['text'].split(' ')
    if index == 0:
        raise row.build_error('span2_index must be above 0, got 0')
    word = words[index] if index < len(words) else ''
    if word != example['span2_text'] and text not in TEXTS_WITH_WRONG_INDEX:
        raise row.build_error(f'span2_text is {example["span2_text"]!a:.60}, word {index} is {word!a:.60}')


def _correct_span(span: str, index: int, text: str) -> str:
    if not span or span in text or span in _SCATTERED:
        return span
    first = span[0].lower() if text.split()[index][0].islower() else span[0].upper()
    return (first + span[1:]).rstrip('.').replace('\n', ' ')


_READERS: dict[str, tuple[Mapping[str, str], Reader]] = {
    **{
        folder: (
            build_text_features(*columns, idx=INTEGER, label=INTEGER),
            functools.partial(_read_rows, columns, names),
        )
        for folder, (columns, names) in _CLASSIFICATION.items()
    },
    'MultiRC': (
        build_text_features('paragraph', 'question', 'answer', label=INTEGER)
        | dict.fromkeys(('idx/paragraph', 'idx/question', 'idx/answer'), INTEGER),
        _read_multirc,
    ),
    'ReCoRD': (
        build_text_features('passage', 'query', entities=TEXTS, answers=TEXTS)
        | dict.fromkeys(('idx/passage', 'idx/query'), INTEGER),
        _read_record_queries,
    ),
    'WSC': (
        dict.fromkeys(('text', 'span1_text', 'span2_text'), TEXT)
        | dict.fromkeys(('span1_index', 'span2_index', 'idx', 'label'), INTEGER),
        _read_wsc,
    ),
}


def build_dataset(folder: str) -> LabelledDataset:
    """Returns the SuperGLUE data set that is published in `folder`, such as 'BoolQ' or 'AX-b'."""
    features, read = _READERS[folder]
    if folder.startswith('AX'):
        files = {TEST: f'{folder}.jsonl'}
    else:
        files = {TRAIN: 'train.jsonl', VALIDATION: 'val.jsonl', TEST: 'test.jsonl'}
    return LabelledDataset(
        name=f'super_glue/{folder}',
        features=features,
        splits=build_single_file_layouts({split: f'super_glue/{folder}/{name}' for split, name in files.items()}, read),
        tfds=f'super_glue/{_TFDS_CONFIGS.get(folder, folder.lower())}:1.0.2',
        terms='for research, terms of each task: https://super.gluebenchmark.com',
        downloads=(PublishedFile(_URL.format(folder), _SHA256[folder], 'super_glue', unzip=True),),
    )


def build_few_shot_dataset(folder: str) -> LabelledDataset:
    """Returns FewGLUE's 32 training and 32 validation examples of a task."""
    features, read = _READERS[folder]
    files = {TRAIN: f'fewglue/{folder}/train.jsonl', VALIDATION: f'fewglue/{folder}/dev32.jsonl'}
    return LabelledDataset(
        name=f'fewglue/{folder}',
        features=features,
        splits=build_single_file_layouts(files, read),
        terms='for research, terms of each task: https://github.com/timoschick/fewglue',
    )


def _build_tasks(data: Callable[[str], LabelledDataset], name: str) -> tuple[TextTask, ...]:
    """Returns the seven tasks of SuperGLUE or FewGLUE; `name` is a format string for their names."""

    def build_classification_task(folder: str, *metrics: text_metrics.Metric) -> TextTask:
        task = folder.lower()
        columns, names = _CLASSIFICATION[folder]
        to_text = prompts.build_classification_preprocessor(task, columns, names)
        metrics = metrics or (text_metrics.accuracy,)
        return TextTask(name.format(task), data(folder), to_text, prompts.ClassIdPostprocessor(names), metrics)

    return (
        build_classification_task('BoolQ'),
        build_classification_task('CB', text_metrics.build_mean_f1_metric(3), text_metrics.accuracy),
        build_classification_task('COPA'),
        TextTask(
            name.format('multirc'),
            data('MultiRC'),
            prompts.build_classification_preprocessor(
                'multirc', ('question', 'answer', 'paragraph'), BOOLEAN_LABELS, markup=True
            ),
            prompts.MultiRCPostprocessor(),
            (text_metrics.multirc_f1, text_metrics.multirc_exact_match),
        ),
        TextTask(
            name.format('record'),
            data('ReCoRD'),
            prompts.format_record_queries,
            prompts.postprocess_record,
            (text_metrics.record_em_and_f1,),
        ),
        build_classification_task('RTE'),
        build_classification_task('WiC'),
    )


def _build_diagnostic_task(name: str, folder: str, columns: Mapping[str, str], metric: text_metrics.Metric) -> TextTask:
    to_text = prompts.build_classification_preprocessor('rte', columns, ENTAILMENT_LABELS)
    return TextTask(name, build_dataset(folder), to_text, prompts.ClassIdPostprocessor(ENTAILMENT_LABELS), (metric,))


_AXB = {'hypothesis': 'sentence2', 'premise': 'sentence1'}
_AXG = {'hypothesis': 'hypothesis', 'premise': 'premise'}
TASKS = (
    *_build_tasks(build_dataset, 'super_glue_{}_v102'),
    _build_diagnostic_task('super_glue_axb_v102', 'AX-b', _AXB, text_metrics.matthews_corrcoef),
    _build_diagnostic_task('super_glue_axg_v102', 'AX-g', _AXG, text_metrics.accuracy),
)
FEW_SHOT = _build_tasks(build_few_shot_dataset, 'fewglue_{}_v001')
