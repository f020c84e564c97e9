"""Span corruption has the properties that T5's paper describes; the tests use no other implementation."""

import numpy as np
import pytest
import seqio
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_tasks import span_corruption as spans
from tests.support.error_lines import error_message

VOCABULARY = seqio.ByteVocabulary(extra_ids=100)
FEATURES = {name: seqio.Feature(VOCABULARY, add_eos=True) for name in ('inputs', 'targets')}
LENGTHS = {'inputs': 512, 'targets': 114}
FIRST_SENTINEL = VOCABULARY.vocab_size - 1


def documents(sizes, seed=0):
    """Returns documents of random token ids without special tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 259, size, dtype=np.int32) for size in sizes]


def dataset(docs):
    values = np.concatenate([*docs, np.zeros(0, np.int32)])
    ragged = tf.RaggedTensor.from_row_lengths(values, np.array([len(doc) for doc in docs], np.int64))
    return tf.data.Dataset.from_tensor_slices(ragged).map(lambda tokens: {'targets': tokens})


def corrupted(docs, lengths=LENGTHS, noise=spans.NoiseSettings(), seed=0):  # noqa: B008 (frozen)
    with seqio.map_seed_manager(seed):
        return list(spans.span_corruption(dataset(docs), lengths, FEATURES, noise).as_numpy_iterator())


def split_at_sentinels(ids):
    """Returns the tokens before the first sentinel, and then those after each sentinel; the last id must be EOS."""
    groups, expected = [[]], FIRST_SENTINEL
    assert ids[-1] == VOCABULARY.eos_id
    for token in ids[:-1]:
        if token > FIRST_SENTINEL - 100:
            assert token == expected, 'sentinels count down from the top of the vocabulary'
            expected -= 1
            groups.append([])
        else:
            groups[-1].append(int(token))
    return groups


def original_tokens(example):
    visible, hidden = split_at_sentinels(example['inputs']), split_at_sentinels(example['targets'])
    assert hidden[0] == [], 'targets start with a sentinel'
    assert len(visible) == len(hidden)
    return [token for pair in zip(hidden, visible, strict=True) for token in (*pair[0], *pair[1])]


def test_the_default_lengths_equal_those_of_t5():
    assert spans.find_longest_segment(512, 114, spans.NoiseSettings(), 100) == 568
    assert spans.NoiseSettings().count_hidden_tokens_and_spans(568) == (85, 28)


def test_the_segment_length_is_found_without_trying_all_lengths():
    message = error_message(corrupted, documents([10]), LENGTHS, spans.NoiseSettings(0.999999))
    assert 'got 114' in message and "'targets': 255500000}" in message and 'a lower NOISE_DENSITY' in message


@settings(max_examples=6, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), max_size=12),
    inputs=st.integers(8, 128),
    density=st.sampled_from([0.05, 0.15, 0.3, 0.5, 0.8]),
    mean_span=st.sampled_from([1.0, 2.5, 3.0, 10.0]),
)
def test_any_stream_can_be_rebuilt(sizes, inputs, density, mean_span):
    docs = documents(sizes)
    noise = spans.NoiseSettings(density, mean_span)
    lengths = {'inputs': inputs, 'targets': 4096}
    length = spans.find_longest_segment(inputs, 4096, noise, np.inf)
    if noise.count_hidden_tokens_and_spans(length)[1] > 100:
        assert 'sentinels' in error_message(corrupted, docs, lengths, noise)
        return
    examples = corrupted(docs, lengths, noise)
    assert sum((original_tokens(example) for example in examples), []) == np.concatenate([*docs, []]).tolist()
    for example in examples[:-1]:
        assert (len(example['inputs']), len(example['targets'])) == noise.compute_feature_lengths(length)


def test_spans_have_the_statistics_of_random_boundaries():
    examples = corrupted(documents([568 * 1500]))
    hidden_lengths = np.array([len(ids) for e in examples for ids in split_at_sentinels(e['targets'])[1:]])
    visible_lengths = np.array([len(ids) for e in examples for ids in split_at_sentinels(e['inputs'])[:-1]])
    assert hidden_lengths.sum() / (568 * 1500) == pytest.approx(85 / 568)
    assert hidden_lengths.mean() == pytest.approx(85 / 28)
    assert hidden_lengths.min() == visible_lengths.min() == 1
    # The 27 boundaries of 28 spans are drawn from 84 positions: a span has length 1 with probability 27 / 84, and
    # length 2 with probability 57 / 84 * 27 / 83.
    assert np.mean(hidden_lengths == 1) == pytest.approx(27 / 84, abs=0.01)
    assert np.mean(hidden_lengths == 2) == pytest.approx(57 / 84 * 27 / 83, abs=0.01)
    # All positions except the edges are hidden equally often.
    masks = []
    for example in examples:
        groups = zip(split_at_sentinels(example['targets']), split_at_sentinels(example['inputs']), strict=True)
        masks.append(np.concatenate([np.repeat([True, False], [*map(len, group)]) for group in groups]))
    rate = np.mean(masks, axis=0)
    assert rate[0] == 0
    assert rate[-1] == 1, 'T5 ends every segment with a hidden span'
    assert rate[60:-60] == pytest.approx(85 / 568, abs=0.04)


def test_every_seed_and_epoch_hides_different_tokens():
    docs = documents([568 * 4])
    two_epochs = corrupted(docs * 2)
    for first, second, other in zip(two_epochs[:4], two_epochs[4:], corrupted(docs, seed=1), strict=True):
        assert original_tokens(first) == original_tokens(second) == original_tokens(other)
        assert len({tuple(example['inputs']) for example in (first, second, other)}) == 3


@pytest.mark.parametrize(
    ('lengths', 'message'),
    [
        ({'inputs': 512, 'targets': 64}, "use {'inputs': 512, 'targets': 114}"),
        ({'inputs': 2, 'targets': 64}, 'is too short'),
        ({'inputs': 4096, 'targets': 4096}, 'extra_ids of the vocabulary to 227'),
    ],
)
def test_lengths_too_short_for_the_noise_are_rejected(lengths, message):
    assert message in error_message(corrupted, documents([10]), lengths)
