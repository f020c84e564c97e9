"""Objectives equal t5's preprocessors, which golden/make_t5_objectives.py recorded, and follow their papers."""

import json
import pathlib

import numpy as np
import pytest
import seqio
import tensorflow as tf

from remixer_t5x.data import pipeline, task_batches
from remixer_tasks import language_modeling, local_files, pretraining, vocabularies
from remixer_tasks import span_corruption as spans
from tests.support.error_lines import error_message

T5 = json.loads((pathlib.Path(__file__).parent / 'golden' / 't5_objectives.json').read_text())
VOCABULARY = seqio.ByteVocabulary(extra_ids=100)
FEATURES = {name: seqio.Feature(VOCABULARY, add_eos=True) for name in ('inputs', 'targets')}
MASK, EOS = VOCABULARY.vocab_size - 1, 1


def random_tokens(size):
    return np.random.default_rng(size).integers(3, 259, size, dtype=np.int32)


def dataset(documents):
    values = tf.ragged.constant(documents, dtype=tf.int32)
    return tf.data.Dataset.from_tensor_slices(values).map(lambda tokens: {'targets': tokens})


def examples(preprocessor, documents, lengths, seed=0, **options):
    with seqio.map_seed_manager(seed):
        return list(preprocessor(dataset(documents), lengths, FEATURES, **options).as_numpy_iterator())


def test_prefixes_equal_those_of_t5():
    assert len(T5['prefix_lm']) == 24
    for case in T5['prefix_lm']:
        tokens, prefix = tf.constant(random_tokens(case['size'])), language_modeling.PrefixSettings(case['density'])
        start, rest = language_modeling.split_at_random_prefix(tokens, prefix, case['seed'])
        assert (start.numpy().tolist(), rest.numpy().tolist()) == (case['inputs'], case['targets'])


def test_segments_of_a_prefix_lm_equal_those_of_t5():
    documents = [random_tokens(size).tolist() for size in (200, 1, 17, 64)]
    ours = examples(language_modeling.prefix_lm, documents, {'inputs': 32, 'targets': 32})
    # Our examples have two EOS tokens.
    assert [len(e['inputs']) + len(e['targets']) - 2 for e in ours] == T5['prefix_segments']
    joined = [np.concatenate([e['inputs'][:-1], e['targets'][:-1]]) for e in ours]
    np.testing.assert_array_equal(np.concatenate(joined), np.concatenate(documents))


def noise_mask(case):
    """Returns the mask of the tokens that t5 hid, reconstructed from its inputs and targets."""
    run_lengths = {'inputs': [0], 'targets': []}
    for name, lengths in run_lengths.items():
        for token in case[name]:
            if token > MASK - 100:
                lengths.append(0)
            else:
                lengths[-1] += 1
    pairs = zip(run_lengths['inputs'], [*run_lengths['targets'], 0], strict=True)
    return np.concatenate([np.repeat([False, True], pair) for pair in pairs])


def test_corrupted_spans_equal_those_of_t5():
    for case in T5['span_corruption']:
        mask = noise_mask(case)
        noise = spans.NoiseSettings(case['density'], case['mean_span'])
        assert noise.count_hidden_tokens_and_spans(case['size'])[0] == mask.sum()
        corrupted = spans.corrupt_spans(tf.constant(random_tokens(case['size'])), tf.constant(mask), VOCABULARY)
        assert corrupted['inputs'].numpy().tolist() == [*case['inputs'], EOS]
        assert corrupted['targets'].numpy().tolist() == [*case['targets'], EOS]


@pytest.mark.parametrize('inputs', [64, 512])
def test_segments_of_every_denoiser_are_as_long_as_those_of_t5(inputs):
    for _, density, span, length, _ in (row for row in T5['helper'] if row[0] == inputs):
        # If the number of spans rounds to 0, t5 hides one span without counting its sentinel, and trims the inputs.
        uncounted = round(length * density / span) == 0
        noise = spans.NoiseSettings(density, span)
        assert spans.find_longest_segment(inputs, inputs, noise, 10_000) == length - uncounted


def test_causal_text_equals_that_of_t5():
    documents = [random_tokens(size).tolist() for size in (200, 1, 17, 64)]
    ours = examples(language_modeling.causal_lm, [[], *documents], {'targets': 24})
    assert [{'targets': example['targets'].tolist()} for example in ours] == T5['full_lm']


def masked_examples(size=2000, count=4, **options):
    lengths = {'inputs': size + 1, 'targets': size + 1}
    documents = [random_tokens(size).tolist()] * count
    ours = examples(language_modeling.masked_lm, documents, lengths, **options)
    return np.array([e['inputs'] for e in ours]), np.array([e['targets'] for e in ours]), random_tokens(size)


def test_masked_tokens_have_the_statistics_of_bert():
    inputs, targets, tokens = masked_examples()
    assert (inputs[:, -1] == EOS).all() and (targets[:, -1] == 0).all()
    inputs, targets = inputs[:, :-1], targets[:, :-1]
    chosen = targets > 0
    assert (chosen.sum(1) == 300).all()
    assert (targets == np.where(chosen, tokens, 0)).all() and (inputs[~chosen] == (tokens + 0 * inputs)[~chosen]).all()
    damaged, original = inputs[chosen], targets[chosen]
    assert np.mean(damaged == MASK) == pytest.approx(0.8, abs=0.04)
    assert np.mean(damaged == original) == pytest.approx(0.1 + 0.1 / 256, abs=0.03)
    random = damaged[(damaged != MASK) & (damaged != original)]
    assert random.min() >= 3 and random.max() < 259 and len(set(random.tolist())) > 50
    assert (chosen[0] != chosen[1]).any(), 'each example has a different mask'
    # All positions are predicted equally often: 15% of 4 examples.
    assert chosen[:, :1000].sum() == pytest.approx(600, abs=70)


def test_masked_tokens_are_the_mask_piece_of_a_bert(tmp_path):
    """[CLS] at the start of a document is not predicted, and '##s' is masked with the piece before it."""
    pieces = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'a', 'text', '##s', 'of', 'words']
    (tmp_path / 'vocab.txt').write_text('\n'.join(pieces))
    vocabulary = vocabularies.wordpiece(str(tmp_path / 'vocab.txt'))
    assert vocabulary.mask_id == pieces.index('[MASK]')
    features = {name: seqio.Feature(vocabulary) for name in ('inputs', 'targets')}
    documents = dataset([vocabulary.encode('a texts of words a texts of words')] * 40)
    masking = {'rate': 0.5, 'masked_share': 1.0, 'random_share': 0.0, 'whole_words': True}
    rows = language_modeling.masked_lm(documents, {'inputs': 32, 'targets': 32}, features, **masking)
    *rows, _ = rows.as_numpy_iterator()
    inputs, targets = (np.stack([row[name] for row in rows]) for name in ('inputs', 'targets'))
    assert (inputs[targets > 0] == vocabulary.mask_id).all() and (targets > 0).sum() > 20
    assert pieces.index('[CLS]') not in targets and (inputs == pieces.index('[CLS]')).any()
    original = np.where(targets > 0, targets, inputs)
    is_word = (original[:, :-1] == pieces.index('text')) & (original[:, 1:] == pieces.index('##s'))
    assert is_word.any() and ((targets[:, :-1] > 0) == (targets[:, 1:] > 0))[is_word].all()


def test_whole_words_are_predicted_together():
    words = np.repeat(np.arange(120), np.random.default_rng(0).integers(1, 5, 120))
    for seed in range(20):
        chosen = language_modeling.choose_predicted_tokens(tf.constant(words), 40, tf.constant([seed, 1])).numpy()
        by_word = [set(chosen[words == word]) for word in range(120)]
        assert all(len(values) == 1 for values in by_word)
        assert 36 < chosen.sum() <= 40
    # A word that is longer than the number of tokens is predicted.
    assert language_modeling.choose_predicted_tokens(tf.zeros([9], tf.int32), 1, tf.constant([0, 1])).numpy().all()


def test_the_seven_denoisers_of_ul2():
    actual = {
        d.name: (d.kind, d.settings.density, getattr(d.settings, 'mean_span', None), d.rate)
        for d in spans.build_denoisers()
    }
    assert actual == {
        'r_span3_rate15': ('r', 0.15, 3, 1),
        'r_span8_rate15': ('r', 0.15, 8, 1),
        's_rate25': ('s', 0.25, None, 1),
        'x_span3_rate50': ('x', 0.5, 3, 1),
        'x_span8_rate50': ('x', 0.5, 8, 1),
        'x_span64_rate15': ('x', 0.15, 64, 1),
        'x_span64_rate50': ('x', 0.5, 64, 1),
    }
    assert sum(denoiser.rate for denoiser in spans.build_denoisers('ul2r')) == 1
    rows = [('r', 3, 0.15, 1), ('s', None, 0.25, 2)]
    assert [(d.name, d.rate) for d in spans.build_denoisers(rows)] == [('r_span3_rate15', 1.0), ('s_rate25', 2.0)]


def run_on_two_tokens(preprocessor, **lengths):
    return examples(preprocessor, [[5, 6]], lengths)


@pytest.fixture
def corpus(tmp_path):
    rng = np.random.default_rng(0)
    words = [''.join(chr(97 + letter) for letter in rng.integers(0, 26, 5)) for _ in range(300)]
    (tmp_path / 'text.txt').write_text('\n\n'.join(' '.join(rng.choice(words, 120)) for _ in range(100)))
    return local_files.corpus(str(tmp_path / 'text.txt'), validation_fraction=0.1)


def test_word_starts_are_the_pieces_that_begin_a_word(corpus):
    vocabulary = vocabularies.trained(corpus, 300)
    starts = language_modeling.find_word_starts(vocabulary)
    ids = vocabulary.encode('abcde fghij klmno')
    assert starts[ids].sum() == 3 < len(ids) and starts[ids[0]]
    assert 'WHOLE_WORDS = False' in error_message(language_modeling.find_word_starts, VOCABULARY)


def test_ul2_has_its_prompts_and_reads_the_text_in_a_different_order_for_each_denoiser(corpus):
    mixture = pretraining.ul2(corpus, VOCABULARY, 'mine')
    assert mixture.name == 'mine_ul2' and len(mixture.tasks) == 7
    orders = (task.source.get_dataset('train', shuffle=True, seed=0) for task in mixture.tasks)
    assert len({next(order.as_numpy_iterator())['text'] for order in orders}) > 3
    denoisers = [('r', 3, 0.15, 1), ('s', None, 0.25, 1), ('x', 8, 0.5, 2)]
    mixture = pretraining.ul2(corpus, VOCABULARY, 'mine', denoisers)
    batches = task_batches.TrainBatches(pipeline.DatasetConfig(mixture, {'inputs': 64, 'targets': 64}, 7))
    seen = [next(batches)['encoder_input_tokens'] for _ in range(4)]
    prompts = [bytes((row[:5] - 3).astype(np.uint8)).decode() for row in np.concatenate(seen)]
    assert set(prompts) == {'[NLU]', '[NLG]', '[S2S]'} and prompts.count('[NLG]') > prompts.count('[S2S]')


def test_examples_of_a_restored_position_must_fit_the_noise(corpus):
    def open_batches(density):
        task = pretraining.span_corruption(corpus, VOCABULARY, noise_density=density)
        return task_batches.TrainBatches(pipeline.DatasetConfig(task, {'inputs': 64, 'targets': 64}, 4))

    batches, restored = open_batches(0.4), open_batches(0.1)
    next(batches)
    restored.restore_states(batches.capture_states())
    assert 'NOISE_DENSITY' in error_message(lambda: [next(restored) for _ in range(500)])


def test_few_sentinels_shorten_segments():
    features = {name: seqio.Feature(seqio.ByteVocabulary(extra_ids=5)) for name in ('inputs', 'targets')}
    lengths, noise = {'inputs': 64, 'targets': 64}, spans.NoiseSettings(0.5, 3)
    corrupted = spans.span_corruption(dataset([random_tokens(400).tolist()]), lengths, features, noise, prompt='[X]')
    example = next(corrupted.as_numpy_iterator())
    assert np.sum(example['targets'] >= 259) == 5
    assert bytes((example['inputs'][:3] - 3).astype(np.uint8)) == b'[X]'


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda: run_on_two_tokens(language_modeling.prefix_lm, inputs=2, targets=9), "'inputs': 2 and 'targets': 9"),
        (lambda: run_on_two_tokens(language_modeling.causal_lm, targets=1), "{'targets': 512}"),
        (lambda: run_on_two_tokens(language_modeling.masked_lm, inputs=16, targets=8), "got {'inputs': 16"),
        (lambda: language_modeling.PrefixSettings(0.6), 'got 0.6'),
        (lambda: spans.NoiseSettings(1.0, 3.0), 'got 1.0'),
        (lambda: spans.build_denoisers([('s', 3, 0.25, 1)]), "'ul2', 'ul2r', or rows"),
        (
            lambda: pretraining.ul2(None, VOCABULARY, prompts={'r': '[R]', 'X': '[X]'}),
            "map only r, x, s to prompts, got 'X'",
        ),
    ],
)
def test_unusable_lengths_and_settings_are_rejected(call, message):
    assert message in error_message(call)


@pytest.mark.parametrize(('density', 'targets'), [(0.09, 24), (0.25, 24), (0.45, 100)])
def test_the_targets_of_a_prefix_lm_fit_with_eos(density, targets):
    """For 0.09 and this length, float32 and float64 round the shortest prefix differently."""
    prefix = language_modeling.PrefixSettings(density)
    tokens = tf.zeros([language_modeling.compute_segment_length(127, targets, prefix)], tf.int32)

    @tf.function
    def target_sizes():
        return tf.map_fn(
            lambda seed: tf.size(language_modeling.split_at_random_prefix(tokens, prefix, tf.stack([seed, 1]))[1]),
            tf.range(500),
        )

    assert tf.reduce_max(target_sizes()).numpy() + 1 in (targets - 1, targets)
