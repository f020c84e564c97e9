"""The pieces of text that the ids of a vocabulary stand for, by which two vocabularies can be compared."""

from typing import Any

from remixer_t5x.errors import UserError


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
