"""A corpus of which a run reads the first volumes while another process writes the later ones.

It has the volumes of `parsing.TextFiles` in one folder of the cache, and no files that are joined from them. A run
takes their files in the order of the volumes, so what it reads does not depend on when a volume was ready: a run that
is resumed when all are there gets the same documents in the same order. The files of text come in an order drawn by
chance, so that a volume has text from all over the corpus.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import fcntl
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from remixer_t5x import lazy
from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio
from remixer_tasks.corpora import text_shards
from remixer_tasks.corpora.parsing import TextFiles
from remixer_tasks.corpora.text_shards import SHARDS
from remixer_tasks.corpora.volumes import TRAIN, VALIDATION, Progress, Volumes
from remixer_tasks.files import cache, workers
from remixer_tasks.files.malformed import Malformed
from remixer_tasks.files.notice import Notice, Silent

# Between two looks for a volume.
_LOOK_SECONDS = 0.2
_LOCK = 'writer.lock'
# There when the first volume is and has documents of both splits.
_FIRST = 'first'


@dataclasses.dataclass(frozen=True)
class GrowingCorpus:
    """Documents of `text`, see `text_corpus.Corpus`.

    What is held out are the documents of the first volume whose hash is below `validation_fraction`, or all of
    `held_out_text`. The documents of later volumes with such a hash are left out, as copies of those might be among
    them. A vocabulary is trained on the first volume.
    """

    name: str
    identity: str
    text: TextFiles = dataclasses.field(compare=False)
    held_out_text: TextFiles | None = dataclasses.field(default=None, compare=False)
    validation_fraction: float = 0.01
    strict: bool = False

    def __post_init__(self):
        if self.held_out_text is None:
            text_shards.check_fraction(self.validation_fraction)

    def source(self, order: int = 0) -> seqio.DataSource:
        # Imported here, because the class derives from seqio's.
        from remixer_tasks.corpora.growing_source import GrowingSource

        return GrowingSource(self, order)

    @functools.cached_property
    def folder(self) -> Path:
        """Where its volumes are."""
        key = self.text.source().key
        name = cache.key('growing corpus 1', self.identity, key, self.validation_fraction, self.strict, SHARDS)
        return cache.root() / 'corpora' / name

    def files(self, split: str) -> Sequence[str]:
        """The user's files in which the documents of a split are."""
        return self.held_out_text.paths if self.held_out_text and split == VALIDATION else self.text.paths

    def shards(self, split: str) -> list[str]:
        """Paths of the split's TFRecords, also of those that are not written yet; the first volume is there.

        Begins to read what is missing, in another process. Raises UserError for what is wrong with the first volume.
        """
        _writing_of(self).wait_for_first()
        if split == TRAIN:
            volumes = [self.volumes(TRAIN).volume(number) for number in range(self.text.source().count)]
        elif self.held_out_text:
            held_out = self.volumes(VALIDATION)
            volumes = [held_out.volume(number) for number in range(self.held_out_text.source().count)]
        else:
            volumes = [self.volumes(TRAIN).volume(0)]
        return [str(volume / text_shards.name(split, index)) for volume in volumes for index in range(SHARDS)]

    def training_documents(self) -> Iterator[str]:
        paths = self.shards(TRAIN)[:SHARDS]
        while not self.is_there(paths[0]):
            pass
        yield from text_shards.texts(paths, self.name, self.folder)

    def is_there(self, path: str) -> bool:
        """Whether a file of `shards` can be read; waits a moment if not. Raises UserError if it never will be."""
        return _writing_of(self).has(Path(path).parent)

    def volumes(self, split: str) -> Volumes:
        """Those of `text`, or of `held_out_text`."""
        return Volumes(self.folder / split, None, True, Silent(), 'documents')


class _Writing:
    """What this process knows of the process that writes the volumes of a corpus."""

    def __init__(self, corpus: GrowingCorpus):
        self._corpus, self._count = corpus, corpus.text.source().count
        self._error: UserError | None = None
        self._whole: set[Path] = set()
        self._told: set[Path] = set()
        self._lock = threading.Lock()
        self._has_ended = (corpus.folder / _FIRST).exists() and corpus.volumes(TRAIN).finished() == self._count
        if not self._has_ended:
            threading.Thread(target=self._write, name='growing corpus', daemon=True).start()

    def wait_for_first(self) -> None:
        # Another process of this machine may have written it, and have the lock until all is written.
        while not self._is_there(self._corpus.folder, (self._corpus.folder / _FIRST).exists):
            time.sleep(_LOOK_SECONDS)

    def has(self, volume: Path) -> bool:
        if volume in self._whole:
            return True
        # One that was cut off will be written again.
        volumes = self._corpus.volumes(volume.parent.name)
        if self._is_there(volume, lambda: volumes.is_whole(int(volume.name))):
            self._whole.add(volume)
            return True
        with self._lock:
            is_new = volume not in self._told
            self._told.add(volume)
        if is_new:
            Notice(f'waiting for volume {int(volume.name) + 1} of {self._count} of {self._corpus.name}')
        time.sleep(_LOOK_SECONDS)
        return False

    def _is_there(self, path: Path, look: Callable[[], bool]) -> bool:
        """What `look` finds. Raises UserError if that will not change."""
        # Asked first, because the last volume may come after the look.
        error, has_ended = self._error, self._has_ended
        if look():
            return True
        if error:
            raise error
        if has_ended:
            raise UserError(f'{path} is damaged or gone; {cache.repair(self._corpus.folder)}')
        return False

    def _write(self) -> None:
        notice = Notice(f'reading {self._corpus.name}')
        has_begun = False
        try:
            with workers.Workers(1) as processes:
                _workers.append(processes)
                for done, progress in processes.results(_write_volumes, self._corpus, lazy.verbose):
                    if done == self._count or not has_begun:
                        notice.done(_said(done, self._count, progress))
                    has_begun = True
            self._has_ended = True
        except UserError as error:
            self._error = error
        except Exception as error:
            if _ends.is_set():
                # The pipe was closed while this thread was reading it.
                return
            # A fault of ours, with the traceback of the other process.
            print(error, file=sys.stderr)
            last = (str(error).strip() or type(error).__name__).splitlines()[-1]
            self._error = UserError(f'{self._corpus.name} cannot be read: {last}')


def _said(done: int, count: int, progress: Progress) -> str:
    documents = f'{progress.counts[TRAIN]:,} documents{Malformed(False, progress.skipped).summary()}'
    if done == count:
        return f'all {count} volumes, {documents}'
    return f'{done} of {count} volumes, {documents}; the others are read while the run trains'


_lock = threading.Lock()
_writings: dict[Path, _Writing] = {}
_workers: list[workers.Workers] = []
_ends = threading.Event()


def _writing_of(corpus: GrowingCorpus) -> _Writing:
    with _lock:
        if corpus.folder not in _writings:
            _writings[corpus.folder] = _Writing(corpus)
        return _writings[corpus.folder]


@atexit.register
def _end() -> None:
    _ends.set()
    for processes in _workers:
        processes.__exit__()


def _write_volumes(corpus: GrowingCorpus, verbose: bool) -> Iterator[tuple[int, Progress]]:
    """In a process of its own: the number of volumes and the progress, at first and after each that it writes.

    verbose: the `lazy.verbose` of the run.
    """
    lazy.verbose = verbose
    with cache.writing(), text_shards.full_disk(), _alone(corpus):
        start, fraction = Progress({TRAIN: 0, VALIDATION: 0}), corpus.validation_fraction
        if corpus.held_out_text:
            held_out = corpus.held_out_text.source()
            read = corpus.volumes(VALIDATION).read(held_out, lambda share: VALIDATION, start, corpus.strict)
            start, fraction = dataclasses.replace(read, place={}), 0.0

        def split(share: float) -> str:
            return VALIDATION if share < fraction else TRAIN

        for done, progress in corpus.volumes(TRAIN).each(corpus.text.source(), split, start, corpus.strict):
            if done:
                _check(corpus, progress)
                (corpus.folder / _FIRST).touch()
                yield done, progress


def _check(corpus: GrowingCorpus, progress: Progress) -> None:
    """Raises UserError if a split has no documents."""
    skipped = Malformed(False, progress.skipped).summary()
    if not progress.counts[TRAIN]:
        raise UserError(f'{corpus.name} has no train documents in its first volume{skipped}: give files with text')
    if not progress.counts[VALIDATION] and corpus.held_out_text:
        raise UserError(f'VALIDATION_FILES of {corpus.name} have no documents{skipped}: give files with text')
    if not progress.counts[VALIDATION]:
        raise UserError(
            f'no document in the first volume of {corpus.name} is held out{skipped}: give VALIDATION_FILES, or a '
            'larger VALIDATION_FRACTION'
        )


@contextlib.contextmanager
def _alone(corpus: GrowingCorpus) -> Iterator[None]:
    """One process at a time writes; its lock ends with it."""
    corpus.folder.mkdir(parents=True, exist_ok=True)
    with open(corpus.folder / _LOCK, 'ab') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(
                f'the folder {corpus.folder} has no locks ({os.strerror(error.errno or 0)}): set TRAIN_WHILE_READING = '
                'False, or REMIXER_T5X_CACHE to a folder on a local disk'
            ) from error
        yield
