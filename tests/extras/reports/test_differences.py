"""Differences between models over seeds: intervals, conclusions, and how often they are right."""

import itertools

import numpy as np
import pytest
import scipy.stats

from remixer_t5x.extras.reports import differences
from remixer_t5x.extras.reports.differences import ComparedMeasure


def simulate_results(rng, gap, seeds, models=2):
    """Returns results of models with standard deviation 1 over seeds; the first model is better by `gap`."""
    values = rng.normal(size=(models, seeds)) + gap * (np.arange(models) == 0)[:, None]
    return {f'model_{index}': dict(enumerate(row)) for index, row in enumerate(values)}


def excludes_zero(gains, confidence=differences.CONFIDENCE):
    """Returns whether the interval of each row of `gains`, [..., seeds], excludes zero."""
    mean, margin = differences.t_interval(gains, confidence)
    return abs(mean) > margin


def test_the_interval_equals_that_of_a_paired_t_test():
    a, b = [3.0, 4.5, 4.0, 5.5], [2.5, 4.75, 3.0, 4.0]
    models = {'a': dict(enumerate(a)), 'b': dict(enumerate(b))}
    (pair,) = differences.compare_models(models, higher_is_better=True)
    interval = scipy.stats.ttest_rel(a, b).confidence_interval(0.9)
    assert (pair.low, pair.high) == pytest.approx((interval.low, interval.high)) and pair.model == 'a'
    (lower,) = differences.compare_models(models, higher_is_better=False)
    assert lower.model == 'b' and lower.gain == pair.gain and not lower.is_significant


# The accuracy on few examples has few possible values, so models often differ equally for all seeds by chance.
@pytest.mark.parametrize(('models', 'seeds', 'examples'), [(2, 2, 0), (4, 3, 0), (2, 2, 20), (4, 2, 5), (4, 2, 56)])
def test_equal_models_are_rarely_called_different(models, seeds, examples):
    rng, size = np.random.default_rng(0), (10_000, models, seeds)
    values = 100 * rng.binomial(examples, 0.7, size) / examples if examples else rng.normal(size=size)
    pairs = np.stack([values[:, a] - values[:, b] for a, b in itertools.combinations(range(models), 2)], axis=1)
    assert excludes_zero(pairs, differences.bonferroni_confidence(models)).any(axis=1).mean() <= 0.15


@pytest.mark.parametrize(('seeds', 'deviation'), [(2, 1.0), (5, 3.0), (5, 1.0)])
def test_a_search_with_the_first_seed_rarely_separates_equal_models(seeds, deviation):
    """The first seed of each model has the best of 8 settings."""
    values, trials = (np.random.default_rng(n).normal(size=(10_000, 2, size)) for n, size in enumerate((seeds, 8)))
    values[:, :, 0] = trials.max(axis=-1)
    assert excludes_zero(values[:, 0] - deviation * values[:, 1]).mean() <= 0.15


@pytest.mark.parametrize(('gap', 'most', 'least'), [(0.0, 15, 0), (2.0, 100, 80)])
def test_comparisons_of_simulated_models_state_what_the_intervals_show(gap, most, least):
    rng = np.random.default_rng(0)
    models = [simulate_results(rng, gap, 5) for _ in range(100)]
    lines = [
        differences.describe_differences(ComparedMeasure('accuracy', each, higher_is_better=True)) for each in models
    ]
    count = sum('model_0 is better' in line for line in lines)
    assert least <= count and sum('is better' in line for line in lines) <= most
    assert all(('no difference shown' in line) != ('is better' in line) for line in lines)


def test_the_expected_best_is_the_mean_over_all_draws():
    values = [3.0, 1.0, 2.0, 2.0]
    for k, expected in enumerate(differences.expected_maximum(values), 1):
        assert expected == pytest.approx(np.mean([max(draw) for draw in itertools.product(values, repeat=k)]))


def test_only_common_seeds_are_compared_and_one_seed_has_no_interval():
    models = {'a': {0: 1.0, 1: 1.1}, 'b': {0: 2.0, 1: 2.1, 2: 9.0}, 'c': {0: 3.0}, 'd': {7: 0.0}}
    pairs = differences.compare_models(models, higher_is_better=True)
    assert [(pair.model, pair.other, pair.seeds) for pair in pairs] == [('b', 'a', 2), ('c', 'a', 1), ('c', 'b', 1)]

    def describe(*names):
        measure = ComparedMeasure('loss', {name: models[name] for name in names}, higher_is_better=False)
        return differences.describe_differences(measure)

    assert 'no difference shown between a and b (the same difference, 1, for all 2 seeds' in describe('a', 'b')
    line = describe('a', 'b', 'c')
    assert 'between a and c (one seed: no interval)' in line and 'inf' not in line
    assert 'one seed' in describe('a', 'c') and 'better' not in describe('a', 'c') and describe('a', 'd') == ''
    # Only the run of c with seed 0 has a result.
    better = {'a': models['a'], 'b': {0: 2.0, 1: 2.11}, 'c': {0: 0.5}}
    line = differences.describe_differences(ComparedMeasure('loss', better, higher_is_better=False))
    assert 'a is better than b by 1.005' in line and 'between c and a (one seed' in line
    # Both models are described by their means, although they have only seed 0 in common.
    assert describe('c', 'a').startswith('loss: c 3, a 1.05 (one seed')
