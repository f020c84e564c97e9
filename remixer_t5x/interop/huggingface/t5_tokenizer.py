"""Reads the tokenizer files of T5 (SentencePiece) and ByT5 (bytes).

For T5, transformers 5 only writes tokenizer.json, without the SentencePiece model.
"""

import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from remixer_t5x import tokenizer_files, untrusted_files
from remixer_t5x.base_vocabulary import MAX_SENTINELS
from remixer_t5x.errors import UserError, root_cause_message
from remixer_t5x.interop.huggingface.model_family import Tokenizer

MODEL, TOKENIZER, CONFIG = tokenizer_files.SENTENCEPIECE, tokenizer_files.TOKENIZER, tokenizer_files.CONFIG
# Default number of sentinels of T5Tokenizer and ByT5Tokenizer.
DEFAULT_SENTINELS = 100
_SENTINEL = re.compile(r'<extra_id_(\d+)>')
# Tokens that have the same ids in all T5 models.
_SPECIAL_TOKENS = ('<pad>', '</s>', '<unk>', '<s>')


def find_t5_tokenizer(folder: pathlib.Path, file: str | None = None) -> Tokenizer:
    """Finds the tokenizer in `folder`, or uses the SentencePiece model `file`. Raises UserError if both are missing."""
    untrusted_files.check_links_inside(folder)
    config = tokenizer_files.read_tokenizer_config(folder)
    if config.get('tokenizer_class') == tokenizer_files.BYTES_TOKENIZER and file is None:
        return 'byte', {'extra_ids': _count_byte_sentinels(config, folder)}
    model = next((folder / name for name in (MODEL, TOKENIZER) if (folder / name).is_file()), None)
    if file is None and model is None:
        raise UserError(
            f'{folder} has neither {MODEL} nor {TOKENIZER}; pass vocabulary=/path/to/{MODEL} (--vocabulary in '
            'commands; T5, T5 v1.1 and FLAN-T5 share one: gs://t5-data/vocabs/cc_all.32000/sentencepiece.model)'
        )
    path = file or str(model)
    extra_ids = _count_piece_sentinels(config, folder, None if file else model)
    return 'sentencepiece', {'path': path, 'extra_ids': extra_ids}


def _count_byte_sentinels(config: Mapping[str, Any], folder: pathlib.Path) -> int:
    """Returns the number of sentinels to add to the ByT5 vocabulary.

    Returns 0 for the default tokenizer, whose sentinel ids ascend from the first id after the bytes. Published ByT5
    models were instead pretrained with the last byte ids as sentinels, as in `vocabularies.byte` without extra ids.
    """
    names = config.get('extra_special_tokens') or config.get('additional_special_tokens') or []
    tokens = {name: index for index, name in enumerate(name for name in names if _SENTINEL.fullmatch(str(name)))}
    tokens |= {
        name: i - 259 for name, i in tokenizer_files.read_added_tokens(folder).items() if _SENTINEL.fullmatch(name)
    }
    _check_added_tokens(set(names) - set(tokens), folder)
    if not tokens or tokens == {f'<extra_id_{index}>': index for index in range(len(tokens))}:
        return 0
    return _count_descending_sentinels(tokens, 0, folder)


def _count_piece_sentinels(config: Mapping[str, Any], folder: pathlib.Path, path: pathlib.Path | None) -> int:
    """Counts the sentinels to add to the SentencePiece model; `path` is None if the model is not in `folder`."""
    if path is not None:
        pieces = _read_vocabulary_pieces(path)
        added = tokenizer_files.read_added_tokens(folder)
        sentinels = {name: index for name, index in added.items() if _SENTINEL.fullmatch(name)}
        _check_added_tokens({name for name in added if name not in sentinels and not pieces.get(name)}, folder)
        if any(_SENTINEL.fullmatch(piece.lstrip('▁')) for piece in pieces):
            return 0
        if sentinels:
            return _count_descending_sentinels(sentinels, len(pieces), folder)
    count = config.get('extra_ids')
    if count is None:
        return len(set(_SENTINEL.findall(json.dumps(config)))) or DEFAULT_SENTINELS
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_SENTINELS:
        raise UserError(
            f'{folder / CONFIG} sets extra_ids to {count!a:.60}; it must be an integer from 0 to {MAX_SENTINELS}'
        )
    return count


def _read_vocabulary_pieces(path: pathlib.Path) -> dict[str, bool]:
    """Reads the pieces of a SentencePiece model, or those in tokenizer.json except for sentinels.

    The value of a piece is whether SentencePiece matches it before all others, like transformers' added tokens.
    """
    if path.name == TOKENIZER:
        model = untrusted_files.read_json_object(path).get('model')
        rows = model.get('vocab') if isinstance(model, dict) else None
        names = [str(row[0]) for row in (rows if isinstance(rows, list) else []) if isinstance(row, list) and row]
        return {name: name.startswith('▁<extra_id_') for name in names if not _SENTINEL.fullmatch(name)}
    from sentencepiece import sentencepiece_model_pb2

    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())  # type: ignore[attr-defined]
    except Exception as error:
        # protobuf's DecodeError, or an error of the disk.
        raise UserError(f'{path} cannot be read as a SentencePiece model: {root_cause_message(error)}') from error
    return {piece.piece: piece.type != piece.NORMAL for piece in model.pieces}


def _check_added_tokens(names: Iterable[str], folder: pathlib.Path) -> None:
    other = sorted(name for name in names if name not in _SPECIAL_TOKENS)
    if other:
        raise UserError(
            f'{folder} has the added token {other[0]!r:.60} ({len(other)} in total), which this vocabulary does not '
            'support; use a model without added tokens'
        )


def _count_descending_sentinels(sentinels: Mapping[str, int], first: int, folder: pathlib.Path) -> int:
    """Counts the sentinels. Raises UserError unless the sentinel ids descend, from <extra_id_0> to the id `first`."""
    count = len(sentinels)
    for name, index in sentinels.items():
        expected = first + count - 1 - int(name[len('<extra_id_') : -1])
        if index != expected:
            raise UserError(
                f'{folder} assigns id {index} to {name}, but this vocabulary assigns {expected}; use a model '
                'whose sentinel ids descend from the last id'
            )
    return count
