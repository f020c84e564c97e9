"""A corpus is documents with a held-out part: where a task's text comes from and a vocabulary is trained on.

`ParsedCorpus` reads its documents once into TFRecord shards in the cache (one record is one document's UTF-8 bytes)
and serves them from there. That costs the text's size on disk and buys what reading the files again each time
cannot give: errors counted before training starts, documents shuffled over the whole corpus, shards for any number
of hosts, and positions that tf.data can save exactly. Every host reads the files for itself; the result is equal.
Large files are read in volumes (`volumes`), so that a killed process loses one of them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from remixer_t5x import temporary
from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio
from remixer_tasks.corpora import text_shards
from remixer_tasks.corpora.parsing import TextFiles
from remixer_tasks.corpora.text_shards import SHARDS
from remixer_tasks.corpora.volumes import TRAIN, VALIDATION, Progress, Source, Volumes, read_at_once
from remixer_tasks.files import cache
from remixer_tasks.files.malformed import Malformed
from remixer_tasks.files.notice import Notice

# A function that gives documents and hands what it cannot read to `Malformed`, or files.
Read = Callable[[Malformed], Iterator[str]] | TextFiles
_COUNTS = 'counts.json'


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
        """Documents of the training split."""


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
    """Documents made by a Python function, kept as TFRecords in the cache.

    read: the documents, called with what collects malformed records.
    read_validation: the held-out documents, or None to hold out a share of the others by their hash.
    validation_fraction: that share; at least one document is held out.
    words: what messages call a document.
    keep_ids: None tokenises documents in every epoch; a number keeps their ids, up to as many bytes (see `token_ids`).
    """

    name: str
    identity: str
    read: Read = dataclasses.field(compare=False)
    read_validation: Read | None = dataclasses.field(default=None, compare=False)
    validation_fraction: float = 0.01
    strict: bool = False
    words: Words = Words()
    keep_ids: float | None = None

    def __post_init__(self):
        if self.read_validation is None:
            text_shards.check_fraction(self.validation_fraction, self.words.parts)

    def source(self, order: int = 0) -> seqio.DataSource:
        # Imported here, because the class derives from seqio's.
        from remixer_tasks.corpora.text_source import TextSource

        return TextSource(self.name, self.shards, (TRAIN, VALIDATION), order)

    def shards(self, split: str) -> list[str]:
        """Paths of the split's shards, made first if need be. Raises UserError for what is wrong with the text."""
        name = cache.key('corpus 1', self.identity, self.validation_fraction, self.strict, SHARDS)
        folder = cache.root() / 'corpora' / name
        if not folder.exists():
            _make(self, folder)
        cache.check(folder)
        return sorted(str(path) for path in folder.glob(f'{split}-*'))

    def training_documents(self) -> Iterator[str]:
        paths = self.shards(TRAIN)
        yield from text_shards.texts(paths, self.name, Path(paths[0]).parent)


def _make(corpus: ParsedCorpus, folder: Path) -> None:
    if _source(corpus.read).count == 1:
        with cache.adding(folder) as unfinished:
            unfinished.mkdir()
            _parse(corpus, unfinished, durable=False)
        return

    def wait() -> None:
        Notice(f'waiting for another process, which reads {corpus.name}')

    with cache.continuing(folder, wait) as continued:
        if continued is not None:
            _parse(corpus, continued, durable=True)


def _parse(corpus: ParsedCorpus, folder: Path, durable: bool) -> None:
    """Writes the shards of both splits, and counts.json next to them, or what is missing of these.

    durable: what is finished is there for the next process, also after the machine stopped.
    """
    if not (folder / _COUNTS).exists():
        notice = Notice(f'reading {corpus.name}')
        with text_shards.full_disk():
            progress = _write_shards(corpus, folder, durable, notice)
        counts, skipped = progress.counts, Malformed(corpus.strict, progress.skipped)
        unfinished = folder / f'{_COUNTS}.tmp'
        unfinished.write_text(json.dumps({**counts, 'skipped': skipped.count, 'empty': skipped.empty_count}))
        temporary.commit(unfinished, folder / _COUNTS)
        parts = corpus.words.parts
        notice.done(f'{counts[TRAIN]:,} {parts}, {counts[VALIDATION]:,} held out{skipped.summary()}')
    for path in list(folder.iterdir()):
        if path.is_dir():
            temporary.remove(path)
    cache.seal(folder)


def _write_shards(corpus: ParsedCorpus, folder: Path, durable: bool, notice: Notice) -> Progress:
    def read(name: str, text: Read, split: Callable[[float], str], start: Progress) -> tuple[Volumes, Progress]:
        source = _source(text)
        volumes = Volumes(folder / f'{name} {source.key}', folder, durable, notice, corpus.words.parts)
        return volumes, volumes.read(source, split, start, corpus.strict)

    start = Progress({TRAIN: 0, VALIDATION: 0})
    if corpus.read_validation is None:
        fraction = corpus.validation_fraction
        volumes, progress = read('dealt', corpus.read, lambda share: VALIDATION if share < fraction else TRAIN, start)
        if not progress.counts[VALIDATION] and progress.counts[TRAIN] > 1:
            # Too few documents for the share: deal again, now that the smallest hash is known.
            least = progress.smallest
            volumes, progress = read('again', corpus.read, lambda share: VALIDATION if share <= least else TRAIN, start)
        _check_dealt(progress.counts, corpus)
        all_volumes = [volumes]
    else:
        volumes, progress = read('train', corpus.read, lambda share: TRAIN, start)
        start = dataclasses.replace(progress, place={})
        held_out, progress = read('held out', corpus.read_validation, lambda share: VALIDATION, start)
        all_volumes = [volumes, held_out]
    _check_both(progress, corpus)
    for volumes in all_volumes:
        volumes.join(TRAIN, shuffled=True)
        volumes.join(VALIDATION, shuffled=False)
    return progress


def _check_both(progress: Progress, corpus: ParsedCorpus) -> None:
    """Raises UserError if a split has no documents."""
    for split, count in progress.counts.items():
        if not count:
            skipped = Malformed(corpus.strict, progress.skipped).summary()
            raise UserError(f'{corpus.name} has no {split} {corpus.words.parts}{skipped}: {corpus.words.find}')


def _check_dealt(counts: Mapping[str, int], corpus: ParsedCorpus) -> None:
    """Raises UserError if all documents are held out, or the only document is not."""
    held_out, parts = counts[VALIDATION], corpus.words.parts
    if sum(counts.values()) == 1:
        single = f'{corpus.name} is a single {corpus.words.part}'
        raise UserError(f'{single}, so none can be held out: {corpus.words.hold_out}')
    if held_out and not counts[TRAIN]:
        raise UserError(
            f'all {held_out:,} {parts} of {corpus.name} are held out, because equal {parts} are held out together: '
            f'{corpus.words.hold_out}'
        )


def _source(read: Read) -> Source:
    return read.source() if isinstance(read, TextFiles) else read_at_once(read)
