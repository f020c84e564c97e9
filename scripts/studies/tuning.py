"""Ease of tuning (HyperMixer, section 4.6 and figure 4): what to expect of the best of k random trials.

    python scripts/studies/tuning.py --figure tuning.png

Each trial draws log10 of the learning rate from U(-8, -1) and the dropout rate from U(0, 0.5), as the paper (which does
not print the base of its logarithm); all models get the same draws. The expected validation performance after k trials
is that of Dodge et al. 2019, equation 2: of n results v_1 <= ... <= v_n, sum_i v_i ((i/n)^k - ((i-1)/n)^k). Results are
appended to --out as they are known; started again, it does what is missing. Task and models: small_task.py.
"""

import argparse

import numpy as np
from library import figures, small_task

from remixer_t5x.extras.reports.differences import expected_best
from remixer_t5x.extras.reports.pictures import drawing

LOG10_RATE, DROPOUT = (-8.0, -1.0), (0.0, 0.5)


def drawn(number: int) -> dict[str, float]:
    """Learning rate and dropout of trial `number`, whatever else is drawn."""
    rng = np.random.default_rng([2023, number])
    return {
        'learning_rate': float(f'{10 ** rng.uniform(*LOG10_RATE):.6g}'),
        'dropout': float(f'{rng.uniform(*DROPOUT):.3f}'),
    }


def trials_of(args: argparse.Namespace, variant: str) -> list[small_task.Trial]:
    """Each with a seed of its own, as the paper's trials."""
    return [small_task.trial_of(args, variant, number, **drawn(number)) for number in range(args.trials)]


def relative(curves: dict[str, np.ndarray], variant: str) -> np.ndarray:
    """Percent more than attention after as many trials, as in the paper's figure; empty without attention."""
    ours, theirs = curves[variant], curves.get(small_task.BASELINE, np.zeros(0))
    both = min(len(ours), len(theirs))
    theirs = np.where(theirs[:both] == 0, np.nan, theirs[:both])
    return 100 * (ours[:both] / theirs - 1)


def print_table(curves: dict[str, np.ndarray], args: argparse.Namespace) -> None:
    shown = sorted({k for k in (1, 2, 3, 5, 8, 10, 15, 20, 30, 50, 100, args.trials) if k <= args.trials})
    print(f'\nexpected {args.metric} of the best of k trials; below it, percent more than attention')
    print(f'{"k":20s}' + ''.join(f'{k:>10d}' for k in shown))
    for variant, curve in curves.items():
        cells = (f'{curve[k - 1]:>10.2f}' if k <= len(curve) else f'{"-":>10s}' for k in shown)
        print(f'{variant:20s}' + ''.join(cells) + f'   {len(curve)} of {args.trials} trials')
        if variant != small_task.BASELINE:
            more = relative(curves, variant)
            print(f'{"":20s}' + ''.join(f'{more[k - 1]:>+9.1f}%' if k <= len(more) else f'{"-":>10s}' for k in shown))


def draw(curves: dict[str, np.ndarray], args: argparse.Namespace) -> None:
    """Expected performance on the left, and as the paper draws it, relative to attention's, on the right."""
    figure = drawing.new_figure(9.6, 3.8)
    left, right = figure.subplots(1, 2)
    for colour, (variant, curve) in zip(drawing.COLOURS, curves.items(), strict=False):
        dots = {'marker': 'o', 'markersize': 3, 'color': colour, 'label': variant}
        left.plot(np.arange(1, len(curve) + 1), curve, **dots)
        if variant != small_task.BASELINE:
            more = relative(curves, variant)
            right.plot(np.arange(1, len(more) + 1), more, **dots)
    right.axhline(0, color=drawing.INK, linewidth=1, linestyle=':')
    for axes in (left, right):
        axes.grid(color=drawing.GRID, linewidth=0.5)
        axes.xaxis.get_major_locator().set_params(integer=True)
    title = f'Random search over learning rate and dropout\n{small_task.describe(args)}'
    drawing.style_axes(left, title, 'trials', f'expected {args.metric} of the best')
    drawing.style_axes(right, '', 'trials', 'percent more than attention')
    left.legend(frameon=False, fontsize=8)
    figures.save(figure, args.figure)


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    small_task.add_arguments(parser, 'runs/studies/tuning.jsonl')
    parser.add_argument('--models', default='attention;hyper_mixer', help='by semicolon')
    parser.add_argument('--trials', type=int, default=20)
    small_task.add_metric(parser, 'token_accuracy')
    parser.add_argument('--figure', default='', help='write a PNG here')
    args = parser.parse_args(given)
    small_task.check_arguments(parser, args)
    small_task.check_metric(parser, args)
    args.models = small_task.names_given(parser, '--models', args.models)
    if args.trials < 1:
        parser.error(f'--trials has {args.trials}; give 1 or more')
    return args


def main() -> None:
    args = parse_arguments()
    # Trial by trial, so that an interrupted study has as many of one model as of the other.
    by_trial = zip(*(trials_of(args, variant) for variant in args.models), strict=True)
    records = small_task.finish(args, [trial for trials in by_trial for trial in trials])
    found = {v: small_task.values_of(records, trials_of(args, v), args.metric) for v in args.models}
    curves = {variant: expected_best(values) for variant, values in found.items() if values}
    print_table(curves, args)
    if args.figure:
        draw(curves, args)


if __name__ == '__main__':
    small_task.exit_with_one_line(main)
