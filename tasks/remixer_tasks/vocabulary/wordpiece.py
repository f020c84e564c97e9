"""BERT's vocabulary: WordPiece as the library `tokenizers` reads it, for encoders that came from Hugging Face.

Ids are the file's. Each text begins with `[CLS]`, as BERT was trained, and `[SEP]` is the end token, which tasks
append.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio, tf
from remixer_tasks.vocabulary import tokenizer_json

CLS, SEP, UNKNOWN, PAD, MASK = '[CLS]', '[SEP]', '[UNK]', '[PAD]', '[MASK]'


class WordPieceVocabulary(seqio.Vocabulary):
    """The ids of a `tokenizer.json`. Two vocabularies with the same words are equal."""

    def __init__(self, path: str):
        super().__init__(extra_ids=0)
        self._path = os.path.expanduser(path)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return read(self._path)

    @functools.cached_property
    def words(self) -> tuple[str, ...]:
        """Pieces by id."""
        found = self._tokenizer.get_vocab(with_added_tokens=True)
        return tuple(sorted(found, key=found.__getitem__))

    def _id(self, piece: str) -> int:
        found = self._tokenizer.token_to_id(piece)
        if found is None:
            raise UserError(f'{self._path} has no {piece}, which BERT needs; give the tokenizer of a BERT')
        return int(found)

    @property
    def bos_id(self) -> int:
        return self._id(CLS)

    @property
    def eos_id(self) -> int:
        return self._id(SEP)

    @property
    def mask_id(self) -> int:
        """The piece that masked language modelling puts in place of others."""
        return self._id(MASK)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Pieces that stand for no text."""
        return tuple(self._id(piece) for piece in (PAD, CLS, SEP, MASK))

    @property
    def unk_id(self) -> int:
        return self._id(UNKNOWN)

    @property
    def _base_vocab_size(self) -> int:
        return len(self.words)

    def _encode(self, s: str) -> list[int]:
        return [self.bos_id, *self._tokenizer.encode(s, add_special_tokens=False).ids]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)

    def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
        ids = tf.numpy_function(lambda text: np.asarray(self._encode(text.decode()), np.int32), [s], tf.int32)
        return tf.ensure_shape(ids, [None])

    def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
        text = tf.numpy_function(lambda given: self._decode(given.tolist()).encode(), [ids], tf.string)
        return tf.ensure_shape(text, [])

    def save(self, path: str) -> None:
        """Writes the vocabulary as a `tokenizer.json`."""
        self._tokenizer.save(path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WordPieceVocabulary) and self.words == other.words

    def __hash__(self) -> int:
        return hash(self._path)


def read(path: str, lowercase: bool = True) -> Any:
    """The tokenizer in a `tokenizer.json`, or in BERT's older `vocab.txt` with one piece a line.

    Raises UserError if the package `tokenizers` is missing, or cannot read the file.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            f"{path} is WordPiece, which the package tokenizers reads; pip install 'remixer-t5x[wordpiece]'"
        ) from error
    if not os.path.isfile(path):
        raise UserError(f'there is no file {path}; give a tokenizer.json or vocab.txt of a BERT')
    try:
        if path.endswith('.txt'):
            found = tokenizers.BertWordPieceTokenizer(path, lowercase=lowercase)._tokenizer
        else:
            found = tokenizer_json.wordpiece(path)
    except UserError:
        raise
    except Exception as error:
        # The library raises Exception itself.
        raise UserError(f'{path} cannot be read as a tokenizer ({str(error).splitlines()[0]:.100})') from error
    if found.token_to_id(UNKNOWN) is None:
        raise UserError(f'{path} has no {UNKNOWN}, which BERT needs; give the tokenizer of a BERT')
    if found.token_to_id(PAD) != 0:
        raise UserError(f'{path} has {PAD} as id {found.token_to_id(PAD)}; allowed is 0, as in published BERTs')
    return found
