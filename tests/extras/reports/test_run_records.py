"""Records, settings and groups of runs, and their summaries, tables and charts."""

import json
import statistics

import pytest

from remixer_t5x.extras.reports import curves, overview, run_records
from remixer_t5x.extras.reports.run_records import MetricsRecord, RecordedRun, RunGroup
from remixer_t5x.run_folder import model_dir


def _run(name, config='', train=((1, 3.0), (2, 2.0)), **evaluations):
    logged = [MetricsRecord('train', step, {'loss': loss}, {'seconds_per_step': 0.5}) for step, loss in train]
    logged += [MetricsRecord(kind.replace('__', '/'), *at, {}) for kind, at in evaluations.items()]
    return RecordedRun(name, f'/runs/{name}', logged, config)


def test_runs_that_differ_only_in_seed_and_folders_are_one_group():
    runs = [
        _run('a_1', "SEED = 1\nX = 2\nMODEL_DIR = 'a'\n"),
        _run('b', "SEED = 1\nX = 3\nMODEL_DIR = 'b'\n"),
        _run('a_2', "SEED = 2\nX = 2\nMODEL_DIR = 'c'\n"),
        _run('bare'),
        _run('bare_too'),
    ]
    groups = run_records.group_runs_by_settings(runs)
    assert [[run.name for run in group.runs] for group in groups] == [['a_1', 'a_2'], ['b'], ['bare'], ['bare_too']]
    assert [group.name for group in groups] == ['a_1 × 2', 'b', 'bare', 'bare_too']


@pytest.mark.parametrize('values', [[5.0], [10.0, 90.0, 20.0]])
def test_the_table_has_mean_and_sample_deviation_over_seeds(values):
    runs = [_run(f'r{n}', f'SEED = {n}\nX = 1\n', eval__cb=(9, {'f1': value})) for n, value in enumerate(values)]
    # Of two runs with one seed, the last is used.
    runs = [_run('first', 'SEED = 0\nX = 1\n', eval__cb=(9, {'f1': 1.0})), *runs]
    [(kind, metric, [cell], _)] = overview.build_task_table(run_records.group_runs_by_settings(runs))
    assert (kind, metric, len(cell.by_seed)) == ('cb, eval', 'f1', len(values))
    assert cell.mean == pytest.approx(statistics.mean(values))
    assert cell.standard_deviation == (pytest.approx(statistics.stdev(values)) if len(values) > 1 else None)


def test_the_newest_evaluation_is_used_and_the_later_line_of_a_step():
    values = ((1, 10.0), (3, 30.0), (2, 20.0), (3, 31.0))
    lines = [MetricsRecord('eval/cb', step, {'f1': value}, {}) for step, value in values]
    assert RecordedRun('r', '/r', lines).find_latest_evaluations()['eval/cb'].numbers == {'f1': 31.0}


def test_an_evaluation_is_shown_twice_only_for_another_split():
    config = "EVAL_SPLIT = 'validation'\ntask_evaluation.TaskEvaluation.split = %EVAL_SPLIT\n"
    run = _run('r', config, **{f'{split}__cb': (9, {'f1': 100.0}) for split in ('eval', 'validation', 'test')})
    assert [row.kind for row in overview.build_task_table([RunGroup('r', [run])])] == ['cb, eval', 'cb, test']


def test_differences_are_settings_other_than_folders():
    config = 'from x import y\n# a comment\nA = 1\nB = \\\n    (@m.C,\n     2)\nm.C.d = %A\n'
    assert run_records.RecordedRun('a', 'a', [], config).parse_settings() == {'A': '1', 'B': '(@m.C, 2)', 'm.C.d': '%A'}
    runs = [_run('a', "A = 1\nm.C.d = 2\nMODEL_DIR = 'a'\n"), _run('b', "A = 1\nZ = 3\nm.C.d = 4\nMODEL_DIR = 'b'\n")]
    assert run_records.find_differing_settings(runs) == [('Z', [None, '3']), ('m.C.d', ['2', '4'])]


def test_numbers_of_macros_that_refer_to_other_macros_are_read():
    run = _run('r', 'SEED = %A\nA = %B\nB = 7000000000\nTRAIN_STEPS = %STEPS\nSTEPS = 50\nX = %Y\nY = %X\n')
    assert run.seed == 7_000_000_000 and overview.summarize_run(run).steps == 50
    assert run.find_whole_number('X') is run.find_whole_number('Z') is None


@pytest.mark.parametrize('text', ['{[]: 1}', f'{"-" * 20_000}1', '%A', '(', '@x.Y'])
def test_a_setting_that_is_not_a_literal_is_none(text):
    assert _run('r', f'A = {text}\nsettings.Folder.best_metrics = %A\n').best_metrics is None


def test_a_chart_shows_only_the_main_metric_of_a_task():
    numbers = {'exact_match': 36.0, 'best_constant_prediction': 0.2}
    run = _run('r', eval__cogs=(9, numbers), eval__average=(9, {'average': 36.0}))
    # A metric may be a fraction, so it has no unit.
    assert 'exact_match 36. ' in overview.summarize_run(run).summary
    titles = [chart.title for chart in curves.draw_charts([run], {'r': 0})['curves']]
    assert titles == ['Training loss', 'cogs, eval: exact_match', 'all tasks, eval: average']


def test_the_main_metric_of_a_task_is_that_of_best_metrics(tmp_path):
    line = {'kind': 'eval/qa', 'step': 9, 'exact_match': 36.0, 'distance': 5.0}
    for name in (model_dir.MARKER_FILE, model_dir.METRICS):
        (tmp_path / name).write_text(json.dumps(line))
    (tmp_path / model_dir.CONFIG).write_text(
        "BEST_METRICS = {'qa': '-distance'}\nsettings.Folder.best_metrics = %BEST_METRICS\n"
    )
    [run] = run_records.read_runs([str(tmp_path)])
    assert 'qa, eval: distance 5.' in overview.summarize_run(run).summary
    assert [row.metric for row in overview.build_task_table([RunGroup('r', [run])])] == ['distance', 'exact_match']


def test_smoothing_follows_its_formula():
    # Of 4, 8 and 2 with weight 0.5: 4 / 1, (2 + 8) / 1.5, (1 + 4 + 2) / 1.75.
    assert curves.moving_average([4.0, 8.0, 2.0], 0.5) == pytest.approx([4.0, 10 / 1.5, 4.0])


@pytest.mark.parametrize(
    ('values', 'negated', 'best'),
    [
        ([(1.0, 1.1), (9.0, 9.3)], '', 'b'),
        ([(1.0, 1.1), (9.0, 9.3)], "settings.Folder.best_metrics = {'toy': '-accuracy'}\n", 'a'),
        ([(1.0, 9.0), (2.0, 7.0)], '', None),
    ],
)
def test_a_group_is_marked_best_only_if_its_difference_is_shown(values, negated, best):
    groups = [
        RunGroup(
            name,
            [
                _run(f'{name}{k}', f'SEED = {k}\n{negated}', (), eval__toy=(10, {'accuracy': x}))
                for k, x in enumerate(row)
            ],
        )
        for name, row in zip('ab', values, strict=True)
    ]
    (row,) = rows = overview.build_task_table(groups)
    assert [cell.best for cell in row.cells] == [group.name == best for group in groups]
    overviews = {run.name: overview.summarize_run(run) for group in groups for run in group.runs}
    (sentence,) = overview.describe_measure_differences(
        overview.collect_compared_measures(groups, rows, overviews), overviews
    )
    assert (f'{best} is better than' in sentence) if best else ('no difference shown' in sentence)
