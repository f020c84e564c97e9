"""Trains with every optimizer on eight virtual CPU devices; test_every_optimizer runs it in a separate process."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from flax import linen as nn

from remixer_t5x.checkpoints import checkpoint_manager
from remixer_t5x.data.prefetch import DataPosition
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.optim import muon, optimizer, parameter_averages, train_state, train_step

SHAPES = {'embedding': (16, 8), 'wi': (3, 8, 16), 'wo': (3, 16, 8), 'norm': (3, 8), 'h': (3, 4, 4), 'logits': (8, 16)}
AXES = {
    'embedding': ('vocab', 'embed'),
    'wi': ('layers', 'embed', 'mlp'),
    'wo': ('layers', 'mlp', 'embed'),
    'norm': ('layers', 'embed'),
    'h': ('layers', 'positions_out', 'positions_in'),
    'logits': ('embed', 'vocab'),
}
RATE = 1e-2
OPTIMIZERS = {
    'adafactor': optimizer.adafactor(RATE, min_dim_size_to_factor=8),
    'adamw_rms': optimizer.adamw_rms(RATE, weight_decay=0.1),
    'adamw': optimizer.adamw(RATE, weight_decay=0.1),
    'adamw bfloat16': optimizer.adamw(RATE, momentum_dtype='bfloat16'),
    'lion': optimizer.lion(RATE, weight_decay=0.1, momentum_dtype='bfloat16'),
    'muon': muon.muon(RATE, weight_decay=0.1),
    'schedule_free_adamw': parameter_averages.schedule_free_adamw(RATE, weight_decay=0.1),
    'average': parameter_averages.average_params(optimizer.adamw(RATE), 0.9),
}


class Layers:
    """Three stacked layers with the parameters that optimizers treat differently."""

    def init(self, rng, batch_shapes):
        keys = jax.random.split(rng, len(SHAPES))
        return {
            name: nn.LogicallyPartitioned(0.3 * jax.random.normal(key, shape), AXES[name])
            for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
        }


class LayersPerOptimizer:
    """A copy of the layers per optimizer, so that one program trains with all optimizers."""

    def init(self, rng, batch_shapes):
        return {name: Layers().init(rng, batch_shapes) for name in OPTIMIZERS}

    def loss(self, params, batch, dropout_rng=None):
        rows = jnp.sum(batch['scale'])
        loss = sum(jnp.sum(jnp.cos(rows * leaf)) for leaf in jax.tree.leaves(params))
        return loss, {'loss': loss, 'weights': jnp.float32(1)}


def all_optimizers(axes):
    """Combines all optimizers; each updates its copy of the parameters."""
    transformations = {name: rule.make(axes[name]) for name, rule in OPTIMIZERS.items()}

    def update(updates, state, params):
        pairs = {name: tx.update(updates[name], state[name], params[name]) for name, tx in transformations.items()}
        return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}

    return optax.GradientTransformation(
        lambda params: {name: tx.init(params[name]) for name, tx in transformations.items()}, update
    )


def start_training(partitioner):
    """Returns the plan, a function that takes a train step, and the initial state."""
    rule = optimizer.Optimizer(None, all_optimizers)
    plan = train_state.plan_train_state(LayersPerOptimizer(), rule, None, partitioner)
    step = train_step.jit_train_step(
        train_step.make_train_step(LayersPerOptimizer(), plan.tx), plan.shardings, partitioner, donate=True
    )

    def take_step(state, number, scale=0.3):
        return step(state, partitioner.shard_batch({'scale': np.full(8, scale + number / 100, np.float32)}))

    return plan, take_step, plan.create(jax.random.key(0))


def state_bytes(state, name):
    leaves = jax.tree.leaves((state.params[name], state.opt_state[name]))
    return [np.asarray(leaf).astype(np.float32).tobytes() for leaf in leaves]


def absolute_sums(params):
    return [float(np.abs(np.asarray(leaf, np.float64)).sum()) for leaf in jax.tree.leaves(params)]


def main(folder):
    """Takes four steps on one device, and on a mesh with a non-finite step and a checkpoint in between.

    Writes the results of each optimizer to results.json.
    """
    _, take_step, state = start_training(Partitioner(devices=jax.devices()[:1]))
    for number in range(4):
        state, _ = take_step(state, number)
    single = jax.device_get(state.params)

    plan, take_step, state = start_training(Partitioner(data=1, fsdp=4, tensor=2))
    for number in range(2):
        state, _ = take_step(state, number)
    # The step donates its arguments.
    before = jax.device_get(state)
    state, metrics = take_step(state, 9, np.nan)
    after = jax.device_get(state)
    checkpoints = checkpoint_manager.RunCheckpoints(epath.Path(folder))
    checkpoints.save(3, state, DataPosition.create_at_start(1), {})
    checkpoints.wait_until_finished()
    restored, _ = checkpoints.restore(3, plan.abstract)
    checkpoints.close()
    for number in (2, 3):
        state, _ = take_step(state, number)
        restored, _ = take_step(restored, number)
    shares = {name: first_device_share(state.opt_state[name]) for name in OPTIMIZERS}
    state, restored = jax.device_get((state, restored))
    results = {'nonfinite': float(metrics['nonfinite'])}
    for name, rule in OPTIMIZERS.items():
        params, opt_state = state.params[name], state.opt_state[name]
        results[name] = {
            'single': absolute_sums(single[name]),
            'mesh': absolute_sums(params),
            'unchanged': state_bytes(before, name) == state_bytes(after, name),
            'moved': state_bytes(after, name) != state_bytes(state, name),
            'resumed': state_bytes(restored, name) == state_bytes(state, name),
            'share': shares[name],
            'dtypes': sorted({str(leaf.dtype) for leaf in jax.tree.leaves(opt_state)}),
            'evaluated': rule.evaluated is not None
            and absolute_sums(rule.evaluated(opt_state, params)) != absolute_sums(params),
        }
    (folder / 'results.json').write_text(json.dumps(results))


def first_device_share(state):
    """Returns the fraction of the moments of `wi` and `wo` on the first device."""
    matrices = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 3 and leaf.shape[1:] in ((8, 16), (16, 8))]
    shards = [shard for leaf in matrices for shard in leaf.addressable_shards if shard.device == jax.devices()[0]]
    return sum(shard.data.nbytes for shard in shards) / max(1, sum(leaf.nbytes for leaf in matrices))
