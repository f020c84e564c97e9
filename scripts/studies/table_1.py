"""Parameters, FLOPs and steps per second of the models in table 1 of REMIXERS, next to the paper's.

    python scripts/studies/table_1.py                     base size, one example a step: minutes on a CPU
    python scripts/studies/table_1.py --batch 128 --dtype bfloat16     on an accelerator

FLOPs count a forward pass of one example (matrix products, a multiply and an add being two), steps are training
steps with Adafactor: forward, backward, update. The paper gives neither batch nor lengths of its FLOPs, so only ratios
to its T5.1.1 can be set side by side. Models take turns in processes of their own (scripts/benchmarks/train_step.py).
"""

import argparse
import pathlib
import sys

from remixer_t5x.costs import counts

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / 'benchmarks'))
import train_step as benchmark  # noqa: E402

# Model and size here: parameters, FLOPs and steps per second in the paper's table 1.
PAPER = {
    ('t5_1_1', 'base'): (248e6, 3.4e13, 9),
    ('mixer_enc', 'base'): (212e6, 1.2e13, 11),
    ('remixer_scaled', 'scaled_base'): (224e6, 1.3e13, 8),
    ('remixer', 'base'): (324e6, 2.1e13, 6),
}


def rows(ours: dict[tuple[str, str], tuple[float, float, float]]) -> list[list[str]]:
    """A row for each model; ratios are to the first."""
    first, paper_first = next(iter(ours.values())), next(iter(PAPER.values()))
    found = []
    for key, (parameters, flops, rate) in ours.items():
        paper = PAPER[key]
        found.append(
            [
                key[0],
                f'{parameters / 1e6:.1f}M',
                f'{paper[0] / 1e6:.0f}M',
                f'{flops:.3g}',
                f'{flops / first[1]:.2f}',
                f'{paper[1] / paper_first[1]:.2f}',
                f'{rate:.3f}',
                f'{rate / first[2]:.2f}',
                f'{paper[2] / paper_first[2]:.2f}',
            ]
        )
    return found


HEADINGS = ['model', 'params', 'paper', 'forward FLOPs', 'to T5', 'paper', 'steps/s', 'to T5', 'paper']


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--batch', type=int, default=1)
    parser.add_argument('--inputs', type=int, default=512)
    parser.add_argument('--targets', type=int, default=114)
    parser.add_argument('--dtype', default='float32', choices=['float32', 'bfloat16'])
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--tiny', action='store_true', help='all at size tiny, to try it')
    args = parser.parse_args()
    contestants = {}
    for model, size in PAPER:
        own = argparse.Namespace(**vars(args), size='tiny' if args.tiny else size, gin_file=[])
        contestants[model, size] = benchmark.Contestant(model, own)
    facts = {key: contestant.call() for key, contestant in contestants.items()}
    device = next(iter(facts.values()))['device']
    print(f'{device}; batch {args.batch}, {args.inputs} to {args.targets}, {args.dtype}', flush=True)
    fastest = dict.fromkeys(contestants, float('inf'))
    for _ in range(args.rounds):
        for key, contestant in contestants.items():
            contestant.call()  # Not timed: a process that was idle pays for its memory and caches once more.
            fastest[key] = min(fastest[key], contestant.call())
    for contestant in contestants.values():
        contestant.stop()
    ours = {
        key: (told['parameters'], told['flops'] / args.batch / counts.TRAINING_FORWARD_PASSES, 1 / fastest[key])
        for key, told in facts.items()
    }
    for cells in [HEADINGS, *rows(ours)]:
        print('  '.join(f'{cell:>14s}' for cell in cells))


if __name__ == '__main__':
    main()
