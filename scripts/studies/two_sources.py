"""Measures TIM's competition on images whose halves have different sources (Lamb et al. 2021, figure 2).

    python scripts/studies/two_sources.py --figure tim_two_sources.png

The paper's images have an MNIST digit on the left and a CIFAR photograph on the right. Here, the left half is a
seven-segment digit, and the right half is a smooth random texture; both are generated. A decoder-only TIM with two
mechanisms predicts the grey levels pixel by pixel in raster order, without source labels. Prints for each TIM layer the
mean weight of mechanism 1 in the left and the right half of held-out images.

As a control, the pixels in each row of an image are shuffled, so that both halves have the same distribution.
"""

import argparse
import time

import jax
import numpy as np

import remixer_t5x
from remixer_t5x.evaluate.predictions import make_decoder_arrays
from remixer_t5x.extras.reports.pictures import drawing, learned_weights

HEIGHT, HALF = 12, 9
LEVELS = 8
# Id 0 is padding.
VOCAB_SIZE = LEVELS + 1
# Segments (top, upper left, upper right, middle, lower left, lower right, bottom) of the digits 0 to 9.
DIGITS = ('1110111', '0010010', '1011101', '1011011', '0111010', '1101011', '1101111', '1010010', '1111111', '1111011')
SIZE = {'EMBED_DIM': 64, 'TIM_EMBED_DIM': 64, 'MLP_DIM': 128, 'TIM_MLP_DIM': 128, 'NUM_HEADS': 4, 'TIM_NUM_HEADS': 4}
SIZE |= {'HEAD_DIM': 16, 'NUM_ENCODER_LAYERS': 0, 'TIM_NUM_ENCODER_LAYERS': 0}


def draw_digits(rng: np.random.Generator, count: int) -> np.ndarray:
    """Returns digits at random positions, [count, HEIGHT, HALF], drawn in one of the two highest grey levels."""
    images: np.ndarray = np.zeros((count, HEIGHT, HALF), np.int32)
    for image, digit in zip(images, rng.integers(0, 10, count), strict=True):
        height, width = rng.integers(3, 5), rng.integers(4, 6)
        top, left = rng.integers(0, HEIGHT - 2 * height), rng.integers(0, HALF - width)
        middle, bottom, right = top + height, top + 2 * height, left + width
        level = LEVELS - 1 - rng.integers(0, 2)
        for segment, is_on in enumerate(DIGITS[digit]):
            if is_on == '1':
                if segment in (0, 3, 6):
                    image[(top, middle, bottom)[segment // 3], left : right + 1] = level
                else:
                    rows = slice(top, middle + 1) if segment < 3 else slice(middle, bottom + 1)
                    image[rows, left if segment in (1, 4) else right] = level
    return images


def draw_textures(rng: np.random.Generator, count: int) -> np.ndarray:
    """Returns sums of four low-frequency plane waves, [count, HEIGHT, HALF], with levels from 0 to LEVELS - 1."""
    y, x = np.mgrid[:HEIGHT, :HALF]
    frequency = rng.uniform(-0.8, 0.8, (2, count, 4, 1, 1))
    phase = rng.uniform(0, 2 * np.pi, (count, 4, 1, 1))
    waves = np.sin(frequency[0] * y + frequency[1] * x + phase).sum(axis=1)
    low, high = (waves.min(axis=(1, 2), keepdims=True), waves.max(axis=(1, 2), keepdims=True))
    return np.minimum((waves - low) / (high - low) * LEVELS, LEVELS - 1).astype(np.int32)


def make_images(rng: np.random.Generator, count: int, shuffled: bool) -> np.ndarray:
    """Returns grey levels [count, HEIGHT, 2 * HALF]; `shuffled` selects the control with shuffled pixels."""
    images = np.concatenate([draw_digits(rng, count), draw_textures(rng, count)], axis=2)
    return rng.permuted(images, axis=2) if shuffled else images


def make_batch(images: np.ndarray) -> dict[str, np.ndarray]:
    return make_decoder_arrays((images.reshape(len(images), -1) + 1).tolist(), HEIGHT * 2 * HALF)


def train_model(shuffled: bool, seed: int, tim_layers: int, steps: int, batch_size: int, learning_rate: float) -> tuple:
    """Trains one model, and returns the model, the parameters, and the loss of the last 100 steps in nats per pixel."""
    model = remixer_t5x.build_model(
        *('models/tim.gin', 'sizes/mini.gin', 'model_types/decoder_only.gin'),
        **SIZE,
        # The model has two plain layers, the TIM layers, and one plain layer.
        NUM_DECODER_LAYERS=tim_layers + 3,
        TIM_NUM_DECODER_LAYERS=tim_layers,
        VOCAB_SIZE=VOCAB_SIZE,
    )
    rng = np.random.default_rng(seed)
    partitioner = remixer_t5x.Partitioner()
    first = make_batch(make_images(rng, batch_size, shuffled))
    optimizer = remixer_t5x.adamw_rms(learning_rate)
    plan = remixer_t5x.plan_train_state(
        model, optimizer, {name: array.shape for name, array in first.items()}, partitioner
    )
    step = remixer_t5x.make_train_step(model, plan.tx)
    step = remixer_t5x.jit_train_step(step, plan.shardings, partitioner, donate=True)
    state = plan.create(jax.random.key(seed))
    losses = []
    for number in range(steps):
        state, metrics = step(state, partitioner.shard_batch(make_batch(make_images(rng, batch_size, shuffled))))
        losses.append(float(metrics['loss'] / metrics['weights']))
        if number % 100 == 99:
            print(f'step {number + 1:,} of {steps:,}: loss {np.mean(losses[-100:]):.3f}', flush=True)
    return model, jax.device_get(state.params), float(np.mean(losses[-100:]))


def compute_competition_weights(model, params, images: np.ndarray) -> list[np.ndarray]:
    """Returns, for each TIM layer, the weight of mechanism 1 at each pixel, [count, HEIGHT, 2 * HALF]."""
    batch = make_batch(images)
    # Input position i + 1 corresponds to pixel i.
    inputs = np.pad(batch['decoder_target_tokens'], ((0, 0), (1, 0)))
    _, sown = model.module.apply({'params': params}, inputs, enable_dropout=False, mutable=['intermediates'])
    layers = learned_weights.collect_layer_arrays(
        jax.device_get(sown['intermediates']), params, 'competition', 'competition'
    )
    return [layer.array[0, :, 1:, 0].reshape(images.shape) for layer in layers]


def plot_figure(images: np.ndarray, weights: dict[str, np.ndarray], file: str) -> None:
    """Plots each image above the weights of mechanism 1 in each layer."""
    figure = drawing.create_figure(1.4 * len(images) + 1, 0.95 * (len(weights) + 1))
    rows = {'image': (images, 'gray', LEVELS - 1), **{name: (array, 'viridis', 1) for name, array in weights.items()}}
    grid = figure.subplots(len(rows), len(images), squeeze=False)
    for axes_row, (name, (arrays, colours, largest)) in zip(grid, rows.items(), strict=True):
        for axes, array in zip(axes_row, arrays, strict=True):
            axes.imshow(array, cmap=colours, vmin=0, vmax=largest, interpolation='nearest')
            axes.set_xticks([])
            axes.set_yticks([])
        axes_row[0].set_ylabel(name, color=drawing.TEXT_COLOUR, fontsize=8, rotation=0, ha='right', va='center')
    figure.savefig(file, dpi=150, facecolor='white')
    print(f'figure: {file}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--tim_layers', type=int, default=4)
    parser.add_argument('--steps', type=int, default=2000)
    parser.add_argument('--batch', type=int, default=16)
    parser.add_argument('--learning_rate', type=float, default=1e-2)
    parser.add_argument('--seeds', type=int, default=1)
    parser.add_argument('--images', type=int, default=200, help='number of held-out images')
    parser.add_argument('--figure', default='', help='PNG file to write for the first seed')
    args = parser.parse_args()
    print('| images | seed | loss | layer | left half | right half | difference |\n|---|---|---|---|---|---|---|')
    for shuffled in (False, True):
        for seed in range(args.seeds):
            start = time.perf_counter()
            model, params, loss = train_model(
                shuffled, seed, args.tim_layers, args.steps, args.batch, args.learning_rate
            )
            held_out = make_images(np.random.default_rng([seed, 1]), args.images, shuffled)
            weights = compute_competition_weights(model, params, held_out)
            for number, layer in enumerate(weights, 1):
                left, right = (float(half.mean()) for half in (layer[:, :, :HALF], layer[:, :, HALF:]))
                name = 'shuffled' if shuffled else 'two sources'
                print(
                    f'| {name} | {seed} | {loss:.3f} | {number} | {left:.2f} | {right:.2f} | {abs(left - right):.2f} |'
                )
            print(f'{time.perf_counter() - start:.0f} s', flush=True)
            if args.figure and seed == 0 and not shuffled:
                plot_figure(held_out[:6], {f'layer {n}': layer[:6] for n, layer in enumerate(weights, 1)}, args.figure)


if __name__ == '__main__':
    main()
