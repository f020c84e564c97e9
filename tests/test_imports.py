"""Tests which modules import TensorFlow, seqio and gin; the first two are imported on first use, without Keras."""

import importlib.util
import subprocess
import sys
import types

import pytest

from remixer_t5x import lazy_imports
from tests.support import paths

# The parts run in one process, in this order, and print the names of loaded modules.
PARTS = {
    'the Python API of a train step': """
import importlib, pkgutil, sys
import remixer_t5x

def loaded(*names):
    print(*sorted({*names} & {*sys.modules}))

remixer_t5x.make_train_step, remixer_t5x.plan_train_state, remixer_t5x.adamw_rms, remixer_t5x.Partitioner
loaded('jax', 'flax', 'numpy', 'tensorflow', 'seqio', 'gin', 'remixer_tasks')
""",
    'a train step and a prediction': """
import functools
import jax, jax.numpy as jnp

MODELS = ('models.layers', 'models.sublayers', 'models.architecture', 'models')
for name in (*MODELS, 'devices', 'optim', 'costs', 'run_folder', 'checkpoints'):
    package = importlib.import_module(f'remixer_t5x.{name}')
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f'{package.__name__}.{module.name}')

from remixer_t5x.models.architecture import encoder_decoder, layer, stack
from remixer_t5x.models.seq2seq import Seq2Seq
from remixer_t5x.models.sublayers import attention, remixer

mixer = functools.partial(remixer.Remixer, hidden_dim=8, max_length=4)
cross = functools.partial(attention.CrossAttention, num_heads=1, head_dim=4)
layers = (functools.partial(layer.PreNorm, sublayers=sublayers) for sublayers in ((mixer,), (cross, mixer)))
stacks = (functools.partial(stack.Stack, ((each, 1),)) for each in layers)
model = Seq2Seq(encoder_decoder.EncoderDecoder(16, 8, *stacks))
tokens = jnp.ones((2, 4), jnp.int32)
batch = {name: tokens for name in ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')}
partitioner, optimizer = remixer_t5x.Partitioner(), remixer_t5x.adafactor(0.1)
plan = remixer_t5x.plan_train_state(model, optimizer, {name: (2, 4) for name in batch}, partitioner)
step = remixer_t5x.jit_train_step(remixer_t5x.make_train_step(model, plan.tx), plan.shardings, partitioner)
state, metrics = step(plan.create(jax.random.key(0)), partitioner.shard_batch(batch))
assert int(state.step) == 1 and float(metrics['loss']) > 0
assert model.generate(state.params, batch, 3).tokens.shape == (2, 1, 3)
loaded('tensorflow', 'seqio', 'gin', 'tensorflow_datasets')
""",
    'modules that gin files name': """
import remixer_tasks.python_docs, remixer_tasks.local_files, remixer_tasks.c4, remixer_tasks.vocabularies
import remixer_tasks.pretraining, remixer_t5x.data.pipeline, remixer_t5x.evaluate.task_evaluation
import remixer_t5x.train.loop
HEAVY = ('tensorflow', 'seqio', 'keras', 'pandas', 'matplotlib', 'pyglove')
loaded(*HEAVY)
""",
    'the first use': """
from remixer_t5x.cli import console
from remixer_t5x.lazy_imports import seqio, tf
console.silence_library_logs()
assert seqio.ByteVocabulary().eos_id == 1
loaded(*HEAVY)
assert tf.config.get_visible_devices('GPU') == [] and tf.data.Dataset.__name__ == 'DatasetV2'
assert tf is not sys.modules['tensorflow']
import matplotlib, pandas, tensorflow, tensorflow_text
assert pandas.DataFrame.__name__ == 'DataFrame'
loaded('keras')
assert tensorflow.keras.layers.Layer.__name__ == 'Layer'
from tensorflow.keras import losses
from tensorflow_text.python import keras
assert keras.layers.ToDense is tensorflow_text.keras.layers.ToDense
assert seqio.dataset_providers.pg.hyper.HyperPrimitive.__name__ == 'HyperPrimitive'
""",
}


def test_each_part_loads_only_the_libraries_that_it_needs():
    environment = paths.environment()
    # Libraries must print nothing, even without this variable.
    environment.pop('TF_CPP_MIN_LOG_LEVEL')
    words = [sys.executable, '-c', ''.join(PARTS.values())]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.splitlines() == ['flax jax numpy', '', '', 'seqio tensorflow', '']


def test_ctrl_c_takes_effect_after_the_import(tmp_path, monkeypatch):
    (tmp_path / 'slow_library.py').write_text('import signal\nsignal.raise_signal(signal.SIGINT)\nfinished = True\n')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        lazy_imports._import_quickly('slow_library')
    assert sys.modules.pop('slow_library').finished


def import_lazy_after_tensorflow(monkeypatch, **config):
    """Imports `lazy_imports` again, after a fake TensorFlow whose `config` has the given functions."""
    tensorflow = types.ModuleType('tensorflow')
    tensorflow.data, tensorflow.config = 'data', types.SimpleNamespace(**config)
    monkeypatch.setitem(sys.modules, 'tensorflow', tensorflow)
    spec = importlib.util.find_spec('remixer_t5x.lazy_imports')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_accelerators_are_hidden_if_a_library_has_imported_tensorflow(monkeypatch):
    hidden = []
    module = import_lazy_after_tensorflow(monkeypatch, set_visible_devices=lambda *args: hidden.append(args))
    assert (module.tf.data, module.tf.data) == ('data', 'data')
    assert hidden == [([], 'GPU'), ([], 'TPU')]
    with pytest.raises(AttributeError, match='nothing_like_this'):
        module.tf.nothing_like_this  # noqa: B018
