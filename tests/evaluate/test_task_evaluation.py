"""Metrics of seqio tasks equal those of seqio's Evaluator, and invalid settings are rejected."""

import contextlib
import dataclasses
import shutil
import types

import flax
import jax.numpy as jnp
import numpy as np
import pytest
import seqio
import tensorflow as tf

from remixer_t5x.devices import collectives
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import checkpoint_evaluation
from remixer_t5x.evaluate.predictions import Decoding
from remixer_t5x.evaluate.task_evaluation import TaskEvaluation, TaskEvaluator, TaskReport, format_metrics
from remixer_t5x.models.beam_search import BeamSearch
from remixer_tasks import vocabularies
from remixer_tasks.corpora.text_corpus import ParsedCorpus
from tests.support import hf_folders

BYTES = seqio.ByteVocabulary(extra_ids=0)
TYPES = seqio.metrics.ModelOutputType
LENGTHS = {'inputs': 24, 'targets': 12}
TEXTS = ['yes', 'no', 'yes', 'perhaps', 'no', 'yes, a text that is too long to fit']


@dataclasses.dataclass(frozen=True)
class Label:
    labels: tuple[str, ...] = ('no', 'yes', 'perhaps')

    def __call__(self, text, example=None, is_target=False):
        assert example is not None
        return (self.labels.index(text) if text in self.labels else -1, is_target and int(example['idx']))


def accuracy(targets, predictions):
    assert not any(prediction[1] for prediction in predictions)
    return {'accuracy': np.float32(np.mean([a[0] == b[0] for a, b in zip(targets, predictions, strict=True)]))}


def with_scores(targets, predictions, aux_values):
    return {'sure': seqio.metrics.Scalar(float(np.sum(aux_values['scores']))), 'words': seqio.metrics.Text('no number')}


def likelihood(targets, scores):
    return {'likelihood': float(np.sum(scores)), 'groups': float(sum(target[1] for target in targets))}


@flax.struct.dataclass
class Equal(seqio.metrics.Metric):
    """The percentage of predictions whose decoded text equals their target."""

    model_output_type: TYPES = TYPES.PREDICTION
    fraction: float = 0.0

    @classmethod
    def from_model_output(cls, inputs, model_output, features, target_field_name='targets', mask=None, indices_2d=None):
        decode = features[target_field_name].vocabulary.decode
        texts = [decode([int(token) for token in tokens if token]) for tokens in model_output]
        targets = [example['targets_pretokenized'].decode() for example in inputs]
        return cls(fraction=float(np.mean([a == b for a, b in zip(texts, targets, strict=True)])))

    def compute(self):
        return {'equal': 100 * self.fraction}


@flax.struct.dataclass
class MeanScore(seqio.metrics.Metric):
    model_output_type: TYPES = TYPES.SCORE
    mean: float = 0.0

    @classmethod
    def from_model_output(cls, inputs, model_output, features, target_field_name='targets', mask=None, indices_2d=None):
        return cls(mean=float(np.mean(model_output)))

    def compute(self):
        return {'mean_score': self.mean}


def task(
    name='echo',
    texts=TEXTS,
    metrics=(accuracy,),
    objects=(),
    vocabulary=BYTES,
    splits=('validation',),
    postprocess=Label(),  # noqa: B008 (frozen)
):
    def read(split, shuffle_files, seed=None):
        targets = ['yes' if i % 2 else text for i, text in enumerate(texts)]
        strings = {'inputs': tf.constant(texts, tf.string), 'targets': tf.constant(targets, tf.string)}
        return tf.data.Dataset.from_tensor_slices({**strings, 'idx': np.arange(len(texts)) + 10})

    feature = seqio.Feature(vocabulary, add_eos=True)
    return seqio.Task(
        name,
        source=seqio.FunctionDataSource(read, splits),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
        output_features={'inputs': feature, 'targets': feature},
        postprocess_fn=postprocess,
        metric_fns=list(metrics),
        metric_objs=list(objects),
    )


class Echo:
    """Answers with the input, scored by minus its length; prefers a choice with the same first token as the input."""

    vocab_size = 384
    model_type = 'encoder_decoder'
    module = None

    def generate(self, params, batch, max_decode_length, eos_id, decoder, rng, stop_strings):
        tokens = batch['encoder_input_tokens'][:, None, :max_decode_length]
        return tokens, -jnp.sum(tokens > 0, axis=-1).astype(jnp.float32)

    def score(self, params, batch):
        return -0.5 * jnp.sum(batch['decoder_target_tokens'] > 0, axis=-1)

    def score_choices(self, params, inputs, choices):
        same = choices[:, :, 0] == inputs[:, None, 0]
        return jnp.where(same, -1.0, -2.0 - jnp.arange(choices.shape[1]))


def evaluator(mixture, **settings):
    decoding = Decoding(4, LENGTHS)
    return TaskEvaluator(TaskEvaluation(mixture, decoding, **settings), Echo(), Partitioner())


def test_metrics_equal_those_of_seqios_evaluator():
    echo = task(metrics=(accuracy, with_scores, likelihood), objects=(Equal(), MeanScore()))
    (report,) = evaluator(echo)({})
    seqio.TaskRegistry.add_provider(echo.name, echo)

    def predictions(dataset):
        rows = list(dataset.as_numpy_iterator())
        ids = [row['encoder_input_tokens'] for _, row in rows]
        answers = [row[: LENGTHS['targets']] for row in ids]
        return list(enumerate(answers)), {'scores': [-float(np.sum(row > 0)) for row in answers]}

    reference = seqio.Evaluator(
        echo.name, seqio.EncDecFeatureConverter(pack=False), 'validation', sequence_length=LENGTHS, num_examples=None
    )
    computed, _ = reference.evaluate(
        compute_metrics=True,
        step=0,
        predict_fn=lambda dataset: predictions(dataset)[0],
        predict_with_aux_fn=predictions,
        score_fn=lambda dataset: [
            (i, -0.5 * float(np.sum(row['decoder_target_tokens'] > 0)))
            for i, (_, row) in enumerate(dataset.as_numpy_iterator())
        ],
    )
    metrics = computed.result()[echo.name]
    numbers = {name: float(getattr(value, 'value', value)) for name, value in metrics.items() if name != 'words'}
    assert report.metrics == pytest.approx(numbers) and set(report.metrics) == set(numbers)
    assert 0 < report.metrics['accuracy'] < 1 and report.metrics['groups'] == sum(range(10, 16))
    assert {'equal', 'mean_score'} < set(numbers)


def test_all_processes_report_the_metrics_of_the_first_process(monkeypatch):
    """A metric may be random; processes that disagree about the best checkpoint would wait for each other forever."""
    task_evaluator = evaluator(task('echo_random'))
    monkeypatch.setattr(collectives, 'broadcast', lambda value: {name: -1.0 for name in value})
    (report,) = task_evaluator({})
    assert set(report.metrics.values()) == {-1.0}


def test_rows_have_inputs_targets_and_predictions():
    task_evaluator = evaluator(task('echo_rows'))
    (report,) = task_evaluator({})
    assert [row['index'] for row in report.rows] == list(range(6))
    row = report.rows[3]
    assert (row['input'], row['target'], row['prediction'], row['score']) == ('perhaps', 'yes', 'perhaps', -8.0)
    assert row['example'] == {'idx': 13}
    assert task_evaluator.notes == ['echo_rows, validation: 1 of 6 inputs have more than 24 tokens: truncated']


@pytest.mark.parametrize(
    ('metrics', 'text'),
    [
        ({'accuracy': 55.2, 'accuracy/hard': 50, 'f1': 48}, 'accuracy 55.20 (hard 50.00), f1 48.00'),
        ({'accuracy/hard': 50, 'accuracy': 55.2}, 'accuracy 55.20 (hard 50.00)'),
        ({'accuracy/hard': 50}, 'accuracy/hard 50.00'),
        (dict.fromkeys('abcd', 1), 'a 1.00, b 1.00, c 1.00 and 1 more'),
    ],
)
def test_metrics_of_groups_are_formatted_in_any_order(metrics, text):
    assert format_metrics(metrics) == text


def test_results_are_appended_after_a_truncated_line(tmp_path):
    report = TaskReport('a', 'validation', {'accuracy': 1.0}, [], 0.0)
    for step in (1, 2):
        with contextlib.closing(checkpoint_evaluation.ReportWriter(str(tmp_path))) as writer:
            writer.write(report, step, tmp_path)
        with (tmp_path / 'metrics.jsonl').open('a') as file:
            file.write('{"kind": "val')
    assert checkpoint_evaluation.read_evaluated_steps(str(tmp_path), {'validation/a': ''}) == {1, 2}
    assert b'\n\n' not in (tmp_path / 'metrics.jsonl').read_bytes()


def test_results_of_a_renamed_checkpoint_have_step_0(tmp_path):
    report = TaskReport('a', 'validation', {'accuracy': 1.0}, [], 0.0)
    with contextlib.closing(checkpoint_evaluation.ReportWriter(str(tmp_path))) as writer:
        checkpoint_evaluation.evaluate_and_write_reports(lambda params: [report], {}, tmp_path / 'final', writer)
    assert checkpoint_evaluation.read_evaluated_steps(str(tmp_path), {'validation/a': ''}) == {0}


def test_a_step_is_evaluated_again_with_other_settings(tmp_path):
    echo, decoding = task('echo_settings'), Decoding(4, LENGTHS)
    with contextlib.closing(checkpoint_evaluation.ReportWriter(str(tmp_path))) as writer:
        for report in evaluator(echo)({}):
            writer.write(report, 1, tmp_path)

    def read_steps(decoding=decoding, **settings):
        other = TaskEvaluator(TaskEvaluation(echo, decoding, **settings), Echo(), Partitioner())
        return checkpoint_evaluation.read_evaluated_steps(str(tmp_path), other.settings_hashes)

    assert read_steps() == read_steps(Decoding(8, LENGTHS, seed=1)) == {1}
    others = [{'examples': 5}, {'rank_choices': True}]
    fields = [{'decoder': BeamSearch(beams=2)}, {'stop_strings': 'no'}, {'feature_lengths': {**LENGTHS, 'targets': 11}}]
    others += [{'decoding': dataclasses.replace(decoding, **changed)} for changed in fields]
    assert [read_steps(**settings) for settings in others] == [set()] * 5


@pytest.mark.parametrize('text', ['even  odd', 'né'])
def test_texts_that_the_vocabulary_cannot_represent_are_reported(text):
    lines = [f'even {number * 7919 % 10007} odd' for number in range(2000)]
    vocabulary = vocabularies.trained(ParsedCorpus('words', 'even words', lambda malformed: iter(lines)), 380)
    texts = ['even', 'odd', text, 'even']
    *unknown, note = evaluator(task('echo_changed', texts=texts, vocabulary=vocabulary)).notes
    assert '1 of 4 targets' in note and f'{text!r} in row 3' in note and '\n' not in note
    assert evaluator(task('echo_same', texts=['even', 'odd', '<unk>'], vocabulary=vocabulary)).notes == []
    labelled = task('echo_labels', texts=texts, vocabulary=vocabulary)
    assert len(evaluator(labelled, rank_choices=True).notes) == len(unknown) == ('é' in text)
    # Other versions of SentencePiece train other pieces. Each text ends with the end token.
    ids = [index for each in texts for index in (*vocabulary.encode(each), vocabulary.eos_id)]
    share = ids.count(vocabulary.unk_id) / len(ids)
    assert all(f'{share:.1%} of the input tokens are unknown' in note for note in unknown)


def test_rank_choices_answers_with_the_most_likely_label():
    (report,) = evaluator(task('echo_ranked'), rank_choices=True)({})
    assert [row['prediction'] for row in report.rows] == ['yes', 'no', 'yes', 'perhaps', 'no', 'yes']
    assert report.rows[0]['predictions'] == ['yes', 'no', 'perhaps'] and report.rows[0]['scores'] == [-1.0, -2.0, -4.0]


def test_examples_limits_each_selected_task():
    task_evaluator = evaluator([task('echo_a'), task('echo_b'), task('echo_c')], examples=2, tasks='echo_c, echo_a')
    assert [(report.task, len(report.rows)) for report in task_evaluator({})] == [('echo_c', 2), ('echo_a', 2)]


def test_tasks_without_the_split_or_metrics_are_skipped():
    mixture = seqio.Mixture(
        'echo_mixture',
        [(task('echo_judged'), 1), (task('echo_train', splits=('train',)), 1), (task('echo_bare', metrics=()), 1)],
    )
    task_evaluator = evaluator(mixture)
    assert [each.name for each in task_evaluator.seqio_tasks] == ['echo_judged']
    notes = {'echo_bare has no metrics', "echo_train has no split 'validation', only train"}
    assert notes < set(task_evaluator.notes)


@pytest.mark.parametrize(
    ('mixture', 'settings', 'message'),
    [
        ('echp', {}, "MIXTURE_OR_TASK_NAME must be .* got 'echp'"),
        ([task('echo_d')], {'tasks': 'echo_e'}, "EVAL_TASKS must contain only echo_d, got 'echo_e'"),
        (task('echo_f'), {'split': 'test'}, "no task of echo_f .* no split 'test'.*EVAL_SPLIT"),
        (task('echo_h', metrics=()), {}, 'echo_h has no metrics; use a task with metrics; `report MODEL_DIR`'),
        (task('echo_g', postprocess=None), {'rank_choices': True}, 'RANK_CHOICES must be False for echo_g'),
        (
            [task('echo_x'), task('echo_y', vocabulary=seqio.ByteVocabulary(5))],
            {},
            'different ones for echo_x and echo_y',
        ),
    ],
)
def test_invalid_settings_raise_errors(mixture, settings, message):
    with pytest.raises(UserError, match=message):
        evaluator(mixture, **settings)


def test_tasks_with_copies_of_one_vocabulary_are_evaluated_together(tmp_path):
    copy = shutil.copy(hf_folders.SPIECE, tmp_path)
    vocabularies = [seqio.SentencePieceVocabulary(str(path)) for path in (hf_folders.SPIECE, copy)]
    tasks = [task(f'echo_copy_{i}', vocabulary=vocabulary) for i, vocabulary in enumerate(vocabularies)]
    assert evaluator(tasks).seqio_tasks == tasks


def test_a_metric_of_likelihoods_is_rejected_for_a_model_without_them():
    settings = TaskEvaluation(task('echo_i', metrics=(likelihood,)), Decoding(4, LENGTHS))
    model = types.SimpleNamespace(model_type='token_labels', vocab_size=384, module=None)
    with pytest.raises(UserError, match="MODEL_TYPE must be classifier for the metrics of echo_i, got 'token_labels'"):
        TaskEvaluator(settings, model, Partitioner())
