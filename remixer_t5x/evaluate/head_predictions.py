"""Predictions of models with outputs per token or per pair of texts, as texts that metrics and JSON lines contain.

| model type | input | prediction | score |
|---|---|---|---|
| token_labels | words | a label for each word | mean log-probability of the labels |
| span | `question: ... context: ...` | a part of the context, or '' | score of the answer minus score of no answer |
| embedding | two texts with a tab between them | their cosine similarity | the same |
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from remixer_t5x.data import batch_formats, token_alignment
from remixer_t5x.data.token_alignment import EncodedText
from remixer_t5x.evaluate.predictions import Prediction, Predictor


class Pair(NamedTuple):
    """The ids of two texts, and the number of tokens of the longer text before truncation."""

    first: list[int]
    second: list[int]
    num_tokens: int


def has_head(model: Any) -> bool:
    """Returns whether this module computes the predictions of the model."""
    return model.model_type in _PREDICTIONS


def encode(model: Any, vocabulary: Any, text: str, length: int) -> EncodedText | Pair:
    """Encodes an input text to at most `length` tokens."""
    if model.model_type == batch_formats.EMBEDDING:
        return Pair(*token_alignment.encode_pair(vocabulary, text, length))
    return token_alignment.encode_words(vocabulary, text, length)


def predict(predictor: Predictor, params: Any, model: Any, inputs: Sequence[Any]) -> list[Prediction]:
    """Returns a prediction for each result of `encode`."""
    return _PREDICTIONS[model.model_type](predictor, params, model, inputs)


def _predict_tags(predictor: Predictor, params: Any, model: Any, inputs: Sequence[EncodedText]) -> list[Prediction]:
    results = []
    for encoded, logits in zip(inputs, predictor.token_logits(params, [each.ids for each in inputs]), strict=True):
        logits = logits[encoded.first_tokens()]
        log_probabilities = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        tags = [model.labels[index] for index in np.argmax(logits, axis=1)]
        # Words that were truncated get the label O, or the first label.
        rest = 'O' if 'O' in model.labels else model.labels[0]
        tags += [rest] * (len(encoded.text.split()) - len(tags))
        score = float(np.mean(np.max(log_probabilities, axis=1))) if len(logits) else 0.0
        results.append(Prediction([], [score], [' '.join(tags)]))
    return results


def _predict_spans(predictor: Predictor, params: Any, model: Any, inputs: Sequence[EncodedText]) -> list[Prediction]:
    results = []
    for encoded, logits in zip(inputs, predictor.token_logits(params, [each.ids for each in inputs]), strict=True):
        start, end, margin = best_span(logits, encoded.is_context(), model.max_answer_length)
        is_null = model.null_threshold is not None and -margin > model.null_threshold
        text = '' if is_null or margin == -np.inf else encoded.text[encoded.offsets[start][0] : encoded.offsets[end][1]]
        results.append(Prediction([], [margin], [text]))
    return results


def best_span(logits: np.ndarray, is_context: np.ndarray, max_length: int) -> tuple[int, int, float]:
    """Returns the first and last token of the best span in the context, and its score minus that of no answer.

    The score of a span is the sum of two logits, as in transformers' `compute_predictions_logits`; the span of no
    answer is token 0. The difference is -inf if no token belongs to the context.

    Args:
        logits: [tokens, 2], of the first and the last token of an answer.
        is_context: [tokens] bool.
        max_length: maximum number of tokens of a span.
    """
    starts, ends = np.where(is_context[:, None], logits, -np.inf).T
    length = len(logits)
    band = np.tri(length, k=max_length - 1, dtype=bool) & ~np.tri(length, k=-1, dtype=bool)
    scores = np.where(band, starts[:, None] + ends[None, :], -np.inf)
    start, end = np.unravel_index(np.argmax(scores), scores.shape)
    return int(start), int(end), float(scores[start, end] - logits[0].sum())


def _predict_similarity(predictor: Predictor, params: Any, model: Any, inputs: Sequence[Pair]) -> list[Prediction]:
    first = predictor.embed(params, [pair.first for pair in inputs])
    second = predictor.embed(params, [pair.second for pair in inputs])
    cosines = np.sum(first * second, axis=1).tolist()
    return [Prediction([], [cosine], [f'{cosine:.6g}']) for cosine in cosines]


_PREDICTIONS: dict[str, Callable[..., list[Prediction]]] = {
    batch_formats.TOKEN_LABELS: _predict_tags,
    batch_formats.SPAN: _predict_spans,
    batch_formats.EMBEDDING: _predict_similarity,
}
