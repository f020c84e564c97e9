"""A kernel that is wrong, raises, crashes or hangs never computes: its formula does, with one line."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remixer_t5x.errors import UserError
from remixer_t5x.kernels import self_check
from remixer_t5x.kernels.attention import choice
from remixer_t5x.kernels.attention.inputs import Visibility
from tests.support import broken_kernels

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """An empty compilation cache, a process that has checked nothing, and children that can import the tests."""
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    monkeypatch.setattr(self_check, '_failures', {})
    self_check.warn_of_formula.cache_clear()
    before = jax.config.jax_compilation_cache_dir
    jax.config.update('jax_compilation_cache_dir', str(tmp_path))
    yield tmp_path
    jax.config.update('jax_compilation_cache_dir', before)


def attend(monkeypatch, attend, implementation='auto'):
    """Attention on this CPU, whose kernel is `attend`."""
    monkeypatch.setitem(choice.KERNELS, 'cpu', ('tpu_kernel', broken_kernels.Kernel(attend)))
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(2, 6, 2, 4)), jnp.float32) for _ in range(3))
    visibility = Visibility(None, jnp.asarray([[1] * 6, [1] * 3 + [0] * 3]))

    @jax.jit  # a trace, in which the check must not be recorded
    def mixed(query, key, value):
        return choice.attention(query, key, value, visibility, None, implementation)

    return mixed(query, key, value), broken_kernels.right(query, key, value, visibility, None)


BROKEN = {
    'ignores_padding': 'differs from the formula by',
    'wrong_gradient': 'differs from the formula by',
    'not_a_number': 'differs from the formula by nan',
    'raises': 'ValueError: Mosaic failed to compile',
    'kills_its_process': 'crashed with exit code -9',
}


@pytest.mark.parametrize('name', BROKEN)
def test_a_broken_kernel_falls_back_to_the_formula_or_is_an_error(name, monkeypatch, caplog):
    kernel = getattr(broken_kernels, name)
    for _ in range(2):
        actual, expected = attend(monkeypatch, kernel)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
    [record] = caplog.records
    for fact in ('tpu_kernel', '6 x 6 tokens, 2 heads of 4', 'float32', BROKEN[name]):
        assert fact in record.getMessage()
    with pytest.raises(UserError, match=BROKEN[name]):
        attend(monkeypatch, kernel, 'tpu_kernel')


def test_a_kernel_that_hangs_is_stopped(monkeypatch):
    monkeypatch.setattr(self_check, '_LONGEST', 0.5)
    assert 'took over 0.5 s' in self_check.run(broken_kernels.check(broken_kernels.hangs)).failure(
        broken_kernels.check(broken_kernels.hangs)
    )


def test_a_right_kernel_is_used_and_checked_once(monkeypatch, own_cache, caplog):
    used = []

    def kernel(*arguments):
        used.append(True)
        return broken_kernels.right(*arguments)

    check = broken_kernels.check(broken_kernels.right)
    first = self_check.run(check)
    assert first.difference < 1e-5 and first.failure(check) is None
    assert len(list((own_cache / self_check.FOLDER).glob('*.json'))) == 1
    # From the cache, so that a later start has no child.
    monkeypatch.setattr(subprocess, 'run', None)
    assert self_check.run(check) == first
    monkeypatch.setattr(self_check, 'run', lambda check: first)
    attend(monkeypatch, kernel)
    assert used and not caplog.records


@pytest.mark.parametrize('kernel', ['right', 'kills_its_process'])
def test_where_no_child_can_have_the_device_a_crash_is_known_to_the_next_start(kernel, own_cache):
    """As on a TPU: the check ends its own process, and the next one does not repeat it."""
    program = f"""
import jax
jax.default_backend = lambda: 'tpu'
from remixer_t5x.kernels import self_check
from tests.support import broken_kernels
check = broken_kernels.check(broken_kernels.{kernel})
print(self_check.run(check).failure(check))
"""
    environment = {'JAX_PLATFORMS': 'cpu', 'JAX_COMPILATION_CACHE_DIR': str(own_cache), 'PYTHONPATH': str(ROOT)}
    first, second = (
        subprocess.run([sys.executable, '-c', program], env=environment, capture_output=True, text=True)
        for _ in range(2)
    )
    if kernel == 'right':
        assert (first.stdout, second.stdout) == ('None\n', 'None\n'), first.stderr
    else:
        assert first.returncode == -9 and second.returncode == 0, second.stderr
        assert 'crashed or hung in an earlier check' in second.stdout and str(own_cache) in second.stdout


def test_programs_for_described_devices_are_not_checked(monkeypatch):
    from remixer_t5x.kernels.compile_target import compiling_for

    monkeypatch.setattr(self_check, 'run', None)
    with compiling_for('tpu'):
        assert self_check.failure(broken_kernels.check(broken_kernels.raises)) is None
