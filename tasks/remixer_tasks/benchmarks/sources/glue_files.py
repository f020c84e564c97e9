"""GLUE (Wang et al. 2018) as data sets: the published TSV files, or TFDS's `glue`.

Other layouts in which people have them are read too: CoLA as its authors publish it, AX with its labels, and the CSV
files of github.com/felipessalvatore/NLI_datasets. An example has the number of its row.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence

from remixer_t5x.errors import UserError
from remixer_tasks.benchmarks import labels
from remixer_tasks.benchmarks.sources.dataset import (
    INTEGER,
    REAL,
    TEST,
    TEXT,
    TRAIN,
    UNLABELLED,
    VALIDATION,
    Dataset,
    Download,
    Example,
    Layout,
    Reader,
)
from remixer_tasks.files import raw_rows

MNLI = ('entailment', 'neutral', 'contradiction')
ENTAILMENT = ('entailment', 'not_entailment')
LABELS = {
    'cola': ('unacceptable', 'acceptable'),
    'sst2': ('negative', 'positive'),
    'mrpc': ('not_equivalent', 'equivalent'),
    'qqp': ('not_duplicate', 'duplicate'),
    'mnli': MNLI,
    'qnli': ENTAILMENT,
    'rte': ENTAILMENT,
    'wnli': ('not_entailment', 'entailment'),
    'ax': MNLI,
}
_COLA_COLUMNS = ('source', 'label', 'mark', 'sentence')
MATCHED = 9815  # Rows of MNLI's matched validation set, which come first where both are in one file.


def _table(
    columns: Mapping[str, str], label: str, names: Sequence[str], read: functools.partial, *paths: str
) -> Iterator[Example]:
    """columns: of each text in the file. label: the column of the label. read: a reader of `raw_rows`."""
    index = 0
    for path in paths:
        for number, row in read(path):
            texts = {text: labels.cell(row, column, path, number) for text, column in columns.items()}
            yield {**texts, 'idx': index, 'label': labels.of_row(row, label, names, path, number)}
            index += 1


def _similarity(path: str) -> Iterator[Example]:
    for index, (number, row) in enumerate(raw_rows.tsv(path)):
        texts = {text: labels.cell(row, text, path, number) for text in ('sentence1', 'sentence2')}
        try:
            score = float(row.get('score', UNLABELLED))
        except ValueError as error:
            raise raw_rows.bad(path, number, f'the score {row["score"]!r} is not a number') from error
        yield {**texts, 'idx': index, 'label': score}


def section(first: int, last: int | None, read: Reader, path: str) -> Iterator[Example]:
    """Examples `first` to before `last` of a file; the rest of it is not judged."""
    found = False
    for index, example in enumerate(read(path)):
        if last is not None and index >= last:
            break
        if index >= first:
            found = True
            yield {**example, 'idx': index - first}
    if not found:
        raise UserError(f'{path} has no row {first + 1}, where this split begins: download the file again')


def _reader(texts: Sequence[str] | Mapping[str, str], label: str, names: Sequence[str], read=raw_rows.tsv) -> Reader:
    columns = texts if isinstance(texts, Mapping) else {text: text for text in texts}
    return functools.partial(_table, columns, label, names, read)


def _csv(texts: Sequence[str], names: Sequence[str]) -> Reader:
    """A file with the columns premise, hypothesis and label."""
    columns = dict(zip(texts, ('premise', 'hypothesis'), strict=True))
    return _reader(columns, 'label', names, raw_rows.comma_separated)


def _layouts(folder: str, read: Reader, dev: str = 'dev', test: str = 'test') -> dict[str, list[Layout]]:
    return {
        TRAIN: [Layout((f'glue/{folder}/train.tsv',), read)],
        VALIDATION: [Layout((f'glue/{folder}/{dev}.tsv',), read)],
        TEST: [Layout((f'glue/{folder}/{test}.tsv',), read)],
    }


def _cola() -> dict[str, list[Layout]]:
    read = _reader(('sentence',), 'label', LABELS['cola'], functools.partial(raw_rows.tsv, columns=_COLA_COLUMNS))
    layouts = _layouts('CoLA', read)
    layouts[TEST] = [Layout(('glue/CoLA/test.tsv',), _reader(('sentence',), 'label', LABELS['cola']))]
    layouts[TRAIN].append(Layout(('glue/CoLA/in_domain_train.tsv',), read))
    layouts[VALIDATION].append(Layout(('glue/CoLA/in_domain_dev.tsv', 'glue/CoLA/out_of_domain_dev.tsv'), read))
    return layouts


def _with_csv(layouts: dict[str, list[Layout]], folder: str, read: Reader) -> dict[str, list[Layout]]:
    layouts[TRAIN].append(Layout((f'nli_datasets/{folder}/train.csv',), read))
    layouts[VALIDATION].append(Layout((f'nli_datasets/{folder}/dev.csv',), read))
    return layouts


def _pair_of_sentences(folder: str, names: Sequence[str]) -> dict[str, list[Layout]]:
    """RTE and WNLI."""
    texts = ('sentence1', 'sentence2')
    return _with_csv(_layouts(folder, _reader(texts, 'label', names)), folder.lower(), _csv(texts, names))


def _wnli() -> dict[str, list[Layout]]:
    layouts = _pair_of_sentences('WNLI', LABELS['wnli'])
    layouts[TEST].append(
        Layout(('dpr_wsc/wnli-test.tsv',), _reader(('sentence1', 'sentence2'), 'label', LABELS['wnli']))
    )
    return layouts


def _mnli() -> dict[str, list[Layout]]:
    """The training file, and both validation and test files by their names in TFDS."""
    read = _reader({'premise': 'sentence1', 'hypothesis': 'sentence2'}, 'gold_label', MNLI)
    both = _csv(('premise', 'hypothesis'), MNLI)
    rows = {'matched': (0, MATCHED), 'mismatched': (MATCHED, None)}
    layouts = {TRAIN: [Layout(('glue/MNLI/train.tsv',), read)]}
    for kind, part in rows.items():
        layouts[f'validation_{kind}'] = [
            Layout((f'glue/MNLI/dev_{kind}.tsv',), read),
            Layout(('nli_datasets/mnli/dev.csv',), functools.partial(section, *part, both)),
        ]
    for kind in rows:
        layouts[f'test_{kind}'] = [Layout((f'glue/MNLI/test_{kind}.tsv',), read)]
    return layouts


def _mrpc() -> dict[str, list[Layout]]:
    read = _reader({'sentence1': '#1 String', 'sentence2': '#2 String'}, 'Quality', LABELS['mrpc'])
    return _layouts('MRPC', read)


def _ax() -> dict[str, list[Layout]]:
    columns = {'premise': 'Premise', 'hypothesis': 'Hypothesis'}
    plain = {'premise': 'sentence1', 'hypothesis': 'sentence2'}
    return {
        TEST: [
            Layout(('glue/AX/diagnostic-full.tsv',), _reader(columns, 'Label', MNLI)),
            Layout(('glue/AX/AX.tsv',), _reader(plain, 'label', MNLI)),
        ]
    }


# The archive of each data set under _URL, and its SHA-256 as TFDS publishes it.
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
_TERMS = 'for research, terms of each task: https://gluebenchmark.com'


def _dataset(name: str, texts: Sequence[str], splits: dict[str, list[Layout]], label: str = INTEGER) -> Dataset:
    archive = _ARCHIVES.get(name.partition('_')[0])
    return Dataset(
        name=f'glue/{name}',
        features={**dict.fromkeys(texts, TEXT), 'idx': INTEGER, 'label': label},
        splits=splits,
        tfds=f'glue/{name}:1.0.0',
        terms=_TERMS,
        downloads=(Download(_URL.format(archive[0]), archive[1], 'glue', unzip=True),) if archive else (),
    )


def _part_of_mnli(kind: str) -> Dataset:
    whole = _mnli()
    splits = {VALIDATION: whole[f'validation_{kind}'], TEST: whole[f'test_{kind}']}
    return _dataset(f'mnli_{kind}', ('premise', 'hypothesis'), splits)


_SKIP_SHORT = functools.partial(raw_rows.tsv, skip_short=True)
_QUESTIONS = ('question1', 'question2')
_PAIR = ('sentence1', 'sentence2')
DATASETS = {
    'cola': _dataset('cola', ('sentence',), _cola()),
    'sst2': _dataset('sst2', ('sentence',), _layouts('SST-2', _reader(('sentence',), 'label', LABELS['sst2']))),
    'mrpc': _dataset('mrpc', _PAIR, _mrpc()),
    # Published with some rows that lack cells.
    'qqp': _dataset(
        'qqp', _QUESTIONS, _layouts('QQP', _reader(_QUESTIONS, 'is_duplicate', LABELS['qqp'], _SKIP_SHORT))
    ),
    'stsb': _dataset('stsb', _PAIR, _layouts('STS-B', _similarity), REAL),
    'mnli': _dataset('mnli', ('premise', 'hypothesis'), _mnli()),
    'mnli_matched': _part_of_mnli('matched'),
    'mnli_mismatched': _part_of_mnli('mismatched'),
    'qnli': _dataset(
        'qnli',
        ('question', 'sentence'),
        _layouts('QNLI', _reader(('question', 'sentence'), 'label', LABELS['qnli'])),
    ),
    'rte': _dataset('rte', _PAIR, _pair_of_sentences('RTE', LABELS['rte'])),
    'wnli': _dataset('wnli', _PAIR, _wnli()),
    'ax': _dataset('ax', ('premise', 'hypothesis'), _ax()),
}
