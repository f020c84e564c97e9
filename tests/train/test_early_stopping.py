"""Early stopping ends a resumed run at the same step as an uninterrupted run."""

import contextlib
import json
import math
import pathlib
from unittest import mock

import numpy as np
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

from remixer_t5x.evaluate import checkpoint_ranking
from remixer_t5x.evaluate.task_evaluation import TaskReport
from remixer_t5x.train import hooks
from remixer_t5x.train.run_state import EarlyStopping, RunState


def count_until_end(values, limit, restores=()):
    """Returns the number of values until the end; saves and restores the state after each value in `restores`."""
    patience = EarlyStopping(limit)
    for number, value in enumerate(values, 1):
        patience.add_evaluation(number, value)
        if patience.is_exhausted:
            return number
        if number in restores:
            patience = EarlyStopping(limit, **json.loads(json.dumps(patience.to_json())))
    return None


VALUES = st.lists(st.sampled_from([1.0, 2.0, 3.0, float('nan'), float('inf')]), max_size=12)


@given(VALUES, st.integers(1, 4), st.sets(st.integers(1, 12)))
def test_a_run_ends_after_limit_evaluations_without_improvement(values, limit, restores):
    def is_over(number):
        """Returns whether there is a finite value, and none of the last `limit` values is the best finite value."""
        best, best_index = None, 0
        for index, value in enumerate(values[:number], 1):
            if math.isfinite(value) and (best is None or value > best):
                best, best_index = value, index
        return best is not None and number - best_index >= limit

    expected = next((number for number in range(1, len(values) + 1) if is_over(number)), None)
    assert count_until_end(values, limit) == expected == count_until_end(values, limit, restores)
    assert count_until_end(values, None) is None


def test_other_examples_restart_the_count():
    patience = EarlyStopping(2, best=9.0, step=10, since=1)
    # A checkpoint of version 0.1.0 does not identify the examples.
    patience.add_evaluation(20, 8.0, 'a')
    assert (patience.best, patience.since) == (9.0, 2) and patience.is_exhausted
    patience.add_evaluation(30, 5.0, 'b')
    assert (patience.best, patience.step, patience.since) == (5.0, 30, 0)
    patience.add_evaluation(40, 4.0, 'b')
    assert (patience.best, patience.since) == (5.0, 1)


def logged_steps(folder, kind='eval'):
    lines = pathlib.Path(folder, 'metrics.jsonl').read_text().splitlines()
    return [record['step'] for record in map(json.loads, lines) if record['kind'] == kind]


def test_a_resumed_run_ends_early_at_the_same_step(training, tmp_path):
    """With a learning rate of 0, no evaluation is better than the first."""
    run = {'learning_rate': 0.0, 'eval_period': 2, 'checkpoint_period': 4, 'stop_after_evaluations': 3}
    code, output = training.run(model_dir=str(tmp_path / 'whole'), train_steps=30, quiet=False, **run)
    assert code == 0, output
    assert 'stopping early at step 8: no better evaluation since step 2 (3 without improvement' in output
    assert logged_steps(tmp_path / 'whole') == [2, 4, 6, 8]
    assert logged_steps(tmp_path / 'whole', 'train') == [3, 6, 8]
    code, output = training.run(model_dir=str(tmp_path / 'parts'), train_steps=4, **run)
    assert code == 0, output
    for _ in range(2):
        code, output = training.run(model_dir=str(tmp_path / 'parts'), train_steps=30, quiet=False, **run)
        assert code == 0, output
        assert logged_steps(tmp_path / 'parts') == [2, 4, 6, 8]
    assert 'is already at step 8 (no better evaluation since step 2' in output


def test_another_task_restarts_early_stopping_and_the_best_average(tmp_path):
    reports = [TaskReport(name, 'validation', {'accuracy': 60.0}, (), 0.0, settings_hash=name) for name in 'abc']
    state, best = RunState({}, patience=EarlyStopping(3)), []
    for step, count in enumerate((2, 2, 3)):
        evaluator = mock.Mock(split='validation', return_value=reports[:count])
        checkpoints = checkpoint_ranking.BestCheckpoints(epath.Path(tmp_path), {})
        log = mock.Mock(tolerate_write_errors=contextlib.nullcontext)
        state.step = step
        hook = hooks.TaskEvaluationHook(evaluator, checkpoints, log, lambda state: {'table': np.ones(2)}, mock.Mock())
        hook(state)
        best.append((state.patience.step, checkpoint_ranking.find_best_checkpoints(str(tmp_path))['average']['step']))
    assert best == [(0, 0), (0, 0), (2, 2)]
