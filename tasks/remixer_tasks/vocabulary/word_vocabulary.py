"""Words between spaces as a vocabulary, for languages with few of them, such as COGS."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

from remixer_tasks.vocabulary import python_tokenizer

PAD, EOS, UNKNOWN = 0, 1, 2
_SPECIAL = 3


class WordVocabulary(python_tokenizer.PythonTokenizer):
    """T5's ids for padding, end and unknown, then every word of `texts` by the order of characters. No sentinels.

    name: of the texts. texts: called once, at first use. Two vocabularies with the same name and words are equal.
    """

    def __init__(self, name: str, texts: Callable[[], Iterable[str]]):
        super().__init__(extra_ids=0)
        self._name = name
        self._texts = texts

    @functools.cached_property
    def words(self) -> tuple[str, ...]:
        """Words by id, from the first id that is not special."""
        return tuple(sorted({word for text in self._texts() for word in text.split()}))

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words, _SPECIAL)}

    @property
    def bos_id(self) -> int | None:
        return None

    @property
    def eos_id(self) -> int:
        return EOS

    @property
    def unk_id(self) -> int:
        return UNKNOWN

    @property
    def _base_vocab_size(self) -> int:
        return _SPECIAL + len(self.words)

    def _encode(self, s: str) -> list[int]:
        return [self._ids.get(word, UNKNOWN) for word in s.split()]

    def _decode(self, ids: Sequence[int]) -> str:
        """Padding and end are nothing, other ids without a word are '<unk>'."""
        return ' '.join(self._word(index) for index in ids if index not in (PAD, EOS))

    def _word(self, index: int) -> str:
        return self.words[index - _SPECIAL] if _SPECIAL <= index < self._base_vocab_size else '<unk>'

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WordVocabulary):
            return False
        return self is other or (self._name == other._name and self.words == other.words)

    def __hash__(self) -> int:
        return hash((type(self), self._name))

    def __str__(self) -> str:
        return f'WordVocabulary({self._name})'
