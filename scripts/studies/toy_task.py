"""Runs HyperMixer's toy task (Mai et al. 2023, section 4.7): test error by token mixer and number of training examples.

    python scripts/studies/toy_task.py --figure toy_task.png

A row contains two rectangles and two triangles; in the target, both shapes of a kind have the mean of their heights
(toy_data.py). The model has two convolutions, a token mixer and two convolutions (toy_model.py). Results are appended
to --out; running the same command again computes only missing results. --show only prints the results in --out.

By default, at most 10,000 training examples are used (the paper uses up to 100,000). The paper does not specify width,
steps, batch size, learning rate or seeds, so we chose them.
"""

import argparse
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from library import toy_data, toy_model
from library.results_file import ResultsFile, format_summary, parse_sorted_integers

from remixer_t5x.extras.reports.pictures import drawing

TEST_SEED = 20_231
# Number of steps per call of the compiled program. The training error is the mean over the steps of the last call.
CHUNK = 50


@dataclasses.dataclass(frozen=True)
class StudySettings:
    """Settings shared by all cells. `length` is in tokens; `hidden` is the number of hidden units of the mixers."""

    length: int
    width: int
    hidden: int
    steps: int
    batch: int
    learning_rate: float
    test_examples: int


@functools.cache
def compile_training(mixer: str, settings: StudySettings) -> tuple[Callable, Callable, Callable]:
    """Returns the compiled functions init, train and predict.

    A carry is a pair (parameters, Adam state), and rows are pairs (inputs, targets).

        init(key) -> carry
        train(carry, rows [steps, batch, length]) -> carry, mean loss of the steps; donates the carry
        predict(parameters, inputs [batch, length]) -> outputs [batch, length]
    """
    mixers = toy_model.build_mixer_factories(settings.width, settings.hidden, settings.length)
    network = toy_model.ShapesNetwork(mixers[mixer], settings.width)
    adam = optax.adam(optax.cosine_decay_schedule(settings.learning_rate, settings.steps))

    def init(key):
        params = nn.unbox(network.init(key, jnp.zeros((1, settings.length))))
        return params, adam.init(params)

    def loss(params, inputs, targets):
        return jnp.mean(jnp.square(network.apply(params, inputs) - targets))

    def train_step(carry, rows):
        params, state = carry
        error, gradient = jax.value_and_grad(loss)(params, *rows)
        updates, state = adam.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), error

    def train(carry, rows):
        carry, errors = jax.lax.scan(train_step, carry, rows)
        return carry, jnp.mean(errors)

    return jax.jit(init), jax.jit(train, donate_argnums=0), jax.jit(network.apply)


def draw_batches(rng: np.random.Generator, examples: int, batch: int) -> Iterator[np.ndarray]:
    """Yields the example indices of batches for successive epochs; a batch repeats examples if there are too few."""
    waiting: np.ndarray = np.empty(0, np.int64)
    while True:
        while len(waiting) < batch:
            waiting = np.concatenate([waiting, rng.permutation(examples)])
        yield waiting[:batch]
        waiting = waiting[batch:]


def train_and_test(mixer: str, examples: int, seed: int, settings: StudySettings) -> dict[str, float]:
    """Trains one model, and returns the mean squared errors per token on the last chunk of steps and on the test rows.

    The seed determines the rows, their order and the initial parameters.
    """
    start = time.perf_counter()
    init, train, predict = compile_training(mixer, settings)
    rng = np.random.default_rng([seed, examples])
    inputs, targets, _ = toy_data.generate_examples(rng, examples, settings.length)
    order = draw_batches(rng, examples, settings.batch)
    carry, error = init(jax.random.key(seed)), float('nan')
    for first in range(0, settings.steps, CHUNK):
        indices = np.stack(list(itertools.islice(order, min(CHUNK, settings.steps - first))))
        carry, error = train(carry, (inputs[indices], targets[indices]))
    test_inputs, test_targets, _ = generate_test_examples(settings)
    # Test rows are evaluated in chunks, because attention over all rows at once would need gigabytes of memory.
    parts = np.array_split(test_inputs, max(1, len(test_inputs) // 100))
    predicted = np.concatenate([predict(carry[0], part) for part in parts])
    test = float(np.mean(np.square(predicted - test_targets)))
    return {'test_mse': test, 'train_mse': float(error), 'seconds': round(time.perf_counter() - start, 1)}


@functools.cache
def generate_test_examples(settings: StudySettings) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return toy_data.generate_examples(np.random.default_rng(TEST_SEED), settings.test_examples, settings.length)


def build_cell_settings(mixer: str, examples: int, seed: int, settings: StudySettings) -> dict[str, Any]:
    return {'mixer': mixer, 'examples': examples, 'seed': seed, **dataclasses.asdict(settings)}


Errors = dict[str, dict[int, list[float]]]


def train_missing_models(records: ResultsFile, args: argparse.Namespace, settings: StudySettings) -> None:
    """Runs the missing cells in order of seed, so that an interrupted study has results for all mixers."""
    cells = [(m, n, seed) for seed in range(args.seeds) for m in args.mixers for n in args.examples]
    missing = [cell for cell in cells if records.find_result(build_cell_settings(*cell, settings)) is None]
    print(f'{len(cells)} runs, {len(cells) - len(missing)} already done', flush=True)
    for number, (mixer, examples, seed) in enumerate(missing, 1):
        result = train_and_test(mixer, examples, seed, settings)
        records.append_result(build_cell_settings(mixer, examples, seed, settings), result)
        print(
            f'{number:3d} of {len(missing)}  {mixer:12s}{examples:>8,} examples, seed {seed}: '
            f'test {result["test_mse"]:.3f}, training {result["train_mse"]:.3f}, {result["seconds"]:.0f} s',
            flush=True,
        )


def collect_results(records: ResultsFile, args: argparse.Namespace, settings: StudySettings) -> Errors:
    """Returns, for each mixer and number of training examples, the test errors of the finished seeds."""
    errors: Errors = {mixer: {} for mixer in args.mixers}
    for mixer, examples, seed in itertools.product(args.mixers, args.examples, range(args.seeds)):
        result = records.find_result(build_cell_settings(mixer, examples, seed, settings))
        if result is not None:
            errors[mixer].setdefault(examples, []).append(result['test_mse'])
    return errors


def compute_baseline_errors(settings: StudySettings) -> dict[str, float]:
    """Returns the errors of two untrained baselines: the unchanged input, and the best guess from a shape's height."""
    inputs, targets, local = generate_test_examples(settings)
    return {
        'input unchanged': float(np.mean(np.square(inputs - targets))),
        'own shape alone': float(np.mean(np.square(local - targets))),
    }


def print_table(errors: Errors, sizes: list[int], references: dict[str, float]) -> None:
    print('\nmean squared test error per token: mean over seeds, standard deviation, [seeds]')
    print(f'{"training examples":18s}' + ''.join(f'{size:>22,}' for size in sizes))
    for mixer, by_size in errors.items():
        cells = (format_summary(by_size.get(size, []), digits=3) for size in sizes)
        print(f'{mixer:18s}' + ''.join(f'{cell:>22s}' for cell in cells))
    for name, value in references.items():
        print(f'{name:18s}{value:22.3f}')


def plot_figure(errors: Errors, references: dict[str, float], file: str, note: str) -> None:
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    figure = drawing.create_figure(6.4, 4.2)
    axes = figure.subplots()
    for colour, (mixer, by_size) in zip(drawing.COLOURS, errors.items(), strict=False):
        if not by_size:
            continue
        sizes = list(by_size)
        means = np.asarray([np.mean(by_size[size]) for size in sizes])
        # The band is the range over seeds. The mean minus the standard deviation can be negative, which a logarithmic
        # axis cannot show.
        ranges = [means - [min(by_size[size]) for size in sizes], [max(by_size[size]) for size in sizes] - means]
        axes.errorbar(sizes, means, ranges, marker='o', markersize=4, capsize=3, color=colour, label=mixer)
    axes.axhline(
        references['own shape alone'], color=drawing.TEXT_COLOUR, linestyle=':', linewidth=1, label='own shape alone'
    )
    axes.set_xscale('log')
    axes.set_yscale('log')
    # If the errors span less than a power of ten, an axis with ticks only at powers of ten may have no labels.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FormatStrFormatter('%g'))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(color=drawing.GRID, linewidth=0.5)
    title = f'Toy task: test error by training examples; mean, best and worst seed\n{note}'
    drawing.style_axes(axes, title, 'training examples', 'mean squared error')
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=150, facecolor='white')
    print(f'figure: {file}')


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = list(toy_model.build_mixer_factories(1, 1, 1))
    parser.add_argument('--mixers', default=','.join(known), help='comma-separated mixers')
    examples = 'numbers of training examples, separated by commas'
    parser.add_argument('--examples', type=parse_sorted_integers, default='100,1000,10000', help=examples)
    parser.add_argument('--seeds', type=int, default=3, help='number of runs per mixer and training set size')
    parser.add_argument('--steps', type=int, default=2000)
    parser.add_argument('--batch', type=int, default=16)
    parser.add_argument('--width', type=int, default=32, help='model width')
    parser.add_argument('--hidden', type=int, default=64, help='hidden units of MLP-Mixer and HyperMixer')
    parser.add_argument('--length', type=int, default=100, help=f'tokens in a row, at least {toy_data.SHORTEST}')
    parser.add_argument(
        '--learning_rate', type=float, default=3e-3, help='peak learning rate of Adam, with cosine decay to 0'
    )
    parser.add_argument('--test_examples', type=int, default=1000)
    parser.add_argument('--out', default='runs/studies/toy_task.jsonl', help='JSON lines file for the results')
    parser.add_argument('--figure', default='', help='PNG file to write')
    parser.add_argument('--show', action='store_true', help='only print the results in --out')
    args = parser.parse_args()
    args.mixers = args.mixers.split(',')
    return args


def main() -> None:
    args = parse_arguments()
    settings = StudySettings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(StudySettings)})
    note = f'length {args.length}, width {args.width}, {args.steps:,} steps of {args.batch}, float32'
    print(f'{jax.devices()[0].device_kind} x {jax.device_count()}; {note}, hidden {args.hidden}; results in {args.out}')
    records = ResultsFile(args.out)
    if not args.show:
        train_missing_models(records, args, settings)
    errors, references = collect_results(records, args, settings), compute_baseline_errors(settings)
    print_table(errors, args.examples, references)
    if args.figure:
        plot_figure(errors, references, args.figure, note)


if __name__ == '__main__':
    main()
