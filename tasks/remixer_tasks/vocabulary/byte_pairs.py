"""Implements GPT-2's byte-level byte-pair encoding (Radford et al. 2019, section 2.2), loaded from tokenizer files.

Ids are GPT-2's ids plus one, because id 0 is padding.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import os
import pathlib
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from remixer_t5x import tokenizer_files, untrusted_files
from remixer_t5x.base_vocabulary import Vocabulary
from remixer_t5x.errors import UserError

VOCABULARY, MERGES, TOKENIZER = 'vocab.json', 'merges.txt', tokenizer_files.TOKENIZER
_ADVICE = 'use the folder of a GPT-2 model'
# Supported settings of the components in tokenizer.json.
_MODEL: dict[str, Any] = {
    'type': 'BPE',
    'dropout': None,
    **dict.fromkeys(('continuing_subword_prefix', 'end_of_word_suffix'), (None, '')),
    **dict.fromkeys(('byte_fallback', 'ignore_merges'), (None, False)),
}
_PRE_TOKENIZER = {'type': 'ByteLevel', 'add_prefix_space': False, 'use_regex': (None, True)}
_CONFIG = {'add_prefix_space': (None, False), 'add_bos_token': (None, False)}
# Matches a word in a string in which each character is replaced by its class: letter (L), number (N), space (_), other
# white space (S), or any other character (O).
_WORD = re.compile(r'_?L+|_?N+|_?O+|[_S]+(?![^_S])|[_S]+')
_CONTRACTION = re.compile(r"'(?:s|t|re|ve|m|ll|d)")

# Unicode's White_Space characters except the space; str.isspace() also accepts four control characters.
_WHITE_SPACE = frozenset(
    '\t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000' + ''.join(map(chr, range(0x2000, 0x200B)))
)


def _classify_character(character: str) -> str:
    if character == ' ':
        return '_'
    if character in _WHITE_SPACE:
        return 'S'
    return {'L': 'L', 'N': 'N'}.get(unicodedata.category(character)[0], 'O')


def split_words(text: str) -> Iterator[str]:
    classes, position = ''.join(map(_classify_character, text)), 0
    while position < len(text):
        word = _CONTRACTION.match(text, position) or _WORD.match(classes, position)
        assert word is not None
        yield text[position : word.end()]
        position = word.end()


@functools.cache
def list_byte_characters() -> tuple[str, ...]:
    """Returns the characters that represent the 256 bytes in tokenizer files; a printable byte represents itself."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return tuple(chr(byte) if byte in printed else chr(next(others)) for byte in range(256))


class BytePairs(Vocabulary):
    """The vocabulary of a GPT-2 tokenizer; the files are read at first use.

    `folder` contains tokenizer.json, or vocab.json and merges.txt. `end_id` is GPT-2's id of <|endoftext|>; `eos_id` is
    `end_id` + 1.
    """

    def __init__(self, folder: str, end_id: int):
        super().__init__()
        self.folder, self.end_id = os.path.expanduser(folder), end_id

    @functools.cached_property
    def _file_contents(self) -> tuple[dict[str, int], dict[tuple[str, ...], int], dict[str, int]]:
        """Returns three dicts: GPT-2's ids of the pieces, the ranks of pairs, and GPT-2's ids of the added tokens."""
        folder = pathlib.Path(self.folder)
        if (folder / TOKENIZER).is_file():
            tokenizer = untrusted_files.read_json_object(folder / TOKENIZER)
            where = str(folder / TOKENIZER)
            tokenizer_files.check_tokenizer_settings(tokenizer.get('model'), _MODEL, f'{where}, model')
            tokenizer_files.check_tokenizer_settings(
                tokenizer.get('pre_tokenizer'), _PRE_TOKENIZER, f'{where}, pre_tokenizer'
            )
            tokenizer_files.check_tokenizer_settings(tokenizer, {'normalizer': None}, where)
            pieces: Any = tokenizer['model'].get('vocab')
            merges: Any = tokenizer['model'].get('merges')
        else:
            pieces = untrusted_files.read_json_object(folder / VOCABULARY, _ADVICE)
            merges = untrusted_files.read_text(folder / MERGES, _ADVICE).replace('\r\n', '\n').split('\n')
        if not isinstance(pieces, dict) or not isinstance(merges, list) or not pieces:
            raise UserError(f'the tokenizer in {folder} does not use byte-pair encoding; {_ADVICE}')
        tokenizer_files.check_tokenizer_settings(
            tokenizer_files.read_tokenizer_config(folder), _CONFIG, str(folder / tokenizer_files.CONFIG)
        )
        added = tokenizer_files.read_added_tokens(folder)
        ids = list({**pieces, **added}.values())
        if sorted(map(str, ids)) != sorted(map(str, range(len(ids)))) or not 0 <= self.end_id < len(ids):
            raise UserError(
                f'the token ids in {folder} must be 0 to {len(ids) - 1} without gaps; download the folder again'
            )
        end = next(piece for piece, index in {**pieces, **added}.items() if index == self.end_id)
        pairs = [pair.split(' ') if isinstance(pair, str) else pair for pair in merges]
        ranked = [
            tuple(pair)
            for pair in pairs
            if isinstance(pair, list) and [type(piece) for piece in pair] == [str, str] and pair[0] != '#version:'
        ]
        return pieces, {pair: rank for rank, pair in enumerate(ranked)}, {**added, end: self.end_id}

    @functools.cached_property
    def token_texts(self) -> list[bytes]:
        """The text of each id as bytes; empty for padding and the end token."""
        byte_of_letter = {letter: byte for byte, letter in enumerate(list_byte_characters())}
        pieces, _, added = self._file_contents
        texts = [b''] * (1 + len({**pieces, **added}))
        for piece, index in pieces.items():
            texts[index + 1] = bytes(byte_of_letter[letter] for letter in piece if letter in byte_of_letter)
        for token, index in added.items():
            texts[index + 1] = b'' if index == self.end_id else token.encode()
        return texts

    @property
    def eos_id(self) -> int:
        return self.end_id + 1

    bos_id = unk_id = eos_id

    @property
    def vocab_size(self) -> int:
        return len(self.token_texts)

    def encode(self, text: str) -> list[int]:
        letters, (pieces, _, added) = list_byte_characters(), self._file_contents
        ids: list[int] = []
        for part in self._split_at_added_tokens(text):
            if part in added:
                ids.append(added[part] + 1)
                continue
            for word in split_words(part):
                spelled = ''.join(letters[byte] for byte in word.encode())
                ids += [pieces.get(piece, self.end_id) + 1 for piece in self._merge_pairs(spelled)]
        return ids

    def huggingface_ids(self, text: str) -> list[int]:
        """Encodes a text with GPT-2's original ids, which are not shifted."""
        return [index - 1 for index in self.encode(text)]

    @functools.cached_property
    def _split_at_added_tokens(self) -> Callable[[str], list[str]]:
        return tokenizer_files.make_token_splitter(self._file_contents[2])

    @functools.lru_cache(maxsize=2**16)  # noqa: B019 (a vocabulary lives as long as its process)
    def _merge_pairs(self, word: str) -> list[str]:
        """Splits a word into pieces in O(n log n), with linked lists and a heap of pairs ordered by rank."""
        ranks, parts = self._file_contents[1], list(word)
        before, after = list(range(-1, len(word) - 1)), list(range(1, len(word) + 1))
        heap = [(ranks[pair], position) for position, pair in enumerate(itertools.pairwise(parts)) if pair in ranks]
        heapq.heapify(heap)
        while heap:
            rank, left = heapq.heappop(heap)
            right = after[left]
            # Skips an outdated pair, one of whose pieces has since been merged.
            if not parts[left] or right == len(parts) or ranks.get((parts[left], parts[right])) != rank:
                continue
            parts[left], parts[right] = parts[left] + parts[right], ''
            after[left] = after[right]
            if after[left] < len(parts):
                before[after[left]] = left
            for first in (before[left], left):
                if first >= 0 and after[first] < len(parts):
                    pair = parts[first], parts[after[first]]
                    if pair in ranks:
                        heapq.heappush(heap, (ranks[pair], first))
        return [part for part in parts if part]

    def _decode(self, ids: Sequence[int]) -> str:
        texts = self.token_texts
        return b''.join(texts[index] for index in ids if 0 <= index < len(texts)).decode(errors='replace')

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BytePairs) and (self.folder, self.end_id) == (other.folder, other.end_id)

    def __hash__(self) -> int:
        return hash((type(self), self.folder))

    @property
    def words(self) -> list[str]:
        """The pieces in the order of their ids, as hexadecimal strings, to be stored in checkpoints."""
        return [piece.hex() for piece in self.token_texts]
