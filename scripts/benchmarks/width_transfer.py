"""Checks muP (`optim.mup`): activations and the best learning rate should not depend on the width.

    python scripts/benchmarks/width_transfer.py                       # coordinate check of MODELS
    python scripts/benchmarks/width_transfer.py --rates --models t5_1_1

The coordinate check trains models of increasing width for a few steps, and fits the log RMS of each layer's output and
of the logits against log width. A slope of 0 means that updates have the same effect at all widths. `--rates` trains
models of each width with learning rates in powers of 2, and prints the losses.
"""

import argparse
import functools
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from remixer_t5x import build_model
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.models.interface import Model
from remixer_t5x.optim import mup, optimizer, train_state, train_step

MODELS = ('t5_1_1', 'remixer', 'mixer_enc_dec', 'hyper_mixer', 'gmlp', 'tim', 'fnet', 'linear_transformer')
VOCAB_SIZE, INPUTS, TARGETS = 64, 16, 8


def build_scaled_model(name: str, width: int, base_width: int | None, layers: int = 1) -> Model:
    """Builds a model whose hidden widths and number of heads are proportional to `width`."""
    macros: dict[str, int | None] = {'EMBED_DIM': width, 'TIM_EMBED_DIM': width, 'REMIXER_DIM': width, 'HEAD_DIM': 32}
    macros |= dict.fromkeys(('MLP_DIM', 'TIM_MLP_DIM', 'WIDER_MLP_DIM', 'HYPER_MIXER_MLP_DIM'), 2 * width)
    macros |= {'GMLP_DIM': 4 * width, 'NUM_HEADS': width // 32, 'TIM_NUM_HEADS': width // 32}
    # Sets the hidden sizes of the token mixers and the sequence lengths.
    macros |= {'HYPER_MIXER_DIM': 64, 'MIXER_DIM': 64, 'MAX_INPUT_LENGTH': INPUTS, 'MAX_TARGET_LENGTH': TARGETS}
    macros |= {'VOCAB_SIZE': VOCAB_SIZE, 'NUM_ENCODER_LAYERS': layers, 'NUM_DECODER_LAYERS': layers}
    macros |= {'TIM_NUM_ENCODER_LAYERS': 1, 'TIM_NUM_DECODER_LAYERS': 1, 'MUP_BASE_WIDTH': base_width}
    return build_model(f'models/{name}.gin', 'sizes/tiny.gin', **macros)


def generate_batches(rows: int, seed: int = 0) -> Iterator[Mapping[str, jax.Array]]:
    """Yields batches of a synthetic task, in which targets are the first input tokens in reverse order."""
    rng = np.random.default_rng(seed)
    while True:
        inputs = rng.integers(2, VOCAB_SIZE, (rows, INPUTS), np.int32)
        targets = inputs[:, TARGETS - 1 :: -1]
        shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
        arrays = {'encoder_input_tokens': inputs, 'decoder_input_tokens': shifted, 'decoder_target_tokens': targets}
        yield {name: jnp.asarray(array) for name, array in arrays.items()}


def train_model(
    model: Model, width: int, base_width: int | None, rate: float, data: Sequence[Mapping[str, jax.Array]]
) -> tuple[train_state.Params, list[float]]:
    """Trains for one step per batch, and returns the parameters and the losses."""
    rule = mup.scale_by_width(optimizer.adamw(rate), width, base_width)
    plan = train_state.plan_train_state(
        model, rule, {name: array.shape for name, array in data[0].items()}, Partitioner()
    )
    state, losses = plan.create(jax.random.key(0)), []
    step = jax.jit(train_step.make_train_step(model, plan.tx))
    for batch in data:
        state, metrics = step(state, batch)
        losses.append(float(metrics['loss'] / metrics['weights']))
    return state.params, losses


def compute_activation_rms(
    model: Model, params: train_state.Params, batch: Mapping[str, jax.Array]
) -> dict[str, float]:
    """Returns the RMS of the logits and of the residual stream after each layer."""
    options = {'enable_dropout': False, 'capture_intermediates': True, 'mutable': ['intermediates']}
    apply = jax.jit(functools.partial(model.module.apply, **options))
    _, state = apply({'params': params}, batch['encoder_input_tokens'], batch['decoder_input_tokens'])
    arrays = {
        jax.tree_util.keystr(path, simple=True, separator='/'): array
        for path, array in jax.tree_util.tree_flatten_with_path(state['intermediates'])[0]
    }
    layers = {name: array for name, array in arrays.items() if name.endswith('layer/__call__/0')}
    return {
        name.removesuffix('/layer/__call__/0'): float(jnp.sqrt(jnp.mean(jnp.square(array.astype(jnp.float32)))))
        for name, array in (layers | {'logits': arrays['__call__/0']}).items()
    }


def compute_rms_slopes(
    name: str, widths: Sequence[int], base_width: int | None, rate: float, steps: int
) -> dict[str, float]:
    """Returns the slope of log RMS against log width, for each layer and the logits, after `steps` training steps."""
    batch = next(generate_batches(2))
    values = []
    for width in widths:
        model = build_scaled_model(name, width, base_width)
        params, _ = train_model(model, width, base_width, rate, [batch] * steps)
        values.append(compute_activation_rms(model, params, batch))
    return {key: float(np.polyfit(np.log(widths), np.log([value[key] for value in values]), 1)[0]) for key in values[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', default=','.join(MODELS), help='names of models, separated by commas')
    parser.add_argument(
        '--widths', default='128,256,512,1024', help='comma-separated widths; the first is the base width of muP'
    )
    parser.add_argument('--rate', type=float, default=2**-9, help='learning rate of the coordinate check')
    steps = 'training steps (default: 10 for the coordinate check, 200 with --rates)'
    parser.add_argument('--steps', type=int, help=steps)
    parser.add_argument('--rates', action='store_true', help='train with learning rates from 2^-11 to 2^-4')
    args = parser.parse_args()
    widths = [int(width) for width in args.widths.split(',')]
    for name in args.models.split(','):
        for label, base_width in (('muP', widths[0]), ('standard', None)):
            if not args.rates:
                fitted = compute_rms_slopes(name, widths, base_width, args.rate, args.steps or 10)
                print(f'{name:20s} {label:9s}', '  '.join(f'{key} {slope:+.3f}' for key, slope in fitted.items()))
                continue
            data = [batch for batch, _ in zip(generate_batches(32), range(args.steps or 200), strict=False)]
            for width in widths:
                model = build_scaled_model(name, width, base_width)
                losses = {
                    power: float(np.mean(train_model(model, width, base_width, 2.0**power, data)[1][-20:]))
                    for power in range(-11, -3)
                }
                best = min(losses, key=losses.__getitem__)
                print(f'{name} {label} width {width}: best 2^{best};', {k: round(v, 3) for k, v in losses.items()})


if __name__ == '__main__':
    main()
