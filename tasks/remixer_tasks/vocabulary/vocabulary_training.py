"""Trains a SentencePiece unigram model on a corpus, once: the same corpus and settings give the same file.

Normalisation is SentencePiece's default (NFKC, runs of white space become one space), as in T5's own model.
"""

import dataclasses
import io
import re
import string
from collections.abc import Iterator
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from remixer_t5x.errors import UserError, reason
from remixer_tasks.corpora.text_corpus import Corpus
from remixer_tasks.files import cache
from remixer_tasks.files.notice import Notice
from remixer_tasks.vocabulary import sentinels

# 20 MB of text settle some ten thousand pieces; more only costs time and memory.
SAMPLE_CHARACTERS = 20_000_000
# SentencePiece skips sentences above 4,192 bytes: longer lines are cut below that.
LINE_CHARACTERS = 1000
# The sums of the EM steps depend on the number of threads, so it is fixed and not the machine's.
THREADS = 4
# Always in a vocabulary, whatever the text: labels of tasks are written with them ('not_entailment').
REQUIRED = string.digits + string.ascii_letters + string.punctuation


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides a trained model besides its corpus. pieces: ids without sentinels, with padding, EOS, unknown;
    `at_most` takes as many as a smaller text allows.
    """

    pieces: int
    character_coverage: float
    at_most: bool = False


def model_path(corpus: Corpus, settings: Settings) -> Path:
    """Where the trained model of this corpus and these settings is or will be."""
    decides = (settings.pieces, settings.character_coverage, *([True] if settings.at_most else []))
    name = cache.key('vocabulary 2', corpus.identity, decides, SAMPLE_CHARACTERS)
    return cache.root() / 'vocabularies' / f'{name}.model'


def ensure_trained(corpus: Corpus, settings: Settings) -> Path:
    """Trains the model unless it is in the cache. Raises UserError when the text is too small for it."""
    path = model_path(corpus, settings)
    if not path.exists():
        sample = list(_lines(corpus.training_documents()))
        characters = sum(map(len, sample))
        notice = Notice(
            f'training a vocabulary of {settings.pieces} pieces on {characters / 1e6:.1f} M characters of {corpus.name}'
        )
        model = _train(sample, settings)
        with cache.adding(path) as temporary:
            temporary.write_bytes(model)
        notice.done(f'kept in {path}')
    return path


def check(model: bytes) -> None:
    """Raises ValueError if the bytes are not a SentencePiece model whose id 0 is padding."""
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made at run time
    try:
        proto.ParseFromString(model)
    except Exception as error:
        raise ValueError(f'this is not a SentencePiece model ({reason(error)})') from error
    if not proto.pieces:
        raise ValueError('this is not a SentencePiece model')
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ValueError(f'this is not a SentencePiece model ({reason(error)})') from error
    if not processor.IsControl(0) or processor.eos_id() <= 0:
        raise ValueError(
            f'id 0 is {processor.IdToPiece(0)!a:.40} and eos_id is {processor.eos_id()}, and id 0 must be padding and '
            'eos_id above it (train the model with --pad_id=0 --eos_id=1 --unk_id=2)'
        )


def sentinels_in(model: bytes) -> int:
    """The number of sentinels at the end of a SentencePiece model's own pieces."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]  # made at run time
    return sentinels.trailing([piece.piece for piece in proto.pieces[-1000:]])


def _train(sample: list[str], settings: Settings) -> bytes:
    writer = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=writer,
            model_type='unigram',
            vocab_size=settings.pieces,
            character_coverage=settings.character_coverage,
            required_chars=REQUIRED,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            num_threads=THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        most = _most(str(error))
        if settings.at_most and most:
            return _train(sample, dataclasses.replace(settings, pieces=most, at_most=False))
        raise UserError(_explain(str(error), settings)) from error
    return writer.getvalue()


def _most(message: str) -> int | None:
    """How many pieces the text allows, where SentencePiece says so."""
    found = re.search(r'<= ?(\d+)', message)
    return int(found[1]) if found else None


def _explain(message: str, settings: Settings) -> str:
    most = _most(message)
    if most:
        return (
            f'the text is too small for a vocabulary of {settings.pieces} pieces, allowed are at most '
            f'{most}: make VOCAB_SIZE {settings.pieces - most} or more smaller, give more text, '
            'or use VOCABULARY = @vocabularies.byte()'
        )
    return (
        f'SentencePiece cannot train {settings.pieces} pieces on this text ({" ".join(message.split())}): '
        'try another VOCAB_SIZE, or VOCABULARY = @vocabularies.byte()'
    )


def _lines(documents: Iterator[str]) -> Iterator[str]:
    """Lines of the first documents, cut to what SentencePiece takes."""
    characters = 0
    for document in documents:
        for line in document.splitlines():
            for start in range(0, len(line), LINE_CHARACTERS):
                yield line[start : start + LINE_CHARACTERS]
        characters += len(document)
        if characters > SAMPLE_CHARACTERS:
            return
