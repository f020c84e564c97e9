"""Loss against FLOPs: six token mixers at several sizes on T5's span corruption.

    python scripts/studies/scaling.py --text '/data/wikinews_en/AA/*' --figure scaling.png
    python scripts/studies/scaling.py --text '/data/wikinews_en/AA/*' --hardware hardware/gpu.gin \\
        --sizes 128x2,256x4,512x8,768x12 --budgets 1e15,1e16,1e17 --max_steps 20000 --batch 128 --length 512 \\
        --rows 400000

A size such as 128x2 is a width and the number of layers of the encoder, and of the decoder. The models are those of
configs/models, whose hidden sizes have the proportions of configs/sizes/tiny.gin, so that models of one size have about
equally many parameters. All train on the same batches with Adam at one rate, which stays constant after its warm-up:
the held-out loss of one run after n steps is then the loss of a run of n steps, and a single run gives the losses for
all --budgets. A budget is a number of FLOPs: matrix products of the traced step, forward and backward, embeddings not
counted and output logits counted. A run has no loss for a budget of fewer steps than two warm-ups or more than
--max_steps.

One seed gives parameters and the order of the segments. Results are appended to --out as they are known; started
again, it does what is missing. --show runs nothing.
"""

import argparse
import dataclasses
import functools
import time
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec
from library import scaling_fit, sized_models, training_loop
from library.damaged_text import data_of, target_lengths
from library.epochs import batches
from library.records import Records
from library.rows import Rows, totals
from library.small_task import exit_with_one_line

from remixer_t5x.config import loading
from remixer_t5x.data import batch_formats
from remixer_t5x.errors import UserError

MODELS = ('t5_1_1', 'remixer', 'hyper_mixer', 'mixer_enc', 'gmlp', 'linear_transformer')


@dataclasses.dataclass(frozen=True)
class Trial:
    """All that a result depends on. `size` is width x layers, `length` tokens of the inputs, `budgets` FLOPs."""

    model: str
    size: str
    seed: int
    text: str
    budgets: tuple[float, ...]
    max_steps: int
    warmup: int
    batch: int
    length: int
    vocabulary: int
    rows: int
    learning_rate: float
    hardware: str


def setup_of(trial: Trial) -> tuple[Any, Any]:
    """The model, and the partitioner of the hardware.

    Raises UserError where the hardware file is for another platform than JAX runs on.
    """
    width, layers = size_of(trial.size)
    given = sized_models.given(
        trial.model, width, layers, target_lengths(trial.length), trial.vocabulary, files=[trial.hardware]
    )
    model, partitioner, platform = loading.values(given, 'MODEL', 'PARTITIONER', 'PLATFORM')
    if platform != jax.default_backend():
        raise UserError(
            f'--hardware {trial.hardware} is for {platform}, and JAX runs on {jax.default_backend()}; '
            'give a file of configs/hardware for it'
        )
    return model, partitioner


def size_of(text: str) -> tuple[int, int]:
    """'128x2' as (128, 2). Raises ValueError for anything else, or a width that the heads do not divide."""
    width, layers = map(int, text.split('x'))
    # The causal HyperMixer has eight heads.
    if width % 8 or min(width, layers) < 1:
        raise ValueError(text)
    return width, layers


def steps_of(trial: Trial, flops_of_a_step: float) -> dict[float, int]:
    """For each budget that this trial has a loss for, the number of steps that spend it."""
    steps = {budget: round(budget / flops_of_a_step) for budget in trial.budgets}
    return {budget: count for budget, count in steps.items() if 2 * trial.warmup <= count <= trial.max_steps}


@functools.cache
def compiled(trial: Trial) -> tuple[Any, Any, Any, float]:
    """The training, judge(params, rows) -> sums, the partitioner, and the FLOPs of a step; the seed does not matter."""
    model, partitioner = setup_of(trial)
    lengths = target_lengths(trial.length)
    shapes = batch_formats.batch_shapes(model.model_type, lengths)
    schedule = optax.linear_schedule(0.0, trial.learning_rate, trial.warmup)

    def initial(key):
        boxed = model.init(key, shapes)
        return jax.lax.with_sharding_constraint(nn.unbox(boxed), partitioner.param_shardings(boxed))

    program = training_loop.compiled(initial, training_loop.loss_per_token(model), schedule)
    judge = jax.jit(lambda params, rows: model.loss(params, rows)[1])
    return program, judge, partitioner, training_loop.step_flops(model, trial.batch, lengths)


def run(trial: Trial) -> dict[str, Any]:
    """The held-out loss after each budget, as pairs [FLOPs, loss]."""
    begun = time.perf_counter()
    text, held_out = data_of(trial.text, trial.length, trial.vocabulary, trial.rows)
    program, judge, partitioner, flops_of_a_step = compiled(dataclasses.replace(trial, seed=0))
    sharding = NamedSharding(partitioner.mesh, PartitionSpec(None, partitioner.batch_axes))
    order = batches(np.random.default_rng(trial.seed), len(text['encoder_input_tokens']), trial.batch)
    points, done = [], 0
    with partitioner.activate():
        carry = program.init(jax.random.key(trial.seed))
        parameters = sum(leaf.size for leaf in jax.tree.leaves(carry[0]))
        for budget, steps in steps_of(trial, flops_of_a_step).items():
            carry, _ = training_loop.run(
                program,
                carry,
                text,
                order,
                range(done, steps),
                place=functools.partial(jax.device_put, device=sharding),
                label=f'{trial.model} {trial.size}, seed {trial.seed}',
            )
            done = steps
            points.append([budget, held_out_loss(judge, carry[0], held_out, partitioner, trial.batch)])
    seconds = round(time.perf_counter() - begun, 1)
    return {
        'points': points,
        'parameters': parameters,
        'step_flops': flops_of_a_step,
        'steps': done,
        'seconds': seconds,
    }


def held_out_loss(judge: Any, params: Any, rows: Rows, partitioner: Any, batch: int) -> float:
    """Mean over target tokens of whole batches; the rest is left out."""
    whole = len(rows['encoder_input_tokens']) // batch * batch
    taken = {name: array[:whole] for name, array in rows.items()}
    sums = totals(judge, params, taken, batch, functools.partial(jax.device_put, device=partitioner.batch_sharding))
    return sums['loss'] / sums['weights']


def run_missing(records: Records, trials: list[Trial], minutes: float | None) -> None:
    """Runs what is missing, and begins nothing new after `minutes`."""
    missing = [trial for trial in trials if records.get(dataclasses.asdict(trial)) is None]
    print(f'{len(trials)} runs, {len(trials) - len(missing)} done before', flush=True)
    begun = time.monotonic()
    for number, trial in enumerate(missing, 1):
        if minutes is not None and time.monotonic() - begun > 60 * minutes:
            print(f'{minutes:g} minutes are over; the same command runs the other {len(missing) - number + 1}')
            return
        result = run(trial)
        records.add(dataclasses.asdict(trial), result)
        last = f'{result["points"][-1][1]:.4f} at {result["points"][-1][0]:.2g} FLOPs' if result['points'] else 'none'
        print(
            f'{number:3d} of {len(missing)}  {trial.model} {trial.size}, seed {trial.seed}: '
            f'{result["parameters"]:,} parameters, {result["step_flops"] / 1e9:.3f} GFLOPs a step, '
            f'{result["steps"]:,} steps, held-out loss {last}, {result["seconds"]:.0f} s',
            flush=True,
        )


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--text', required=True, help='JSON lines with `text`: a path or glob')
    parser.add_argument('--models', default=','.join(MODELS), help='by comma')
    parser.add_argument('--sizes', default='32x1,64x2,96x2,128x2', help='width x layers, by comma')
    parser.add_argument('--budgets', default='2.5e10,5e10,1e11,2e11,4e11,8e11,1.6e12', help='FLOPs, by comma')
    parser.add_argument('--hardware', default='hardware/cpu.gin', help='a gin file with DTYPE and MESH')
    parser.add_argument('--learning_rate', type=float, default=3e-3, help="Adam's, after the warm-up")
    for name, default, meaning in (
        ('seeds', 2, ''), ('max_steps', 3000, 'budgets of more steps are left out'), ('warmup', 50, 'steps'),
        ('batch', 16, 'segments'), ('length', 64, 'tokens of the inputs'), ('vocabulary', 2048, 'pieces'),
        ('rows', 40_000, 'segments to train on'),
    ):  # fmt: skip
        parser.add_argument(f'--{name}', type=int, default=default, help=meaning)
    parser.add_argument('--minutes', type=float, default=None, help='begin no run after this time')
    parser.add_argument('--out', default='runs/studies/scaling.jsonl', help='results, one line each')
    parser.add_argument('--figure', default='', help='write a PNG here')
    parser.add_argument('--show', action='store_true', help='run nothing, show what is in --out')
    args = parser.parse_args(given)
    args.models, args.sizes = args.models.split(','), args.sizes.split(',')
    if unknown := [name for name in args.models if name not in MODELS]:
        parser.error(f'--models has {unknown[0]!r}; known are {", ".join(MODELS)}')
    for size in args.sizes:
        try:
            size_of(size)
        except ValueError:
            parser.error(f'--sizes has {size!r}; give width x layers, as in 64x2, the width a multiple of 8')
    try:
        args.budgets = tuple(sorted({float(budget) for budget in args.budgets.split(',')}))
    except ValueError:
        parser.error(f'--budgets is {args.budgets!r}; give FLOPs, as in 1e11,2e11')
    for name in ('seeds', 'max_steps', 'warmup', 'batch', 'length', 'vocabulary', 'rows'):
        if getattr(args, name) < 1:
            parser.error(f'--{name} has {getattr(args, name)}; give 1 or more')
    return args


def trials_of(args: argparse.Namespace) -> list[Trial]:
    """Seed by seed and size by size, so that a study that is stopped has every model."""
    fields = [field.name for field in dataclasses.fields(Trial) if field.name not in ('model', 'size', 'seed')]
    settings = {name: getattr(args, name) for name in fields}
    return [
        Trial(model, size, seed, **settings)
        for size in args.sizes
        for seed in range(args.seeds)
        for model in args.models
    ]


def main() -> None:
    args = parse_arguments()
    trials = trials_of(args)
    print(
        f'{jax.devices()[0].device_kind} x {jax.device_count()}, {args.hardware}; inputs of {args.length} tokens, '
        f'batches of {args.batch}, Adam at {args.learning_rate:g}; results in {args.out}',
        flush=True,
    )
    records = Records(args.out)
    if not args.show:
        run_missing(records, trials, args.minutes)
    found = scaling_fit.collect([(trial.model, trial.size, records.get(dataclasses.asdict(trial))) for trial in trials])
    scaling_fit.print_tables(found, args.budgets)
    if args.figure:
        scaling_fit.draw(found, args.budgets, args.figure)


if __name__ == '__main__':
    exit_with_one_line(main)
