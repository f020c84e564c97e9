"""Differences between models over seeds: intervals, conclusions, and how often they are right."""

import numpy as np
import pytest
import scipy.stats

from remixer_t5x.extras.reports import differences


def simulated(rng, gap, seeds, models=2):
    """`models` models of standard deviation 1 over seeds; the first is better by `gap`."""
    values = rng.normal(size=(models, seeds)) + gap * (np.arange(models) == 0)[:, None]
    return {f'model_{index}': dict(enumerate(row)) for index, row in enumerate(values)}


def test_the_interval_is_that_of_a_paired_t_test():
    a, b = [3.0, 4.5, 4.0, 5.5], [2.5, 4.75, 3.0, 4.0]
    models = {'a': dict(enumerate(a)), 'b': dict(enumerate(b))}
    (pair,) = differences.compare_models(models, higher_is_better=True)
    interval = scipy.stats.ttest_rel(a, b).confidence_interval(0.9)
    assert (pair.low, pair.high) == pytest.approx((interval.low, interval.high)) and pair.model == 'a'
    (lower,) = differences.compare_models(models, higher_is_better=False)
    assert lower.model == 'b' and lower.gain == pair.gain and not lower.is_shown


@pytest.mark.parametrize(('models', 'seeds'), [(2, 2), (2, 3), (2, 5), (4, 3)])
def test_equal_models_are_rarely_called_different(models, seeds):
    rng = np.random.default_rng(0)
    wrong = sum(
        any(each.is_shown for each in differences.compare_models(simulated(rng, 0.0, seeds, models), True))
        for _ in range(1000)
    )
    assert wrong <= 150


def test_a_gap_of_two_deviations_is_found_with_five_seeds():
    rng = np.random.default_rng(0)
    pairs = [differences.compare_models(simulated(rng, 2.0, 5), True)[0] for _ in range(1000)]
    assert sum(pair.is_shown and pair.model == 'model_0' for pair in pairs) >= 800


def test_only_common_seeds_are_compared():
    models = {'a': {0: 1.0, 1: 2.0, 2: 9.0}, 'b': {0: 0.5, 1: 1.75}, 'c': {7: 0.0}}
    (pair,) = differences.compare_models(models, higher_is_better=True)
    assert (pair.model, pair.other, pair.seeds) == ('a', 'b', 2)
    assert differences.conclusion('loss', {'a': {0: 1.0}, 'c': {7: 0.0}}, True) == ''


def test_a_conclusion_names_the_best_model_and_each_other():
    values = {'a': [1.0, 1.1, 1.05], 'b': [2.0, 2.1, 2.05], 'c': [0.5, 1.6, 1.1]}
    models = {name: dict(enumerate(row)) for name, row in values.items()}
    line = differences.conclusion('accuracy', models, higher_is_better=True)
    assert 'b is better than a' in line and '3 seeds' in line and 'between a' not in line
    assert ('b is better than c' in line) == differences.compare_models(models, True)[2].is_shown


def test_a_pair_with_one_common_seed_has_no_interval():
    models = {'a': {0: 1.0, 1: 1.1}, 'b': {0: 2.0, 1: 2.1}, 'c': {0: 3.0}}
    line = differences.conclusion('loss', models, higher_is_better=False)
    assert 'between a and c (one common seed)' in line and 'inf' not in line


def test_one_seed_shows_no_difference():
    line = differences.conclusion('loss', {'a': {0: 1.0}, 'b': {0: 2.0}}, higher_is_better=False)
    assert 'one seed' in line and 'better' not in line
