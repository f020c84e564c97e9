"""One number for a task and for a mixture, against T5's own eval_utils (golden/make_t5_averages.py)."""

import json

import pytest

from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import averages
from tests.support.paths import GOLDEN

T5 = json.loads((GOLDEN / 't5_averages.json').read_text())


def by_task(benchmark, step):
    """The metrics of each task of GLUE or SuperGLUE at a step."""
    found = {}
    for tag, values in T5['metrics'].items():
        task, metric = tag.split('/')
        if ('super' in task) == (benchmark == 'SuperGLUE'):
            found.setdefault(task, {})[metric] = values[step]
    return found


def score(task, metrics):
    return averages.score(task, metrics, averages.MEAN)[1]


@pytest.mark.parametrize('benchmark', ['GLUE', 'SuperGLUE'])
def test_the_average_of_a_step_is_t5s(benchmark):
    for step, wanted in enumerate(T5['averages'][benchmark]):
        tasks = by_task(benchmark, step)
        assert len(tasks) >= 8
        assert averages.average({task: score(task, own) for task, own in tasks.items()}) == pytest.approx(wanted)


@pytest.mark.parametrize('benchmark', ['GLUE', 'SuperGLUE'])
def test_the_best_step_of_a_task_is_t5s(benchmark):
    for task, metrics in by_task(benchmark, 0).items():
        # T5 chooses one step for both test sets of MNLI.
        if len(T5['best']) and 'mnli' not in task:
            values = [score(task, by_task(benchmark, step)[task]) for step in range(len(T5['steps']))]
            best = values.index(max(values))
            for metric in metrics:
                assert T5['best'][f'{task}/{metric}'] == [
                    T5['steps'][best], pytest.approx(by_task(benchmark, best)[task][metric])
                ]  # fmt: skip


def test_errors_count_negative_and_are_left_out_of_a_mean():
    metrics = {'pearson': 80.0, 'spearman': 60.0, 'mean_absolute_error': 3.0}
    assert averages.score('stsb', metrics, averages.MEAN) == ('mean', 70.0)
    assert averages.score('stsb', {'a_loss': 3.0, 'perplexity': 5.0}, averages.MEAN) == ('mean', -4.0)
    ranks = {task: averages.rank(*score) for task, score in {'a': ('accuracy', 50.0), 'b': ('wer', 10.0)}.items()}
    assert averages.average(ranks) == 20.0


def test_without_a_wish_it_is_the_first_metric():
    assert averages.score('cb', {'f1': 2.0, 'accuracy': 3.0}) == ('f1', 2.0)
    assert averages.score('cb', {'f1': 2.0, 'accuracy': 3.0}, {'cb': 'accuracy'}) == ('accuracy', 3.0)
    assert averages.score('cb', {}) is None and averages.score('cb', {}, averages.MEAN) is None
    with pytest.raises(UserError, match="BEST_METRICS is 'f1'; it takes 'mean', or a metric by task"):
        averages.score('cb', {'f1': 2.0}, 'f1')
