"""GLUE (Wang et al. 2018) with T5's task names and prompts, read from the published TSV files or TFDS's `glue`.

Also reads CoLA as published by its authors, AX with labels, and the CSV files of
github.com/felipessalvatore/NLI_datasets. The feature `idx` is the row index. AX uses MNLI's prompt; T5 has no metric
for AX.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping

from remixer_tasks.benchmarks import prompts, raw_rows, text_metrics
from remixer_tasks.benchmarks.text_task import (
    INTEGER,
    REAL,
    TEST,
    TRAIN,
    VALIDATION,
    Example,
    FileLayout,
    LabelledDataset,
    PublishedFile,
    Reader,
    TextTask,
    build_single_file_layouts,
    build_text_features,
)

MNLI = ('entailment', 'neutral', 'contradiction')
LABELS = {
    'cola': ('unacceptable', 'acceptable'),
    'sst2': ('negative', 'positive'),
    'mrpc': ('not_equivalent', 'equivalent'),
    'qqp': ('not_duplicate', 'duplicate'),
    **dict.fromkeys(('mnli', 'mnli_matched', 'mnli_mismatched', 'ax'), MNLI),
    **dict.fromkeys(('qnli', 'rte'), ('entailment', 'not_entailment')),
    'wnli': ('not_entailment', 'entailment'),
}
# The text columns of each dataset, in the order of T5's prompts.
_TEXTS = {
    **dict.fromkeys(('cola', 'sst2'), ('sentence',)),
    **dict.fromkeys(('mrpc', 'stsb', 'rte', 'wnli'), ('sentence1', 'sentence2')),
    **dict.fromkeys(('mnli', 'mnli_matched', 'mnli_mismatched', 'ax'), ('hypothesis', 'premise')),
    'qqp': ('question1', 'question2'),
    'qnli': ('question', 'sentence'),
}
# Maps each dataset to the name of its archive in _URL, and to the SHA-256 published by TFDS.
_URL = 'https://dl.fbaipublicfiles.com/glue/data/{}.zip'
_ARCHIVES = {
    'cola': ('CoLA', 'f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff'),
    'sst2': ('SST-2', 'd67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa'),
    'qqp': ('QQP', '40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0'),
    'stsb': ('STS-B', 'e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85'),
    'mnli': ('MNLI', 'e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633'),
    'qnli': ('QNLIv2', 'e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5'),
    'rte': ('RTE', '6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee'),
    'wnli': ('WNLI', 'ae0e8e4d16f4d46d4a0a566ec7ecceccfd3fbfaa4a7a4b4e02848c0f2561ac46'),
}
# Number of rows in MNLI's matched validation set. A file with both sets contains these rows first.
_NUM_MATCHED = 9815


def _build_reader(
    name: str,
    columns: Mapping[str, str] | None = None,
    label: str = 'label',
    read: raw_rows.RowReader = raw_rows.read_tsv,
    rows: slice = slice(None),
) -> Reader:
    """Returns a reader of a GLUE dataset, or of a range of its rows; `idx` is counted from 0.

    `columns` maps features to columns; None means that their names are equal.
    """
    columns = columns or {text: text for text in _TEXTS[name]}

    def parse_row(row: Example) -> Iterator[Example]:
        texts = raw_rows.get_texts(row, columns.values())
        if name == 'stsb':
            value: float = float(row.get(label, prompts.UNLABELLED))
        else:
            value = raw_rows.parse_label(row.get(label), LABELS[name])
        yield {**{feature: texts[column] for feature, column in columns.items()}, 'label': value}

    def read_examples(*paths: str) -> Iterator[Example]:
        examples = raw_rows.parse_rows(read, parse_row, *paths)
        for index, example in enumerate(itertools.islice(examples, rows.start, rows.stop)):
            yield {**example, 'idx': index}

    return read_examples


def _build_tsv_layouts(folder: str, read: Reader) -> dict[str, list[FileLayout]]:
    names = {TRAIN: 'train', VALIDATION: 'dev', TEST: 'test'}
    return build_single_file_layouts({split: f'glue/{folder}/{name}.tsv' for split, name in names.items()}, read)


def _build_cola_layouts() -> dict[str, list[FileLayout]]:
    columns = ('source', 'label', 'mark', 'sentence')
    read = _build_reader('cola', read=functools.partial(raw_rows.read_tsv, columns=columns))
    layouts = _build_tsv_layouts('CoLA', read)
    layouts[TEST] = [FileLayout(('glue/CoLA/test.tsv',), _build_reader('cola'))]
    layouts[TRAIN].append(FileLayout(('glue/CoLA/in_domain_train.tsv',), read))
    layouts[VALIDATION].append(FileLayout(('glue/CoLA/in_domain_dev.tsv', 'glue/CoLA/out_of_domain_dev.tsv'), read))
    return layouts


def _build_rte_or_wnli_layouts(name: str) -> dict[str, list[FileLayout]]:
    layouts = _build_tsv_layouts(name.upper(), _build_reader(name))
    read = _build_reader(name, {'sentence1': 'premise', 'sentence2': 'hypothesis'}, read=raw_rows.read_csv)
    layouts[TRAIN].append(FileLayout((f'nli_datasets/{name}/train.csv',), read))
    layouts[VALIDATION].append(FileLayout((f'nli_datasets/{name}/dev.csv',), read))
    layouts[TEST].append(FileLayout((f'dpr_wsc/{name}-test.tsv',), _build_reader(name)))
    return layouts


def _build_mnli_layouts() -> dict[str, list[FileLayout]]:
    """Returns MNLI's file layouts, keyed by TFDS's split names."""
    read = _build_reader('mnli', {'premise': 'sentence1', 'hypothesis': 'sentence2'}, 'gold_label')
    rows = {'matched': slice(_NUM_MATCHED), 'mismatched': slice(_NUM_MATCHED, None)}
    layouts = {TRAIN: [FileLayout(('glue/MNLI/train.tsv',), read)]}
    for kind, part in rows.items():
        layouts[f'validation_{kind}'] = [
            FileLayout((f'glue/MNLI/dev_{kind}.tsv',), read),
            FileLayout(('nli_datasets/mnli/dev.csv',), _build_reader('mnli', read=raw_rows.read_csv, rows=part)),
        ]
    return layouts | {f'test_{kind}': [FileLayout((f'glue/MNLI/test_{kind}.tsv',), read)] for kind in rows}


def _build_ax_layouts() -> dict[str, list[FileLayout]]:
    with_labels = _build_reader('ax', {'premise': 'Premise', 'hypothesis': 'Hypothesis'}, 'Label')
    plain = _build_reader('ax', {'premise': 'sentence1', 'hypothesis': 'sentence2'})
    return {TEST: [FileLayout(('glue/AX/diagnostic-full.tsv',), with_labels), FileLayout(('glue/AX/AX.tsv',), plain)]}


_MNLI = _build_mnli_layouts()
_SPLITS = {
    'cola': _build_cola_layouts(),
    'sst2': _build_tsv_layouts('SST-2', _build_reader('sst2')),
    'mrpc': _build_tsv_layouts(
        'MRPC', _build_reader('mrpc', {'sentence1': '#1 String', 'sentence2': '#2 String'}, 'Quality')
    ),
    # Skips published rows with missing cells.
    'qqp': _build_tsv_layouts(
        'QQP', _build_reader('qqp', None, 'is_duplicate', functools.partial(raw_rows.read_tsv, skip_short=True))
    ),
    'stsb': _build_tsv_layouts('STS-B', _build_reader('stsb', label='score')),
    'mnli': _MNLI,
    'mnli_matched': {VALIDATION: _MNLI['validation_matched'], TEST: _MNLI['test_matched']},
    'mnli_mismatched': {VALIDATION: _MNLI['validation_mismatched'], TEST: _MNLI['test_mismatched']},
    'qnli': _build_tsv_layouts('QNLI', _build_reader('qnli')),
    'rte': _build_rte_or_wnli_layouts('rte'),
    'wnli': _build_rte_or_wnli_layouts('wnli'),
    'ax': _build_ax_layouts(),
}


def _build_dataset(name: str) -> LabelledDataset:
    archive = _ARCHIVES.get(name.partition('_')[0])
    return LabelledDataset(
        name=f'glue/{name}',
        features=build_text_features(*_TEXTS[name], idx=INTEGER, label=REAL if name == 'stsb' else INTEGER),
        splits=_SPLITS[name],
        tfds=f'glue/{name}:1.0.0',
        terms='for research, terms of each task: https://gluebenchmark.com',
        downloads=(PublishedFile(_URL.format(archive[0]), archive[1], 'glue', unzip=True),) if archive else (),
    )


def _build_classification_task(name: str, *metrics: text_metrics.Metric) -> TextTask:
    prompt = 'mnli' if LABELS[name] is MNLI else name
    metrics = metrics or (text_metrics.accuracy,)
    return prompts.build_classification_task(
        f'glue_{name}_v002', _build_dataset(name), prompt, _TEXTS[name], LABELS[name], *metrics
    )


TASKS = (
    _build_classification_task('cola', text_metrics.matthews_corrcoef),
    _build_classification_task('sst2'),
    _build_classification_task('mrpc', text_metrics.f1, text_metrics.accuracy),
    _build_classification_task('qqp', text_metrics.f1, text_metrics.accuracy),
    TextTask(
        'glue_stsb_v002',
        _build_dataset('stsb'),
        prompts.format_stsb,
        prompts.parse_number,
        (text_metrics.pearson_corrcoef, text_metrics.spearman_corrcoef),
    ),
    _build_classification_task('mnli'),
    _build_classification_task('mnli_matched'),
    _build_classification_task('mnli_mismatched'),
    _build_classification_task('qnli'),
    _build_classification_task('rte'),
    _build_classification_task('wnli'),
    _build_classification_task('ax', text_metrics.matthews_corrcoef),
)
