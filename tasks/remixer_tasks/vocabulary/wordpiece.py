"""Loads BERT's WordPiece vocabulary, for encoders from Hugging Face, with the library `tokenizers`.

Encoded texts begin with `[CLS]`, as in BERT's training. Tasks append the end token `[SEP]`.
"""

from __future__ import annotations

import functools
import os
import pathlib
from typing import Any

from remixer_t5x import tokenizer_files
from remixer_t5x.errors import UserError, import_optional, reason
from remixer_tasks.vocabulary import huggingface_tokenizer
from remixer_tasks.vocabulary.huggingface_tokenizer import HuggingFaceTokenizer

CLS, SEP, UNKNOWN, PAD, MASK = '[CLS]', '[SEP]', '[UNK]', '[PAD]', '[MASK]'
# Maps attributes of the normalizer to the corresponding keys of tokenizer_config.json.
SETTINGS = {
    'lowercase': 'do_lower_case',
    'strip_accents': 'strip_accents',
    'handle_chinese_chars': 'tokenize_chinese_chars',
}


class WordPieceVocabulary(HuggingFaceTokenizer):
    """BERT's vocabulary in a `tokenizer.json`. Two vocabularies with the same pieces are equal."""

    # No settings are saved, because the path alone restores the vocabulary.
    saved_settings: Any = None

    @functools.cached_property
    def _loaded(self) -> tuple[Any, list[int], list[int]]:
        tokenizer = read(self._path)
        return tokenizer, [tokenizer.token_to_id(CLS)], [tokenizer.token_to_id(SEP)]

    def _piece_id(self, piece: str) -> int:
        index = self._tokenizer.token_to_id(piece)
        if index is None:
            raise UserError(f'{self._path} has no {piece}, which BERT requires; use the tokenizer of a BERT model')
        return int(index)

    @property
    def mask_id(self) -> int:
        return self._piece_id(MASK)

    @property
    def special_ids(self) -> tuple[int, ...]:
        return tuple(self._piece_id(piece) for piece in (PAD, CLS, SEP, MASK))

    @property
    def unk_id(self) -> int:
        return self._piece_id(UNKNOWN)

    def huggingface_ids(self, text: str) -> list[int]:
        """Encodes a text without [CLS] and [PAD]."""
        return [token for token in self._tokenizer.encode(text, add_special_tokens=False).ids if token]


def read(path: str) -> Any:
    """Loads the tokenizer of a `tokenizer.json`, or of BERT's older `vocab.txt`.

    Also applies the settings and added tokens in other files of the folder.
    """
    tokenizers = import_optional('tokenizers', path, 'wordpiece')
    if not os.path.isfile(path):
        raise UserError(f'{path} must be an existing file; use a tokenizer.json or vocab.txt of a BERT model')
    folder = pathlib.Path(path).parent
    config = tokenizer_files.read_config(folder)
    if path.endswith('.txt'):
        try:
            tokenizer = tokenizers.BertWordPieceTokenizer(
                path,
                clean_text=True,
                lowercase=bool(config.get('do_lower_case', True)),
                strip_accents=config.get('strip_accents'),
                handle_chinese_chars=bool(config.get('tokenize_chinese_chars', True)),
            )._tokenizer
        except Exception as error:
            # `tokenizers` raises plain Exceptions.
            raise UserError(f'{path} cannot be read as a tokenizer ({reason(error)})') from error
    else:
        tokenizer, _, _ = huggingface_tokenizer.load_tokenizer(path)
    if missing := [piece for piece in (UNKNOWN, CLS, SEP) if tokenizer.token_to_id(piece) is None]:
        raise UserError(f'{path} has no {missing[0]}, which BERT requires; use the tokenizer of a BERT model')
    if tokenizer.token_to_id(PAD) != 0:
        raise UserError(
            f'{PAD} in {path} must have id 0, got {tokenizer.token_to_id(PAD)}; use the tokenizer of a BERT model'
        )
    for ours, theirs in SETTINGS.items():
        value = getattr(tokenizer.normalizer, ours, None)
        if config.get(theirs) is not None and value is not None and bool(value) != bool(config[theirs]):
            raise UserError(
                f'{path} has {ours} {value}, but tokenizer_config.json has {theirs} {config[theirs]}; make them equal'
            )
    for token, index in sorted(tokenizer_files.read_added_tokens(folder).items(), key=lambda item: item[1]):
        tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False)])
        if tokenizer.token_to_id(token) != index:
            raise UserError(
                f'{folder} assigns id {index} to {token!r:.60}, but its vocabulary assigns '
                f'{tokenizer.token_to_id(token)}; correct its files'
            )
    return tokenizer
