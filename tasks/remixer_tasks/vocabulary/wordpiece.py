"""BERT's WordPiece vocabulary, with the library `tokenizers`, for encoders from Hugging Face.

The ids equal those in the file. Each text begins with `[CLS]`, as in BERT's training. Tasks append the end token
`[SEP]`.

The library does not load `tokenizer.json` directly, because a malicious file can make the library abort, panic or hang.
Instead, the tokenizer is built from BERT's components with the vocabulary, added tokens and flags in the file. Padding,
truncation and the post-processor are not used.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from remixer_t5x import tokenizer_files, untrusted_files
from remixer_t5x.base_vocabulary import Vocabulary
from remixer_t5x.errors import UserError, reason

CLS, SEP, UNKNOWN, PAD, MASK = '[CLS]', '[SEP]', '[UNK]', '[PAD]', '[MASK]'
# Attributes of the normalizer, and their names in tokenizer_config.json.
SETTINGS = {
    'lowercase': 'do_lower_case',
    'strip_accents': 'strip_accents',
    'handle_chinese_chars': 'tokenize_chinese_chars',
}
_COMPONENTS = {'normalizer': 'BertNormalizer', 'pre_tokenizer': 'BertPreTokenizer', 'model': 'WordPiece'}
_FLAGS = {'clean_text': True, 'handle_chinese_chars': True, 'strip_accents': None, 'lowercase': True}
_TOKEN_FLAGS = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': True, 'special': False}
# The limit is needed because encoding time grows quadratically with word length; published BERT models allow 100.
MAX_WORD = 1000
_MAX_PIECE = 1000


class WordPieceVocabulary(Vocabulary):
    """BERT's vocabulary in a `tokenizer.json`. Vocabularies with the same words are equal."""

    def __init__(self, path: str):
        super().__init__()
        self._path = os.path.expanduser(path)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return read(self._path)

    @functools.cached_property
    def words(self) -> tuple[str, ...]:
        """Pieces by id."""
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        return tuple(sorted(ids, key=ids.__getitem__))

    def _id(self, piece: str) -> int:
        index = self._tokenizer.token_to_id(piece)
        if index is None:
            raise UserError(f'{self._path} has no {piece}, which BERT requires; use the tokenizer of a BERT model')
        return int(index)

    @property
    def bos_id(self) -> int:
        return self._id(CLS)

    @property
    def eos_id(self) -> int:
        return self._id(SEP)

    @property
    def mask_id(self) -> int:
        """The id of the mask token."""
        return self._id(MASK)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Pieces without text."""
        return tuple(self._id(piece) for piece in (PAD, CLS, SEP, MASK))

    @property
    def unk_id(self) -> int:
        return self._id(UNKNOWN)

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        return [self.bos_id, *self.huggingface_ids(text)]

    def huggingface_ids(self, text: str) -> list[int]:
        """Returns the ids without [CLS]. Skips [PAD] in a text, because id 0 is padding."""
        return [token for token in self._tokenizer.encode(text, add_special_tokens=False).ids if token]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)

    def save(self, path: str) -> None:
        """Writes the vocabulary as a `tokenizer.json`."""
        self._tokenizer.save(path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WordPieceVocabulary) and self.words == other.words

    def __hash__(self) -> int:
        return hash(self._path)


def read(path: str) -> Any:
    """Returns the tokenizer of a `tokenizer.json`, or of BERT's older `vocab.txt`, with the settings and the
    added tokens in other files of its folder.

    Raises UserError if the package `tokenizers` is missing, or if the files cannot be read or contradict each other.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            f'{path} is read with the package tokenizers, which cannot be imported ({reason(error)}); '
            "type pip install 'remixer-t5x[wordpiece]'"
        ) from error
    if not os.path.isfile(path):
        raise UserError(f'{path} must be an existing file; use a tokenizer.json or vocab.txt of a BERT model')
    folder = pathlib.Path(path).parent
    config = tokenizer_files.read_config(folder)
    try:
        if path.endswith('.txt'):
            tokenizer = tokenizers.BertWordPieceTokenizer(
                path,
                clean_text=True,
                lowercase=bool(config.get('do_lower_case', True)),
                strip_accents=config.get('strip_accents'),
                handle_chinese_chars=bool(config.get('tokenize_chinese_chars', True)),
            )._tokenizer
        else:
            tokenizer = _read_json(path)
    except UserError:
        raise
    except Exception as error:
        # The library raises plain Exception.
        raise UserError(f'{path} cannot be read as a tokenizer ({reason(error)})') from error
    if tokenizer.token_to_id(UNKNOWN) is None:
        raise UserError(f'{path} has no {UNKNOWN}, which BERT requires; use the tokenizer of a BERT model')
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
    for token, index in sorted(tokenizer_files.added_tokens(folder).items(), key=lambda item: item[1]):
        tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False)])
        if tokenizer.token_to_id(token) != index:
            raise UserError(
                f'{folder} assigns id {index} to {token!r:.60}, but its vocabulary assigns '
                f'{tokenizer.token_to_id(token)}; correct its files'
            )
    return tokenizer


def _read_json(path: str) -> Any:
    """Builds the tokenizer of a `tokenizer.json`.

    Raises UserError if the file is not BERT's, and errors of the library for invalid flags.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    content = untrusted_files.read_object(path)
    parts: dict[str, dict[str, Any]] = {}
    for name, kind in _COMPONENTS.items():
        part = content.get(name)
        parts[name] = part if isinstance(part, dict) else {}
        # Older files do not specify the type of the model.
        allowed = (None, kind) if name == 'model' else kind
        tokenizer_files.check_settings(parts[name], {'type': allowed}, f'{path}, {name}')
    model, added = parts['model'], content.get('added_tokens') or []
    longest, prefix = model.get('max_input_chars_per_word', 100), model.get('continuing_subword_prefix', '##')
    if type(longest) is not int or not 0 < longest <= MAX_WORD:
        raise UserError(f'{path}: max_input_chars_per_word must be 1 to {MAX_WORD}, got {longest!r:.60}; correct it')
    unknown, vocab = model.get('unk_token'), model.get('vocab')
    is_list = isinstance(added, list) and all(isinstance(token, dict) for token in added)
    if not isinstance(vocab, dict) or not is_list:
        raise UserError(f'{path}: vocab must be an object and added_tokens a list of objects; download it again')
    pieces = [*vocab.items(), *((token.get('content'), token.get('id')) for token in added)]
    for piece, index in [*pieces, (unknown, 0), (prefix, 0)]:
        if not isinstance(piece, str) or not 0 < len(piece) <= _MAX_PIECE or type(index) is not int:
            raise UserError(
                f'{path}: {piece!r:.60} with id {index!r:.60} is not a valid vocabulary entry; download it again'
            )
    if {index for _, index in pieces} != {*range(len({*pieces}))} or unknown not in vocab:
        raise UserError(f'{path}: ids must be consecutive from 0 and include {unknown!r:.60}; download it again')
    tokenizer = Tokenizer(
        models.WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=longest, continuing_subword_prefix=prefix)
    )
    flags: dict[str, Any] = {name: parts['normalizer'].get(name, default) for name, default in _FLAGS.items()}
    tokenizer.normalizer = normalizers.BertNormalizer(**flags)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    decoder = content.get('decoder')
    cleanup = not isinstance(decoder, dict) or decoder.get('cleanup') is not False
    tokenizer.decoder = decoders.WordPiece(prefix, cleanup)
    for token in sorted(added, key=lambda token: token['id']):
        values: dict[str, Any] = {name: token.get(name, default) for name, default in _TOKEN_FLAGS.items()}
        tokenizer.add_tokens([AddedToken(token['content'], **values)])
    return tokenizer
