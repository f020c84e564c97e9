"""Vocabularies for seqio tasks: a SentencePiece model, bytes, or pieces trained on the corpus at first use.

All of them reserve T5's ids (0 padding, 1 EOS, 2 unknown) and end with `extra_ids` sentinels, <extra_id_0> last.
In gin: `VOCABULARY = @vocabularies.sentencepiece()`, with `vocabularies.sentencepiece.path = '...'`.
"""

import functools
import os

import seqio
import tensorflow as tf

from remixer_t5x.errors import UserError
from remixer_tasks.text import vocabulary_training
from remixer_tasks.text.text_corpus import Corpus

T5_MODEL = 'gs://t5-data/vocabs/cc_all.32000/sentencepiece.model'
SENTINELS = 100


class SentencePiece(seqio.SentencePieceVocabulary):
    """seqio's vocabulary with one-line errors for a model file that cannot be read. Loaded at first use."""

    def _model_context(self):
        if self._model is None:
            _read_model(self.sentencepiece_model_file)
        return super()._model_context()


class TrainedPieces(SentencePiece):
    """A SentencePiece vocabulary whose model file is trained on a corpus when it is first needed."""

    def __init__(self, corpus: Corpus, settings: vocabulary_training.Settings, extra_ids: int):
        self._corpus = corpus
        self._settings = settings
        super().__init__(str(vocabulary_training.model_path(corpus, settings)), extra_ids=extra_ids)

    def _model_context(self):
        if self._model is None:
            # seqio asks for the model while it traces a graph; training reads documents, which graphs cannot.
            with tf.init_scope():
                vocabulary_training.ensure_trained(self._corpus, self._settings)
        return super()._model_context()


def sentencepiece(path: str = T5_MODEL, extra_ids: int = SENTINELS) -> SentencePiece:
    """The SentencePiece model at `path` (a local file, ~ allowed, or gs://), plus `extra_ids` sentinels.

    Nothing is read before the first use. The default is T5's: 32,000 pieces, 32,100 ids with the sentinels.
    """
    return SentencePiece(os.path.expanduser(path), extra_ids=extra_ids)


def byte(extra_ids: int = SENTINELS) -> seqio.ByteVocabulary:
    """UTF-8 bytes as in ByT5 (Xue et al. 2022): 3 special ids, 256 bytes, `extra_ids` sentinels."""
    return seqio.ByteVocabulary(extra_ids=extra_ids)


def trained(
    corpus: Corpus,
    vocab_size: int,
    extra_ids: int = SENTINELS,
    character_coverage: float = 0.9995,
) -> TrainedPieces:
    """Pieces trained on `corpus` at first use and cached, exactly `vocab_size` ids with the sentinels.

    character_coverage: share of the text's characters that get a piece; the rest become the unknown id.
    Raises UserError when `vocab_size` leaves no room for pieces, at first use when the text is too small for it.
    """
    smallest = extra_ids + 128
    if vocab_size < smallest:
        raise UserError(
            f'VOCAB_SIZE is {vocab_size}, a trained vocabulary with {extra_ids} sentinels needs at least '
            f'{smallest}: try 4096, or VOCABULARY = @vocabularies.byte()'
        )
    settings = vocabulary_training.Settings(pieces=vocab_size - extra_ids, character_coverage=character_coverage)
    return TrainedPieces(corpus, settings, extra_ids)


@functools.lru_cache(maxsize=16)
def _read_model(path: str) -> bytes:
    """Raises UserError when there is no SentencePiece model at `path`."""
    hint = 'give a local file: --gin.vocabularies.sentencepiece.path=/path/to/sentencepiece.model'
    try:
        with tf.io.gfile.GFile(path, 'rb') as file:
            model = file.read()
    except (tf.errors.OpError, OSError) as error:
        reason = 'there is no such file' if isinstance(error, tf.errors.NotFoundError) else 'it cannot be read'
        raise UserError(f'vocabulary {path}: {reason}; {hint}') from error
    try:
        vocabulary_training.check(model)
    except ValueError as error:
        raise UserError(f'vocabulary {path}: this is not a SentencePiece model; {hint}') from error
    return model
