"""How far parameters that start near zero get: Remixer's H and alpha, gMLP's W, by Adafactor at T5's rate of 0.01.

    python scripts/studies/near_zero.py

Adafactor multiplies a parameter's update by its size, but at least by a minimum: 1e-3 as in T5X, or `min_rms_near_zero`
for parameters that may start near zero (optim/per_layer.py). Task: COGS as in small_task.py, with one
encoder and one decoder layer and the mixer on both sides.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from library import small_task
from library.epochs import batches
from library.near_zero_params import movement, watched

from remixer_t5x.config import loading
from remixer_t5x.data import batch_formats
from remixer_t5x.models.seq2seq import Seq2Seq
from remixer_t5x.optim import optimizer

MODELS = ('remixer', 'gmlp_mixer')
INPUTS, TARGETS, BATCH = 24, 48, 32
T5X_MINIMUM = 1e-3
SHOWN = (100, 500)


def model_of(name: str, vocab_size: int, width: int) -> Seq2Seq:
    hidden = dict.fromkeys(('MLP_DIM', 'REMIXER_DIM', 'GMLP_DIM'), 2 * width)
    sizes: dict[str, Any] = {'EMBED_DIM': width, **hidden, 'VOCAB_SIZE': vocab_size}
    sizes |= {'NUM_HEADS': 4, 'HEAD_DIM': width // 4}
    sizes |= {'NUM_ENCODER_LAYERS': 1, 'NUM_DECODER_LAYERS': 1, 'REMAT_POLICY': 'None'}
    sizes |= {'MAX_INPUT_LENGTH': INPUTS, 'MAX_TARGET_LENGTH': TARGETS}
    flags = [(macro, str(value)) for macro, value in sizes.items()]
    (model,) = loading.values(loading.Given([f'models/{name}.gin', 'sizes/tiny.gin'], flags), 'MODEL')
    return model


def train(
    model: Seq2Seq, rows: Mapping[str, np.ndarray], minimum: float, steps: int, seed: int
) -> Iterator[tuple[int, float, dict[str, np.ndarray]]]:
    """(step, mean loss of the last 50 steps, watched parameters) at the start and at each of SHOWN."""
    boxed = model.init(
        jax.random.key(seed), {'encoder_input_tokens': (1, INPUTS), 'decoder_target_tokens': (1, TARGETS)}
    )
    logical_axes, params = nn.get_partition_spec(boxed), nn.unbox(boxed)
    tx = optimizer.adafactor(0.01, min_rms_near_zero=minimum)(logical_axes)

    @jax.jit
    def step(params, state, batch):
        def loss(params):
            total, sums = model.loss(params, batch)
            return total / sums['weights']

        error, gradient = jax.value_and_grad(loss)(params)
        updates, state = tx.update(gradient, state, params)
        return jax.tree.map(lambda p, u: p + u, params, updates), state, error

    state, errors = tx.init(params), []
    order = batches(np.random.default_rng(seed), len(rows['encoder_input_tokens']), BATCH)
    yield 0, float('nan'), watched(params, logical_axes)
    for done in range(1, steps + 1):
        chosen = next(order)
        params, state, error = step(params, state, {name: array[chosen] for name, array in rows.items()})
        errors.append(error)
        if done in SHOWN or done == steps:
            yield done, float(np.mean(errors[-50:])), watched(params, logical_axes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--steps', type=int, default=500)
    parser.add_argument('--width', type=int, default=64)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--minima', default=f'{T5X_MINIMUM},{optimizer.MIN_RMS_NEAR_ZERO}', help='by comma')
    args = parser.parse_args()
    splits, vocab_size = small_task.data_of(small_task.COGS, '', batch_formats.ENCODER_DECODER, INPUTS, TARGETS, 1)
    print(f'{jax.devices()[0].device_kind} x {jax.device_count()}; root mean square of the movement from the start')
    for name in MODELS:
        model = model_of(name, vocab_size, args.width)
        for minimum in (float(word) for word in args.minima.split(',')):
            start: dict[str, np.ndarray] = {}
            for step, loss, now in train(model, splits.train, minimum, args.steps, args.seed):
                start = start or now
                moved = movement(start, now)
                shown = {path: np.sqrt(np.mean(value**2)) for path, value in start.items()} if step == 0 else moved
                words = '  '.join(f'{path} {value:.4f}' for path, value in shown.items())
                what = 'size at the start' if step == 0 else f'loss {loss:.4f}'
                print(f'{name}, minimum {minimum:g}, step {step}: {what}  {words}', flush=True)


if __name__ == '__main__':
    small_task.exit_with_one_line(main)
