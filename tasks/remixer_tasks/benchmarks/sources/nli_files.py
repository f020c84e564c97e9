"""SNLI, Adversarial NLI, ConjNLI and Abductive NLI as data sets, from the published files, the first two also TFDS."""

import functools
import os
from collections.abc import Iterator, Sequence

from remixer_tasks.benchmarks import labels
from remixer_tasks.benchmarks.sources.dataset import (
    INTEGER,
    TEST,
    TEXT,
    TRAIN,
    UNLABELLED,
    VALIDATION,
    Dataset,
    Download,
    Example,
    Layout,
)
from remixer_tasks.files import raw_rows
from remixer_tasks.files.raw_rows import Row

THREE = ('entailment', 'neutral', 'contradiction')
CHOICES = ('hyp1', 'hyp2')
_LETTERS = {'e': 'entailment', 'n': 'neutral', 'c': 'contradiction'}


def _pairs(read, columns: Sequence[str], path: str) -> Iterator[Example]:
    """columns: premise, hypothesis and label in the file; an e, n or c is spelt out, '-' means unlabelled."""
    premise, hypothesis, label = columns
    for number, row in read(path):
        given = row.get(label)
        value = None if given == '-' else _LETTERS.get(given, given)
        yield {
            'premise': labels.cell(row, premise, path, number),
            'hypothesis': labels.cell(row, hypothesis, path, number),
            'label': labels.of_row({'label': value}, 'label', THREE, path, number),
        }


def _adversarial(read, columns: Sequence[str], path: str) -> Iterator[Example]:
    for example in _pairs(read, columns, path):
        yield {'context': example['premise'], 'hypothesis': example['hypothesis'], 'label': example['label']}


def _abductive(path: str, labels_path: str | None = None) -> Iterator[Example]:
    """obs1, obs2, hyp1 and hyp2 per line, and in the second file, line by line, the number of the right one, 1 or 2."""
    given = raw_rows.lines(labels_path) if labels_path else None
    for number, row in raw_rows.jsonl(path):
        label = None
        if given is not None:
            _, label = next(given, (0, None))
            if label is None:
                raise raw_rows.bad(str(labels_path), number, f'no label for line {number} of {os.path.basename(path)}')
        yield _abductive_example(row, label, str(labels_path or path), number)
    if given is not None and (rest := next(given, None)):
        raise raw_rows.bad(str(labels_path), rest[0], f'a label without a line in {os.path.basename(path)}')


def _opinions(path: str) -> Iterator[Example]:
    """ChaosNLI's file of the validation set, with the label that the set was published with."""
    for number, row in raw_rows.jsonl(path):
        example = row.get('example')
        if not isinstance(example, dict):
            raise raw_rows.bad(path, number, "the field 'example' is missing or not a JSON object")
        yield _abductive_example(example, str(row.get('old_label')), path, number)


def _abductive_example(row: Row, label: str | None, path: str, number: int) -> Example:
    if label not in (None, '1', '2'):
        raise raw_rows.bad(path, number, f'unknown label {label!r}, allowed are 1, 2')
    texts = {name: labels.cell(row, name, path, number) for name in ('obs1', 'obs2', 'hyp1', 'hyp2')}
    return {**texts, 'label': UNLABELLED if label is None else int(label) - 1}


_SNLI_COLUMNS = ('sentence1', 'sentence2', 'gold_label')
_PLAIN = ('premise', 'hypothesis', 'label')


def _snli(file: str) -> list[Layout]:
    return [
        Layout((f'snli_1.0/snli_1.0_{file}.jsonl',), functools.partial(_pairs, raw_rows.jsonl, _SNLI_COLUMNS)),
        Layout((f'nli_datasets/snli/{file}.csv',), functools.partial(_pairs, raw_rows.comma_separated, _PLAIN)),
    ]


SNLI = Dataset(
    name='snli',
    features={'premise': TEXT, 'hypothesis': TEXT, 'label': INTEGER},
    splits={split: _snli(file) for split, file in ((TRAIN, 'train'), (VALIDATION, 'dev'), (TEST, 'test'))},
    tfds='snli:1.1.0',
    terms='CC BY-SA 4.0: https://nlp.stanford.edu/projects/snli',
    downloads=(
        Download(
            'https://nlp.stanford.edu/projects/snli/snli_1.0.zip',
            'afb3d70a5af5d8de0d9d81e2637e0fb8c22d1235c2749d83125ca43dab0dbd3e',
            '',
            unzip=True,
        ),
    ),
)


def _anli(number: int) -> Dataset:
    """One round. ANLI_analysis is the authors' annotation of the validation set, which has all of its pairs."""
    read = functools.partial(_adversarial, raw_rows.jsonl, ('context', 'hypothesis', 'label'))
    annotated = functools.partial(_adversarial, raw_rows.comma_separated, ('context', 'statement', 'gold_label'))
    files = {TRAIN: 'train', VALIDATION: 'dev', TEST: 'test'}
    splits = {split: [Layout((f'anli_v0.1/R{number}/{file}.jsonl',), read)] for split, file in files.items()}
    splits[VALIDATION].append(Layout((f'anli_dev/ANLI_analysis_r{number}_dev.csv',), annotated))
    return Dataset(
        name=f'anli/r{number}',
        features={'context': TEXT, 'hypothesis': TEXT, 'label': INTEGER},
        splits=splits,
        tfds=f'anli/r{number}:0.1.0',
        terms='CC BY-NC 4.0: https://github.com/facebookresearch/anli',
        downloads=(
            Download(
                'https://dl.fbaipublicfiles.com/anli/anli_v0.1.zip',
                '16ac929a7e90ecf9093deaec89cc81fe86a379265a5320a150028efe50c5cde8',
                '',
                unzip=True,
            ),
        ),
    )


ANLI = {number: _anli(number) for number in (1, 2, 3)}

_CONJUNCTIVE_URL = (
    'https://raw.githubusercontent.com/swarnaHub/ConjNLI/10e0515c0d1777651b5084d9cca4664ead8162a4/data/NLI/{}'
)
_CONJUNCTIVE_FILES = {
    TRAIN: ('adversarial_train_15k.tsv', '00133a82516686b321cf8e0077935a975e7d924f04dda5b7c655e5886996de33'),
    VALIDATION: ('conj_dev.tsv', '6dc560fa1d6c0b7377c499db0b9d400761da1e54fece0d64f3f60f4e392b7545'),
    TEST: ('conj_test.tsv', '38040d28fa3c06c437ee38c4c86d79cb79f9d823ce6243197fba189b7af7f8b6'),
}
_conjunctive = functools.partial(_pairs, raw_rows.tsv, ('Premise', 'Hypothesis', 'Label'))
CONJUNCTIVE = Dataset(
    name='conjnli',
    features={'premise': TEXT, 'hypothesis': TEXT, 'label': INTEGER},
    splits={split: [Layout((f'conjnli/{file}',), _conjunctive)] for split, (file, _) in _CONJUNCTIVE_FILES.items()},
    terms='MIT: https://github.com/swarnaHub/ConjNLI',
    downloads=tuple(
        Download(_CONJUNCTIVE_URL.format(file), sha256, 'conjnli') for file, sha256 in _CONJUNCTIVE_FILES.values()
    ),
)

# No download: the checksum of the published archive (storage.googleapis.com/ai2-mosaic, anli.zip) is not known to us.
ABDUCTIVE = Dataset(
    name='abductive_nli',
    features={'obs1': TEXT, 'obs2': TEXT, 'hyp1': TEXT, 'hyp2': TEXT, 'label': INTEGER},
    splits={
        TRAIN: [Layout(('abductive_nli/train.jsonl', 'abductive_nli/train-labels.lst'), _abductive)],
        VALIDATION: [
            Layout(('abductive_nli/dev.jsonl', 'abductive_nli/dev-labels.lst'), _abductive),
            Layout(('chaosnli_alphanli/chaosNLI_alphanli.jsonl',), _opinions),
        ],
        TEST: [
            Layout(('abductive_nli/test.jsonl', 'abductive_nli/test-labels.lst'), _abductive),
            Layout(('abductive_nli/test.jsonl',), _abductive),
        ],
    },
    terms='http://abductivecommonsense.xyz',
)
