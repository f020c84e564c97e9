"""Loads Hugging Face's `tokenizer.json`, and BERT's WordPiece vocabulary, with the library `tokenizers`.

A malicious file can make the library abort, panic or hang. Therefore only components in `ALLOWED_COMPONENTS`, strings
of limited length and known regular expressions are accepted, and a child process with a time limit loads the file
first.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from remixer_t5x import tokenizer_files, untrusted_files
from remixer_t5x.base_vocabulary import Vocabulary
from remixer_t5x.errors import UserError, import_optional, root_cause_message

# Accepted types of each component of a tokenizer.json.
ALLOWED_COMPONENTS = {
    'model': 'BPE Unigram WordPiece WordLevel',
    'normalizer': 'Sequence NFC NFD NFKC NFKD Lowercase Strip StripAccents Prepend Replace BertNormalizer',
    'pre_tokenizer': 'Sequence Split ByteLevel Metaspace BertPreTokenizer Whitespace WhitespaceSplit Digits '
    'Punctuation',
    'post_processor': 'Sequence TemplateProcessing BertProcessing RobertaProcessing ByteLevel',
    'decoder': 'Sequence ByteLevel Metaspace WordPiece BPEDecoder Replace ByteFallback Fuse Strip',
}
# Regular expressions of published tokenizers: GPT-2, Llama 3, Qwen 2, digits and white space.
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r'[^\r\n\p{L}\p{N}]?\p{L}+'
_REST = r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
REGEXES = frozenset({
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    rf'{_SUFFIXES}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}',
    rf'{_SUFFIXES}|{_WORDS}|\p{{N}}|{_REST}',
    *(r'\p{N}{1,3}', r'\p{N}', r'\s+', r'[0-9]', r'\d'),
})  # fmt: skip
# Limits in a tokenizer.json on the length of strings and lists, the size of numbers, and the nesting depth.
MAX_TEXT, MAX_ID, MAX_DEPTH = 1000, 10_000_000, 8
# Maximum factor by which the Replace components in a section of tokenizer.json may lengthen a text.
MAX_GROWTH = 1000
TIME_LIMIT = 60
# The child process prints the ids of a text with and without the special tokens that the file adds.
_TRIAL_SCRIPT = """
import json, sys
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_str(sys.stdin.read())
ids = [tokenizer.encode(' A b\\u00e9\\u4f60 12\\n', add_special_tokens=special).ids for special in (True, False)]
for row in ids: tokenizer.decode(row)
print(json.dumps(ids))
"""
CLS, SEP, UNKNOWN, PAD, MASK = '[CLS]', '[SEP]', '[UNK]', '[PAD]', '[MASK]'
# Maps attributes of the normalizer to the corresponding keys of tokenizer_config.json.
SETTINGS = {
    'lowercase': 'do_lower_case',
    'strip_accents': 'strip_accents',
    'handle_chinese_chars': 'tokenize_chinese_chars',
}


@functools.cache
def list_byte_characters() -> tuple[str, ...]:
    """Returns the characters that represent the 256 bytes in GPT-2's pieces; a printable byte represents itself."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return tuple(chr(byte) if byte in printed else chr(next(others)) for byte in range(256))


class HuggingFaceTokenizer(Vocabulary):
    """The vocabulary of a `tokenizer.json`. Encoded texts begin with the special tokens that the file adds.

    A start token that is also the end token is omitted, because decoding would stop there.

    Two vocabularies with the same pieces are equal.
    """

    def __init__(self, path: str, end: str | None = None, shifted: bool = False):
        """Stores the arguments; the file is read at first use.

        Args:
            path: a tokenizer.json; tokenizer_config.json is read from the same folder.
            end: the end token, such as '</s>'; None uses the last token that the file adds after a text, or `eos_token`
                in tokenizer_config.json.
            shifted: whether to add 1 to the ids, for files in which id 0 is not padding. Otherwise, the token with id 0
                would have no weight in the loss.
        """
        super().__init__()
        self._path, self._end, self.shifted = os.path.expanduser(path), end, shifted

    @functools.cached_property
    def _loaded_tokenizer(self) -> tuple[Any, list[int], list[int]]:
        return load_tokenizer(self._path)

    @property
    def _tokenizer(self) -> Any:
        return self._loaded_tokenizer[0]

    @functools.cached_property
    def words(self) -> tuple[str, ...]:
        """The pieces in the order of their ids; '' for unused ids."""
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        pieces = [''] * (max(ids.values()) + 1 + self.shifted)
        for piece, index in ids.items():
            pieces[index + self.shifted] = piece
        return tuple(pieces)

    @functools.cached_property
    def _special_tokens(self) -> dict[str, int]:
        """Maps each special token to its id."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: index + self.shifted for index, token in added.items() if token.special}

    @functools.cached_property
    def eos_id(self) -> int:
        tokenizer, _, after = self._loaded_tokenizer
        end = self._end or tokenizer_files.read_tokenizer_config(pathlib.Path(self._path).parent).get('eos_token')
        end = end.get('content') if isinstance(end, dict) else end
        index = tokenizer.token_to_id(end) if isinstance(end, str) else None
        if self._end is None and after:
            index = after[-1]
        if index is None:
            raise UserError(f'{self._path} has no end token {end!a:.60}; set vocabularies.huggingface_tokenizer.end')
        is_padding = 0 in tokenizer.get_added_tokens_decoder() or 'pad' in (tokenizer.id_to_token(0) or '').lower()
        if not self.shifted and (index == 0 or not is_padding):
            raise UserError(
                f'{self._path}: id 0 must be padding, got {tokenizer.id_to_token(0)!a:.60}; set '
                'vocabularies.huggingface_tokenizer.shifted = True'
            )
        return int(index) + self.shifted

    @functools.cached_property
    def _start_ids(self) -> list[int]:
        """The ids that the tokenizer prepends to a text, without the end token, because decoding would stop at it."""
        _, before, _ = self._loaded_tokenizer
        return [index + self.shifted for index in before if index + self.shifted != self.eos_id]

    @property
    def bos_id(self) -> int | None:
        return self._start_ids[0] if self._start_ids else None

    @property
    def unk_id(self) -> int:
        return self._special_tokens.get('[UNK]', self._special_tokens.get('<unk>', self.eos_id))

    @property
    def mask_id(self) -> int:
        """The id of the mask token, or the last id if the file has none."""
        return self._special_tokens.get('[MASK]', self._special_tokens.get('<mask>', len(self.words) - 1))

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The ids of padding, the end token, and the tokens that the file flags as special."""
        return tuple({self.pad_id, self.eos_id, *self._special_tokens.values()})

    @property
    def continuation_prefix(self) -> str | None:
        """The prefix of pieces that continue a word, such as WordPiece's '##'; None if the model has none."""
        return getattr(self._tokenizer.model, 'continuing_subword_prefix', None)

    @functools.cached_property
    def token_texts(self) -> list[bytes]:
        """The text of each id as bytes, with the space before a word; empty for special and unknown tokens."""
        if 'ByteLevel' in str(json.loads(self._tokenizer.to_str()).get('decoder')):
            byte_of_letter = {letter: bytes([byte]) for byte, letter in enumerate(list_byte_characters())}
            added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
            texts = [
                piece.encode()
                if piece in added
                else b''.join(byte_of_letter.get(letter, letter.encode()) for letter in piece)
                for piece in self.words
            ]
        else:
            pieces: Sequence[str] = self.words
            if prefix := self.continuation_prefix:
                pieces = [each.removeprefix(prefix) if each.startswith(prefix) else f' {each}' for each in pieces]
            texts = [
                bytes([int(piece[3:5], 16)])
                if re.fullmatch(r'<0x[0-9A-F]{2}>', piece)
                else piece.replace('\u2581', ' ').encode()
                for piece in pieces
            ]
        special = {*self.special_ids, self.unk_id}
        return [b'' if index in special else text for index, text in enumerate(texts)]

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        ids = [*self._start_ids, *(index + self.shifted for index in self.huggingface_ids(text))]
        # Removes id 0, which is padding.
        return [index for index in ids if index]

    def huggingface_ids(self, text: str) -> list[int]:
        """Returns the ids in the file's numbering, without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _decode(self, ids: Sequence[int]) -> str:
        known = [index - self.shifted for index in ids if index > self.pad_id and index != self.eos_id]
        return self._tokenizer.decode(known, skip_special_tokens=True)

    def save(self, folder: pathlib.Path) -> dict[str, Any]:
        self._tokenizer.save(str(folder / tokenizer_files.TOKENIZER))
        return {'kind': 'huggingface', 'end': self.words[self.eos_id], 'shifted': self.shifted}

    @property
    def special_ids_in_file(self) -> dict[str, int | None]:
        """The file's ids of the padding, first and last token; None for a missing token."""
        roles = {
            'pad': self._special_tokens.get('[PAD]', self._special_tokens.get('<pad>')),
            'cls': self.bos_id,
            'sep': self.eos_id,
        }
        return {role: None if index is None else index - self.shifted for role, index in roles.items()}

    @property
    def special_token_names(self) -> dict[str, str]:
        """Maps keys of tokenizer_config.json, such as `pad_token`, to special tokens."""
        roles = {'pad_token': ('[PAD]', '<pad>'), 'unk_token': ('[UNK]', '<unk>'), 'mask_token': ('[MASK]', '<mask>')}
        names = {role: name for role, choices in roles.items() for name in choices if name in self._special_tokens}
        end = self.words[self.eos_id]
        first = {} if self.bos_id is None else {'cls_token': self.words[self.bos_id], 'sep_token': end}
        return {**names, **first, 'bos_token': first.get('cls_token', end), 'eos_token': end}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HuggingFaceTokenizer) and self.words == other.words

    def __hash__(self) -> int:
        return hash((type(self), self._path))


def load_tokenizer(path: str) -> tuple[Any, list[int], list[int]]:
    """Returns the tokenizer, and the special ids that the tokenizer adds before and after a text."""
    tokenizers = import_optional('tokenizers', path, 'tokenizers')
    content = untrusted_files.read_json_object(path)
    text = json.dumps(select_supported_components(content, path))
    try:
        trial = subprocess.run(
            [sys.executable, '-c', _TRIAL_SCRIPT],
            input=text,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            check=True,
        )
        whole, plain = json.loads(trial.stdout)
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f'the package tokenizers took more than {TIME_LIMIT} seconds to parse {path}; download the file again'
        ) from error
    except Exception as error:
        # `tokenizers` raises plain Exceptions.
        lines = (getattr(error, 'stderr', None) or str(error)).strip().splitlines()
        raise UserError(f'{path} cannot be read as a tokenizer ({lines[-1] if lines else error!s:.200})') from error
    for piece, index in tokenizer.get_vocab(with_added_tokens=True).items():
        if len(piece) > MAX_TEXT or index >= MAX_ID:
            raise UserError(f'{path}: the piece {piece!a:.60} or its id {index} is too long; download the file again')
    start = next(index for index in range(len(whole) + 1) if whole[index : index + len(plain)] == plain)
    return tokenizer, whole[:start], whole[start + len(plain) :]


def select_supported_components(content: dict[str, Any], path: str) -> dict[str, Any]:
    """Returns the supported components of a tokenizer.json. Raises UserError if a component is not allowed."""
    for section, allowed in ALLOWED_COMPONENTS.items():
        growth = 1.0
        for component in _iterate_components(content.get(section)):
            kind = component.get('type')
            if section == 'model' and kind is None:
                # Older files do not specify the type of the model.
                kind = 'BPE' if 'merges' in component else 'WordPiece'
            if kind not in allowed.split():
                raise UserError(f'{path}: {section} must be one of {allowed.replace(" ", ", ")}, got {kind!a:.60}')
            pattern = component.get('pattern')
            if isinstance(pattern, dict) and pattern.get('Regex', r'\s+') not in REGEXES:
                raise UserError(f'{path}: {section} has an unsupported regular expression: {pattern["Regex"]!a:.80}')
            if kind == 'Replace':
                replaced = pattern.get('String') if isinstance(pattern, dict) else None
                growth *= max(1.0, len(str(component.get('content'))) / max(1, len(str(replaced or ' '))))
                if growth > MAX_GROWTH:
                    raise UserError(f'{path}: {section} replaces text with much longer text; download the file again')
            for name, value in component.items():
                if name not in ('vocab', 'merges') and not _is_small_setting(value):
                    raise UserError(
                        f'{path}: {name} in {section} is too long, got {value!a:.60}; download the file again'
                    )
    model: Any = content.get('model')
    if not isinstance(model, dict):
        raise UserError(f'{path} has no model; download the file again')
    if model.get('dropout') or model.get('max_input_chars_per_word', 0) > MAX_TEXT:
        raise UserError(f'{path}: dropout must be 0 and max_input_chars_per_word at most {MAX_TEXT}')
    sections = {section: content.get(section) for section in ALLOWED_COMPONENTS}
    added = content.get('added_tokens') or []
    return {'version': '1.0', 'truncation': None, 'padding': None, 'added_tokens': added, **sections}


def _iterate_components(part: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yields a component and, for a Sequence, its nested components."""
    if part is None:
        return
    part = part if isinstance(part, dict) and depth < MAX_DEPTH else {'type': str(part)}
    yield part
    for value in part.values() if part.get('type') == 'Sequence' else ():
        for item in value if isinstance(value, list) else ():
            yield from _iterate_components(item, depth + 1)


def _is_small_setting(value: Any, depth: int = 0) -> bool:
    """Returns whether a setting contains only short strings and lists and small numbers (MAX_TEXT, MAX_ID)."""
    if isinstance(value, dict | list):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return (
            depth < MAX_DEPTH and len(items) <= MAX_TEXT and all(_is_small_setting(item, depth + 1) for item in items)
        )
    return len(value) <= MAX_TEXT if isinstance(value, str) else value is None or abs(value) <= MAX_ID


class WordPieceVocabulary(HuggingFaceTokenizer):
    """BERT's vocabulary. Encoded texts begin with `[CLS]`, as in BERT's training; tasks append `[SEP]`.

    Two vocabularies with the same pieces are equal.
    """

    @functools.cached_property
    def _loaded_tokenizer(self) -> tuple[Any, list[int], list[int]]:
        tokenizer = load_wordpiece_tokenizer(self._path)
        return tokenizer, [tokenizer.token_to_id(CLS)], [tokenizer.token_to_id(SEP)]

    def save(self, folder: pathlib.Path) -> dict[str, Any]:
        super().save(folder)
        return {'kind': 'wordpiece'}

    @property
    def mask_id(self) -> int:
        return self._tokenizer.token_to_id(MASK)

    @property
    def special_ids(self) -> tuple[int, ...]:
        return tuple(self._tokenizer.token_to_id(piece) for piece in (PAD, CLS, SEP, MASK))

    @property
    def unk_id(self) -> int:
        return self._tokenizer.token_to_id(UNKNOWN)


def load_wordpiece_tokenizer(path: str) -> Any:
    """Loads the tokenizer of a `tokenizer.json`, or of BERT's older `vocab.txt`.

    Also applies the settings and added tokens in other files of the folder.
    """
    tokenizers = import_optional('tokenizers', path, 'tokenizers')
    if not os.path.isfile(path):
        raise UserError(f'{path} must be an existing file; use the tokenizer.json or vocab.txt of a BERT model')
    folder = pathlib.Path(path).parent
    config = tokenizer_files.read_tokenizer_config(folder)
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
            raise UserError(f'{path} cannot be read as a tokenizer ({root_cause_message(error)})') from error
    else:
        tokenizer, _, _ = load_tokenizer(path)
    ids = {piece: tokenizer.token_to_id(piece) for piece in (PAD, UNKNOWN, CLS, SEP, MASK)}
    if ids[PAD] != 0 or None in ids.values():
        raise UserError(
            f"{path} must contain BERT's special tokens, {PAD} with id 0, got {ids}; use the tokenizer of a BERT model"
        )
    for ours, theirs in SETTINGS.items():
        value = getattr(tokenizer.normalizer, ours, None)
        if config.get(theirs) is not None and value is not None and bool(value) != bool(config[theirs]):
            raise UserError(
                f'{path} has {ours} {value}, but tokenizer_config.json has {theirs} {config[theirs]}; make them equal'
            )
    loaded = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    entries = tokenizer_files.read_added_token_entries(folder)
    for token, entry in sorted(entries.items(), key=lambda item: item[1]['id']):
        if token not in loaded:
            # By default, the normalizer is applied to the text before the token is matched, as in transformers.
            flags = {'normalized': bool(entry.get('normalized', True))}
            flags |= {flag: bool(entry.get(flag)) for flag in ('special', 'single_word', 'lstrip', 'rstrip')}
            tokenizer.add_tokens([tokenizers.AddedToken(token, **flags)])
        if tokenizer.token_to_id(token) != entry['id']:
            raise UserError(
                f'{folder} assigns id {entry["id"]} to {token!r:.60}, but its vocabulary assigns '
                f'{tokenizer.token_to_id(token)}; correct its files'
            )
    return tokenizer
