"""A corpus is documents with a held-out part: where a task's text comes from and a vocabulary is trained on.

`ParsedCorpus` reads its documents once into Arrow files in the cache, and serves them from there. That costs the text's
size on disk and buys what reading the files again each time cannot give: errors counted before training starts, an
order drawn over the whole corpus, equal shares for any number of hosts, and a position that is one number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from remixer_t5x import temporary, tf_data, untrusted_files
from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio
from remixer_tasks.files import cache, workers
from remixer_tasks.files.malformed import Malformed
from remixer_tasks.files.notice import Notice

TRAIN, VALIDATION = 'train', 'validation'
# A function that gives documents and hands what it cannot read to `Malformed`.
Read = Callable[[Malformed], Iterator[str]]


class Corpus(Protocol):
    """What tasks and vocabularies need to know."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def identity(self) -> str:
        """Differs whenever the text could differ."""

    def source(self, order: int = 0) -> seqio.DataSource:
        """Splits 'train' and 'validation' of examples {'text': UTF-8 scalar}; opens nothing. Where the examples are
        shuffled, each `order` is another one for the same seed."""

    def training_documents(self) -> Iterator[str]:
        """Documents of the training split, in random order."""


@dataclasses.dataclass(frozen=True)
class Words:
    """What messages call a document of a corpus, and what they advise.

    Attributes:
        part: a document.
        hold_out: what to type if none can be held out.
        find: what to type if there are none.
    """

    part: str = 'document'
    hold_out: str = (
        "give VALIDATION_FILES, or cut the text into documents (blank lines between them, or TXT_DOCUMENTS = 'line')"
    )
    find: str = 'give files with text'

    @property
    def parts(self) -> str:
        return f'{self.part}s'


@dataclasses.dataclass(frozen=True)
class ParsedCorpus:
    """Documents made by Python functions, kept in the cache.

    read: the function that gives all documents, or functions of which each gives the next ones. Several are called in
        as many processes as there are cores, and a killed process loses only what those that ran have read.
    read_validation: the same for held-out documents, or None to hold out a share of the others by their hash.
    validation_fraction: that share; at least one document is held out.
    words: what messages call a document.
    """

    name: str
    identity: str
    read: Read | Sequence[Read] = dataclasses.field(compare=False)
    read_validation: Read | Sequence[Read] | None = dataclasses.field(default=None, compare=False)
    validation_fraction: float = 0.01
    strict: bool = False
    words: Words = Words()

    def __post_init__(self):
        if self.read_validation is None:
            check_fraction(self.validation_fraction, self.words.parts)

    def source(self, order: int = 0) -> seqio.DataSource:
        # Imported here, because the class derives from seqio's.
        from remixer_tasks.corpora.text_source import TextSource

        return TextSource(self, order)

    def folder(self) -> Path:
        """Its files in the cache, which are made first if need be. Raises UserError for what is wrong with the text."""
        name = cache.key('corpus 2', self.identity, self.validation_fraction, self.strict)
        folder = cache.root() / 'corpora' / name
        if not folder.exists():
            wait = f'waiting for another process, which reads {self.name}'
            with cache.continuing(folder, lambda: Notice(wait)) as unfinished:
                if unfinished is not None:
                    _parse(self, unfinished)
        cache.check(folder)
        return folder

    def files(self, split: str) -> list[str]:
        """Paths of the documents' files, and last of the rows of a split."""
        folder = self.folder()
        return [str(path) for path in (*sorted(folder.glob('*.arrow')), folder / f'{split}.npy')]

    def documents(self, split: str) -> Any:
        """The `arrow_files.Documents` of a split."""
        return _open(tuple(self.files(split)))

    def training_documents(self) -> Iterator[str]:
        for document in tf_data.arrays(self.documents(TRAIN).dataset(seed=0)):
            yield document.decode()


@functools.cache
def _open(files: tuple[str, ...]) -> Any:
    """Opens what `ParsedCorpus.files` names, once for all tasks and streams, because every file stays open."""
    from remixer_tasks.corpora import arrow_files

    *paths, rows = map(Path, files)
    repair = cache.repair(rows.parent)
    try:
        numbers = np.load(rows, mmap_mode='r', allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f'{rows} is damaged; {repair}') from error
    return arrow_files.Documents(paths, numbers, repair)


def share_of(document: bytes) -> float:
    """A number in [0, 1) that depends on the document's text alone, so that it keeps its split when others come."""
    return int.from_bytes(hashlib.sha256(document).digest()[:6], 'big') / 2**48


def check_fraction(fraction: float, documents: str = 'documents') -> None:
    """Raises UserError unless it can be the share of documents that is held out; `documents` is what it calls them."""
    if not 0.0 < fraction < 1.0:
        raise UserError(
            f'the held-out share is {fraction}, allowed is above 0 and below 1: 0.01 holds out 1 % of the {documents}'
        )


def _parse(corpus: ParsedCorpus, folder: Path) -> None:
    """Writes the documents, the rows of both splits, and counts.json, or what is missing of these."""
    from remixer_tasks.corpora import arrow_files

    notice, malformed = Notice(f'reading {corpus.name}'), Malformed(corpus.strict)
    train = _read(corpus, corpus.read, 'documents', folder, malformed, notice)
    if corpus.read_validation is None:
        shares = arrow_files.Documents(train).shares()
        is_held_out = shares < corpus.validation_fraction
        if not is_held_out.any() and len(shares) > 1:
            # Too few documents for the share.
            is_held_out = shares == shares.min()
        _check_held_out(int(is_held_out.sum()), len(shares), corpus)
    else:
        held_out = _read(corpus, corpus.read_validation, 'held_out', folder, malformed, notice)
        lengths = [len(arrow_files.Documents(paths)) for paths in (train, held_out)]
        is_held_out = np.repeat([False, True], lengths)
    rows = {TRAIN: np.flatnonzero(~is_held_out), VALIDATION: np.flatnonzero(is_held_out)}
    for split, numbers in rows.items():
        if not len(numbers):
            raise UserError(
                f'{corpus.name} has no {split} {corpus.words.parts}{malformed.summary()}: {corpus.words.find}'
            )
        np.save(folder / f'{split}.npy', numbers)
    counts = {split: len(numbers) for split, numbers in rows.items()}
    noted = malformed.noted()
    (folder / 'counts.json').write_text(json.dumps({**counts, 'skipped': noted['skipped'], 'empty': noted['empty']}))
    for path in folder.glob('*.unfinished'):
        path.unlink(missing_ok=True)
    parts = corpus.words.parts
    notice.done(f'{counts[TRAIN]:,} {parts}, {counts[VALIDATION]:,} held out{malformed.summary()}')
    cache.seal(folder)


def _read(
    corpus: ParsedCorpus, read: Read | Sequence[Read], name: str, folder: Path, malformed: Malformed, notice: Notice
) -> list[Path]:
    """The files that the functions' documents are written to, each by one rename."""
    functions = [read] if callable(read) else read
    paths = [folder / f'{name}-{number:05d}.arrow' for number in range(len(functions))]
    jobs = [(function, path, corpus.strict) for function, path in zip(functions, paths, strict=True)]
    if len(jobs) == 1:
        results = iter([_write(*jobs[0], lambda count: notice.update(lambda: f'{count:,} {corpus.words.parts}'))])
    else:
        results = workers.in_order(_write, jobs, workers.cores())
    for number, noted in enumerate(results, 1):
        malformed.add(noted)
        notice.step(number, len(jobs), 'parts')
    return paths


def _write(read: Read, path: Path, strict: bool, progress: Callable[[int], Any] = lambda count: None) -> dict[str, Any]:
    """Writes what a function gives unless that is done; what was `Malformed.noted`. It may be in another process."""
    from remixer_tasks.corpora import arrow_files

    with contextlib.suppress(OSError, ValueError):
        return untrusted_files.parse(arrow_files.read_notes(path))
    malformed = Malformed(strict)

    def documents() -> Iterator[bytes]:
        for number, document in enumerate(read(malformed), 1):
            yield document.encode()
            progress(number)

    # A worker of a killed process may write its own file for another moment.
    unfinished = path.with_suffix(f'.{os.getpid()}.unfinished')
    try:
        with cache.writing():
            arrow_files.write(unfinished, documents(), lambda: json.dumps(malformed.noted()))
            temporary.commit(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return malformed.noted()


def _check_held_out(held_out: int, count: int, corpus: ParsedCorpus) -> None:
    """Raises UserError if all documents are held out, or the only document is not."""
    parts = corpus.words.parts
    if count == 1:
        single = f'{corpus.name} is a single {corpus.words.part}'
        raise UserError(f'{single}, so none can be held out: {corpus.words.hold_out}')
    if held_out == count > 0:
        raise UserError(
            f'all {held_out:,} {parts} of {corpus.name} are held out, because equal {parts} are held out together: '
            f'{corpus.words.hold_out}'
        )
