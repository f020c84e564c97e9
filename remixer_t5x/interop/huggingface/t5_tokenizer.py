"""The files of Hugging Face's tokenizers for T5 (a SentencePiece model) and ByT5 (bytes), and our vocabularies.

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

MODEL, BOTH, CONFIG = 'spiece.model', tokenizer_files.BOTH, tokenizer_files.CONFIG
BYTES_TOKENIZER = 'ByT5Tokenizer'
# Reading adds each as a piece of the vocabulary.
MAX_SENTINELS = 10_000
# The number that T5Tokenizer and ByT5Tokenizer add by default.
DEFAULT_SENTINELS = 100
_SENTINEL = re.compile(r'<extra_id_(\d+)>')
# Names of ids that every T5 has.
_SPECIAL = ('<pad>', '</s>', '<unk>', '<s>')


def read(folder: pathlib.Path, file: str | None = None) -> Tokenizer:
    """The vocabulary of the tokenizer in `folder`.

    Args:
        folder: Hugging Face's folder.
        file: a SentencePiece model to use instead of the folder's.

    Raises:
        UserError: the folder has no vocabulary that we can read, and `file` is None.
    """
    safe_paths.check_inside(folder)
    config = tokenizer_files.config(folder)
    if config.get('tokenizer_class') == BYTES_TOKENIZER and file is None:
        return Tokenizer('byte', {'extra_ids': _count_byte_sentinels(config, folder)}, 'the vocabulary of bytes')
    model = next((folder / name for name in (MODEL, BOTH) if (folder / name).is_file()), None)
    if file is None and model is None:
        raise UserError(
            f'{folder} has neither {MODEL} nor {BOTH}, and ids mean nothing without one; give '
            f'--vocabulary=/path/to/{MODEL} '
            '(T5, T5 v1.1 and FLAN-T5 share one: gs://t5-data/vocabs/cc_all.32000/sentencepiece.model)'
        )
    path = file or str(model)
    extra_ids = _count_piece_sentinels(config, folder, None if file else model)
    return Tokenizer('sentencepiece', {'path': path, 'extra_ids': extra_ids}, path)


def write(vocabulary: Any, folder: pathlib.Path) -> str:
    """Writes the files of a tokenizer that gives `vocabulary`'s ids. Returns one line that says what it wrote.

    vocabulary: a seqio vocabulary. Nothing is written if it is neither SentencePiece nor bytes.
    """
    sentinels = vocabulary.extra_ids
    special = {'eos_token': '</s>', 'unk_token': '<unk>', 'pad_token': '<pad>', 'extra_ids': sentinels}
    special['additional_special_tokens'] = [f'<extra_id_{i}>' for i in range(sentinels)]
    model = getattr(vocabulary, 'sentencepiece_model_file', None)
    if model:
        # Copy the file, because in memory seqio has added its sentinels to the pieces.
        (folder / MODEL).write_bytes(epath.Path(model).expanduser().read_bytes())
        _write(folder, {'tokenizer_class': 'T5Tokenizer', **special})
        return f'{MODEL} and {CONFIG} ({vocabulary.vocab_size:,} ids, {sentinels} of them sentinels)'
    if type(vocabulary).__name__ == 'ByteVocabulary':
        # ByT5Tokenizer gives the tokens of the list ids in its order, and <extra_id_0> is our last id.
        names = special.pop('additional_special_tokens')[::-1]
        _write(folder, {'tokenizer_class': BYTES_TOKENIZER, **special, 'extra_special_tokens': names})
        return f'{CONFIG} (bytes, {sentinels} sentinels)'
    return f'no tokenizer: Hugging Face has none for {type(vocabulary).__name__}'


def _write(folder: pathlib.Path, config: Mapping[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + '\n', encoding='utf-8')


def _count_byte_sentinels(config: Mapping[str, Any], folder: pathlib.Path) -> int:
    """The sentinels of a ByT5: 0 if the tokenizer counts them up from the first id behind the bytes, as it does unless
    told otherwise. A ByT5 was pretrained with the last bytes instead, which `vocabularies.byte` uses without extra ids.
    """
    names = config.get('extra_special_tokens') or config.get('additional_special_tokens') or []
    tokens = {name: index for index, name in enumerate(name for name in names if _SENTINEL.fullmatch(str(name)))}
    tokens |= {name: i - 259 for name, i in tokenizer_files.added_tokens(folder).items() if _SENTINEL.fullmatch(name)}
    _check_added_tokens(set(names) - set(tokens), folder)
    if not tokens or tokens == {f'<extra_id_{index}>': index for index in range(len(tokens))}:
        return 0
    return _count_descending(tokens, 0, folder)


def _count_piece_sentinels(config: Mapping[str, Any], folder: pathlib.Path, path: pathlib.Path | None) -> int:
    """The sentinels behind the pieces of the model at `path`; None for a model that is not in `folder`."""
    pieces = [] if path is None else _pieces(path)
    added = {name: index for name, index in tokenizer_files.added_tokens(folder).items() if name not in _SPECIAL}
    sentinels = {name: index for name, index in added.items() if _SENTINEL.fullmatch(name)}
    if path is not None:
        _check_added_tokens(set(added) - set(sentinels) - set(pieces), folder)
        if any(_SENTINEL.fullmatch(piece.lstrip('▁')) for piece in pieces):
            return 0
        if sentinels:
            return _count_descending(sentinels, len(pieces), folder)
    count = config.get('extra_ids')
    if count is None:
        return len(set(_SENTINEL.findall(json.dumps(config)))) or DEFAULT_SENTINELS
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_SENTINELS:
        raise UserError(f'{folder / CONFIG} says extra_ids {count!a:.60}; it takes a number from 0 to {MAX_SENTINELS}')
    return count


def _pieces(path: pathlib.Path) -> list[str]:
    """The pieces of a model, without the sentinels that tokenizer.json has behind them."""
    if path.name == BOTH:
        model = untrusted_files.read_object(path).get('model')
        vocabulary = model.get('vocab') if isinstance(model, dict) else None
        rows = vocabulary if isinstance(vocabulary, list) else []
        pieces = [str(row[0]) for row in rows if isinstance(row, list) and row]
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
            f'{folder} has the added token {other[0]!r:.60} ({len(other)} of them), which our vocabulary cannot have; '
            'give a model without added tokens'
        )


def _count_descending(sentinels: Mapping[str, int], first: int, folder: pathlib.Path) -> int:
    """The number of sentinels. Raises UserError unless <extra_id_0> is the last id and the others count down to
    `first`.
    """
    count = len(sentinels)
    for name, index in sentinels.items():
        expected = first + count - 1 - int(_SENTINEL.fullmatch(name)[1])  # type: ignore[index]
        if index != expected:
            raise UserError(
                f'{folder} gives {name} the id {index}, and our vocabulary {expected}; give a model whose sentinels '
                'count down from its last id'
            )
    return count
