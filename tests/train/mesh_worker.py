"""Trains a model on several meshes of eight virtual CPU devices, in a separate process of test_meshes.

Writes a JSON object:
    runs: for each run, losses and norms per step, the bytes of the state on the first device, and those of the
        parameters according to `list_sharding_rows` and of the state according to the plan.
    formula, tpu, gpu: for each kernel, random projections of its output and gradients.
    decoded: tokens and scores on one device and on a mesh.
"""

import json

import jax
import numpy as np
from flax import linen as nn

from remixer_t5x.context import SequenceContext
from remixer_t5x.costs import step_memory
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.kernels import attention
from remixer_t5x.kernels.attention_formula import DistanceBias, Visibility
from remixer_t5x.kernels.compile_target import compile_for_platform, get_target_platform
from remixer_t5x.kernels.running_token_mlp import apply_running_token_mlp
from remixer_t5x.models.architecture.encoder_decoder import EncoderDecoder
from remixer_t5x.models.architecture.layer import make_layer
from remixer_t5x.models.architecture.stack import Stack
from remixer_t5x.models.layers.positions import RelativePositionBias
from remixer_t5x.models.seq2seq import Seq2Seq
from remixer_t5x.models.sublayers.attention import CrossAttention, SelfAttention
from remixer_t5x.models.sublayers.feed_forward import GatedMLP
from remixer_t5x.models.sublayers.gmlp import GMLP, TinyAttention
from remixer_t5x.models.sublayers.mlp_mixer import WindowMixer
from remixer_t5x.optim import optimizer, train_state, train_step

VOCAB, EMBED, MLP, ROWS, LENGTH = 64, 32, 48, 16, 12


# Two heads cannot be sharded over tensor=4, so their activations and biases are replicated.
TWO_HEADS = {'num_heads': 2}
# Four query heads can be sharded over tensor=4; their key heads cannot.
GROUPED_HEADS = {'num_heads': 4, 'num_kv_heads': 2}


def make_model(heads, dropout_rate=0.0):
    def attention(module):
        return lambda **names: module(head_dim=16, dropout_rate=dropout_rate, **heads, **names)

    def stack(*sublayers):
        layer = lambda **names: make_layer((*sublayers, lambda **n: GatedMLP(MLP, **n)), **names)  # noqa: E731
        bias = lambda **names: RelativePositionBias(num_heads=heads['num_heads'], **names)  # noqa: E731
        return lambda **names: Stack(((layer, 2),), position_bias=bias, **names)

    return Seq2Seq(
        EncoderDecoder(
            VOCAB,
            EMBED,
            encoder_stack=stack(attention(SelfAttention)),
            decoder_stack=stack(attention(SelfAttention), attention(CrossAttention)),
        )
    )


def batches(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        inputs, targets = rng.integers(1, VOCAB, (2, ROWS, LENGTH), np.int32)
        targets[:, LENGTH // 2 :] *= (np.arange(ROWS) % 3 > 0)[:, None]
        yield {
            'encoder_input_tokens': inputs,
            'decoder_input_tokens': np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
            'decoder_target_tokens': targets,
            'decoder_loss_weights': (targets > 0).astype(np.int32),
        }


def train(make_optimizer, partitioner, microbatches=1, dropout_rate=0.0, heads=TWO_HEADS, steps=3):
    model = make_model(heads, dropout_rate)
    shapes = {name: array.shape for name, array in next(batches(1)).items()}
    plan = train_state.plan_train_state(model, make_optimizer, shapes, partitioner)
    state = plan.create(jax.random.key(0))
    step = train_step.make_train_step(model, plan.tx, microbatches=microbatches)
    step = train_step.jit_train_step(step, plan.shardings, partitioner, donate=True)
    losses = []
    for batch in batches(steps):
        state, metrics = step(state, partitioner.shard_batch(batch))
        losses.append([float(metrics[name]) for name in ('loss', 'grad_norm', 'param_norm')])
    device = partitioner.mesh.devices.flat[0]
    shards = [shard for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]
    state_bytes = sum(shard.data.nbytes for shard in shards if shard.device == device)
    table = sum(row.bytes_per_device for row in partitioner.list_sharding_rows(plan.boxed_params))
    planned = step_memory.count_bytes_per_device(plan.abstract)
    return {'losses': losses, 'bytes': state_bytes, 'table': table, 'planned': planned}


def generate(heads, partitioner):
    """Returns tokens and scores of greedy decoding with sharded parameters."""
    model, batch = make_model(heads), next(batches(1))
    boxed = jax.eval_shape(lambda: model.init(jax.random.key(0), {name: array.shape for name, array in batch.items()}))
    rng = np.random.default_rng(3)
    params = jax.tree.map(lambda leaf: 0.3 * rng.normal(size=leaf.shape).astype(np.float32), nn.unbox(boxed))
    params = jax.device_put(params, partitioner.param_shardings(boxed))
    with partitioner.activate_mesh():
        decoded = jax.jit(lambda params, batch: model.generate(params, batch, LENGTH))(
            params, partitioner.shard_batch({'encoder_input_tokens': batch['encoder_input_tokens']})
        )
    return {'tokens': np.asarray(decoded.tokens).tolist(), 'scores': np.asarray(decoded.scores).tolist()}


def projections(compute, arrays, partitioner):
    """Returns random projections of the output of `compute` and of its gradients."""
    rng = np.random.default_rng(1)

    def loss(arrays):
        out = compute(*arrays)
        return (out * np.random.default_rng(2).normal(size=out.shape).astype(np.float32)).sum()

    with partitioner.activate_mesh():
        total, gradients = jax.jit(jax.value_and_grad(loss))(arrays)
    return [float(total)] + [float((rng.normal(size=g.shape) * g).sum()) for g in map(np.asarray, gradients)]


def token_ids():
    return next(batches(1))['decoder_target_tokens']


def attend(partitioner):
    implementation = 'tpu_kernel' if get_target_platform() == 'tpu' else 'formula'
    rng = np.random.default_rng(0)
    by_distance = rng.normal(size=(2, 2 * LENGTH - 1)).astype(np.float32)
    visibility = Visibility(None, token_ids(), causal=True)

    def compute(query, key, value, by_distance):
        return attention.attention(query, key, value, visibility, DistanceBias(by_distance), implementation)

    return projections(
        compute, [*rng.normal(size=(3, ROWS, LENGTH, 2, 16)).astype(np.float32), by_distance], partitioner
    )


def mix_tokens(partitioner):
    """Returns projections of the causal mixing of HyperMixer, with two heads of 4 hidden units."""
    ids = (token_ids() > 0).astype(np.int32)

    def compute(w_in, value, w_out):
        return apply_running_token_mlp(w_in, value, w_out, ids, packed=False)

    arrays = np.random.default_rng(0).normal(size=(3, ROWS, LENGTH, 2, 4)).astype(np.float32)
    return projections(compute, list(arrays), partitioner)


def sublayer(module, width):
    """Returns a function that computes projections of a sublayer and of the gradients of its parameters."""

    def project(partitioner):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(ROWS, LENGTH, width)).astype(np.float32)
        positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
        ctx = SequenceContext((token_ids() > 0).astype(np.int32), positions, causal=True)
        params, tree = jax.tree.flatten(nn.unbox(module.init(jax.random.key(0), x, ctx)))
        params = [rng.normal(size=array.shape).astype(np.float32) for array in params]
        compute = lambda x, *params: module.apply(tree.unflatten(params), x, ctx)  # noqa: E731
        return projections(compute, [x, *params], partitioner)

    return project


OPERATIONS = {
    'attention': attend,
    'running': mix_tokens,
    'window': sublayer(WindowMixer(hidden_dim=3, window=5), 128),
    'amlp': sublayer(
        GMLP(hidden_dim=MLP, max_length=LENGTH, attention=lambda **names: TinyAttention(head_dim=16, **names)), EMBED
    ),
}
# Operations with a kernel for each platform.
KERNELS = {'tpu': ('attention', 'running', 'window'), 'gpu': ('running', 'window', 'amlp')}


def main(path):
    single = jax.devices()[:1]
    adam, factored = optimizer.adamw_rms(0.01), optimizer.adafactor(0.01, min_dim_size_to_factor=16)
    runs = {
        'adam single': (adam, Partitioner(devices=single), 1, 0.1),
        'adam data': (adam, Partitioner(), 1, 0.1),
        'adam fsdp': (adam, Partitioner(data=1, fsdp=-1), 1, 0.1),
        'adafactor single': (factored, Partitioner(devices=single)),
        'adafactor tensor': (factored, Partitioner(tensor=4)),
        'adafactor all, 2 microbatches': (factored, Partitioner(data=2, fsdp=2, tensor=2), 2),
        'grouped single': (adam, Partitioner(devices=single), 1, 0.0, GROUPED_HEADS),
        'grouped tensor': (adam, Partitioner(tensor=4), 1, 0.0, GROUPED_HEADS),
    }
    results = {name: train(*arguments) for name, arguments in runs.items()}
    operations = {'formula': {name: compute(Partitioner(devices=single)) for name, compute in OPERATIONS.items()}}
    decoded = [
        generate(GROUPED_HEADS, partitioner) for partitioner in (Partitioner(devices=single), Partitioner(tensor=4))
    ]
    for platform, names in KERNELS.items():
        with compile_for_platform(platform, interpret=True):
            operations[platform] = {name: OPERATIONS[name](Partitioner(data=2, fsdp=2, tensor=2)) for name in names}
    path.write_text(json.dumps({'runs': results, 'decoded': decoded, **operations}))
