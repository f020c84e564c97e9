"""Ablations on a small task: REMIXERS, table 5; HyperMixer, tables 5 and 6.

    python scripts/studies/ablations.py
    python scripts/studies/ablations.py --tables layouts --seeds 1

Results are appended to --out as they are known; started again, it does what is missing. Task and models: small_task.py.
"""

import argparse

from library import small_task, variants
from library.records import Records, summary

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
METRICS = ('exact_match', 'token_accuracy', 'parameters')


def trials_of(args: argparse.Namespace, variant: str) -> list[small_task.Trial]:
    return [small_task.trial_of(args, variant, seed) for seed in range(args.seeds)]


def print_table(records: Records, args: argparse.Namespace, name: str) -> None:
    print(f'\n{name}: mean over seeds, (standard deviation), [seeds]')
    print(f'{"":36s}' + ''.join(f'{metric:>22s}' for metric in METRICS))
    for variant in TABLES[name]:
        exact, tokens, parameters = (
            small_task.values_of(records, trials_of(args, variant), metric) for metric in METRICS
        )
        counted = f'{int(parameters[0]):,}' if parameters else ''
        print(f'{variant:36s}{summary(exact):>22s}{summary(tokens):>22s}{counted:>22s}')


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    small_task.add_arguments(parser, 'runs/studies/ablations.jsonl', seeds=2)
    parser.add_argument('--tables', default=','.join(TABLES), help='by comma')
    args = parser.parse_args(given)
    small_task.check_arguments(parser, args)
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
