"""The text that the ids of a vocabulary stand for: its bytes, by which a loss becomes bits per byte, and its pieces, by
which two vocabularies are compared.

Losses per token of two vocabularies cannot be compared, bits per byte can. Ids that stand for no text have 0 bytes:
padding, the end token, sentinels and an unknown piece. The space before a word counts, also the space that
SentencePiece puts before the first word of a text.
"""

import re
from typing import Any

import numpy as np

from remixer_t5x.errors import UserError

# SentencePiece writes a space, and a byte, as these.
SPACE, BYTE = '\u2581', re.compile(r'<0x[0-9A-F]{2}>')


def token_bytes(vocabulary: Any) -> np.ndarray:
    """[ids] int32."""
    own = getattr(vocabulary, 'token_bytes', None)
    if own is not None:
        return np.asarray(own, np.int32)
    counts: np.ndarray = np.zeros(vocabulary.vocab_size, np.int32)
    model: Any = getattr(vocabulary, 'tokenizer', None)
    for index in range(vocabulary.vocab_size - vocabulary.extra_ids):
        if not hasattr(model, 'IdToPiece'):
            counts[index] = _decoded_bytes(vocabulary, index)
        elif not (model.IsControl(index) or model.IsUnknown(index)):
            piece = model.IdToPiece(index)
            counts[index] = 1 if BYTE.fullmatch(piece) else len(piece.replace(SPACE, ' ').encode())
    return counts


def _decoded_bytes(vocabulary: Any, index: int) -> int:
    """For bytes and words, whose ids stand for a text each; words have a space between them."""
    if index in (0, vocabulary.eos_id, vocabulary.unk_id):
        return 0
    if type(vocabulary).__name__ == 'ByteVocabulary':
        return 1
    return len(vocabulary.decode([index]).encode()) + 1


def pieces(vocabulary: Any) -> list[str]:
    """The piece of each id, as SentencePiece writes them (a space is U+2581); sentinels are `<extra_id_0>`, ...

    Raises UserError for a vocabulary that has neither SentencePiece's pieces nor bytes.
    """
    count, extra = vocabulary.vocab_size, vocabulary.extra_ids
    model: Any = getattr(vocabulary, 'tokenizer', None)
    if hasattr(model, 'IdToPiece'):
        own = [model.IdToPiece(index) for index in range(count - extra)]
    elif type(vocabulary).__name__ == 'ByteVocabulary':
        own = ['<pad>', '</s>', '<unk>', *(f'<0x{byte:02X}>' for byte in range(256))]
    else:
        raise UserError(
            f'{type(vocabulary).__name__} has no pieces to compare; rows are taken by piece of SentencePiece '
            'vocabularies and of bytes'
        )
    return [*own, *(f'<extra_id_{extra - 1 - index}>' for index in range(extra))]
