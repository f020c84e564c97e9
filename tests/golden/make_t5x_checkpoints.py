"""Writes t5x_checkpoints.tar.gz: tiny random T5 models of T5X's networks, saved by T5X, with a batch and its logits.

Needs T5X (docs/t5x.md): `python tests/golden/make_t5x_checkpoints.py`.
"""

import pathlib
import tarfile
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import freeze
from t5x import adafactor, checkpoints, partitioning, train_state
from t5x.examples.scalable_t5 import network as scalable_network
from t5x.examples.t5 import network

SIZES = dict(
    vocab_size=64, emb_dim=16, num_heads=2, num_encoder_layers=2, num_decoder_layers=3, head_dim=4, mlp_dim=24,
    dropout_rate=0.0,
)  # fmt: skip
V1_1 = dict(mlp_activations=('gelu', 'linear'), logits_via_embedding=False)
V1_0 = dict(mlp_activations=('relu',), logits_via_embedding=True)
STEP = 7
# Name of the checkpoint: network, settings, and whether Orbax saves it.
CHECKPOINTS = {
    't5_1_1': (network, V1_1, False),
    't5_1_1_orbax': (network, V1_1, True),
    't5_1_0': (network, V1_0, False),
    't5_1_1_scanned': (scalable_network, V1_1, False),
}


def make(folder: pathlib.Path, name: str, seed: int = 0) -> None:
    """Writes a MODEL_DIR of T5X with one checkpoint, and outputs.npz with inputs, targets and logits."""
    module, settings, by_orbax = CHECKPOINTS[name]
    model = module.Transformer(module.T5Config(**SIZES, **settings))
    tokens = jnp.ones((2, 4), jnp.int32)
    variables = dict(model.init(jax.random.key(0), tokens, tokens, tokens, enable_dropout=False))
    rng = np.random.default_rng(seed)
    # All parameters are random, including norms, so that the tests detect swapped parameters.
    params = jax.tree.map(lambda x: rng.normal(1.0, 0.5, x.shape).astype(np.float32), variables['params'])
    params = jax.tree.map(lambda x: x / np.sqrt(x.shape[0]) if x.ndim > 1 else x, params)
    for stack in ('encoder', 'decoder'):
        bias = params[stack].get(stack, {}).get('relpos_bias')
        if bias:  # The scalable network has one bias per layer; our layers share one.
            bias['rel_embedding'] = np.repeat(bias['rel_embedding'][:, :1], bias['rel_embedding'].shape[1], axis=1)
    save(folder, {**variables, 'params': params}, by_orbax)

    inputs, targets = rng.integers(1, SIZES['vocab_size'], (2, 3, 9), dtype=np.int32)
    inputs[1, 6:], targets[2, 5:] = 0, 0
    shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    logits = model.apply({'params': params}, inputs, shifted, targets, enable_dropout=False)
    np.savez(folder / 'outputs.npz', inputs=inputs, targets=targets, logits=logits)


def save(folder: pathlib.Path, variables: dict, by_orbax: bool) -> None:
    optimizer = adafactor.Adafactor(logical_factor_rules=adafactor.standard_logical_factor_rules())
    state = train_state.FlaxOptimTrainState.create(optimizer, freeze(jax.tree.map(jnp.asarray, variables)))
    state = state.replace_step(jnp.asarray(STEP))
    folder.mkdir(parents=True, exist_ok=True)
    partitioner = partitioning.PjitPartitioner(num_partitions=1)
    if by_orbax:
        manager = checkpoints.OrbaxCheckpointManagerInterface(str(folder), state, partitioner)
        manager.save(state)
        manager.close()
    else:
        checkpoints.Checkpointer(state, partitioner, str(folder)).save(state)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in CHECKPOINTS:
            make(pathlib.Path(folder) / name, name)
        with tarfile.open(pathlib.Path(__file__).parent / 't5x_checkpoints.tar.gz', 'w:gz') as archive:
            for name in CHECKPOINTS:
                archive.add(pathlib.Path(folder) / name, arcname=name)


if __name__ == '__main__':
    main()
