"""GLUE (Wang et al. 2018) with T5's names and prompts, from the published TSV files or TFDS's `glue`.

Other supported layouts are CoLA as published by its authors, AX with labels, and the CSV files of
github.com/felipessalvatore/NLI_datasets. `idx` is the index of the row.

The diagnostic AX uses the prompt of MNLI. T5 has no metric for it; this task computes the leaderboard's metric if
labels are present. WNLI has two tasks: a classification, and T5's evaluation by the noun that WSC's models predict.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping

from remixer_t5x.errors import UserError
from remixer_tasks.benchmarks import prompts, raw_rows, text_metrics, winograd
from remixer_tasks.benchmarks.text_task import (
    INTEGER,
    REAL,
    TEST,
    TRAIN,
    VALIDATION,
    Dataset,
    Download,
    Example,
    Layout,
    Reader,
    TextTask,
    one_layout,
    texts,
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
# The text columns of each data set, in the order of T5's prompts.
_TEXTS = {
    **dict.fromkeys(('cola', 'sst2'), ('sentence',)),
    **dict.fromkeys(('mrpc', 'stsb', 'rte', 'wnli'), ('sentence1', 'sentence2')),
    **dict.fromkeys(('mnli', 'mnli_matched', 'mnli_mismatched', 'ax'), ('hypothesis', 'premise')),
    'qqp': ('question1', 'question2'),
    'qnli': ('question', 'sentence'),
}
# The archive of each data set under _URL, and its SHA-256, as published by TFDS.
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
_MATCHED = 9815  # Rows of MNLI's matched validation set, which come first if both are in one file.


def _reader(
    name: str, columns: Mapping[str, str] | None = None, label: str = 'label', read: raw_rows.RowReader = raw_rows.tsv
) -> Reader:
    """Returns a reader of the data set `name`; `columns` maps texts to columns, None to columns of the same name."""
    columns = columns or {text: text for text in _TEXTS[name]}

    def read_examples(*paths: str) -> Iterator[Example]:
        for index, row in enumerate(itertools.chain.from_iterable(map(read, paths))):
            texts = {text: row.text(column) for text, column in columns.items()}
            yield {**texts, 'idx': index, 'label': row.label(LABELS[name], label)}

    return read_examples


def _read_similarity(path: str) -> Iterator[Example]:
    for index, row in enumerate(raw_rows.tsv(path)):
        try:
            score = float(row.get('score', prompts.UNLABELLED))
        except ValueError as error:
            raise row.error(f'the score {row["score"]!r} is not a number') from error
        yield {**row.texts(_TEXTS['stsb']), 'idx': index, 'label': score}


def read_section(first: int, last: int | None, read: Reader, path: str) -> Iterator[Example]:
    """Yields examples `first` to `last` - 1 of a file, numbered from 0."""
    examples = enumerate(itertools.islice(read(path), first, last))
    if (start := next(examples, None)) is None:
        raise UserError(f'{path} must have row {first + 1}, the first of this split; download the file again')
    return ({**example, 'idx': index} for index, example in itertools.chain([start], examples))


def _files(folder: str, read: Reader) -> dict[str, list[Layout]]:
    names = {TRAIN: 'train', VALIDATION: 'dev', TEST: 'test'}
    return one_layout({split: f'glue/{folder}/{name}.tsv' for split, name in names.items()}, read)


def _cola() -> dict[str, list[Layout]]:
    columns = ('source', 'label', 'mark', 'sentence')
    read = _reader('cola', read=functools.partial(raw_rows.tsv, columns=columns))
    layouts = _files('CoLA', read)
    layouts[TEST] = [Layout(('glue/CoLA/test.tsv',), _reader('cola'))]
    layouts[TRAIN].append(Layout(('glue/CoLA/in_domain_train.tsv',), read))
    layouts[VALIDATION].append(Layout(('glue/CoLA/in_domain_dev.tsv', 'glue/CoLA/out_of_domain_dev.tsv'), read))
    return layouts


def _pair_of_sentences(name: str) -> dict[str, list[Layout]]:
    """Returns the layouts of RTE or WNLI."""
    layouts = _files(name.upper(), _reader(name))
    read = _reader(name, {'sentence1': 'premise', 'sentence2': 'hypothesis'}, read=raw_rows.csv)
    layouts[TRAIN].append(Layout((f'nli_datasets/{name}/train.csv',), read))
    layouts[VALIDATION].append(Layout((f'nli_datasets/{name}/dev.csv',), read))
    layouts[TEST].append(Layout((f'dpr_wsc/{name}-test.tsv',), _reader(name)))
    return layouts


def _mnli() -> dict[str, list[Layout]]:
    """Returns the layouts of the splits, which have TFDS's names."""
    read = _reader('mnli', {'premise': 'sentence1', 'hypothesis': 'sentence2'}, 'gold_label')
    both = _reader('mnli', read=raw_rows.csv)
    rows = {'matched': (0, _MATCHED), 'mismatched': (_MATCHED, None)}
    layouts = {TRAIN: [Layout(('glue/MNLI/train.tsv',), read)]}
    for kind, bounds in rows.items():
        layouts[f'validation_{kind}'] = [
            Layout((f'glue/MNLI/dev_{kind}.tsv',), read),
            Layout(('nli_datasets/mnli/dev.csv',), functools.partial(read_section, *bounds, both)),
        ]
    return layouts | {f'test_{kind}': [Layout((f'glue/MNLI/test_{kind}.tsv',), read)] for kind in rows}


def _ax() -> dict[str, list[Layout]]:
    with_labels = _reader('ax', {'premise': 'Premise', 'hypothesis': 'Hypothesis'}, 'Label')
    plain = _reader('ax', {'premise': 'sentence1', 'hypothesis': 'sentence2'})
    return {TEST: [Layout(('glue/AX/diagnostic-full.tsv',), with_labels), Layout(('glue/AX/AX.tsv',), plain)]}


_SPLITS = {
    'cola': _cola(),
    'sst2': _files('SST-2', _reader('sst2')),
    'mrpc': _files('MRPC', _reader('mrpc', {'sentence1': '#1 String', 'sentence2': '#2 String'}, 'Quality')),
    # Some published rows lack cells.
    'qqp': _files('QQP', _reader('qqp', None, 'is_duplicate', functools.partial(raw_rows.tsv, skip_short=True))),
    'stsb': _files('STS-B', _read_similarity),
    'mnli': _mnli(),
    **{
        f'mnli_{kind}': {VALIDATION: _mnli()[f'validation_{kind}'], TEST: _mnli()[f'test_{kind}']}
        for kind in ('matched', 'mismatched')
    },
    'qnli': _files('QNLI', _reader('qnli')),
    'rte': _pair_of_sentences('rte'),
    'wnli': _pair_of_sentences('wnli'),
    'ax': _ax(),
}


def _dataset(name: str) -> Dataset:
    archive = _ARCHIVES.get(name.partition('_')[0])
    return Dataset(
        name=f'glue/{name}',
        features=texts(*_TEXTS[name], idx=INTEGER, label=REAL if name == 'stsb' else INTEGER),
        splits=_SPLITS[name],
        tfds=f'glue/{name}:1.0.0',
        terms='for research, terms of each task: https://gluebenchmark.com',
        downloads=(Download(_URL.format(archive[0]), archive[1], 'glue', unzip=True),) if archive else (),
    )


def _task(name: str, *metrics: text_metrics.Metric) -> TextTask:
    wording = 'mnli' if LABELS[name] is MNLI else name
    return TextTask(
        f'glue_{name}_v002',
        _dataset(name),
        prompts.classification(wording, _TEXTS[name], LABELS[name]),
        prompts.ClassId(LABELS[name]),
        metrics or (text_metrics.accuracy,),
    )


TASKS = (
    _task('cola', text_metrics.matthews_corrcoef),
    _task('sst2'),
    _task('mrpc', text_metrics.f1, text_metrics.accuracy),
    _task('qqp', text_metrics.f1, text_metrics.accuracy),
    TextTask(
        'glue_stsb_v002',
        _dataset('stsb'),
        prompts.similarity,
        prompts.number,
        (text_metrics.pearson_corrcoef, text_metrics.spearman_corrcoef),
    ),
    _task('mnli'),
    _task('mnli_matched'),
    _task('mnli_mismatched'),
    _task('qnli'),
    _task('rte'),
    _task('wnli'),
    _task('ax', text_metrics.matthews_corrcoef),
    TextTask(
        'glue_wnli_v002_simple_eval',
        _dataset('wnli'),
        winograd.as_schema,
        prompts.refers,
        (text_metrics.accuracy,),
        splits=(VALIDATION, TEST),
    ),
)
