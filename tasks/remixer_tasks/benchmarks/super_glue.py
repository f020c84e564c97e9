"""SuperGLUE (Wang et al. 2019) with T5's task names and prompts, read from the published JSON lines or TFDS.

WSC's tasks are in `winograd`. The diagnostic datasets AX-b and AX-g use RTE's prompt; T5 has no metrics for them.
FewGLUE (Schick and Schuetze 2021) has the same format, with 32 training and 32 validation examples of each task.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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


def _parse_row(columns: Sequence[str], names: Sequence[str], row: Example) -> Iterator[Example]:
    label = raw_rows.parse_label(row.get('label'), names)
    yield {**raw_rows.get_texts(row, columns), 'idx': int(row['idx']), 'label': label}


def _parse_multirc_row(row: Example) -> Iterator[Example]:
    """Yields an example for each answer to each question about a paragraph."""
    for question in row['passage']['questions']:
        for answer in question['answers']:
            yield {
                'paragraph': row['passage']['text'],
                'question': question['question'],
                'answer': answer['text'],
                'idx/paragraph': int(row['idx']),
                'idx/question': int(question['idx']),
                'idx/answer': int(answer['idx']),
                'label': raw_rows.parse_label(answer.get('label'), BOOLEAN_LABELS),
            }


def _parse_record_row(row: Example) -> Iterator[Example]:
    """Yields an example for each query; entities and correct answers are distinct and sorted, as in TFDS."""
    text = row['passage']['text']
    for query in row['qas']:
        yield {
            'passage': text,
            'query': query['query'],
            'entities': sorted({text[each['start'] : each['end'] + 1] for each in row['passage']['entities']}),
            'answers': sorted({answer['text'] for answer in query.get('answers', [])}),
            'idx/passage': int(row['idx']),
            'idx/query': int(query['idx']),
        }


def _parse_wsc_row(row: Example) -> Iterator[Example]:
    """Yields WSC's example; like TFDS's `wsc.fixed`, corrects the case, line breaks and final periods of spans."""
    text, target = row['text'], row['target']
    example = {'text': text, 'idx': int(row['idx']), 'label': raw_rows.parse_label(row.get('label'), BOOLEAN_LABELS)}
    for span in ('span1', 'span2'):
        index = int(target[f'{span}_index'])
        example[f'{span}_index'] = index
        example[f'{span}_text'] = _correct_span(target[f'{span}_text'], index, text)
    # T5 rejects a pronoun that is the first word, or that is not at `span2_index`.
    index, pronoun = example['span2_index'], example['span2_text']
    if index < 1 or (text.split(' ')[index : index + 1] != [pronoun] and text not in TEXTS_WITH_WRONG_INDEX):
        raise ValueError(f'span2_text must be word {index} of the text and not the first word, got {pronoun!a:.60}')
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


def _correct_span(span: str, index: int, text: str) -> str:
    if not span or span in text or span in _SCATTERED:
        return span
    first = span[0].lower() if text.split()[index][0].islower() else span[0].upper()
    return (first + span[1:]).rstrip('.').replace('\n', ' ')


# Maps each folder to its features, and to the function that creates examples from a row.
_PARSERS: dict[str, tuple[Mapping[str, str], Callable[[Example], Iterator[Example]]]] = {
    **{
        folder: (
            build_text_features(*columns, idx=INTEGER, label=INTEGER),
            functools.partial(_parse_row, columns, names),
        )
        for folder, (columns, names) in _CLASSIFICATION.items()
    },
    'MultiRC': (
        build_text_features('paragraph', 'question', 'answer', label=INTEGER)
        | dict.fromkeys(('idx/paragraph', 'idx/question', 'idx/answer'), INTEGER),
        _parse_multirc_row,
    ),
    'ReCoRD': (
        build_text_features('passage', 'query', entities=TEXTS, answers=TEXTS)
        | dict.fromkeys(('idx/passage', 'idx/query'), INTEGER),
        _parse_record_row,
    ),
    'WSC': (
        dict.fromkeys(('text', 'span1_text', 'span2_text'), TEXT)
        | dict.fromkeys(('span1_index', 'span2_index', 'idx', 'label'), INTEGER),
        _parse_wsc_row,
    ),
}


def build_dataset(folder: str) -> LabelledDataset:
    """Returns the SuperGLUE dataset that is published in `folder`, such as 'BoolQ' or 'AX-b'."""
    if folder.startswith('AX'):
        files = {TEST: f'{folder}.jsonl'}
    else:
        files = {TRAIN: 'train.jsonl', VALIDATION: 'val.jsonl', TEST: 'test.jsonl'}
    return _build_dataset(
        folder,
        'super_glue',
        files,
        tfds=f'super_glue/{_TFDS_CONFIGS.get(folder, folder.lower())}:1.0.2',
        terms='for research, terms of each task: https://super.gluebenchmark.com',
        downloads=(PublishedFile(_URL.format(folder), _SHA256[folder], 'super_glue', unzip=True),),
    )


def build_few_shot_dataset(folder: str) -> LabelledDataset:
    """Returns FewGLUE's 32 training and 32 validation examples of a task."""
    files = {TRAIN: 'train.jsonl', VALIDATION: 'dev32.jsonl'}
    terms = 'for research, terms of each task: https://github.com/timoschick/fewglue'
    return _build_dataset(folder, 'fewglue', files, terms=terms)


def _build_dataset(folder: str, suite: str, files: Mapping[str, str], **fields: Any) -> LabelledDataset:
    features, parse = _PARSERS[folder]
    name, read = f'{suite}/{folder}', functools.partial(raw_rows.parse_rows, raw_rows.read_jsonl, parse)
    splits = build_single_file_layouts({split: f'{name}/{file}' for split, file in files.items()}, read)
    return LabelledDataset(name, features, splits, **fields)


def _build_tasks(data: Callable[[str], LabelledDataset], name: str) -> tuple[TextTask, ...]:
    """Returns the seven tasks of SuperGLUE or FewGLUE; `name` is a format string for their names."""

    def build_classification_task(folder: str, *metrics: text_metrics.Metric) -> TextTask:
        task = folder.lower()
        metrics = metrics or (text_metrics.accuracy,)
        return prompts.build_classification_task(
            name.format(task), data(folder), task, *_CLASSIFICATION[folder], *metrics
        )

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
    return prompts.build_classification_task(name, build_dataset(folder), 'rte', columns, ENTAILMENT_LABELS, metric)


_AXB = {'hypothesis': 'sentence2', 'premise': 'sentence1'}
_AXG = {'hypothesis': 'hypothesis', 'premise': 'premise'}
TASKS = (
    *_build_tasks(build_dataset, 'super_glue_{}_v102'),
    _build_diagnostic_task('super_glue_axb_v102', 'AX-b', _AXB, text_metrics.matthews_corrcoef),
    _build_diagnostic_task('super_glue_axg_v102', 'AX-g', _AXG, text_metrics.accuracy),
)
FEW_SHOT = _build_tasks(build_few_shot_dataset, 'fewglue_{}_v001')
