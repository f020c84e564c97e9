"""Span corruption, UL2 and prefix LM on one recipe: what each teaches for the same number of FLOPs.

    python scripts/studies/objectives.py --text '/data/wikinews_en/AA/wiki_0[0-3]'

One T5.1.1 trains on each objective with Adam, a warm-up over a tenth of the steps and a cosine to 0, in float32. Then
it restores held-out text that each of UL2's seven denoisers has damaged: the model of UL2 sees the denoiser's prompt,
the others see none, as in their training. Rows of an objective are as long as its longest targets, so a step of UL2
costs more than one of span corruption, and takes fewer steps.

One seed gives parameters and the order of the rows. Results are appended to --out as they are known; started again, it
does what is missing.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from library import comparison, damaged_text, rows, sized_models, training_loop
from library.epochs import batches
from library.records import summary
from library.rows import Rows
from library.small_task import exit_with_one_line
from library.training_loop import Program

from remixer_t5x.config import loading
from remixer_t5x.data import batch_formats
from remixer_t5x.errors import UserError

OBJECTIVES = ('span_corruption', 'ul2', 'prefix_lm')
NO_PROMPTS = {'r': '', 'x': '', 's': ''}
HELD_OUT_ROWS = 256


@dataclasses.dataclass(frozen=True)
class Trial:
    """All that a result depends on; `length` is the tokens of the inputs, and the most tokens of the targets."""

    objective: str
    seed: int
    text: str
    budget: float
    batch: int
    length: int
    width: int
    layers: int
    vocabulary: int
    rows: int
    learning_rate: float


def rows_of(task: Any, split: str, length: int, limit: int) -> Rows:
    """The first `limit` examples, padded to `length` inputs and to the longest targets.

    Raises UserError where the text has none.
    """
    found = list(damaged_text.examples(task, split, {'inputs': length, 'targets': length}, limit))
    if not found:
        raise UserError(
            f'{task.name}, {split}, has no segment of {length} tokens: give more text, or a smaller --length'
        )
    longest = max(len(row['targets']) for row in found)
    inputs = np.stack([np.pad(row['inputs'], (0, length - len(row['inputs']))) for row in found])
    targets = np.stack([np.pad(row['targets'], (0, longest - len(row['targets']))) for row in found])
    return rows.encoder_decoder(inputs, targets)


def together(parts: list[Rows]) -> Rows:
    """All rows, with targets as long as the longest part's."""
    longest = max(part['decoder_target_tokens'].shape[1] for part in parts)

    def padded(name: str) -> np.ndarray:
        width = longest if name.startswith('decoder') else parts[0][name].shape[1]
        return np.concatenate([np.pad(part[name], ((0, 0), (0, width - part[name].shape[1]))) for part in parts])

    return {name: padded(name) for name in parts[0]}


@dataclasses.dataclass(frozen=True)
class Data:
    """Rows to train on; and held-out rows of each denoiser, with prompts or without."""

    train: Rows
    held_out: Mapping[str, Rows]


@functools.cache
def data_of(objective: str, text: str, length: int, vocabulary: int, count: int) -> Data:
    from remixer_tasks import local_files, pretraining, vocabularies
    from remixer_tasks.objectives import ul2

    corpus = local_files.corpus(text, format='jsonl')
    pieces = vocabularies.trained(corpus, vocabulary)
    prompts = ul2.PROMPTS if objective == 'ul2' else NO_PROMPTS
    denoisers = pretraining.ul2(corpus, pieces, prompts=prompts).tasks
    if objective == 'ul2':
        # As many rows of each: all seven take part equally often.
        train = together([rows_of(task, 'train', length, count // len(denoisers)) for task in denoisers])
    else:
        train = rows_of(getattr(pretraining, objective)(corpus, pieces), 'train', length, count)
    held_out = {
        task.name.partition('_ul2_')[2]: rows_of(task, 'validation', length, HELD_OUT_ROWS) for task in denoisers
    }
    return Data(train, held_out)


def model_of(trial: Trial) -> Any:
    lengths = {'inputs': trial.length, 'targets': trial.length}
    given = sized_models.given('t5_1_1', trial.width, trial.layers, lengths, trial.vocabulary)
    return loading.values(given, 'MODEL')[0]


@functools.cache
def program_of(trial: Trial, targets: int) -> tuple[Program, Callable, int]:
    """The training, which does not depend on the trial's seed; judge(params, rows) -> sums; and its number of steps."""
    model, lengths = model_of(trial), {'inputs': trial.length, 'targets': targets}
    steps = round(trial.budget / training_loop.step_flops(model, trial.batch, lengths))
    schedule = optax.warmup_cosine_decay_schedule(0.0, trial.learning_rate, max(1, steps // 10), max(2, steps))
    shapes = batch_formats.batch_shapes(model.model_type, lengths)
    program = training_loop.compiled(
        lambda key: nn.unbox(model.init(key, shapes)), training_loop.loss_per_token(model), schedule
    )
    return program, jax.jit(lambda params, rows: model.loss(params, rows)[1]), steps


def held_out_loss(judge: Callable, params: Any, held_out: Rows, batch: int) -> float:
    """Mean over all target tokens."""
    sums = rows.totals(judge, params, held_out, batch)
    return sums['loss'] / sums['weights']


def run(trial: Trial) -> dict[str, float]:
    begun = time.perf_counter()
    data = data_of(trial.objective, trial.text, trial.length, trial.vocabulary, trial.rows)
    targets = data.train['decoder_target_tokens'].shape[1]
    program, judge, steps = program_of(dataclasses.replace(trial, seed=0), targets)
    order = batches(np.random.default_rng(trial.seed), len(data.train['encoder_input_tokens']), trial.batch)
    carry, _ = training_loop.run(
        program,
        program.init(jax.random.key(trial.seed)),
        data.train,
        order,
        range(steps),
        label=f'{trial.objective}, seed {trial.seed}',
    )
    losses = {name: held_out_loss(judge, carry[0], held, trial.batch) for name, held in data.held_out.items()}
    return {**losses, 'targets': targets, 'steps': steps, 'seconds': round(time.perf_counter() - begun, 1)}


def print_table(found: Mapping[str, list[dict[str, float]]]) -> None:
    """A row for each denoiser, a column for each objective."""
    from remixer_tasks.objectives import ul2

    print('held-out loss a target token, mean over seeds (standard deviation) [seeds]')
    print('| ' + ' | '.join(['trained on', *found]) + ' |')
    print('|---' * (len(found) + 1) + '|')
    for name in [denoiser.name for denoiser in ul2.denoisers()]:
        cells = [summary([result[name] for result in results], 3) for results in found.values()]
        print('| ' + ' | '.join([name, *cells]) + ' |')
    for name in ('steps', 'targets'):
        cells = [f'{results[0][name]:,}' if results else '' for results in found.values()]
        print('| ' + ' | '.join([name, *cells]) + ' |')


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--text', required=True, help='JSON lines with `text`: a path or glob')
    parser.add_argument('--objectives', default=','.join(OBJECTIVES), help='by comma')
    parser.add_argument('--budget', type=float, default=1e12, help='FLOPs of one run, forward and backward')
    for name, default in (
        ('seeds', 3), ('batch', 32), ('length', 128), ('width', 64), ('layers', 2), ('vocabulary', 2048),
        ('rows', 28_000),
    ):  # fmt: skip
        parser.add_argument(f'--{name}', type=int, default=default)
    parser.add_argument('--learning_rate', type=float, default=3e-3, help="Adam's highest")
    parser.add_argument('--out', default='runs/studies/objectives.jsonl', help='results, one line each')
    parser.add_argument('--show', action='store_true', help='run nothing, show what is in --out')
    args = parser.parse_args(given)
    args.objectives = comparison.check_names(parser, '--objectives', args.objectives.split(','), OBJECTIVES, ',')
    return args


def main() -> None:
    args = parse_arguments()
    print_table(comparison.compare(args, Trial, 'objective', args.objectives, run))


if __name__ == '__main__':
    exit_with_one_line(main)
