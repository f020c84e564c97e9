"""Saving the best parameters of a task; mean scores equal T5's eval_utils (golden/make_t5_averages.py)."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from remixer_t5x.checkpoints import saved_params
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import checkpoint_ranking
from remixer_t5x.evaluate.task_evaluation import TaskReport
from tests.support.paths import GOLDEN

pytestmark = pytest.mark.filterwarnings('ignore::DeprecationWarning')
RECORD = {'vocabulary': 'ab12 of 384 ids'}
T5 = json.loads((GOLDEN / 't5_averages.json').read_text())


def report(task='rte', settings_hash='', **metrics):
    return TaskReport(task, 'validation', metrics, (), 0.0, settings_hash=settings_hash)


def params(value):
    return {'table': jnp.full((4, 2), float(value))}


def read_value(path):
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params(0))
    return float(saved_params.restore_params(str(path), abstract, RECORD['vocabulary'])['table'][0, 0])


def best_checkpoints(tmp_path, metrics=None):
    return checkpoint_ranking.BestCheckpoints(epath.Path(tmp_path), RECORD, metrics)


def test_only_better_parameters_are_saved(tmp_path):
    """A non-finite metric is never better."""
    values = {5: np.nan, 10: 50.0, 20: 60.0, 30: 60.0, 40: 55.0, 50: np.nan, 60: np.inf}
    saved = [
        step
        for step, value in values.items()
        if best_checkpoints(tmp_path).save_if_best(report(accuracy=value, f1=-value), step, params(step))
    ]
    assert saved == [10, 20]
    assert read_value(tmp_path / 'best' / 'rte') == 20.0
    assert [path.name for path in (tmp_path / 'best' / 'rte').iterdir() if path.name.isdigit()] == ['20']
    record = {'task': 'rte', 'metric': 'accuracy', 'value': 60.0, 'step': 20, 'path': str(tmp_path / 'best/rte/20')}
    assert checkpoint_ranking.find_best_checkpoints(str(tmp_path)) == {'rte': {**record, 'evaluated': ''}}


def test_values_on_other_examples_are_not_compared(tmp_path):
    values = [('a', 60.0), ('b', 50.0), ('b', 40.0), ('b', 70.0)]
    saved = [
        best_checkpoints(tmp_path).save_if_best(report(settings_hash=examples, accuracy=value), step, params(step))
        for step, (examples, value) in enumerate(values)
    ]
    assert saved == [True, True, False, True]


def test_a_new_run_replaces_the_best_parameters_of_an_abandoned_run(tmp_path):
    assert best_checkpoints(tmp_path).save_if_best(report(accuracy=90.0), 10, params(1))
    new_run = checkpoint_ranking.BestCheckpoints(epath.Path(tmp_path), RECORD, is_new=True)
    saved = [new_run.save_if_best(report(accuracy=value), 5 * value, params(value)) for value in (40, 30, 50)]
    assert saved == [True, False, True] and read_value(tmp_path / 'best' / 'rte') == 50.0


def test_the_metric_can_be_named_by_task(tmp_path):
    checkpoints = best_checkpoints(tmp_path, {'cb': 'f1'})
    assert checkpoints.select_metric(report('cb', accuracy=1.0, f1=2.0)) == ('f1', 2.0)
    assert checkpoints.select_metric(report('rte', accuracy=1.0)) == ('accuracy', 1.0)
    assert not checkpoints.save_if_best(report('rte'), 1, params(1))
    with pytest.raises(UserError, match=r"BEST_METRICS of cb must be one of its metrics \(accuracy\), got 'f1'"):
        checkpoints.save_if_best(report('cb', accuracy=1.0), 1, params(1))


def test_the_lowest_error_is_best(tmp_path):
    checkpoints = best_checkpoints(tmp_path, {'rte': '-quality'})
    values = [1.69, 1.23, 1.31]
    saved = [checkpoints.save_if_best(report(quality=value), step, params(step)) for step, value in enumerate(values)]
    assert saved == [True, True, False]
    assert read_value(tmp_path / 'best' / 'rte') == 1.0


def test_a_record_without_a_valid_best_metric_is_reported(tmp_path):
    step = epath.Path(tmp_path / 'best' / 'task' / '1')
    (step / 'state').mkdir(parents=True)
    (step / 'run').mkdir()
    (step / 'run' / 'metadata').write_text('{"best": {"metric": "f1", "value": "x", "step": 1}}')
    with pytest.raises(UserError, match='no record of the best metric'):
        checkpoint_ranking.read_best_record(step)
    assert checkpoint_ranking.find_best_checkpoints(str(tmp_path)) == {}


def metrics_by_task(benchmark, step):
    """Returns the metrics of each task of GLUE or SuperGLUE at a step."""
    metrics = {}
    for tag, values in T5['metrics'].items():
        task, metric = tag.split('/')
        if ('super' in task) == (benchmark == 'SuperGLUE'):
            metrics.setdefault(task, {})[metric] = values[step]
    return metrics


def mean_score(task, metrics):
    return checkpoint_ranking.select_ranking_metric(task, metrics, checkpoint_ranking.MEAN)[1]


@pytest.mark.parametrize('benchmark', ['GLUE', 'SuperGLUE'])
def test_averages_and_best_steps_equal_those_of_t5(benchmark):
    for step, average in enumerate(T5['averages'][benchmark]):
        tasks = metrics_by_task(benchmark, step)
        assert len(tasks) >= 8
        assert checkpoint_ranking.compute_mean_score(
            {task: mean_score(task, metrics) for task, metrics in tasks.items()}
        ) == pytest.approx(average)
    for task, metrics in metrics_by_task(benchmark, 0).items():
        # T5 chooses one step for both test sets of MNLI.
        if 'mnli' not in task:
            values = [mean_score(task, metrics_by_task(benchmark, step)[task]) for step in range(len(T5['steps']))]
            step = values.index(max(values))
            for metric in metrics:
                expected = [T5['steps'][step], pytest.approx(metrics_by_task(benchmark, step)[task][metric])]
                assert T5['best'][f'{task}/{metric}'] == expected


def test_errors_count_negative_and_are_excluded_from_a_mean():
    metrics = {'pearson': 80.0, 'spearman': 60.0, 'mean_absolute_error': 3.0}
    assert checkpoint_ranking.select_ranking_metric('stsb', metrics, checkpoint_ranking.MEAN) == ('mean', 70.0)
    for name in ('mse', 'brier_score', 'bits_per_byte', 'dev_nll/short'):
        assert checkpoint_ranking.compute_signed_score(name, 2.0) == -2.0
    assert checkpoint_ranking.select_ranking_metric(
        'stsb', {'a_loss': 3.0, 'perplexity': 5.0}, checkpoint_ranking.MEAN
    ) == ('-mean', 4.0)
    ranks = {
        task: checkpoint_ranking.compute_signed_score(*score)
        for task, score in {'a': ('accuracy', 50.0), 'b': ('wer', 10.0)}.items()
    }
    assert checkpoint_ranking.compute_mean_score(ranks) == 20.0


def test_a_mean_does_not_count_the_groups_of_a_metric_again():
    metrics = {'accuracy': 50.0, 'accuracy/easy': 90.0, 'accuracy/hard': 10.0, 'f1': 40.0, 'rouge/1': 30.0}
    metrics |= {'f1/yes/no': 90.0}
    assert checkpoint_ranking.select_ranking_metric('cb', metrics, checkpoint_ranking.MEAN) == ('mean', 40.0)
