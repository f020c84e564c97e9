"""What gMLP's W looks like after training: weights for pairs of positions, and how near they come to Toeplitz.

    python scripts/studies/spatial_weights.py --text '/data/wikinews_en/AA/*' --figure spatial_weights.png

An encoder of gMLP restores 15% of the tokens of segments, as in encoders.py, once with a weight for each distance (W is
a Toeplitz matrix) and once with a weight for each pair of positions. The paper (Liu et al. 2021, section 4) says that
free weights become Toeplitz-like. Their Toeplitz share says how far: the part of W's variance that is left when each
diagonal has its mean. It is 1 for a Toeplitz matrix, and about 2/n for n x n numbers drawn at random. Results are
appended to --out as they are known; started again, the study does what is missing.
"""

import argparse
import dataclasses
import functools
import time
from typing import Any

import encoders
import jax
import numpy as np
from library import comparison, damaged_text, figures
from library.rows import Rows
from library.small_task import exit_with_one_line

MIXERS = {'gmlp': 'by distance', 'gmlp, free': 'by pair of positions'}
DIGITS = 5


@dataclasses.dataclass(frozen=True)
class Trial:
    """All that a result depends on."""

    mixer: str
    seed: int
    text: str
    steps: int
    batch: int
    length: int
    width: int
    layers: int
    vocabulary: int
    rows: int
    learning_rate: float


def toeplitz_share(weights: np.ndarray) -> float:
    """The part of the variance of W, [n, n], that is left when each diagonal has its mean."""
    n = len(weights)
    means = {offset: np.mean(np.diagonal(weights, offset)) for offset in range(1 - n, n)}
    smoothed = np.array([[means[column - row] for column in range(n)] for row in range(n)])
    return float(np.var(smoothed) / np.var(weights))


@functools.cache
def data_of(text: str, length: int, vocabulary: int, rows: int) -> tuple[Rows, Rows]:
    from remixer_tasks import pretraining

    task = pretraining.masked_lm(*damaged_text.corpus_of(text, vocabulary))
    return tuple(
        encoders.masked_rows(task, split, length, limit)
        for split, limit in (('train', rows), ('validation', encoders.VALIDATION_ROWS))
    )


def run(trial: Trial) -> dict[str, Any]:
    """The held-out loss, and for each layer the Toeplitz share before and after, and W."""
    from remixer_t5x.extras.reports.pictures import learned

    begun = time.perf_counter()
    text, held_out = data_of(trial.text, trial.length, trial.vocabulary, trial.rows)
    fields = {**dataclasses.asdict(trial), 'seed': 0, 'tasks': '', 'finetune_steps': 0, 'finetune_rate': 0.0}
    program, judge = encoders.program_of(encoders.Trial(**fields))
    carry = program.init(jax.random.key(trial.seed))

    def weights(params: Any) -> list[np.ndarray]:
        found = learned.spatial_weights(jax.tree.map(np.asarray, params), {'encoder': trial.length})
        return [np.asarray(one.array, np.float64) for one in found]

    before = weights(carry[0])
    params = encoders.trained(program, carry, text, trial.steps, trial.batch, trial.seed)
    loss, accuracy = encoders.judged(judge, params, held_out, trial.batch)
    after = weights(params)
    return {
        'held-out loss': loss,
        'masked accuracy': 100 * accuracy,
        'share before': [toeplitz_share(w) for w in before],
        'share after': [toeplitz_share(w) for w in after],
        'weights': [np.round(w, DIGITS).tolist() for w in after],
        'seconds': round(time.perf_counter() - begun, 1),
    }


def print_table(found: comparison.Found, steps: int) -> None:
    print('| weights | seed | steps | held-out loss | Toeplitz share of each layer, before | after |')
    print('|---' * 6 + '|')
    for mixer, results in found.items():
        for seed, result in enumerate(results):
            shares = [', '.join(f'{one:.2f}' for one in result[f'share {when}']) for when in ('before', 'after')]
            cells = [MIXERS[mixer], str(seed), f'{steps:,}', f'{result["held-out loss"]:.3f}', *shares]
            print('| ' + ' | '.join(cells) + ' |')


def draw(found: comparison.Found, file: str) -> None:
    """The magnitude of W of each layer, of the first seed; a row for each form of the weights."""
    from remixer_t5x.extras.reports.pictures import drawing

    shown = {MIXERS[mixer]: results[0]['weights'] for mixer, results in found.items() if results}
    grid = [
        [drawing.Panel(f'layer {number}', np.asarray(weights)) for number, weights in enumerate(layers, 1)]
        for layers in shown.values()
    ]
    figures.save(drawing.draw_matrices(grid, list(shown)), file)


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--text', required=True, help='JSON lines with `text`: a path or glob')
    parser.add_argument('--mixers', default=';'.join(MIXERS), help=f'by semicolon, of {"; ".join(MIXERS)}')
    for name, default in (
        ('seeds', 1), ('steps', 20_000), ('batch', 32), ('length', 64), ('width', 64), ('layers', 4),
        ('vocabulary', 1024), ('rows', 100_000),
    ):  # fmt: skip
        parser.add_argument(f'--{name}', type=int, default=default)
    parser.add_argument('--learning_rate', type=float, default=3e-3, help="Adam's highest")
    parser.add_argument('--out', default='runs/studies/spatial_weights.jsonl', help='results, one line each')
    parser.add_argument('--figure', default='', help='write a PNG here')
    parser.add_argument('--show', action='store_true', help='run nothing, show what is in --out')
    args = parser.parse_args(given)
    args.mixers = comparison.check_names(parser, '--mixers', args.mixers.split(';'), MIXERS)
    return args


def main() -> None:
    args = parse_arguments()
    found = comparison.compare(args, Trial, 'mixer', args.mixers, run)
    print_table(found, args.steps)
    if args.figure and any(found.values()):
        draw(found, args.figure)


if __name__ == '__main__':
    exit_with_one_line(main)
