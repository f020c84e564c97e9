"""Text corpora with a held-out split, for tasks and for training vocabularies.

`ParsedCorpus` parses its documents once into Arrow files in the cache, which need as much disk space as the text.
Therefore errors are reported before training starts, the whole corpus is shuffled, the order of documents does not
depend on the number of hosts, and the position of a reader is a single number.
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

from remixer_t5x import ranges, temporary, tf_data, untrusted_files
from remixer_t5x.errors import UserError, reason
from remixer_t5x.lazy import seqio
from remixer_tasks.files import cache, workers
from remixer_tasks.files.malformed import Malformed
from remixer_tasks.files.notice import Notice

TRAIN, VALIDATION = 'train', 'validation'
# A function that yields documents and reports unreadable records to `Malformed`.
Read = Callable[[Malformed], Iterator[str]]


class Corpus(Protocol):
    """The interface that tasks and vocabularies use."""

    @property
    def name(self) -> str:
        """The name of the corpus in messages."""

    @property
    def identity(self) -> str:
        """A key that changes if the text may have changed."""

    def source(self, order: int = 0) -> seqio.DataSource:
        """Returns splits 'train' and 'validation' of examples {'text': UTF-8 scalar}, without opening a file.

        `order` changes the order of shuffled examples for the same seed.
        """

    def training_documents(self) -> Iterator[str]:
        """Yields the documents of the training split, in random order."""


@dataclasses.dataclass(frozen=True)
class ParsedCorpus:
    """A corpus of documents that Python functions yield, stored in the cache.

    Attributes:
        read: a function that yields all documents, or a list of functions that each yield a part. The functions run in
            parallel processes, one per core; if they are killed, only unfinished functions are repeated.
        read_validation: like `read`, for held-out documents; None holds out documents of `read` by their hash.
        validation_fraction: fraction of the documents to hold out; at least one document is held out.
        document_noun: the word for a document in messages.
        hold_out_advice: advice in the error if no document can be held out.
        empty_advice: advice in the error if there is no document.
    """

    name: str
    identity: str
    read: Read | Sequence[Read] = dataclasses.field(compare=False)
    read_validation: Read | Sequence[Read] | None = dataclasses.field(default=None, compare=False)
    validation_fraction: float = 0.01
    strict: bool = False
    document_noun: str = 'document'
    hold_out_advice: str = (
        "set VALIDATION_FILES, or split the text into documents (blank lines between them, or TXT_DOCUMENTS = 'line')"
    )
    empty_advice: str = 'use files with text'

    def __post_init__(self):
        if self.read_validation is None:
            ranges.check_value('validation_fraction', self.validation_fraction, ranges.OpenShare)

    def source(self, order: int = 0) -> seqio.DataSource:
        # Imported lazily, because `sources` imports seqio.
        from remixer_tasks.corpora.sources import TextSource

        return TextSource(self, order)

    def folder(self) -> Path:
        """Returns the corpus folder in the cache; parses the text first if necessary.

        Raises UserError for unusable text.
        """
        name = cache.key('corpus 2', self.identity, self.validation_fraction, self.strict)
        folder = cache.root() / 'corpora' / name
        if not (folder / cache.FILE_LIST).exists():
            with cache.fill_entry(folder, self.name) as is_incomplete:
                if is_incomplete:
                    _parse_corpus(self, folder)
        cache.check_files(folder)
        return folder

    def files(self, split: str) -> list[str]:
        """Returns the paths of the Arrow files, followed by the path of the file with the split's row numbers."""
        folder = self.folder()
        return [str(path) for path in (*sorted(folder.glob('*.arrow')), *folder.glob(f'{split}-*.npy'))]

    def documents(self, split: str) -> Any:
        """Returns the `arrow_files.Documents` of a split."""
        return _open_documents(tuple(self.files(split)))

    def training_documents(self) -> Iterator[str]:
        for document in tf_data.numpy_iterator(self.documents(TRAIN).dataset(seed=0)):
            yield document.decode()


@functools.cache
def _open_documents(files: tuple[str, ...]) -> Any:
    """Opens the paths `ParsedCorpus.files`; cached, because all tasks and streams share the open files."""
    from remixer_tasks.corpora import arrow_files

    *paths, rows = map(Path, files)
    repair = cache.advise_repair(rows.parent)
    try:
        numbers = np.load(rows, mmap_mode='r', allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f'{rows} is damaged ({reason(error)}); {repair}') from error
    return arrow_files.Documents(paths, numbers, repair)


def hash_fraction(document: bytes) -> float:
    """Hashes a document to a number in [0, 1), so that its split does not depend on other documents."""
    return int.from_bytes(hashlib.sha256(document).digest()[:6], 'big') / 2**48


def _parse_corpus(corpus: ParsedCorpus, folder: Path) -> None:
    """Parses the documents that `folder` lacks, writes the row numbers of both splits, and marks it as complete."""
    from remixer_tasks.corpora import arrow_files

    nouns = f'{corpus.document_noun}s'
    notice, malformed = Notice(f'reading {corpus.name}'), Malformed(corpus.strict)
    paths = _write_parts(corpus, corpus.read, 'documents', folder, malformed, notice)
    shares = arrow_files.Documents(paths).hash_fractions()
    if corpus.read_validation is None:
        if len(shares) == 1:
            raise UserError(f'{corpus.name} is a single {corpus.document_noun}; {corpus.hold_out_advice}')
        is_held_out = shares < corpus.validation_fraction
        if not is_held_out.any() and len(shares):
            # Small corpora hold out the document with the smallest hash.
            is_held_out = shares == shares.min()
        if is_held_out.all() and len(shares):
            raise UserError(f'all {len(shares):,} {nouns} of {corpus.name} are equal; {corpus.hold_out_advice}')
    else:
        paths = _write_parts(corpus, corpus.read_validation, 'held_out', folder, malformed, notice)
        held_out = arrow_files.Documents(paths).hash_fractions()
        is_held_out = np.repeat([False, True], [len(shares), len(held_out)])
        shares = np.concatenate([shares, held_out])
    # The digest is part of the file name, so that a resumed run detects changed text without reading it.
    digest = hashlib.sha256(shares.tobytes()).hexdigest()[:16]
    for split, numbers in {TRAIN: np.flatnonzero(~is_held_out), VALIDATION: np.flatnonzero(is_held_out)}.items():
        if not len(numbers):
            raise UserError(f'{corpus.name} has no {split} {nouns}{malformed.summary()}; {corpus.empty_advice}')
        np.save(folder / 'rows.tmp.npy', numbers)
        temporary.sync_and_rename(folder / 'rows.tmp.npy', folder / f'{split}-{digest}.npy')
    for path in folder.glob('*.unfinished'):
        # A killed command has left this file.
        path.unlink(missing_ok=True)
    count = int(is_held_out.sum())
    notice.done(f'{len(shares) - count:,} {nouns}, {count:,} held out{malformed.summary()}')
    cache.mark_complete(folder)


def _write_parts(
    corpus: ParsedCorpus, read: Read | Sequence[Read], name: str, folder: Path, malformed: Malformed, notice: Notice
) -> list[Path]:
    """Writes the documents that each function yields to a separate file; returns the paths of the files."""
    functions = [read] if callable(read) else read
    paths = [folder / f'{name}-{number:05d}.arrow' for number in range(len(functions))]
    jobs = [(function, path, corpus.strict) for function, path in zip(functions, paths, strict=True)]
    if len(jobs) == 1:
        results = iter(
            [_write_part(*jobs[0], lambda count: notice.update(lambda: f'{count:,} {corpus.document_noun}s'))]
        )
    else:
        results = workers.map_in_order(_write_part, jobs, workers.count_cores())
    for number, counts in enumerate(results, 1):
        malformed.add_counts(counts)
        notice.step(number, len(jobs), 'parts')
    return paths


def _write_part(
    read: Read, path: Path, strict: bool, progress: Callable[[int], Any] = lambda count: None
) -> dict[str, Any]:
    """Writes the documents of `read` to `path` unless the file exists; returns the counts of skipped records.

    May run in a worker process.
    """
    from remixer_tasks.corpora import arrow_files

    with contextlib.suppress(OSError, ValueError):
        return untrusted_files.parse_json(arrow_files.read_notes(path))
    malformed = Malformed(strict)

    def documents() -> Iterator[bytes]:
        for number, document in enumerate(read(malformed), 1):
            yield document.encode()
            progress(number)

    # The name contains the process id, so that concurrent processes write different files.
    unfinished = path.with_suffix(f'.{os.getpid()}.unfinished')
    try:
        with cache.wrap_write_errors():
            arrow_files.write(unfinished, documents(), lambda: json.dumps(malformed.counts()))
            temporary.sync_and_rename(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return malformed.counts()
