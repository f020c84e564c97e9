"""Functions that are compiled ahead of time in a thread."""

import threading
import time
import types

import jax
import jax.numpy as jnp
import pytest

from remixer_t5x.config import loading
from remixer_t5x.devices import collectives, compilation_cache, compiler_options
from remixer_t5x.devices.hardware_table import PLATFORMS
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.optim.train_step import CompiledStep
from remixer_t5x.train.compilation import AheadOfTimeFunction

SHAPE = jax.ShapeDtypeStruct((3, 4), jnp.float32)


def test_a_call_raises_the_error_of_tracing():
    def function(x):
        raise UserError('this sublayer cannot decode; use another')

    ahead = AheadOfTimeFunction(CompiledStep(jax.jit(function), Partitioner()), SHAPE)
    for _ in range(2):
        with pytest.raises(UserError, match='cannot decode'):
            ahead(jnp.ones(SHAPE.shape))


def test_an_invalid_xla_option_is_reported():
    options = {'xla_cpu_of_the_moon': True}
    ahead = AheadOfTimeFunction(jax.jit(jnp.sin), SHAPE, options=options)
    with pytest.raises(UserError, match='XLA_OPTIONS must be .*xla_cpu_of_the_moon.*--gin.XLA_OPTIONS=None'):
        ahead(jnp.ones(SHAPE.shape))


@pytest.mark.parametrize('options', [{'xla_cpu_enable_fast_math': True}, {'cuda': {}}])
def test_xla_options_of_an_unknown_platform_are_rejected(options):
    with pytest.raises(UserError, match=rf'XLA_OPTIONS must map platforms \(cpu, gpu, tpu\).*{next(iter(options))}'):
        compiler_options.get_training_options(options, jax.devices()[0])


def test_xla_options_are_selected_by_platform():
    option_sets = loading.load_macro_values(
        loading.ConfigSources(['hardware/tpu.gin'], [('TOPOLOGY', 'v5e:2x4')]), 'XLA_OPTIONS'
    )[0]
    options = {
        name: compiler_options.get_training_options(option_sets, types.SimpleNamespace(platform=name))
        for name in PLATFORMS
    }
    assert options['cpu'] == {} and all(options['tpu'].values()) and len(options['tpu']) == 6
    # XLA on a CPU accepts the options of GPUs; only libtpu accepts those of TPUs.
    compiled = compiler_options.compile_with_options(jax.jit(jnp.sin).lower(SHAPE), options['gpu'])
    assert compiled is not None and options['gpu']
    assert compiler_options.get_training_options(None, jax.devices()[0]) == {}


def test_start_traces_at_once_and_the_first_call_waits_for_the_compiler_and_other_processes(monkeypatch):
    events, finish = [], threading.Event()

    def lower(shape):
        events.append('traced')
        return types.SimpleNamespace(compile=lambda options: finish.wait() and events.append)

    monkeypatch.setattr(collectives, 'barrier', lambda: events.append('barrier'))
    ahead = AheadOfTimeFunction(types.SimpleNamespace(lower=lower), SHAPE)
    assert not compilation_cache.is_compiling()
    ahead.start_compilation()
    assert events == ['traced'] and compilation_cache.is_compiling()
    finish.set()
    ahead('first call')
    ahead('second call')
    assert events == ['traced', 'barrier', 'first call', 'second call']
    while compilation_cache.is_compiling():
        time.sleep(0.01)
