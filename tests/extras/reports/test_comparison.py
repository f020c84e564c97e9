"""Results of a comparison of simulated runs: search and table; and equal costs."""

import dataclasses
import pathlib

import numpy as np
import pytest

from remixer_t5x.config import loading
from remixer_t5x.costs.model_counts import ModelCounts
from remixer_t5x.errors import UserError
from remixer_t5x.extras.reports import comparison, cost_matching
from remixer_t5x.extras.reports.run_records import MetricsRecord, RecordedRun, RunGroup
from remixer_t5x.extras.reports.sweep import SweepCell

COUNTS = ModelCounts({('a',): 1000}, {(): 2e6}, tokens=100)
LOSSES = {'t5': [2.0, 2.1, 2.2], 'remixer': [1.0, 1.2, 1.1]}


def run(name, seed, loss, **tasks):
    """Returns a run of 10 steps with 4 examples each, with metrics of `tasks`."""
    logged = [MetricsRecord('train', 10, {'loss': loss}, {'seconds_per_step': 0.5, 'tokens_per_second': 9.0})]
    logged += [MetricsRecord('held_out', 10, {'loss': loss}, {})]
    logged += [MetricsRecord(f'eval/{task}', 10, {'accuracy': value}, {}) for task, value in tasks.items()]
    return RecordedRun(name, f'/{name}', logged, f'SEED = {seed}\nBATCH_SIZE = %ROWS\nROWS = 4\n')


def cell(model, rate, seed=0):
    return SweepCell(model, (('LEARNING_RATE', rate),), seed, pathlib.Path(f'/{model}/{rate}/seed_{seed}'), ())


VALUES = {('t5', '1e-3'): 2.0, ('t5', '3e-3'): 2.5, ('remixer', '1e-3'): 1.5, ('remixer', '3e-3'): 1.0}


def search():
    runs = {cell(model, rate): run(f'{model}{rate}', 0, loss) for (model, rate), loss in VALUES.items()}
    return comparison.collect_search_results([*runs, cell('t5', '9e-1')], runs)


def test_the_best_setting_has_the_lowest_held_out_loss():
    results = search()
    assert results.measure == 'held-out loss' and results.settings[-1] == (('LEARNING_RATE', '9e-1'),)
    best = [results.find_best_setting(model) for model in ('t5', 'remixer')]
    assert best == [(('LEARNING_RATE', '1e-3'),), (('LEARNING_RATE', '3e-3'),)]
    # The expected minimum of two draws from 2.0 and 2.5 is 2.0 in three of four cases.
    assert results.compute_expected_best_values('t5') == pytest.approx([2.25, 2.125])


def test_a_setting_whose_last_held_out_loss_is_not_finite_is_not_selected():
    runs = {cell('t5', rate): run(rate, 0, loss) for rate, loss in (('1', 1.0), ('2', 2.0))}
    diverged = runs[cell('t5', '1')]
    values = {}
    for kind in (diverged.list_evaluation_names()[0], 'held_out/another_task'):
        last = MetricsRecord(kind, 20, {'loss': None}, {})
        runs[cell('t5', '1')] = dataclasses.replace(diverged, records=[*diverged.records, last])
        values[kind] = comparison.collect_search_results(list(runs), runs).values['t5']
    assert [list(by_setting.values()) for by_setting in values.values()] == [[2.0], [1.0, 2.0]]


def test_task_settings_are_selected_by_the_mean_validation_metric_if_it_is_finite():
    accuracies = (('1', 50.0, 60.0), ('2', 70.0, 50.0), ('3', None, 80.0))
    runs = {cell('t5', rate): run(rate, 0, 1.0, cb=cb, rte=rte) for rate, cb, rte in accuracies}
    test = MetricsRecord('test/cb', 10, {'accuracy': 100.0}, {})
    runs[cell('t5', '1')] = dataclasses.replace(runs[cell('t5', '1')], evaluations=[test])
    results = comparison.collect_search_results(list(runs), runs)
    assert list(results.values['t5'].values()) == [55.0, 60.0]
    assert results.find_best_setting('t5') == (('LEARNING_RATE', '2'),)


def evaluated_runs(config='', **by_task):
    """Returns one run per setting; each keyword argument lists the metrics of a task, one dict per run."""
    names = [f'{n}' for n in range(len(next(iter(by_task.values()))))]
    return {
        cell('t5', name): RecordedRun(
            name,
            '/run',
            [MetricsRecord(f'eval/{task}', 1, rows[int(name)], {}) for task, rows in by_task.items()],
            config,
        )
        for name in names
    }


ERRORS = [{'accuracy': 60.0, 'wer': 9.0}, {'accuracy': 50.0, 'wer': 7.0}]
LOSS_ONLY = [{'wer': 4.0, 'cer': 2.0}, {'wer': 5.0, 'cer': 3.0}]
# An average over tasks in which both variants of MNLI count as one task.
MIXTURE = {
    'cb': [{'f1': 30.0}, {'f1': 60.0}],
    'mnli_matched': [{'accuracy': 80.0}, {'accuracy': 60.0}],
    'mnli_mismatched': [{'accuracy': 80.0}, {'accuracy': 60.0}],
    'average': [{'average': 55.0}, {'average': 60.0}],
}


@pytest.mark.parametrize(
    ('tasks', 'best_metrics', 'measure', 'values', 'best'),
    [
        ({'a': ERRORS}, {'a': 'wer'}, 'wer', [9, 7], '1'),
        ({'a': ERRORS}, {'a': '-accuracy'}, 'accuracy', [60, 50], '1'),
        ({'a': LOSS_ONLY}, 'mean', 'mean', [3, 4], '0'),
        (MIXTURE, None, "mean of the tasks' metrics", [55, 60], '1'),
        ({'a': ERRORS, 'b': LOSS_ONLY}, None, "mean of the tasks' metrics, with errors negated", [28, 22.5], '0'),
    ],
)
def test_settings_are_ranked_by_the_metric_of_the_best_checkpoint(tasks, best_metrics, measure, values, best):
    runs = evaluated_runs(f'settings.Folder.best_metrics = {best_metrics!r}\n', **tasks)
    results = comparison.collect_search_results(list(runs), runs)
    assert results.measure == measure and list(results.values['t5'].values()) == values
    assert results.find_best_setting('t5') == (('LEARNING_RATE', best),)


def test_the_table_has_costs_and_means():
    groups = [
        RunGroup(name, [run(f'{name}_{seed}', seed, loss) for seed, loss in enumerate(losses)])
        for name, losses in LOSSES.items()
    ]
    result = comparison.ModelComparison(groups, dict.fromkeys(LOSSES, COUNTS), search())
    rows = dict(result.results_table)
    assert rows['best setting'] == ['LEARNING_RATE=1e-3', 'LEARNING_RATE=3e-3']
    assert rows['parameters'] == ['1,000'] * 2 and rows['forward FLOPs per token'] == ['20 k'] * 2
    assert rows['held-out loss'] == ['2.1000 ± 0.1000', '1.1000 ± 0.1000']
    # 6 MFLOPs to train on an example, 10 steps of 4 examples, 3 settings.
    assert rows['E x D x H'] == ['720 MFLOPs'] * 2
    assert dict(result.search_table)['LEARNING_RATE=9e-1'] == ['-', '-']


@pytest.mark.parametrize(('target', 'power'), [(30_000, 1), (250_000, 2)])
def test_widths_are_scaled_until_costs_are_within_one_percent(target, power):
    calls = []

    def cost_of(widths):
        calls.append(widths)
        return 20_000 + 100 * widths['A'] ** power / 64 ** (power - 1) + 50 * widths['B']

    widths = cost_matching.match_widths(cost_of, {'A': 128, 'B': 64}, target)
    assert abs(cost_of(widths) / target - 1) <= cost_matching.TOLERANCE and len(calls) < 20
    assert widths['A'] / widths['B'] == pytest.approx(2, rel=0.2)
    # No multiple of 8 has a cost within 1%.
    assert 258 <= cost_matching.match_widths(lambda widths: widths['A'], {'A': 256}, 260)['A'] <= 262
    with pytest.raises(UserError, match='no A has a cost within 1% of 1,000'):
        cost_matching.match_widths(lambda widths: 20_000 + widths['A'], {'A': 128}, 1000)


def test_a_model_without_a_width_to_change_raises_an_error(monkeypatch):
    text = 'EMBED_DIM = 8\nA_MLP_DIM = 16\nMLP_DIM = %A_MLP_DIM\n'
    monkeypatch.setattr(loading, 'get_config_text', lambda **_: text)
    assert cost_matching.find_feed_forward_widths() == {'A_MLP_DIM': 16}
    text = 'WIDTH = 8\n'
    with pytest.raises(UserError, match='sets none of them'):
        cost_matching.find_feed_forward_widths()


def test_cost_differences_above_five_percent_cause_a_warning():
    more = dataclasses.replace(COUNTS, parameters={('a',): 1100})
    costs = {'t5': COUNTS, 'remixer': more}
    (line,) = cost_matching.describe_cost_differences(costs)
    assert 'remixer has 10% more parameters than t5' in line and '--equal' in line
    assert cost_matching.describe_cost_differences({'t5': COUNTS, 'remixer': COUNTS}) == []
    costs['remixer'] = dataclasses.replace(more, forward_flops={(): 4e6})
    assert len(cost_matching.describe_cost_differences(costs)) == 2


def test_the_step_time_excludes_the_log_that_compiles():
    times = ((1, 9.0), (2, 1.0), (3, 2.0))
    logged = [MetricsRecord('train', step, {}, {'seconds_per_step': time}) for step, time in times]
    assert cost_matching.compute_seconds_per_step(RecordedRun('r', '/r', logged)) == 1.5
    assert np.isclose(cost_matching.compute_seconds_per_step(RecordedRun('r', '/r', logged[:1])), 9.0)
