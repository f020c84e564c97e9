"""Converts the outputs of models with a head to text predictions, for metrics and JSON lines.

| model type | input | prediction | score |
|---|---|---|---|
| classifier | text | all labels, most likely first, or a number | log-probability of each label, or the number |
| token_labels | words | a label for each word | mean log-probability of the labels |
| span | `question: ... context: ...` | a substring of the context, or '' | answer score minus no-answer score |
| embedding | two texts separated by a tab | cosine similarity of their embeddings | cosine similarity |
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from remixer_t5x.data import batch_formats, token_alignment
from remixer_t5x.data.token_alignment import EncodedPair, EncodedQuestion, EncodedText
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate.predictions import Prediction, Predictor, TokenIds


def has_head(model: Any) -> bool:
    """Returns whether the model's predictions are not tokens of the vocabulary."""
    return model.model_type in _PREDICTIONS


def encodes_texts(model: Any) -> bool:
    """Returns whether the model's inputs are encoded by `encode_text`; otherwise, they are token ids."""
    return model.model_type in _ENCODERS


def encode_text(model: Any, vocabulary: Any, text: str, length: int) -> EncodedText | EncodedQuestion | EncodedPair:
    """Encodes an input text as one or more sequences of at most `length` tokens."""
    stride = {'stride': model.doc_stride} if model.model_type == batch_formats.SPAN else {}
    return _ENCODERS[model.model_type](vocabulary, text, length, **stride)


def predict_texts(
    predictor: Predictor, params: Any, model: Any, inputs: Sequence[Any], task_labels: Sequence[str] | None = None
) -> list[Prediction]:
    """Returns a prediction for each input.

    Inputs are results of `encode_text` if `encodes_texts(model)`, otherwise token ids. `task_labels` are the candidate
    labels of a classifier; None uses all labels of the model.
    """
    if model.model_type == batch_formats.CLASSIFIER:
        return _predict_classes(predictor, params, model, inputs, task_labels)
    return _PREDICTIONS[model.model_type](predictor, params, model, inputs)


def _predict_classes(
    predictor: Predictor, params: Any, model: Any, inputs: Sequence[TokenIds], task_labels: Sequence[str] | None = None
) -> list[Prediction]:
    labels, outputs = model.labels, predictor.classify(params, inputs)
    if labels is None:
        return [Prediction([], [float(value)], [f'{value:.6g}']) for value in outputs[:, 0]]
    chosen = _find_label_indices(model, labels if task_labels is None else task_labels)
    names, scores = [labels[index] for index in chosen], outputs[:, chosen]
    order = np.argsort(-scores, axis=1, kind='stable')
    return [
        Prediction([], [float(row[index]) for index in best], [names[index] for index in best])
        for row, best in zip(scores, order, strict=True)
    ]


def score_labels(
    predictor: Predictor, params: Any, model: Any, inputs: Sequence[TokenIds], targets: Sequence[str]
) -> list[float]:
    """Returns a classifier's log p(target | input) of each text.

    Raises UserError for a regression model or an unknown label.
    """
    if model.labels is None:
        raise UserError('LABELS must be set for tasks that are scored by likelihood, got None')
    return predictor.classify(params, inputs)[np.arange(len(inputs)), _find_label_indices(model, targets)].tolist()


def _find_label_indices(model: Any, names: Sequence[str]) -> list[int]:
    for name in names:
        if name not in model.labels:
            raise UserError(f'LABELS must include the target {name!r:.60} of the task, got {tuple(model.labels)}')
    return [model.labels.index(name) for name in names]


def _predict_token_labels(
    predictor: Predictor, params: Any, model: Any, inputs: Sequence[EncodedText]
) -> list[Prediction]:
    results = []
    for encoded, logits in zip(
        inputs, predictor.compute_token_logits(params, [each.ids for each in inputs]), strict=True
    ):
        first = encoded.find_first_tokens()
        logits = logits[first]
        log_probabilities = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        # Words without tokens or beyond the maximum length get the label 'O', or the first label if 'O' is not a label.
        tags = ['O' if 'O' in model.labels else model.labels[0]] * len(encoded.text.split())
        for at, index in zip(first, np.argmax(logits, axis=1), strict=True):
            tags[encoded.words[at]] = model.labels[index]
        score = float(np.mean(np.max(log_probabilities, axis=1))) if len(logits) else 0.0
        results.append(Prediction([], [score], [' '.join(tags)]))
    return results


def _predict_spans(
    predictor: Predictor, params: Any, model: Any, inputs: Sequence[EncodedQuestion]
) -> list[Prediction]:
    logits = iter(
        predictor.compute_token_logits(params, [window.ids for question in inputs for window in question.windows])
    )
    results = []
    for question in inputs:
        window_logits = list(itertools.islice(logits, len(question.windows)))
        text, margin = find_best_answer(question.windows, window_logits, model.max_answer_length)
        has_no_answer = model.null_threshold is not None and -margin > model.null_threshold
        results.append(Prediction([], [margin], ['' if has_no_answer else text]))
    return results


def find_best_answer(
    windows: Sequence[EncodedText], logits: Sequence[np.ndarray], max_length: int
) -> tuple[str, float]:
    """Returns the best answer over all windows of a question, and the answer's score minus the no-answer score.

    The no-answer score is the minimum over the windows, as in transformers' `compute_predictions_logits`. If the
    windows contain no token of the context, the answer is '' and the score difference is -inf.

    For each window, `logits` contains a [tokens, 2] array with the logits for each token as the first and as the last
    token of the answer.
    """
    spans = [
        find_best_span(values, window.compute_context_mask(), max_length)
        for window, values in zip(windows, logits, strict=True)
    ]
    best = int(np.argmax([score for _, _, score in spans]))
    start, end, score = spans[best]
    margin = score - min(float(values[0].sum()) for values in logits)
    offsets = windows[best].offsets
    return ('' if margin == -np.inf else windows[best].text[offsets[start][0] : offsets[end][1]]), margin


def find_best_span(logits: np.ndarray, is_context: np.ndarray, max_length: int) -> tuple[int, int, float]:
    """Returns the positions of the first and last token of the best span in the context, and the span's score.

    `logits` [tokens, 2] contains two logits per token: for the first and for the last token of the answer.
    `is_context` [tokens] is True for tokens of the context. The score is the logit of the first token plus that of the
    last token, or -inf if no token belongs to the context.
    """
    starts, ends = np.where(is_context[:, None], logits, -np.inf).T
    length = len(logits)
    is_valid = np.tri(length, k=max_length - 1, dtype=bool) & ~np.tri(length, k=-1, dtype=bool)
    scores = np.where(is_valid, starts[:, None] + ends[None, :], -np.inf)
    start, end = np.unravel_index(np.argmax(scores), scores.shape)
    return int(start), int(end), float(scores[start, end])


def _predict_similarity(
    predictor: Predictor, params: Any, model: Any, inputs: Sequence[EncodedPair]
) -> list[Prediction]:
    first = predictor.embed(params, [pair.first for pair in inputs])
    second = predictor.embed(params, [pair.second for pair in inputs])
    cosines = np.sum(first * second, axis=1).tolist()
    return [Prediction([], [cosine], [f'{cosine:.6g}']) for cosine in cosines]


# Functions (vocabulary, text, length) that encode texts, for the model types in `converters.TEXT_CONVERTERS`.
_ENCODERS: dict[str, Callable[..., Any]] = {
    batch_formats.TOKEN_LABELS: token_alignment.encode_words,
    batch_formats.SPAN: token_alignment.encode_question,
    batch_formats.EMBEDDING: token_alignment.encode_pair,
}
_PREDICTIONS: dict[str, Callable[..., list[Prediction]]] = {
    batch_formats.CLASSIFIER: _predict_classes,
    batch_formats.TOKEN_LABELS: _predict_token_labels,
    batch_formats.SPAN: _predict_spans,
    batch_formats.EMBEDDING: _predict_similarity,
}
