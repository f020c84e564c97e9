"""Finds the sentinels <extra_id_0>, <extra_id_1>, ... of a vocabulary.

T5 counts sentinels down from the last id. mT5's sentinels are the last pieces of its SentencePiece model; ByT5's are
the last byte values, which do not occur in UTF-8.
"""

from __future__ import annotations

from typing import Any

# Number of byte values that do not occur in UTF-8, 0xF5 to 0xFF.
UNUSED_BYTES = 11


def find_sentinel_range(vocabulary: Any) -> tuple[int, int]:
    """Returns the id of <extra_id_0> and the number of sentinels; the ids of the others count down from this id."""
    return vocabulary.vocab_size - 1, getattr(vocabulary, 'sentinels', vocabulary.extra_ids)


def count_ordinary_ids(vocabulary: Any) -> int:
    """Returns the number of ids below the sentinels."""
    first, count = find_sentinel_range(vocabulary)
    return first + 1 - count


def build_sentinel_regex(count: int) -> str:
    """Returns a regular expression, for Python and TensorFlow, that matches the names of `count` sentinels."""
    return f'<extra_id_({"|".join(map(str, range(count)))})>'
