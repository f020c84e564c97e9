"""Metrics and predictions of heads equal seqeval and transformers' SQuAD metrics."""

import json
import types

import numpy as np
import pytest
import seqio

from remixer_t5x.data import token_alignment
from remixer_t5x.evaluate import head_predictions
from remixer_tasks.benchmarks import text_metrics
from tests.support.hf_folders import SPIECE

WORDS = ['the', 'a', 'cat', 'Cat', 'mat.', '(mat)', 'sat', 'on', "it's"]


# F1, precision, recall and accuracy by seqeval 1.2.2 for the tags of the test.
SEQEVAL = {
    'BIO': (0.7049273173494431, 0.7060380688264213, 0.7038200552902739, 0.7544022242817423),
    'BIOES': (0.7612876254180603, 0.7598581264343834, 0.7627225130890052, 0.730390091835875),
}
# From transformers 3.0's `squad_metrics` for the texts of the test.
SQUAD = {
    'em': 46.45, 'f1': 52.65464285714285, 'HasAns_em': 42.60935143288084, 'HasAns_f1': 51.96778711484594,
    'NoAns_em': 54.00593471810089, 'NoAns_f1': 54.00593471810089,
}  # fmt: skip


@pytest.mark.parametrize('prefixes', SEQEVAL)
def test_entity_f1_equals_seqeval(prefixes):
    rng = np.random.default_rng(0)
    tags = ['O', *(f'{prefix}-{kind}' for prefix in prefixes if prefix != 'O' for kind in ('PER', 'LOC-X'))]
    targets = [rng.choice(tags, rng.integers(1, 12)).tolist() for _ in range(2000)]
    predictions = [[t if rng.random() < 0.7 else str(rng.choice(tags)) for t in row] for row in targets]
    values = text_metrics.entity_f1([' '.join(row) for row in targets], [' '.join(row) for row in predictions])
    np.testing.assert_allclose(list(values.values()), 100 * np.asarray(SEQEVAL[prefixes]), rtol=1e-12)
    assert text_metrics.entity_f1(['O'], ['O'])['entity_f1'] == 0


def test_span_answers_equal_transformers():
    rng = np.random.default_rng(0)

    def text():
        return ' '.join(rng.choice(WORDS, rng.integers(1, 5)))

    answers = [[text() for _ in range(rng.integers(0, 3))] for _ in range(2000)]
    predictions = [str(rng.choice([*row, text(), ''])) for row in answers]
    targets = [json.dumps({'text': row, 'answer_start': [0] * len(row)}) for row in answers]
    assert text_metrics.span_metrics(targets, predictions) == pytest.approx(SQUAD, rel=1e-12)


def test_best_span_is_the_best_of_all_pairs():
    rng = np.random.default_rng(0)
    for _ in range(1000):
        length, longest = int(rng.integers(2, 14)), int(rng.integers(1, 6))
        logits, is_context = rng.standard_normal((length, 2)), rng.random(length) < 0.6
        is_context[0] = False
        scores = {
            (start, end): logits[start, 0] + logits[end, 1]
            for start in range(length)
            for end in range(start, min(length, start + longest))
            if is_context[start] and is_context[end]
        }
        start, end, score = head_predictions.find_best_span(logits, is_context, longest)
        if not scores:
            assert score == -np.inf
            continue
        best = max(scores, key=scores.get)
        assert (start, end) == best and score == pytest.approx(scores[best])


def test_a_word_without_tokens_has_the_default_label():
    """The same applies to a word beyond the maximum length."""
    vocabulary = seqio.SentencePieceVocabulary(str(SPIECE), extra_ids=0)
    encoded = token_alignment.encode_words(vocabulary, '\u200b it is it', 4)
    logits = np.eye(2)[[1, *(len(encoded.ids) - 1) * [0]]]
    assert encoded.words[0] == 1 and max(encoded.words) < 3
    model = types.SimpleNamespace(model_type='token_labels', labels=('X', 'Y', 'O'))
    predictor = types.SimpleNamespace(compute_token_logits=lambda params, rows: [np.pad(logits, ((0, 0), (0, 1)))])
    (prediction,) = head_predictions.predict_texts(predictor, None, model, [encoded])
    assert prediction.texts[0].split()[:2] == ['O', 'Y'] and prediction.texts[0].split()[3] == 'O'


def test_best_answer_is_the_best_of_all_windows():
    """The margin is the best sum of two logits minus the smallest score of no answer."""
    rng, vocabulary = np.random.default_rng(0), seqio.ByteVocabulary(extra_ids=0)
    text = 'question: a? context: it is Ada, I think'
    windows = token_alignment.encode_question(vocabulary, text, 28, 4).windows
    assert len(windows) > 1
    for _ in range(20):
        logits = [rng.standard_normal((len(window.ids), 2)) for window in windows]
        best, text_of_best = max(
            (values[start, 0] + values[end, 1], text[window.offsets[start][0] : window.offsets[end][1]])
            for window, values in zip(windows, logits, strict=True)
            for start in np.flatnonzero(window.compute_context_mask())
            for end in np.flatnonzero(window.compute_context_mask())
            if start <= end < start + 5
        )
        answer, margin = head_predictions.find_best_answer(windows, logits, 5)
        assert answer == text_of_best
        assert margin == pytest.approx(best - min(values[0].sum() for values in logits))
