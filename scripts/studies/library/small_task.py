"""Small models trained on one task of `tasks/`, whole in memory, for low_resource.py, tuning.py and ablations.py.

A model is T5.1.1 with another token mixer, layout or feed-forward in its encoder (variants.py). Its model type is an
encoder-decoder, whose decoder is T5's, or with `--model_type classifier` the encoder alone with a head for labels. Each
trial is Adam with a warm-up over a tenth of the steps and a cosine to 0, in float32, and is judged on the validation
split (text_answers.py, label_answers.py).
"""

import argparse
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn

from library import comparison, label_answers, text_answers, training_loop, variants
from library.epochs import batches
from library.records import Records
from library.rows import Rows, Splits
from library.training_loop import Program
from library.variants import VARIANTS
from remixer_t5x.data import batch_formats
from remixer_t5x.errors import UserError

# For each model type, the module that prepares a task and computes its metrics.
ANSWERS: dict[str, Any] = {batch_formats.ENCODER_DECODER: text_answers, batch_formats.CLASSIFIER: label_answers}
# What other models are compared with.
BASELINE = 'attention'
COGS = 'cogs_v001'
EVALUATED_AT_ONCE = 250
TARGETS = 48


@dataclasses.dataclass(frozen=True)
class Trial:
    """All that a result depends on. `percentage` of the training split, `inputs` and `targets` in tokens.

    `model_type` is a key of ANSWERS; a classifier has 0 targets. `vocabulary` is the file of a SentencePiece model;
    '' for COGS, which has its own words.
    """

    task: str
    vocabulary: str
    model_type: str
    variant: str
    seed: int
    percentage: float
    steps: int
    batch: int
    learning_rate: float
    dropout: float
    width: int
    layers: int
    inputs: int
    targets: int
    validation_examples: int


@functools.cache
def data_of(
    name: str, vocabulary_file: str, model_type: str, inputs: int, targets: int, validation_examples: int
) -> tuple[Splits, int]:
    """The task's rows, and how many ids the vocabulary has."""
    from remixer_tasks import catalogue, vocabularies
    from remixer_tasks.benchmarks import cogs

    if name == COGS:
        vocabulary = cogs.words()
    else:
        if not os.path.exists(vocabulary_file):
            raise UserError(
                f'the task {name} needs a SentencePiece model, but there is no file {vocabulary_file!r}: '
                'name its file with --vocabulary or VOCABULARY_PATH'
            )
        vocabulary = vocabularies.sentencepiece(vocabulary_file)
    splits = ANSWERS[model_type].splits_of(catalogue.task(name, vocabulary), inputs, targets, validation_examples)
    return splits, -(-vocabulary.vocab_size // 64) * 64


def model_of(trial: Trial, vocab_size: int, labels: tuple[str, ...] = ()) -> Any:
    """The trial's model; a classifier needs `labels`."""
    own = {'LABELS': labels} if trial.model_type == batch_formats.CLASSIFIER else {'MAX_TARGET_LENGTH': trial.targets}
    return variants.model_of(
        VARIANTS[trial.variant],
        trial.width,
        trial.layers,
        type_files=ANSWERS[trial.model_type].FILES,
        MAX_INPUT_LENGTH=trial.inputs,
        VOCAB_SIZE=vocab_size,
        DROPOUT_RATE=trial.dropout,
        **own,
    )


@functools.lru_cache(maxsize=4)
def compiled(trial: Trial, vocab_size: int, labels: tuple[str, ...]) -> tuple[Program, Callable]:
    """The training, whose rate is an argument, and right(params, rows).

    `trial` is one without seed, percentage and learning rate: they are arguments of one program.
    """
    model = model_of(trial, vocab_size, labels)
    shapes = batch_formats.smallest_shapes(trial.model_type)

    def loss(params, rows, key):
        total, sums = model.loss(params, rows, key if trial.dropout else None)
        return total / sums['weights']

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, max(1, trial.steps // 10), trial.steps)
    program = training_loop.compiled(lambda key: nn.unbox(model.init(key, shapes)), loss, schedule)
    return program, ANSWERS[trial.model_type].right_answers(model)


def program_of(trial: Trial, vocab_size: int, labels: tuple[str, ...] = ()) -> tuple[Program, Callable]:
    return compiled(dataclasses.replace(trial, seed=0, percentage=0.0, learning_rate=0.0), vocab_size, labels)


def run(trial: Trial) -> dict[str, float]:
    """Trains and judges once. One seed gives the part of the training split, its order, parameters and dropout."""
    start = time.perf_counter()
    splits, vocab_size = data_of(
        trial.task, trial.vocabulary, trial.model_type, trial.inputs, trial.targets, trial.validation_examples
    )
    program, right = program_of(trial, vocab_size, splits.labels)
    rng = np.random.default_rng(trial.seed)
    everything = len(splits.train['encoder_input_tokens'])
    part = rng.permutation(everything)[: max(1, round(everything * trial.percentage / 100))]
    carry = program.init(jax.random.key(trial.seed))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(carry[0]))
    carry, loss = training_loop.run(
        program,
        carry,
        {name: array[part] for name, array in splits.train.items()},
        batches(rng, len(part), trial.batch),
        range(trial.steps),
        rate=trial.learning_rate,
        key=jax.random.key(trial.seed + 1),
        label=trial.variant,
    )
    judged = judge(trial.model_type, functools.partial(right, carry[0]), splits.validation)
    seconds = round(time.perf_counter() - start, 1)
    return {**judged, 'loss': loss, 'examples': len(part), 'parameters': parameters, 'seconds': seconds}


def judge(model_type: str, right: Callable[[Rows], jax.Array], rows: Rows) -> dict[str, float]:
    """The model type's METRICS of these rows, in percent."""
    return ANSWERS[model_type].judge(all_rows(right, rows), rows)


def all_rows(right: Callable[[Rows], jax.Array], rows: Rows) -> np.ndarray:
    """`right` of all rows, `EVALUATED_AT_ONCE` of them or fewer at a time."""
    count = len(rows['encoder_input_tokens'])
    parts = np.array_split(np.arange(count), -(-count // EVALUATED_AT_ONCE))
    return np.concatenate([right({name: array[part] for name, array in rows.items()}) for part in parts])


def finish(args: argparse.Namespace, trials: Sequence[Trial]) -> Records:
    """Says what this is, runs what is missing (nothing with --show), and returns all results."""
    print(f'{jax.devices()[0].device_kind} x {jax.device_count()}; {describe(args)}; results in {args.out}')
    records = Records(args.out)
    if not args.show:
        run_missing(records, trials)
    return records


def run_missing(records: Records, trials: Sequence[Trial]) -> None:
    """Runs what `records` lacks, in the given order; each result is kept and printed at once."""
    missing = [trial for trial in trials if records.get(dataclasses.asdict(trial)) is None]
    if records.ignored:
        print(f'{records.ignored} unreadable lines are ignored; their trials are done again')
    print(f'{len(trials)} trials, {len(trials) - len(missing)} done before', flush=True)
    for number, trial in enumerate(missing, 1):
        result = run(trial)
        records.add(dataclasses.asdict(trial), result)
        judged = ', '.join(f'{metric} {result[metric]:.2f}' for metric in ANSWERS[trial.model_type].METRICS)
        print(
            f'{number:3d} of {len(missing)}  {trial.variant}, {result["examples"]:,} examples, seed {trial.seed}, '
            f'rate {trial.learning_rate:.2g}, dropout {trial.dropout:.2f}: {judged}, loss {result["loss"]:.3f}, '
            f'{result["seconds"]:.0f} s',
            flush=True,
        )


def add_arguments(parser: argparse.ArgumentParser, out: str, seeds: int = 3) -> None:
    """The flags of every study of a small task."""
    parser.add_argument('--task', default=COGS, help='a name of docs/tasks.md')
    own = os.environ.get('VOCABULARY_PATH', '')
    text = f'a SentencePiece model, in place of VOCABULARY_PATH; {COGS} has words of its own'
    parser.add_argument('--vocabulary', default=own, help=text)
    parser.add_argument(
        '--model_type',
        choices=list(ANSWERS),
        default=batch_formats.ENCODER_DECODER,
        help='a classifier is the encoder alone',
    )
    parser.add_argument('--seeds', type=int, default=seeds)
    parser.add_argument('--steps', type=int, default=800)
    parser.add_argument('--batch', type=int, default=32)
    parser.add_argument('--learning_rate', type=float, default=3e-3, help="Adam's highest")
    parser.add_argument('--dropout', type=float, default=0.0)
    parser.add_argument('--width', type=int, default=64)
    parser.add_argument('--layers', type=int, default=2, help='of the encoder; a decoder has one')
    parser.add_argument('--inputs', type=int, default=24, help='tokens; longer ones are left out, or cut: classifier')
    parser.add_argument('--targets', type=int, help=f'tokens, {TARGETS} if not given; not for a classifier')
    parser.add_argument('--validation_examples', type=int, default=1000)
    parser.add_argument('--out', default=out, help='results, one line each')
    parser.add_argument('--show', action='store_true', help='run nothing, show what is in --out')


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    counts = ['seeds', 'steps', 'batch', 'width', 'layers', 'inputs', 'validation_examples']
    if args.task == COGS:
        args.vocabulary = ''
    if args.model_type == batch_formats.CLASSIFIER:
        if args.targets is not None:
            parser.error(f'a classifier answers with a label: leave out --targets, which has {args.targets}')
        args.targets = 0
    else:
        args.targets = TARGETS if args.targets is None else args.targets
        counts.append('targets')
    for name in counts:
        if getattr(args, name) < 1:
            parser.error(f'--{name} has {getattr(args, name)}; give 1 or more')
    if args.width % 4:
        parser.error(f'--width has {args.width}; give a multiple of 4, the number of heads')
    if not 0 <= args.dropout < 1:
        parser.error(f'--dropout has {args.dropout}; give at least 0 and less than 1')


def add_metric(parser: argparse.ArgumentParser, default: str) -> None:
    """--metric, whose default is for an encoder-decoder."""
    parser.add_argument('--metric', help=f'{default}, or accuracy of a classifier, if not given')
    parser.set_defaults(text_metric=default)


def check_metric(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    known = ANSWERS[args.model_type].METRICS
    if args.metric is None:
        args.metric = args.text_metric if args.text_metric in known else known[0]
    if args.metric not in known:
        parser.error(f'--metric has {args.metric!r}; a {args.model_type} has {", ".join(known)}')


def names_given(parser: argparse.ArgumentParser, flag: str, text: str) -> list[str]:
    """Names of variants, separated by semicolons (some have commas in them)."""
    names = [name.strip() for name in text.split(';') if name.strip()]
    return comparison.check_names(parser, flag, names, VARIANTS)


def trial_of(args: argparse.Namespace, variant: str, seed: int, **changed: float) -> Trial:
    given: dict[str, Any] = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(Trial)}
    return Trial(**{**given, 'percentage': 100.0, **changed, 'variant': variant, 'seed': seed})


def describe(args: argparse.Namespace) -> str:
    tokens = f'{args.inputs} + {args.targets}' if args.targets else f'{args.inputs}'
    return (
        f'{args.task}, {args.model_type}, width {args.width}, {args.layers} encoder layers, {tokens} tokens, '
        f'{args.steps:,} steps of {args.batch}, float32'
    )


def values_of(records: Records, trials: Sequence[Trial], metric: str) -> list[float]:
    """Of the trials that are done."""
    found = [records.get(dataclasses.asdict(trial)) for trial in trials]
    return [result[metric] for result in found if result is not None]


def exit_with_one_line(main: Callable[[], None]) -> None:
    """Runs `main`; a user's mistake is one line and exit code 2."""
    try:
        main()
    except UserError as error:
        sys.exit(print(f'error: {error}', file=sys.stderr) or 2)
