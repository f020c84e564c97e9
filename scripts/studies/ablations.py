"""Ablations on a small task: REMIXERS, table 5; HyperMixer, tables 5 and 6.

    python scripts/studies/ablations.py
    python scripts/studies/ablations.py --tables layouts --seeds 1
    python scripts/studies/ablations.py --model_type classifier --task glue_sst2_v002 --inputs 40

Results are appended to --out as they are known; started again, it does what is missing. Task and models: small_task.py.
"""

import argparse
from collections.abc import Sequence

from library import small_task, variants
from library.records import Records, paired, summary

TABLES = {
    'remixer': [
        'attention',
        'remixer',
        'remixer, no composition',
        'remixer, gated alpha',
        'remixer, gated composition',
    ],
    'hyper_mixer': [
        'attention',
        'hyper_mixer',
        'hyper_mixer, untied',
        'feature mixing only',
        'token mixing only',
        'shared weight vector',
    ],
    'mixers': [
        'attention',
        'hyper_mixer',
        'mlp_mixer',
        'linear_attention',
        'fnet',
        'fnet, post-norm',
        'gmlp',
        'remixer',
    ],
    'layouts': [f'{norm}, {layout}' for norm in variants.NORMED for layout in variants.LAYOUTS],
}


def trials_of(args: argparse.Namespace, variant: str) -> list[small_task.Trial]:
    return [small_task.trial_of(args, variant, seed) for seed in range(args.seeds)]


def baseline(table: Sequence[str], variant: str, against: str) -> str:
    """What `variant` is compared with: `against`, which in the table of layouts has the same layout."""
    layout = variant.rpartition(', ')[2]
    same = f'{against}, {layout}'
    return same if layout in variants.LAYOUTS and same in table else against


def print_table(records: Records, args: argparse.Namespace, name: str) -> None:
    metrics = small_task.ANSWERS[args.model_type].METRICS
    print(f'\n{name}: mean over seeds (standard deviation) [seeds], and the difference from {args.against} with the')
    print('same seed, in the same layout: mean ± half of its 90% interval')
    head = ['', *(f'{metric}{what}' for metric in metrics for what in ('', ', difference')), 'parameters']
    print('| ' + ' | '.join(head) + ' |\n' + '|---' * len(head) + '|')
    for variant in TABLES[name]:
        compared = baseline(TABLES[name], variant, args.against)
        cells = [cell for metric in metrics for cell in cells_of(records, args, variant, compared, metric)]
        counted = small_task.values_of(records, trials_of(args, variant), 'parameters')
        print('| ' + ' | '.join([variant, *cells, f'{int(counted[0]):,}' if counted else '']) + ' |')


def cells_of(records: Records, args: argparse.Namespace, variant: str, compared: str, metric: str) -> tuple[str, str]:
    """The summary of the variant's results, and their difference from those of `compared` over the seeds of both."""
    ours, theirs = (
        [small_task.values_of(records, [trial], metric) for trial in trials_of(args, name)]
        for name in (variant, compared)
    )
    pairs = [(*one, *other) for one, other in zip(ours, theirs, strict=True) if one and other]
    difference = paired(*zip(*pairs, strict=True)) if pairs and variant != compared else ''
    return summary([value for values in ours for value in values]), difference


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    small_task.add_arguments(parser, 'runs/studies/ablations.jsonl', seeds=2)
    parser.add_argument('--tables', default=','.join(TABLES), help='by comma')
    parser.add_argument('--against', default=small_task.BASELINE, help='what the others are compared with')
    args = parser.parse_args(given)
    small_task.check_arguments(parser, args)
    small_task.names_given(parser, '--against', args.against)
    args.tables = args.tables.split(',')
    if unknown := [name for name in args.tables if name not in TABLES]:
        parser.error(f'--tables has {unknown[0]!r}; known are {", ".join(TABLES)}')
    return args


def main() -> None:
    args = parse_arguments()
    chosen = dict.fromkeys(variant for name in args.tables for variant in TABLES[name])
    # Model by model, so that each is compiled once.
    records = small_task.finish(args, [trial for variant in chosen for trial in trials_of(args, variant)])
    for name in args.tables:
        print_table(records, args, name)


if __name__ == '__main__':
    small_task.exit_with_one_line(main)
