"""Identifies a task's vocabulary in checkpoints, saves it to MODEL_DIR, and returns the text of each token.

The number of bytes in each token is needed to compute bits per byte, a metric that, unlike the loss per token, can be
compared across vocabularies. Padding, the end token, sentinels and the unknown token have 0 bytes. The space before a
word is counted, including the space that SentencePiece inserts before the first word of a text.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epath

from remixer_t5x import base_vocabulary, tokenizer_files
from remixer_t5x.base_vocabulary import Vocabulary
from remixer_t5x.errors import UserError

if TYPE_CHECKING:
    from remixer_t5x.lazy_imports import seqio

# Folder in MODEL_DIR with a copy of the vocabulary, so that a trained model can be used without its training data.
VOCABULARY_FOLDER = 'vocabulary'
INDEX_FILE = 'vocabulary.json'
# SentencePiece's notation for spaces and bytes.
SPACE, BYTE_PIECE = '\u2581', re.compile(r'<0x[0-9A-F]{2}>')


def get_vocabulary(source: seqio.Task | seqio.Mixture) -> seqio.Vocabulary:
    """Returns the vocabulary of a task. Raises UserError if inputs and targets have different vocabularies."""
    features = source.output_features
    targets = features['targets'].vocabulary
    if 'inputs' in features and features['inputs'].vocabulary != targets:
        raise UserError(
            f'inputs and targets of {source.name} have different vocabularies, but the model has one embedding table; '
            'use the same vocabulary for both features'
        )
    return targets


def get_end_id(vocab: seqio.Vocabulary | None) -> int:
    """Returns the id of the end token, or 1 (T5's end token) if there is no vocabulary or it has no end token."""
    return 1 if vocab is None or vocab.eos_id is None else int(vocab.eos_id)


def get_end_ids(vocab: seqio.Vocabulary) -> list[int]:
    """Returns a list with the id of the end token, or [] for a vocabulary without an end token."""
    return [] if vocab.eos_id is None else [int(vocab.eos_id)]


def get_labels(task: seqio.Task) -> tuple[str, ...] | None:
    """Returns the labels listed by the task's postprocessor, or None if it lists no labels."""
    labels = getattr(task.postprocessor, 'labels', None)
    return tuple(labels) if labels else None


def get_vocabulary_record(vocab: seqio.Vocabulary) -> str:
    """Returns a string that identifies the vocabulary. A run rejects checkpoints with a different vocabulary record.

    Vocabularies loaded from copies of a SentencePiece file have the same record, although their paths differ and they
    are not equal (`==`).
    """
    text = getattr(vocab, 'sp_model', None)
    if not isinstance(text, bytes):
        # Without a model file, the class and the words or token texts identify the vocabulary.
        texts = [] if base_vocabulary.is_byte_vocabulary(vocab) else get_token_texts(vocab)
        if hasattr(vocab, 'words'):
            texts = [word.encode() for word in vocab.words]
        text = b'\n'.join((type(vocab).__name__.encode(), *texts))
    digest = hashlib.sha256(text + f'|{vocab.vocab_size}|{vocab.extra_ids}'.encode()).hexdigest()[:16]
    return f'{digest} of {vocab.vocab_size} ids'


def check_vocabulary_size(name: str, vocab: seqio.Vocabulary, model_vocab_size: int) -> None:
    """Raises UserError if the vocabulary of the task `name` is larger than the model's embedding table."""
    size = vocab.vocab_size
    if size > model_vocab_size:
        raise UserError(
            f'VOCAB_SIZE must be at least {size}, the size of the vocabulary of {name}, got {model_vocab_size}; '
            f'set VOCAB_SIZE to {-(-size // 128) * 128} or use a smaller vocabulary'
        )


def save_vocabulary(vocab: seqio.Vocabulary, folder: epath.PathLike) -> bool:
    """Writes a vocabulary to `folder`. If the vocabulary has a custom class, returns False without writing files."""
    with tempfile.TemporaryDirectory() as temporary:
        local = pathlib.Path(temporary)
        settings = _write_vocabulary_files(vocab, local)
        if settings is None:
            return False
        target = epath.Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for file in sorted(local.iterdir()):
            (target / file.name).write_bytes(file.read_bytes())
        # Write this file last: a folder without it is incomplete.
        (target / INDEX_FILE).write_text(json.dumps(settings) + '\n')
    return True


def _write_vocabulary_files(vocab: Any, folder: pathlib.Path) -> dict[str, Any] | None:
    """Writes the vocabulary files. Returns the settings for loading the files; None for an unknown vocabulary class."""
    if isinstance(vocab, Vocabulary) and (settings := vocab.save(folder)):
        return settings
    # The other classes of remixer_tasks have the attributes of seqio's classes.
    if model := getattr(vocab, 'sentencepiece_model_file', None):
        int(vocab.vocab_size)  # If the vocabulary has not been used yet, this trains it.
        # Write the original model file, because seqio has added sentinels to `sp_model`.
        (folder / tokenizer_files.SENTENCEPIECE).write_bytes(epath.Path(model).expanduser().read_bytes())
        return {'kind': 'sentencepiece', 'extra_ids': int(vocab.extra_ids)}
    if base_vocabulary.is_byte_vocabulary(vocab):
        return {'kind': 'bytes', 'extra_ids': int(vocab.extra_ids)}
    return None


def build_vocabulary_statements(folder: epath.PathLike) -> str:
    """Returns gin statements that load the vocabulary saved in the MODEL_DIR `folder`."""
    return f"""from remixer_tasks import vocabularies
VOCABULARY = @vocabularies.saved()
vocabularies.saved.folder = {str(folder)!r}
"""


def get_saved_vocabulary_flags(model_dir: epath.PathLike | None) -> list[tuple[str, str]]:
    """Returns gin flags that load the vocabulary saved in MODEL_DIR, or [] if MODEL_DIR contains no vocabulary."""
    if model_dir is None or not (epath.Path(model_dir) / VOCABULARY_FOLDER / INDEX_FILE).is_file():
        return []
    return build_vocabulary_flags('saved', folder=str(epath.Path(model_dir) / VOCABULARY_FOLDER))


def build_vocabulary_flags(function: str, **arguments: Any) -> list[tuple[str, str]]:
    """Returns gin flags that set VOCABULARY to the result of a function in `remixer_tasks.vocabularies`."""
    path = f'remixer_tasks.vocabularies.{function}'
    return [('VOCABULARY', f'@{path}()'), *((f'{path}.{name}', repr(value)) for name, value in arguments.items())]


def count_bytes_per_token(vocabulary: Any) -> np.ndarray:
    """Returns the number of bytes in each token's text (0 for sentinels) as an [ids] int32 array."""
    counts: np.ndarray = np.asarray([len(text) for text in get_token_texts(vocabulary)], np.int32)
    counts[base_vocabulary.count_ordinary_ids(vocabulary) :] = 0
    return counts


def get_token_texts(vocabulary: Any) -> list[bytes]:
    """Returns the text of each token id as bytes, including the space before a word; b'' for special ids."""
    texts = getattr(vocabulary, 'token_texts', None)
    if texts is not None:
        return list(texts)
    model: Any = getattr(vocabulary, 'tokenizer', None)
    count, extra = vocabulary.vocab_size, vocabulary.extra_ids
    # A byte vocabulary decodes sentinels to the empty string.
    sentinels = [vocabulary.decode([index]).strip().encode() for index in range(count - extra, count)]
    if base_vocabulary.is_byte_vocabulary(vocabulary):
        return [b'', b'', b'', *(bytes([byte]) for byte in range(256)), *sentinels]
    if not hasattr(model, 'IdToPiece'):
        special = (0, vocabulary.eos_id, vocabulary.unk_id)
        return [b'' if index in special else f' {vocabulary.decode([index])}'.encode() for index in range(count)]
    texts = []
    for index in range(count - extra):
        piece = '' if model.IsControl(index) or model.IsUnknown(index) else model.IdToPiece(index)
        is_byte = BYTE_PIECE.fullmatch(piece)
        texts.append(bytes([int(piece[3:5], 16)]) if is_byte else piece.replace(SPACE, ' ').encode())
    return [*texts, *sentinels]


def list_pieces(vocabulary: Any) -> list[str]:
    """Returns the piece of each id in SentencePiece notation (U+2581 is a space, and `<extra_id_0>` is a sentinel).

    Raises UserError unless the vocabulary is a SentencePiece or byte vocabulary.
    """
    count = base_vocabulary.count_ordinary_ids(vocabulary)
    sentinels = vocabulary.vocab_size - count
    model: Any = getattr(vocabulary, 'tokenizer', None)
    if hasattr(model, 'IdToPiece'):
        names = [model.IdToPiece(index) for index in range(count)]
    elif base_vocabulary.is_byte_vocabulary(vocabulary):
        names = ['<pad>', '</s>', '<unk>', *(f'<0x{byte:02X}>' for byte in range(256))][:count]
    else:
        raise UserError(
            f'INITIAL_VOCABULARY must be a SentencePiece or byte vocabulary, got {type(vocabulary).__name__}, whose '
            'embeddings cannot be matched by piece'
        )
    return [*names, *(f'<extra_id_{sentinels - 1 - index}>' for index in range(sentinels))]
