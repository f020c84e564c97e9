"""Which optimizer learns fastest on one tiny recipe: held-out loss after the same number of steps.

    python scripts/studies/optimizers.py --folder runs/optimizers

Each optimizer is tried with seed 0 at its own learning rate times 1/3, 1 and 3, and further while the highest or the
lowest rate is the best; the best rate gets all seeds.
The recipe is experiments/python_docs.gin, with a warmup of a tenth of the steps and the schedule of each optimizer's
file. Every run is a command `remixer-t5x train` with a folder of its own, so a run that was stopped resumes. Results
are appended to FOLDER/optimizers.jsonl as they are known; started again, the study does what is missing.
"""

import argparse
import functools
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from library.records import Records, summary

# The learning rate of each file of optimizers/.
RATES = {
    'adafactor_constant': 1e-2,
    'adamw_rms': 2e-2,
    'adamw': 1e-3,
    'lion': 1e-4,
    'muon': 2e-3,
    'schedule_free': 2e-3,
}
# Neighbouring rates differ by this factor.
FACTOR = 3.0
# No optimizer is tried at more rates than this.
MOST_RATES = 7
NUMBER = 'cross_ent_loss'


def cell_of(name: str, rate: float, seed: int, steps: int, recipe: str) -> dict[str, Any]:
    """All that decides a result."""
    return {'optimizer': name, 'rate': float(f'{rate:.3g}'), 'seed': seed, 'steps': steps, 'recipe': recipe}


def command(cell: dict[str, Any], folder: pathlib.Path) -> list[str]:
    """The run of a cell, as a user would type it."""
    steps = cell['steps']
    macros = {
        'MODEL_DIR': folder,
        'LEARNING_RATE': cell['rate'],
        'SEED': cell['seed'],
        'TRAIN_STEPS': steps,
        'WARMUP_STEPS': max(1, steps // 10),
        'EVAL_PERIOD': steps,
        'CHECKPOINT_PERIOD': steps,
        'TRACKERS': '()',
    }
    # The recipe's warmup is half of its peak at the start, which belongs to one optimizer alone.
    if cell['optimizer'] not in ('adafactor_constant', 'schedule_free'):
        macros |= {'WARMUP_START': 0.0, 'FINAL_LEARNING_RATE': 0.0}
    flags = [f'--gin.{name}={value}' for name, value in macros.items()]
    return [
        'remixer-t5x', 'train', f'--gin_file={cell["recipe"]}', f'--gin_file=optimizers/{cell["optimizer"]}.gin', *flags
    ]  # fmt: skip


def train(cell: dict[str, Any], folder: pathlib.Path) -> dict[str, float]:
    """Runs or resumes a cell; its last evaluation. A run that diverges has the loss infinity."""
    where = folder / '-'.join(str(cell[key]) for key in ('optimizer', 'rate', 'seed', 'steps'))
    done = subprocess.run(command(cell, where), stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode and 'not finite' in done.stderr:
        return {NUMBER: float('inf')}
    if done.returncode:
        sys.exit(f'{" ".join(command(cell, where))}\nended with exit code {done.returncode}:\n{done.stderr}')
    lines = [json.loads(line) for line in (where / 'metrics.jsonl').read_text().splitlines()]
    last = [line for line in lines if line['kind'] == 'eval'][-1]
    return {NUMBER: last[NUMBER] if last[NUMBER] is not None else float('inf')}


def best_rate(first: float, loss: Callable[[float], float]) -> float:
    """The rate of least loss among `first` times powers of FACTOR: it has tried neighbours on both sides."""
    losses = {power: loss(first * FACTOR**power) for power in (-1, 0, 1)}
    while len(losses) < MOST_RATES:
        best = min(losses, key=losses.__getitem__)
        if best not in (min(losses), max(losses)):
            break
        further = best + (1 if best == max(losses) else -1)
        losses[further] = loss(first * FACTOR**further)
    return first * FACTOR ** min(losses, key=losses.__getitem__)


def study(
    args: argparse.Namespace, run: Callable[..., dict[str, float]] = train
) -> dict[str, tuple[float, list[float]]]:
    """The best rate of each optimizer, and the losses of all seeds at that rate."""
    records, found = Records(args.folder / 'optimizers.jsonl'), {}

    def loss(name: str, rate: float, *, seed: int) -> float:
        cell = cell_of(name, rate, seed, args.steps, args.recipe)
        if records.get(cell) is None:
            records.add(cell, run(cell, args.folder))
        return records.get(cell)[NUMBER]

    for name in args.optimizers:
        best = best_rate(RATES[name], functools.partial(loss, name, seed=0))
        found[name] = best, [loss(name, best, seed=seed) for seed in range(args.seeds)]
    return found


def print_table(found: dict[str, tuple[float, list[float]]]) -> None:
    print('| optimizer | best rate | held-out cross-entropy, mean (deviation) [seeds] |\n|---|---|---|')
    for name, (rate, losses) in sorted(found.items(), key=lambda item: sum(item[1][1])):
        print(f'| `{name}` | {rate:.2g} | {summary(losses, 3)} |')


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--folder', type=pathlib.Path, default=pathlib.Path('runs/optimizers'))
    parser.add_argument('--recipe', default='experiments/python_docs.gin', help='a gin file with everything else')
    parser.add_argument('--optimizers', default=','.join(RATES), help='by comma')
    parser.add_argument('--steps', type=int, default=200)
    parser.add_argument('--seeds', type=int, default=3)
    args = parser.parse_args(given)
    args.optimizers = args.optimizers.split(',')
    if unknown := [name for name in args.optimizers if name not in RATES]:
        parser.error(f'--optimizers has {unknown[0]}; give some of {", ".join(RATES)}')
    return args


if __name__ == '__main__':
    print_table(study(parse_arguments()))
