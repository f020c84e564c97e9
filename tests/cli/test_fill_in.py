"""What `fill_in` counts."""

import numpy as np
import seqio

from remixer_t5x.cli import fill_in

BYTES = seqio.ByteVocabulary(extra_ids=100)
FIRST = BYTES.vocab_size - 1


def row(*texts):
    """Each text behind its sentinel, in 64 places."""
    ids = [token for index, text in enumerate(texts) for token in (FIRST - index, *BYTES.encode(text))]
    return np.pad([*ids, 1], (0, 63 - len(ids)))


def test_gaps_of_one_word_are_counted():
    targets = np.stack([row(' list', 'two words', 'of', '.', 'x', '__init__'), row('self', '12')])
    predicted = np.stack([row('list', 'word', 'if', 'the', 'the', ', an'), row()])
    # list, of, __init__ and self are words; the last two got something else, and nothing.
    assert fill_in.one_word_gaps(BYTES, targets, predicted) == (4, 2, 1)
    assert fill_in.one_word_gaps(BYTES, targets, targets) == (4, 4, 4)
    assert fill_in.one_word_gaps(BYTES, np.zeros((2, 64), int), predicted) == (0, 0, 0)
