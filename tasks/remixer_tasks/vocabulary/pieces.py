"""seqio's SentencePiece vocabularies, read or trained at first use. Importing this module loads seqio."""

from __future__ import annotations

import functools
import re

from remixer_t5x.errors import UserError, reason
from remixer_t5x.lazy import seqio, tf
from remixer_tasks.corpora.text_corpus import Corpus
from remixer_tasks.vocabulary import sentinels, vocabulary_training


class SentencePiece(seqio.SentencePieceVocabulary):
    """seqio's vocabulary with one-line errors for a model file that cannot be read. Loaded at first use.

    <extra_id_N> in a text is a sentinel next to any character: the texts before and after it are encoded separately.
    seqio alone recognises one after a space.
    """

    def _model_context(self):
        if self._model is None:
            own = vocabulary_training.sentinels_in(_read_model(self.sentencepiece_model_file))
            if own and self.extra_ids:
                raise UserError(
                    f'vocabulary {self.sentencepiece_model_file}: extra_ids must be 0, because the model has {own} '
                    f'sentinels itself, got {self.extra_ids}; set extra_ids to 0'
                )
        return super()._model_context()

    @functools.cached_property
    def sentinels(self) -> int:
        """The number of sentinels: `extra_ids`, or those that are pieces of the model, as mT5 has them."""
        return self.extra_ids or vocabulary_training.sentinels_in(self.sp_model)

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


@functools.lru_cache(maxsize=16)
def _read_model(path: str) -> bytes:
    """Raises UserError when there is no SentencePiece model at `path`."""
    hint = 'give a local file: --gin.vocabularies.sentencepiece.path=/path/to/sentencepiece.model'
    try:
        with tf.io.gfile.GFile(path, 'rb') as file:
            model = file.read()
    except (tf.errors.OpError, OSError) as error:
        raise UserError(f'vocabulary {path}: {reason(error)}; {hint}') from error
    try:
        vocabulary_training.check(model)
    except ValueError as error:
        raise UserError(f'vocabulary {path}: {error}; {hint}') from error
    return model
