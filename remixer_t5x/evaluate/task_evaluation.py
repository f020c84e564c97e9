"""Evaluates a model with the metrics of seqio tasks. Generates answers, ranks labels or classifies texts.

Computes task metrics as seqio's Evaluator does: with a task's postprocessor, metric functions and metric objects.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from remixer_t5x import ranges
from remixer_t5x.data import fingerprint, pipeline, task_vocabulary
from remixer_t5x.devices import collectives
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import head_predictions, task_examples
from remixer_t5x.evaluate.predictions import Decoding, Prediction, Predictor, pad_ids
from remixer_t5x.evaluate.task_examples import TaskExamples
from remixer_t5x.lazy_imports import seqio
from remixer_t5x.models import interface

Metrics = dict[str, float]
# Maximum number of characters to print of each text.
SHOWN_CHARACTERS = 200


@dataclasses.dataclass(frozen=True)
class TaskEvaluation:
    """Settings of an evaluation with task metrics; each task of a mixture is evaluated separately.

    Attributes:
        mixture_or_task_name: a mixture or task, its name, or a comma-separated list of names.
        decoding: settings for generating answers.
        tasks: comma-separated names of the tasks to evaluate; None for all tasks.
        split: the split to evaluate; tasks without this split are skipped. None computes no metrics.
        examples: maximum number of examples of each task; None for all examples.
        shown: number of examples per task to print with the model's answers.
        rank_choices: whether to choose the most likely label instead of generating an answer for a task whose
            postprocessor has `labels`.
    """

    mixture_or_task_name: pipeline.TaskOrName | Sequence[pipeline.TaskOrName]
    decoding: Decoding
    tasks: str | None = None
    split: str | None = 'validation'
    examples: ranges.Count | None = None
    rank_choices: bool = False
    shown: ranges.NonNegativeInt = 0

    def __post_init__(self) -> None:
        ranges.check_setting('EVAL_EXAMPLES', self.examples, ranges.Count | None)
        ranges.check_setting('SHOWN_ANSWERS', self.shown, ranges.NonNegativeInt)


@dataclasses.dataclass(frozen=True)
class TaskReport:
    """The metrics of a task, in the order defined by the task, and one row per evaluated example.

    A row contains `index`, `input`, `target`, `prediction` and `score` (see `Prediction`), the lists `predictions` and
    `scores` if there are several predictions, and `example`, a dict of all other features of the example.
    `examples_hash` identifies the data, and `settings_hash` identifies the evaluated examples and the settings that
    affect the answers.
    """

    task: str
    split: str
    metrics: Metrics
    rows: Sequence[Mapping[str, Any]]
    seconds: float
    examples_hash: str = ''
    settings_hash: str = ''


class TaskEvaluator:
    """Evaluates any number of checkpoints of one model on examples that are read only once.

    `notes` contains messages about skipped tasks and truncated texts. `examples_hashes` and `settings_hashes` map
    '<split>/<task>' to the hashes of a `TaskReport`. Raises UserError if a task is unknown, if the split is None,
    missing or empty, if labels are ranked but no task lists labels, or if the vocabulary is larger than the model's
    embedding table.
    """

    def __init__(self, settings: TaskEvaluation, model: Any, partitioner: Partitioner):
        if settings.split is None:
            raise UserError('EVAL_SPLIT must be the name of a split, got None; pass --split=validation')
        self._has_head = head_predictions.has_head(model)
        self._encodes_texts = head_predictions.encodes_texts(model)
        if not self._has_head:
            interface.require_method(model, 'generate', 'evaluation by metrics')
        self._settings, self._model = settings, model
        self.split = settings.split
        self.seqio_tasks, self.notes = task_examples.find_tasks(
            settings.mixture_or_task_name, self.split, settings.tasks
        )
        if settings.rank_choices and not any(map(task_vocabulary.get_labels, self.seqio_tasks)):
            names = ', '.join(task.name for task in self.seqio_tasks)
            raise UserError(
                f'RANK_CHOICES must be False for {names}, got True: no postprocessor lists labels; omit it, or use '
                'a task with the postprocessor remixer_tasks.benchmarks.prompts.ClassIdPostprocessor(labels)'
            )
        for task in filter(needs_target_scores, self.seqio_tasks):
            method = 'classify' if self._has_head else 'score'
            interface.require_method(model, method, f'the metrics of {task.name}')
        first = self.seqio_tasks[0]
        self.vocabulary = task_vocabulary.get_vocabulary(first)
        get_record = task_vocabulary.get_vocabulary_record
        for task in self.seqio_tasks:
            vocabulary = task_vocabulary.get_vocabulary(task)
            if vocabulary != self.vocabulary and get_record(vocabulary) != get_record(self.vocabulary):
                raise UserError(
                    f'all tasks must have the same vocabulary, got different ones for {first.name} and {task.name}; '
                    'evaluate the tasks separately'
                )
        task_vocabulary.check_vocabulary_size(first.name, self.vocabulary, model.vocab_size)
        self._predictor = Predictor(model, partitioner, settings.decoding, self.vocabulary)
        lengths = settings.decoding.feature_lengths
        self._examples = [
            task_examples.read_examples(
                task,
                self.split,
                # Do not truncate the original texts that `head_predictions` tokenizes.
                dict.fromkeys(lengths, 2**20) if self._encodes_texts else lengths,
                settings.examples,
                not self._has_head and not self._get_labels_to_rank(task),
            )
            for task in self.seqio_tasks
        ]
        ids_hashes = {each.task.name: each.hash_ids() for each in self._examples}
        collectives.check_same_on_processes({f'the examples of {name}': ids for name, ids in ids_hashes.items()})
        record = {**settings.decoding.build_record(), 'rank_choices': settings.rank_choices}
        self.settings_hashes = {
            f'{self.split}/{name}': fingerprint.compute_short_hash(repr((ids, record)))
            for name, ids in ids_hashes.items()
        }
        self.examples_hashes = {f'{self.split}/{each.task.name}': each.hash_first_texts() for each in self._examples}
        self.notes += [note for examples in self._examples for note in examples.notes]
        for examples in self._examples if self._encodes_texts else ():
            counts = [encoded.num_tokens for encoded in self._get_head_inputs(examples)]
            if truncated := sum(count > lengths['inputs'] for count in counts):
                self.notes.append(
                    f'{examples.task.name}, {self.split}: {truncated:,} of {len(counts):,} inputs have more than '
                    f'{lengths["inputs"]} tokens: truncated'
                )

    def __call__(self, params: Any, before_batch: Callable[[], None] | None = None) -> Iterator[TaskReport]:
        """Yields a report for each task, in task order. Calls `before_batch` before each batch."""
        self._predictor.before_batch = before_batch
        for examples in self._examples:
            start = time.perf_counter()
            answers = self._predict_answers(params, examples)
            texts = [answer.decode_texts(self.vocabulary)[0] for answer in answers]
            scores = [answer.scores[0] for answer in answers]
            metrics = compute_metrics(examples, texts, scores, self._score_targets(params, examples))
            # Use the metrics of the first process, because all processes must agree on the best checkpoint. Metrics can
            # differ between processes if they use random numbers or iterate over a set of strings.
            metrics = collectives.broadcast(metrics)
            rows = list(self._build_report_rows(examples, texts, answers))
            kind, seconds = f'{self.split}/{examples.task.name}', time.perf_counter() - start
            hashes = self.examples_hashes[kind], self.settings_hashes[kind]
            yield TaskReport(examples.task.name, self.split, metrics, rows, seconds, *hashes)

    def compute_target_metrics(self) -> dict[str, Metrics]:
        """Computes the metrics of each task with the targets as predictions, to find the names of the metrics."""
        results = {}
        for examples in self._examples:
            texts = examples.get_texts('targets')
            results[examples.task.name] = compute_metrics(examples, texts, [0.0] * len(texts), [0.0] * len(texts))
        return results

    def _get_labels_to_rank(self, task: seqio.Task) -> tuple[str, ...] | None:
        return task_vocabulary.get_labels(task) if self._settings.rank_choices else None

    def _predict_answers(self, params: Any, examples: TaskExamples) -> list[Prediction]:
        if self._has_head:
            inputs, labels = self._get_head_inputs(examples), task_vocabulary.get_labels(examples.task)
            return head_predictions.predict_texts(self._predictor, params, self._model, inputs, labels)
        ranked = self._get_labels_to_rank(examples.task)
        if ranked is None:
            return self._predictor.predict(params, examples.inputs)
        feature = examples.task.output_features['targets']
        end = [task_vocabulary.get_end_id(feature.vocabulary)] if feature.add_eos else []
        choices = [[*feature.vocabulary.encode(label), *end] for label in ranked]
        scores = self._predictor.score_choices(params, examples.inputs, choices)
        order = np.argsort(-scores, axis=1, kind='stable')
        return [
            Prediction([choices[index] for index in best], [float(row[index]) for index in best])
            for row, best in zip(scores, order, strict=True)
        ]

    def _get_head_inputs(self, examples: TaskExamples) -> list[Any]:
        if not self._encodes_texts:
            return examples.inputs
        length = self._settings.decoding.feature_lengths['inputs']
        return [
            head_predictions.encode_text(self._model, self.vocabulary, text, length)
            for text in examples.get_texts('inputs')
        ]

    def _score_targets(self, params: Any, examples: TaskExamples) -> list[float] | None:
        if not needs_target_scores(examples.task):
            return None
        if self._has_head:
            targets = examples.get_texts('targets')
            return head_predictions.score_labels(self._predictor, params, self._model, examples.inputs, targets)
        return self._predictor.score(params, examples.inputs, examples.targets).tolist()

    def _build_report_rows(
        self, examples: TaskExamples, texts: Sequence[str], answers: Sequence[Prediction]
    ) -> Iterator[dict]:
        inputs, targets = examples.get_texts('inputs'), examples.get_texts('targets')
        for index, (prediction, example) in enumerate(zip(answers, examples.examples, strict=True)):
            alternatives: dict[str, Any] = {}
            if len(prediction.scores) > 1:
                alternatives = {'predictions': prediction.decode_texts(self.vocabulary), 'scores': prediction.scores}
            yield {
                'index': index,
                'input': inputs[index],
                'target': targets[index],
                'prediction': texts[index],
                'score': prediction.scores[0],
                **alternatives,
                'example': {
                    name: _to_json_value(value)
                    for name, value in example.items()
                    if name.removesuffix('_pretokenized') not in ('inputs', 'targets')
                },
            }


def format_answers(report: TaskReport, count: int) -> Iterator[str]:
    """Yields printable lines with the truncated input, answer and target of the first `count` examples."""
    if rows := report.rows[:count]:
        yield f'{report.task}, {len(rows)} of {len(report.rows):,} examples of {report.split}:'
    for row in rows:
        for label, name in (('input', 'input'), ('answer', 'prediction'), ('target', 'target')):
            yield f'  {label:7}' + (' '.join(row[name].split())[:SHOWN_CHARACTERS] or '(empty)')


def _to_json_value(value: Any) -> Any:
    """Converts the value of a feature to a value that JSON supports. Decodes bytes to strings."""
    if isinstance(value, bytes):
        return value.decode(errors='replace')
    if isinstance(value, np.ndarray):
        return [_to_json_value(item) for item in value.tolist()]
    return value.item() if isinstance(value, np.generic) else value


def needs_target_scores(task: seqio.Task) -> bool:
    """Returns whether a metric of the task uses the log-likelihoods of the targets."""
    kind = seqio.metrics.ModelOutputType.SCORE
    return bool(task.score_metric_fns) or any(each.model_output_type == kind for each in _get_metric_objects(task))


def compute_metrics(
    examples: TaskExamples,
    predictions: Sequence[str],
    scores: Sequence[float],
    target_scores: Sequence[float] | None = None,
) -> Metrics:
    """Evaluates the task's metric functions and then its metric objects. Omits metrics that are not numbers.

    `predictions` contains a text for each example, and `scores` their log-likelihoods. `target_scores` contains the
    log-likelihoods of the targets and is needed only if `needs_target_scores` returns true for the task. Raises
    UserError if the number of predictions differs from the number of examples.
    """
    task, count = examples.task, len(examples.examples)
    if len(predictions) != count:
        raise UserError(
            f'predictions of {task.name}, split {examples.split}, must have {count:,} rows, got '
            f'{len(predictions):,}; use the predictions of this split'
        )

    def postprocess_texts(texts: Sequence[str], is_target: bool) -> list[Any]:
        pairs = zip(texts, examples.examples, strict=True)
        return [task.postprocess_fn(text, example=example, is_target=is_target) for text, example in pairs]

    targets = postprocess_texts(examples.get_texts('targets'), is_target=True)
    metrics: dict[str, Any] = {}
    if task.predict_metric_fns or task.predict_with_aux_metric_fns:
        answers = postprocess_texts(predictions, is_target=False)
        for metric in task.predict_metric_fns:
            metrics.update(metric(targets, answers))
        for metric in task.predict_with_aux_metric_fns:
            metrics.update(metric(targets, answers, {'scores': list(scores)}))
    for metric in task.score_metric_fns:
        metrics.update(metric(targets, target_scores))
    metrics.update(_compute_metric_objects(examples, predictions, scores, target_scores))
    arrays = {name: np.asarray(getattr(value, 'value', value)) for name, value in metrics.items()}
    return {name: float(x) for name, x in arrays.items() if x.ndim == 0 and np.issubdtype(x.dtype, np.number)}


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Formats metrics, as in `accuracy 55.20 (easy 60.40), f1 48.11`, where 60.40 is the value of `accuracy/easy`."""
    groups: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        metric, _, group = name.partition('/')
        if metric in metrics and group:
            groups.setdefault(metric, {})[group] = value
        else:
            groups.setdefault(name, {})
    shown = [f'{name} {metrics[name]:.2f}' + (f' ({format_metrics(of)})' if of else '') for name, of in groups.items()]
    return ', '.join(shown[:3]) + (f' and {len(shown) - 3} more' if len(shown) > 3 else '')


def _get_metric_objects(task: seqio.Task) -> list[Any]:
    """Returns the task's metric objects, without the metric functions that seqio appends to them."""
    return list(task.metric_objs)[: len(task.metric_objs) - len(task.metric_fns)]


def _compute_metric_objects(
    examples: TaskExamples, predictions: Sequence[str], scores: Sequence[float], target_scores: Sequence[float] | None
) -> dict[str, Any]:
    """Evaluates the task's metric objects as seqio's Evaluator does.

    The predicted texts are tokenized again, because metric objects require token ids. Raises UserError for a metric
    object that requires activations.
    """
    task, objects = examples.task, _get_metric_objects(examples.task)
    encoded = [task.output_features['targets'].vocabulary.encode(text) for text in predictions if objects]
    ids = pad_ids(encoded, max([1, *map(len, encoded)]))
    kinds = seqio.metrics.ModelOutputType
    model_outputs = {
        kinds.SCORE: np.asarray(target_scores),
        kinds.PREDICTION: ids,
        kinds.PREDICTION_WITH_AUX: (ids, {'scores': list(scores)}),
    }
    metrics: dict[str, Any] = {}
    for metric in objects:
        kind = metric.model_output_type
        if kind not in model_outputs:
            raise UserError(f'the metrics of {task.name} must use predictions or scores, got {kinds.to_str(kind)}')
        state = metric.from_model_output(examples.examples, model_outputs[kind], task.output_features)
        if isinstance(state, seqio.metrics.CollectingMetric):
            values, _ = state.actual_compute(examples.examples, task.output_features)
        else:
            values = state.compute()
        metrics.update(values)
    return metrics
