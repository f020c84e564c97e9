"""A kernel that is wrong, raises or crashes is replaced by its formula, with one line in the log."""

import os
import pathlib
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remixer_t5x.errors import UserError
from remixer_t5x.kernels import attention, self_check
from remixer_t5x.kernels.attention_formula import Visibility, dot_product_attention
from remixer_t5x.kernels.compile_target import compile_for_platform

ROOT = pathlib.Path(__file__).parents[2]


def correct(query, key, value, visibility, bias):
    return dot_product_attention(query, key, value, visibility.build_mask(), bias)


@jax.custom_vjp
def _doubled(x):
    return x


_doubled.defvjp(lambda x: (x, None), lambda _, gradient: (2 * gradient,))


def wrong_gradient(query, key, value, visibility, bias):
    return correct(query, _doubled(key), value, visibility, bias)


def not_a_number(query, key, value, visibility, bias):
    return correct(query, key, value, visibility, bias) * float('nan')


def raises(*_):
    raise ValueError('Mosaic failed to compile')


def kills_its_process(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def build_check(attend):
    shape = jax.ShapeDtypeStruct((2, 8, 1, 4), 'float32')
    visibility = Visibility(None, jax.ShapeDtypeStruct((2, 8), 'int32'))
    return self_check.KernelCheck('test', '8 tokens', attend, correct, (shape, shape, shape, visibility, None))


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    """Provides an empty compilation cache, and resets the results of earlier checks."""
    monkeypatch.setattr(self_check, '_failures', {})
    self_check.log_fallback.cache_clear()
    before = jax.config.jax_compilation_cache_dir
    jax.config.update('jax_compilation_cache_dir', str(tmp_path))
    yield tmp_path
    jax.config.update('jax_compilation_cache_dir', before)


def run_attention(monkeypatch, kernel, implementation='auto'):
    """Returns the outputs of attention with `kernel` as the CPU's kernel, and of the formula."""
    module = types.SimpleNamespace(attend=kernel, unsupported_reason=lambda *_: None)
    monkeypatch.setitem(attention.KERNELS, 'cpu', ('tpu_kernel', module))
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(2, 6, 2, 4)), jnp.float32) for _ in range(3))
    visibility = Visibility(None, jnp.asarray([[1] * 6, [1] * 3 + [0] * 3]))

    @jax.jit  # The check must not become part of the trace.
    def mixed(query, key, value):
        return attention.attention(query, key, value, visibility, None, implementation)

    return mixed(query, key, value), correct(query, key, value, visibility, None)


@pytest.mark.parametrize(
    ('kernel', 'reason'),
    [
        (wrong_gradient, 'the relative error must be at most'),
        (not_a_number, 'the relative error must be at most 0.01, got nan'),
        (raises, 'ValueError: Mosaic failed to compile'),
    ],
)
def test_a_broken_kernel_falls_back_to_the_formula_or_raises(kernel, reason, monkeypatch, caplog):
    for _ in range(2):
        actual, expected = run_attention(monkeypatch, kernel)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
    [record] = caplog.records
    for words in ('tpu_kernel', '6 x 6 tokens, 2 heads of 4', 'float32', reason):
        assert words in record.getMessage()
    with pytest.raises(UserError, match=reason):
        run_attention(monkeypatch, kernel, 'tpu_kernel')


def test_a_correct_kernel_is_checked_once_and_used(monkeypatch, empty_cache, caplog):
    calls = []

    def kernel(*arguments):
        calls.append(True)
        return correct(*arguments)

    check = build_check(correct)
    first = self_check.run_kernel_check(check)
    assert first.difference < 1e-5 and first.failure_reason(check) is None
    assert len(list((empty_cache / self_check.CACHE_FOLDER).glob('*.json'))) == 1
    # A later start reads the cached result.
    monkeypatch.setattr(self_check, 'compute_relative_error', None)
    assert self_check.run_kernel_check(check) == first
    monkeypatch.setattr(self_check, 'run_kernel_check', lambda check: first)
    run_attention(monkeypatch, kernel)
    assert calls and not caplog.records


@pytest.mark.parametrize('changed', ['XLA_FLAGS', 'LIBTPU_INIT_ARGS', 'cuDNN'])
def test_other_flags_and_libraries_are_checked_again(monkeypatch, empty_cache, changed):
    self_check.run_kernel_check(build_check(correct))
    if changed == 'cuDNN':
        monkeypatch.setattr(self_check, '_list_library_versions', lambda: [('nvidia-cudnn-cu12', '9.0')])
    else:
        monkeypatch.setenv(changed, '--changed')
    monkeypatch.setattr(self_check, 'compute_relative_error', lambda check: 0.5)
    assert self_check.run_kernel_check(build_check(correct)).difference == 0.5


def test_the_formula_is_used_after_a_crash(empty_cache):
    program = 'from tests.kernels.test_self_check import *\nself_check.run_kernel_check(build_check(kills_its_process))'
    environment = {'JAX_PLATFORMS': 'cpu', 'JAX_COMPILATION_CACHE_DIR': str(empty_cache), 'PYTHONPATH': str(ROOT)}
    environment |= {'XLA_FLAGS': flags} if (flags := os.environ.get('XLA_FLAGS')) else {}
    crashed = subprocess.run([sys.executable, '-c', program], env=environment, capture_output=True, text=True)
    assert crashed.returncode == -9, crashed.stderr
    check = build_check(kills_its_process)
    reason = self_check.run_kernel_check(check).failure_reason(check)
    assert 'crashed or hung in an earlier check' in reason and str(empty_cache) in reason


def test_programs_for_other_devices_are_not_checked(monkeypatch):
    monkeypatch.setattr(self_check, 'run_kernel_check', None)
    with compile_for_platform('tpu'):
        assert self_check.failure_reason(build_check(raises)) is None
