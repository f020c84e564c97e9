"""The model, its training step and its decoding run without TensorFlow, seqio and gin."""

import subprocess
import sys

PROGRAM = """
import functools, importlib, pkgutil, sys
import jax, jax.numpy as jnp
import remixer_t5x

MODELS = ('models.layers', 'models.sublayers', 'models.architecture', 'models')
for floor in (*MODELS, 'devices', 'optim', 'costs', 'run_folder', 'checkpoints'):
    package = importlib.import_module(f'remixer_t5x.{floor}')
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f'{package.__name__}.{found.name}')

from remixer_t5x.models.architecture.encoder_decoder import EncoderDecoder
from remixer_t5x.models.architecture.layer import PreNorm
from remixer_t5x.models.architecture.stack import Stack
from remixer_t5x.models.seq2seq import Seq2Seq
from remixer_t5x.devices import partition
from remixer_t5x.optim import optimizer, train_state, train_step
from remixer_t5x.models.sublayers.attention import CrossAttention
from remixer_t5x.models.sublayers.remixer import Remixer

remixer = functools.partial(Remixer, hidden_dim=8, max_length=4)
cross = functools.partial(CrossAttention, num_heads=1, head_dim=4)
encoder, decoder = (functools.partial(PreNorm, sublayers=s) for s in ((remixer,), (cross, remixer)))
stacks = (functools.partial(Stack, runs=((layer, 1),)) for layer in (encoder, decoder))
model = Seq2Seq(EncoderDecoder(16, 8, *stacks))
tokens = jnp.ones((2, 4), jnp.int32)
batch = {name: tokens for name in ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')}
partitioner = partition.Partitioner()
plan = train_state.plan(model, optimizer.adafactor(0.1), {name: (2, 4) for name in batch}, partitioner)
step = train_step.jit_train_step(train_step.make_train_step(model, plan.tx), plan.shardings, partitioner)
state, metrics = step(plan.create(jax.random.key(0)), partitioner.shard_batch(batch))
assert int(state.step) == 1 and float(metrics['loss']) > 0
assert model.predict(state.params, batch, 3).shape == (2, 3)
print(sorted(name for name in ('tensorflow', 'seqio', 'gin', 'tensorflow_datasets') if name in sys.modules))
"""


def test_a_training_step_and_a_prediction_load_no_data_libraries():
    done = subprocess.run([sys.executable, '-c', PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == '[]'
