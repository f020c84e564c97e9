"""A run ends if its evaluations stop improving, at the same step if it is stopped and resumed before."""

import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remixer_t5x.errors import UserError
from remixer_t5x.train.saving import Patience
from remixer_t5x.train.settings import Periods


def end(values, most, cuts=()):
    """The number of observed values if the run is restored from a checkpoint at `cuts`."""
    patience = Patience(most)
    for number, value in enumerate(values, 1):
        patience.observe(number, value)
        if patience.is_exhausted:
            return number
        if number in cuts:
            patience = Patience(most, **json.loads(json.dumps(patience.to_json())))
    return None


VALUES = st.lists(st.sampled_from([1.0, 2.0, 3.0, float('nan')]), max_size=12)


@given(VALUES, st.integers(1, 4), st.sets(st.integers(1, 12)))
def test_it_ends_after_as_many_evaluations_without_a_better_one(values, most, cuts):
    def over(number):
        """By definition: the last `most` of the first `number` values do not have their best."""
        best, at = None, 0
        for index, value in enumerate(values[:number], 1):
            if value == value and (best is None or value > best):
                best, at = value, index
        return number - at >= most

    expected = next((number for number in range(1, len(values) + 1) if over(number)), None)
    assert end(values, most) == expected == end(values, most, cuts)
    assert end(values, None) is None


@pytest.mark.parametrize('value', [0, -1, True, '3'])
def test_the_number_of_evaluations_must_be_positive(value):
    with pytest.raises(UserError, match='STOP_AFTER_EVALUATIONS must be a whole number of at least 1 or None, got '):
        Periods(10, stop_after_evaluations=value)


def evaluated(folder):
    lines = pathlib.Path(folder, 'metrics.jsonl').read_text().splitlines()
    return [record['step'] for record in map(json.loads, lines) if record['kind'] == 'eval']


def test_a_run_ends_early_and_resumed_at_the_same_step(training, tmp_path):
    """With a rate of 0 no evaluation is better than the first."""
    run = {'learning_rate': 0.0, 'eval_period': 2, 'checkpoint_period': 4, 'stop_after_evaluations': 3}
    code, output = training.run(model_dir=str(tmp_path / 'whole'), train_steps=30, quiet=False, **run)
    assert code == 0, output
    assert 'stopping early at step 8: no better evaluation than that of step 2 in the 3 since then' in output
    assert evaluated(tmp_path / 'whole') == [2, 4, 6, 8]
    code, output = training.run(model_dir=str(tmp_path / 'parts'), train_steps=4, **run)
    assert code == 0, output
    for _ in range(2):
        code, output = training.run(model_dir=str(tmp_path / 'parts'), train_steps=30, quiet=False, **run)
        assert code == 0, output
        assert evaluated(tmp_path / 'parts') == [2, 4, 6, 8]
    assert 'is at step 8 already (no better evaluation than that of step 2' in output
