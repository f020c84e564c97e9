"""Low resource (HyperMixer, section 4.5 and figure 3): exact match by how much of the training split is used.

    python scripts/studies/low_resource.py --figure low_resource.png

Every model takes the same number of steps on 10, 25, 50 and 100% of the training split, drawn again for each seed; the
figure has the difference to attention, in percent of attention's, as in the paper. Results are appended to --out as
they are known; started again, it does what is missing. Task and models: small_task.py.
"""

import argparse

import numpy as np
from library import figures, small_task
from library.records import Records, summary

from remixer_t5x.extras.reports.pictures import drawing

Found = dict[str, dict[float, list[float]]]


def trials_of(args: argparse.Namespace, variant: str, percentage: float) -> list[small_task.Trial]:
    return [small_task.trial_of(args, variant, seed, percentage=percentage) for seed in range(args.seeds)]


def collect(records: Records, args: argparse.Namespace) -> Found:
    """Values over seeds, by model and percentage."""
    return {
        variant: {
            percentage: small_task.values_of(records, trials_of(args, variant, percentage), args.metric)
            for percentage in args.percentages
        }
        for variant in args.models
    }


def relative(found: Found, variant: str, percentage: float) -> float:
    """Percent more than attention on the same part; NaN where one is missing or attention has 0."""
    ours, theirs = found[variant][percentage], found.get(small_task.BASELINE, {}).get(percentage, [])
    if not ours or not theirs or not np.mean(theirs):
        return float('nan')
    return 100 * (float(np.mean(ours)) / float(np.mean(theirs)) - 1)


def print_table(found: Found, args: argparse.Namespace) -> None:
    print(f'\n{args.metric}: mean over seeds, (standard deviation), [seeds]; below it, percent more than attention')
    print(f'{"training split":20s}' + ''.join(f'{percentage:>21g}%' for percentage in args.percentages))
    for variant, by_percentage in found.items():
        print(f'{variant:20s}' + ''.join(f'{summary(values):>22s}' for values in by_percentage.values()))
        if variant != small_task.BASELINE:
            print(f'{"":20s}' + ''.join(f'{relative(found, variant, p):>+21.1f}%' for p in args.percentages))


def draw(found: Found, args: argparse.Namespace) -> None:
    figure = drawing.new_figure(9.6, 3.6)
    left, right = figure.subplots(1, 2)
    for colour, (variant, by_percentage) in zip(drawing.COLOURS, found.items(), strict=False):
        done = [percentage for percentage, values in by_percentage.items() if values]
        means = [np.mean(by_percentage[percentage]) for percentage in done]
        spreads = [np.std(by_percentage[p], ddof=1) if len(by_percentage[p]) > 1 else 0.0 for p in done]
        left.errorbar(done, means, spreads, marker='o', markersize=4, capsize=3, color=colour, label=variant)
        if variant != small_task.BASELINE:
            shown = [relative(found, variant, percentage) for percentage in done]
            right.plot(done, shown, marker='o', markersize=4, color=colour, label=variant)
    right.axhline(0, color=drawing.INK, linewidth=1, linestyle=':')
    for axes in (left, right):
        axes.set_xticks(args.percentages)
        axes.grid(color=drawing.GRID, linewidth=0.5)
    drawing.style_axes(left, f'{small_task.describe(args)}', 'percent of the training split', args.metric)
    drawing.style_axes(right, '', 'percent of the training split', 'percent more than attention')
    right.legend(
        frameon=False,
        fontsize=8,
        loc='upper left',
        bbox_to_anchor=(1.01, 1.02),
        handles=left.get_legend_handles_labels()[0],
    )
    figures.save(figure, args.figure)


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    small_task.add_arguments(parser, 'runs/studies/low_resource.jsonl')
    parser.add_argument('--models', default='attention;hyper_mixer;mlp_mixer', help='by semicolon')
    parser.add_argument('--percentages', default='10,25,50,100', help='by comma')
    small_task.add_metric(parser, 'exact_match')
    parser.add_argument('--figure', default='', help='write a PNG here')
    args = parser.parse_args(given)
    small_task.check_arguments(parser, args)
    small_task.check_metric(parser, args)
    args.models = small_task.names_given(parser, '--models', args.models)
    try:
        args.percentages = sorted({float(text) for text in args.percentages.split(',')})
    except ValueError:
        parser.error(f'--percentages is {args.percentages!r}; give numbers, as in 10,100')
    if not 0 < args.percentages[0] <= args.percentages[-1] <= 100:
        parser.error(
            f'--percentages has {args.percentages[0]:g} to {args.percentages[-1]:g}; give some above 0, up to 100'
        )
    return args


def main() -> None:
    args = parse_arguments()
    # Seed by seed, so that an interrupted study has all models.
    by_seed = zip(*(trials_of(args, v, p) for v in args.models for p in args.percentages), strict=True)
    found = collect(small_task.finish(args, [trial for trials in by_seed for trial in trials]), args)
    print_table(found, args)
    if args.figure:
        draw(found, args)


if __name__ == '__main__':
    small_task.exit_with_one_line(main)
