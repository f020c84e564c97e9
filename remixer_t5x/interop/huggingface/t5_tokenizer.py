"""The tokenizer files of T5 (a SentencePiece model) and ByT5 (bytes).

transformers 5 writes a T5's SentencePiece model as tokenizer.json alone.
"""

import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from remixer_t5x import safe_paths, tokenizer_files, untrusted_files
from remixer_t5x.errors import UserError, reason
from remixer_t5x.interop.huggingface.family import Tokenizer

MODEL, BOTH, CONFIG = 'spiece.model', tokenizer_files.TOKENIZER, tokenizer_files.CONFIG
BYTES_TOKENIZER = 'ByT5Tokenizer'
# Each sentinel becomes a piece of the vocabulary, so an untrusted number of them needs a limit.
MAX_SENTINELS = 10_000
# The number that T5Tokenizer and ByT5Tokenizer add by default.
DEFAULT_SENTINELS = 100
_SENTINEL = re.compile(r'<extra_id_(\d+)>')
# Tokens with the same ids in every T5.
_SPECIAL = ('<pad>', '</s>', '<unk>', '<s>')


def read(folder: pathlib.Path, file: str | None = None) -> Tokenizer:
    """Returns the vocabulary of the tokenizer in `folder`.

    Args:
        folder: Hugging Face's folder.
        file: a SentencePiece model to use instead of the folder's.

    Raises:
        UserError: the folder has no vocabulary that we can read, and `file` is None.
    """
    safe_paths.check_inside(folder)
    config = tokenizer_files.read_config(folder)
    if config.get('tokenizer_class') == BYTES_TOKENIZER and file is None:
        return Tokenizer('byte', {'extra_ids': _count_byte_sentinels(config, folder)}, 'the vocabulary of bytes')
    model = next((folder / name for name in (MODEL, BOTH) if (folder / name).is_file()), None)
    if file is None and model is None:
        raise UserError(
            f'{folder} has neither {MODEL} nor {BOTH}; pass --vocabulary=/path/to/{MODEL} '
            '(T5, T5 v1.1 and FLAN-T5 share one: gs://t5-data/vocabs/cc_all.32000/sentencepiece.model)'
        )
    path = file or str(model)
    extra_ids = _count_piece_sentinels(config, folder, None if file else model)
    return Tokenizer('sentencepiece', {'path': path, 'extra_ids': extra_ids}, path)


def write(vocabulary: Any, folder: pathlib.Path) -> str:
    """Writes the files of a tokenizer with the ids of `vocabulary`, and returns a description of them.

    Nothing is written if `vocabulary` is neither SentencePiece nor bytes.
    """
    sentinels = vocabulary.extra_ids
    names = [f'<extra_id_{i}>' for i in range(sentinels)]
    config = {'eos_token': '</s>', 'unk_token': '<unk>', 'pad_token': '<pad>', 'extra_ids': sentinels}
    model = getattr(vocabulary, 'sentencepiece_model_file', None)
    if model:
        # Copies the file, because seqio has added its sentinels to the pieces in memory.
        (folder / MODEL).write_bytes(epath.Path(model).expanduser().read_bytes())
        config |= {'tokenizer_class': 'T5Tokenizer', 'additional_special_tokens': names}
        description = f'{MODEL} and {CONFIG} ({vocabulary.vocab_size:,} ids, {sentinels} of them sentinels)'
    elif type(vocabulary).__name__ == 'ByteVocabulary':
        # ByT5Tokenizer numbers the tokens in the order of the list, and <extra_id_0> is our last id.
        config |= {'tokenizer_class': BYTES_TOKENIZER, 'extra_special_tokens': names[::-1]}
        description = f'{CONFIG} (bytes, {sentinels} sentinels)'
    else:
        return f'no tokenizer: Hugging Face has none for {type(vocabulary).__name__}'
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + '\n', encoding='utf-8')
    return description


def _count_byte_sentinels(config: Mapping[str, Any], folder: pathlib.Path) -> int:
    """The number of extra ids of a ByT5.

    0 if the sentinels count up from the first id after the bytes, which is the tokenizer's default. Published ByT5s
    were pretrained with the last bytes as sentinels instead, as `vocabularies.byte` does without extra ids.
    """
    names = config.get('extra_special_tokens') or config.get('additional_special_tokens') or []
    tokens = {name: index for index, name in enumerate(name for name in names if _SENTINEL.fullmatch(str(name)))}
    tokens |= {name: i - 259 for name, i in tokenizer_files.added_tokens(folder).items() if _SENTINEL.fullmatch(name)}
    _check_added_tokens(set(names) - set(tokens), folder)
    if not tokens or tokens == {f'<extra_id_{index}>': index for index in range(len(tokens))}:
        return 0
    return _count_descending(tokens, 0, folder)


def _count_piece_sentinels(config: Mapping[str, Any], folder: pathlib.Path, path: pathlib.Path | None) -> int:
    """The number of sentinels after the pieces of the model at `path`; None for a model outside of `folder`."""
    if path is not None:
        pieces = _read_pieces(path)
        added = tokenizer_files.added_tokens(folder)
        sentinels = {name: index for name, index in added.items() if _SENTINEL.fullmatch(name)}
        _check_added_tokens(set(added) - set(sentinels) - set(pieces), folder)
        if any(_SENTINEL.fullmatch(piece.lstrip('▁')) for piece in pieces):
            return 0
        if sentinels:
            return _count_descending(sentinels, len(pieces), folder)
    count = config.get('extra_ids')
    if count is None:
        return len(set(_SENTINEL.findall(json.dumps(config)))) or DEFAULT_SENTINELS
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_SENTINELS:
        raise UserError(
            f'{folder / CONFIG} sets extra_ids to {count!a:.60}; it must be a number from 0 to {MAX_SENTINELS}'
        )
    return count


def _read_pieces(path: pathlib.Path) -> list[str]:
    """The pieces of a model, without the sentinels that tokenizer.json lists after them."""
    if path.name == BOTH:
        model = untrusted_files.read_object(path).get('model')
        rows = model.get('vocab') if isinstance(model, dict) else None
        pieces = [str(row[0]) for row in (rows if isinstance(rows, list) else []) if isinstance(row, list) and row]
        return [piece for piece in pieces if not _SENTINEL.fullmatch(piece)]
    import sentencepiece

    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    except (RuntimeError, OSError) as error:
        raise UserError(f'{path} cannot be read as a SentencePiece model: {reason(error)}') from error
    return [processor.IdToPiece(index) for index in range(processor.GetPieceSize())]


def _check_added_tokens(names: Iterable[str], folder: pathlib.Path) -> None:
    other = sorted(name for name in names if name not in _SPECIAL)
    if other:
        raise UserError(
            f'{folder} has the added token {other[0]!r:.60} ({len(other)} in total), which this vocabulary does not '
            'support; use a model without added tokens'
        )


def _count_descending(sentinels: Mapping[str, int], first: int, folder: pathlib.Path) -> int:
    """The number of sentinels. Raises UserError unless <extra_id_0> has the last id and ids descend to `first`."""
    count = len(sentinels)
    for name, index in sentinels.items():
        expected = first + count - 1 - int(name[len('<extra_id_') : -1])
        if index != expected:
            raise UserError(
                f'{folder} assigns id {index} to {name}, but this vocabulary assigns {expected}; use a model '
                'whose sentinels count down from its last id'
            )
    return count
