"""Natural language inference tasks in the format of T5's MNLI prompt: SNLI, ANLI, ConjNLI and Abductive NLI.

T5 does not define these tasks. SNLI pairs without a label are excluded.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from remixer_t5x.lazy_imports import tf
from remixer_tasks.benchmarks import prompts, raw_rows, text_metrics
from remixer_tasks.benchmarks.text_task import (
    INTEGER,
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

_LABELS = ('entailment', 'neutral', 'contradiction')
_LETTERS: dict[Any, str | None] = {'e': 'entailment', 'n': 'neutral', 'c': 'contradiction', '-': None}
_CHOICES = ('hyp1', 'hyp2')
_ANLI_TEXTS = ('context', 'hypothesis')
_HYPOTHESES = ('obs1', 'obs2', 'hyp1', 'hyp2')
_FILES = {TRAIN: 'train', VALIDATION: 'dev', TEST: 'test'}
_SNLI_SHA256 = 'afb3d70a5af5d8de0d9d81e2637e0fb8c22d1235c2749d83125ca43dab0dbd3e'
_ANLI_SHA256 = '16ac929a7e90ecf9093deaec89cc81fe86a379265a5320a150028efe50c5cde8'


def _build_pair_reader(
    read: raw_rows.RowReader, columns: tuple[str, str], label: str, features: Sequence[str] = ('premise', 'hypothesis')
) -> Reader:
    """Returns a reader of text pairs with labels; `columns` are the columns of the two texts `features`.

    A label is a class name, its first letter, or '-' for no label.
    """

    def parse_row(row: Example) -> Iterator[Example]:
        texts = raw_rows.get_texts(row, columns).values()
        value = row.get(label)
        class_id = raw_rows.parse_label(_LETTERS.get(value, value), _LABELS)
        yield {**dict(zip(features, texts, strict=True)), 'label': class_id}

    return functools.partial(raw_rows.parse_rows, read, parse_row)


def _parse_abductive_row(row: Example) -> Iterator[Example]:
    """Yields an Abductive NLI example; `label` is the number of the correct hypothesis, or None."""
    label = row.get('label')
    if label is not None and str(label) not in ('1', '2'):
        raise ValueError(f'the label must be 1 or 2, got {label!r}')
    class_id = prompts.UNLABELLED if label is None else int(label) - 1
    yield {**raw_rows.get_texts(row, _HYPOTHESES), 'label': class_id}


def _read_abductive_nli(path: str, labels_path: str) -> Iterator[Example]:
    """Yields the examples in a JSON lines file, with the labels in the lines of another file."""

    def read_labelled_rows(path: str) -> Iterator[tuple[int, Example]]:
        rows, labels = list(raw_rows.read_jsonl(path)), [label for _, label in raw_rows.read_lines(labels_path)]
        if len(labels) != len(rows):
            reason = f'the file must have {len(rows)} labels, one per line'
            raise raw_rows.build_row_error(labels_path, len(labels), reason)
        for (number, row), label in zip(rows, labels, strict=True):
            yield number, {**row, 'label': label}

    return raw_rows.parse_rows(read_labelled_rows, _parse_abductive_row, path)


def _parse_chaosnli_row(row: Example) -> Iterator[Example]:
    """Yields an Abductive NLI validation example in ChaosNLI's file, with its original label."""
    return _parse_abductive_row({**row['example'], 'label': row['old_label']})


_read_snli = _build_pair_reader(raw_rows.read_jsonl, ('sentence1', 'sentence2'), 'gold_label')
_read_plain_snli = _build_pair_reader(raw_rows.read_csv, ('premise', 'hypothesis'), 'label')
_read_unlabelled = functools.partial(raw_rows.parse_rows, raw_rows.read_jsonl, _parse_abductive_row)
_read_chaosnli = functools.partial(raw_rows.parse_rows, raw_rows.read_jsonl, _parse_chaosnli_row)
_SNLI = LabelledDataset(
    name='snli',
    features=build_text_features('premise', 'hypothesis', label=INTEGER),
    splits={
        split: [
            FileLayout((f'snli_1.0/snli_1.0_{file}.jsonl',), _read_snli),
            FileLayout((f'nli_datasets/snli/{file}.csv',), _read_plain_snli),
        ]
        for split, file in _FILES.items()
    },
    tfds='snli:1.1.0',
    terms='CC BY-SA 4.0: https://nlp.stanford.edu/projects/snli',
    downloads=(PublishedFile('https://nlp.stanford.edu/projects/snli/snli_1.0.zip', _SNLI_SHA256, '', unzip=True),),
)


def _build_anli_dataset(number: int) -> LabelledDataset:
    """Returns an ANLI round's dataset; its validation split is `dev`, or else the annotated ANLI_analysis file."""
    read = _build_pair_reader(raw_rows.read_jsonl, _ANLI_TEXTS, 'label', _ANLI_TEXTS)
    annotated = _build_pair_reader(raw_rows.read_csv, ('context', 'statement'), 'gold_label', _ANLI_TEXTS)
    splits = build_single_file_layouts(
        {split: f'anli_v0.1/R{number}/{file}.jsonl' for split, file in _FILES.items()}, read
    )
    splits[VALIDATION].append(FileLayout((f'anli_dev/ANLI_analysis_r{number}_dev.csv',), annotated))
    return LabelledDataset(
        name=f'anli/r{number}',
        features=build_text_features(*_ANLI_TEXTS, label=INTEGER),
        splits=splits,
        tfds=f'anli/r{number}:0.1.0',
        terms='CC BY-NC 4.0: https://github.com/facebookresearch/anli',
        downloads=(PublishedFile('https://dl.fbaipublicfiles.com/anli/anli_v0.1.zip', _ANLI_SHA256, '', unzip=True),),
    )


_CONJUNCTIVE_URL = (
    'https://raw.githubusercontent.com/swarnaHub/ConjNLI/10e0515c0d1777651b5084d9cca4664ead8162a4/data/NLI/{}'
)
_CONJUNCTIVE_FILES = {
    TRAIN: ('adversarial_train_15k.tsv', '00133a82516686b321cf8e0077935a975e7d924f04dda5b7c655e5886996de33'),
    VALIDATION: ('conj_dev.tsv', '6dc560fa1d6c0b7377c499db0b9d400761da1e54fece0d64f3f60f4e392b7545'),
    TEST: ('conj_test.tsv', '38040d28fa3c06c437ee38c4c86d79cb79f9d823ce6243197fba189b7af7f8b6'),
}
_CONJUNCTIVE = LabelledDataset(
    name='conjnli',
    features=build_text_features('premise', 'hypothesis', label=INTEGER),
    splits=build_single_file_layouts(
        {split: f'conjnli/{file}' for split, (file, _) in _CONJUNCTIVE_FILES.items()},
        _build_pair_reader(raw_rows.read_tsv, ('Premise', 'Hypothesis'), 'Label'),
    ),
    terms='MIT: https://github.com/swarnaHub/ConjNLI',
    downloads=tuple(
        PublishedFile(_CONJUNCTIVE_URL.format(file), sha256, 'conjnli') for file, sha256 in _CONJUNCTIVE_FILES.values()
    ),
)


def _build_abductive_layout(file: str) -> FileLayout:
    return FileLayout((f'abductive_nli/{file}.jsonl', f'abductive_nli/{file}-labels.lst'), _read_abductive_nli)


# No download is defined, because the checksum of anli.zip (in storage.googleapis.com/ai2-mosaic) is unknown.
_ABDUCTIVE = LabelledDataset(
    name='abductive_nli',
    features=build_text_features(*_HYPOTHESES, label=INTEGER),
    splits={
        TRAIN: [_build_abductive_layout('train')],
        VALIDATION: [
            _build_abductive_layout('dev'),
            FileLayout(('chaosnli_alphanli/chaosNLI_alphanli.jsonl',), _read_chaosnli),
        ],
        TEST: [_build_abductive_layout('test'), FileLayout(('abductive_nli/test.jsonl',), _read_unlabelled)],
    },
    terms='http://abductivecommonsense.xyz',
)


def _build_entailment_task(name: str, dataset: LabelledDataset, prompt: str, premise: str = 'premise') -> TextTask:
    features = {'hypothesis': 'hypothesis', 'premise': premise}
    return prompts.build_classification_task(name, dataset, prompt, features, _LABELS, text_metrics.accuracy)


_SNLI_TASK = _build_entailment_task('snli_v001', _SNLI, 'snli')


def _format_labelled_snli(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return _SNLI_TASK.to_text(dataset.filter(lambda example: example['label'] != prompts.UNLABELLED))


TASKS = (
    dataclasses.replace(_SNLI_TASK, to_text=_format_labelled_snli),
    *(_build_entailment_task(f'anli_r{n}_v001', _build_anli_dataset(n), 'anli', 'context') for n in (1, 2, 3)),
    _build_entailment_task('conj_nli_v001', _CONJUNCTIVE, 'conj_nli'),
    prompts.build_classification_task(
        'abductive_nli_v001', _ABDUCTIVE, 'abductive_nli', _HYPOTHESES, _CHOICES, text_metrics.accuracy
    ),
)
