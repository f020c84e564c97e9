"""SentencePiece vocabularies of seqio, loaded or trained at first use. Importing this module loads seqio.

A unigram model is trained on a corpus once: the same corpus and settings give the same file. Normalisation is
SentencePiece's default (NFKC, runs of white space become one space), as in T5's model.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import re
import string
from collections.abc import Iterator
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from remixer_t5x.errors import UserError, reason
from remixer_t5x.lazy import seqio, tf
from remixer_tasks.corpora.text_corpus import Corpus
from remixer_tasks.files import cache
from remixer_tasks.files.notice import Notice
from remixer_tasks.vocabulary import sentinels

# 20 MB of text is enough for ~10k pieces.
SAMPLE_CHARACTERS = 20_000_000
# SentencePiece skips sentences of more than 4,192 bytes, so longer lines are cut.
LINE_CHARACTERS = 1000
# Fixed, because the sums of the EM steps depend on the number of threads.
THREADS = 4
# In every vocabulary, because labels of tasks contain them ('not_entailment').
REQUIRED = string.digits + string.ascii_letters + string.punctuation


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a trained model.

    Attributes:
        pieces: ids without sentinels, including padding, EOS and unknown.
        character_coverage: share of the text's characters that get a piece.
        at_most: uses fewer pieces if the text does not allow more.
    """

    pieces: int
    character_coverage: float
    at_most: bool = False


def model_path(corpus: Corpus, settings: Settings) -> Path:
    """The path of the trained model in the cache."""
    values = (settings.pieces, settings.character_coverage, *([True] if settings.at_most else []))
    name = cache.key('vocabulary 2', corpus.identity, values, SAMPLE_CHARACTERS)
    return cache.root() / 'vocabularies' / f'{name}.model'


def ensure_trained(corpus: Corpus, settings: Settings) -> Path:
    """Trains the model unless it is in the cache. Raises UserError if the text is too small."""
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
        notice.done(f'saved to {path}')
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
        # SentencePiece names the largest number of pieces that the text allows.
        limit = re.search(r'<= ?(\d+)', str(error))
        if limit is None:
            raise UserError(
                f'SentencePiece cannot train {settings.pieces} pieces on this text ({reason(error)}): '
                'try another VOCAB_SIZE, or VOCABULARY = @vocabularies.byte()'
            ) from error
        most = int(limit[1])
        if settings.at_most:
            return _train(sample, dataclasses.replace(settings, pieces=most, at_most=False))
        raise UserError(
            f'the text is too small for a vocabulary of {settings.pieces} pieces, allowed are at most {most}: make '
            f'VOCAB_SIZE {settings.pieces - most} or more smaller, give more text, or use VOCABULARY = '
            '@vocabularies.byte()'
        ) from error
    return writer.getvalue()


def _lines(documents: Iterator[str]) -> Iterator[str]:
    """Lines of the first documents, cut to the lengths that SentencePiece accepts."""
    characters = 0
    for document in documents:
        for line in document.splitlines():
            for start in range(0, len(line), LINE_CHARACTERS):
                yield line[start : start + LINE_CHARACTERS]
        characters += len(document)
        if characters > SAMPLE_CHARACTERS:
            return


class SentencePiece(seqio.SentencePieceVocabulary):
    """seqio's vocabulary with one-line errors for a model file that cannot be read. Loaded at first use.

    <extra_id_N> in a text is a sentinel next to any character: the texts before and after it are encoded separately.
    seqio alone recognises one after a space.
    """

    def _model_context(self):
        if self._model is None:
            count = sentinels_in(_read_model(self.sentencepiece_model_file))
            if count and self.extra_ids:
                raise UserError(
                    f'vocabulary {self.sentencepiece_model_file}: extra_ids must be 0, because the model has {count} '
                    f'sentinels itself, got {self.extra_ids}; set extra_ids to 0'
                )
        return super()._model_context()

    @functools.cached_property
    def sentinels(self) -> int:
        """The number of sentinels: `extra_ids`, or those that are pieces of the model, as mT5 has them."""
        return self.extra_ids or sentinels_in(self.sp_model)

    def _encode(self, s: str) -> list[int]:
        return super()._encode(re.sub(*self._separated, s) if self.extra_ids else s)

    def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
        return super()._encode_tf(tf.strings.regex_replace(s, *self._separated) if self.extra_ids else s)

    @property
    def _separated(self) -> tuple[str, str]:
        """A pattern and its replacement, which put a space on both sides of each sentinel. The first belongs to its
        piece, and SentencePiece begins a word after the second, as at the start of a text.
        """
        return sentinels.pattern(self.extra_ids), r' <extra_id_\1> '

    def __getstate__(self):
        # Two vocabularies with the same state are equal, whether the model was read or not.
        return {name: value for name, value in super().__getstate__().items() if name != 'sentinels'}


class TrainedPieces(SentencePiece):
    """A SentencePiece vocabulary whose model file is trained on a corpus when it is first needed."""

    def __init__(self, corpus: Corpus, settings: Settings, extra_ids: int):
        self._corpus = corpus
        self._settings = settings
        super().__init__(str(model_path(corpus, settings)), extra_ids=extra_ids)

    def _model_context(self):
        if self._model is None:
            # seqio asks for the model while it traces a graph; training reads documents, which graphs cannot.
            with tf.init_scope():
                ensure_trained(self._corpus, self._settings)
        return super()._model_context()


@functools.lru_cache(maxsize=16)
def _read_model(path: str) -> bytes:
    """Raises UserError if there is no SentencePiece model at `path`."""
    hint = 'give a local file: --gin.vocabularies.sentencepiece.path=/path/to/sentencepiece.model'
    try:
        with tf.io.gfile.GFile(path, 'rb') as file:
            model = file.read()
    except (tf.errors.OpError, OSError) as error:
        raise UserError(f'vocabulary {path}: {reason(error)}; {hint}') from error
    try:
        check(model)
    except ValueError as error:
        raise UserError(f'vocabulary {path}: {error}; {hint}') from error
    return model
