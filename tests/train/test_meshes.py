"""Training on meshes of eight virtual devices equals training on one device."""

import json

import numpy as np
import pytest

from tests.support.real_processes import Process
from tests.train import mesh_worker


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp('mesh')
    path, output = folder / 'runs.json', folder / 'output.txt'
    process = Process(mesh_worker.main, path, output=output, devices=8)
    assert process.wait() == 0, process.output()
    return json.loads(path.read_text())


@pytest.fixture(scope='module')
def runs(results):
    return results['runs']


@pytest.mark.parametrize(
    ('mesh', 'single'),
    [
        ('adam data', 'adam single'),
        ('adam fsdp', 'adam single'),
        ('adafactor tensor', 'adafactor single'),
        ('adafactor all, 2 microbatches', 'adafactor single'),
        ('grouped tensor', 'grouped single'),
    ],
)
def test_losses_and_norms_do_not_depend_on_the_mesh(runs, mesh, single):
    assert runs[mesh]['losses'][0][0] != runs[mesh]['losses'][-1][0]
    np.testing.assert_allclose(runs[mesh]['losses'], runs[single]['losses'], rtol=2e-4)


def test_decoding_with_fewer_key_heads_than_devices(results):
    single, sharded = results['decoded']
    assert sharded['tokens'] == single['tokens']
    np.testing.assert_allclose(sharded['scores'], single['scores'], rtol=2e-4)


def test_fsdp_shards_parameters_and_moments_over_eight_devices(runs):
    replicated, sharded = runs['adam single'], runs['adam fsdp']
    assert runs['adam data']['bytes'] == replicated['bytes']
    # A little more than an eighth: biases of two heads and step counters are replicated.
    assert replicated['bytes'] / 8 < sharded['bytes'] < replicated['bytes'] / 7


def test_the_sharding_table_and_the_plan_count_the_bytes_on_a_device(runs):
    for run in ('adam single', 'adam fsdp'):
        # The state contains the parameters, two moments of equal size, and a few int32 step counters.
        assert abs(runs[run]['bytes'] - 3 * runs[run]['table']) <= 16
    assert all(run['planned'] == run['bytes'] for run in runs.values())


def test_factored_moments_are_sharded_like_their_parameters(runs):
    names = ('adafactor single', 'adafactor all, 2 microbatches')
    replicated, sharded = (runs[name]['bytes'] - runs[name]['table'] for name in names)
    # fsdp and tensor halve rows or columns; placeholders, counters and biases of two heads are replicated.
    assert sharded < 0.6 * replicated


@pytest.mark.parametrize(
    ('platform', 'kernel'), [(platform, name) for platform, names in mesh_worker.KERNELS.items() for name in names]
)
def test_a_sharded_kernel_equals_its_formula(results, platform, kernel):
    np.testing.assert_allclose(results[platform][kernel], results['formula'][kernel], rtol=1e-4, atol=1e-3)
