"""Properties of every optimizer: equal results on a mesh, sharded states, exact resume, skipped non-finite steps."""

import json
import re

import numpy as np
import pytest

from tests.optim import optimizer_worker
from tests.optim.optimizer_worker import OPTIMIZERS
from tests.support.paths import CONFIGS
from tests.support.real_processes import Process


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp('optimizers')
    process = Process(optimizer_worker.main, folder, output=folder / 'output.txt', devices=8)
    assert process.wait() == 0, process.output()
    return json.loads((folder / 'results.json').read_text())


def test_no_shipped_optimizer_is_left_out():
    texts = [path.read_text() for path in (CONFIGS / 'optimizers').glob('[!_]*.gin')]
    shipped = {name for text in texts for name in re.findall(r'^OPTIMIZER = @\w+\.(\w+)\(\)', text, re.M)}
    missing = shipped - OPTIMIZERS.keys()
    assert shipped and not missing, f'add {missing} to OPTIMIZERS in tests/optim/optimizer_worker.py'


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_results_and_resumed_runs_equal_those_on_one_device(results, name):
    result = results[name]
    np.testing.assert_allclose(result['mesh'], result['single'], rtol=2e-5)
    assert result['resumed']
    assert results['nonfinite'] == 1.0 and result['unchanged'] and result['moved']
    # States are sharded like parameters; Adafactor stores rows and columns instead of matrices.
    assert result['share'] == (0 if name == 'adafactor' else 1 / 8)


def test_momentum_can_be_bfloat16_and_second_moments_stay_float32(results):
    assert results['adamw bfloat16']['dtypes'] == ['bfloat16', 'float32', 'int32']
    assert results['lion']['dtypes'] == ['bfloat16', 'int32']
    assert all(results[name]['dtypes'] == ['float32', 'int32'] for name in ('adamw', 'muon', 'schedule_free_adamw'))


def test_averages_are_evaluated_instead_of_the_last_parameters(results):
    assert {name for name in OPTIMIZERS if results[name]['evaluated']} == {'schedule_free_adamw', 'average'}
