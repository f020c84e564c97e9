"""Small models trained on one task of `tasks/`, whole in memory, for low_resource.py, tuning.py and ablations.py.

A model is T5.1.1 with another token mixer, layout or feed-forward in its encoder (variants.py); the decoder is T5's.
Each trial is Adam with a warm-up over a tenth of the steps and a cosine to 0, in float32, and is judged on the
validation split. `exact_match` is that of greedy decoding: a greedy output is the target exactly where the likeliest
token after each right beginning is the next right one, so one pass over the targets tells, and nothing is generated.
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
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from library import comparison, training_loop
from library.epochs import batches
from library.records import Records
from library.rows import Rows, encoder_decoder
from library.training_loop import Program
from library.variants import VARIANTS
from remixer_t5x import tf_data
from remixer_t5x.config import loading
from remixer_t5x.errors import UserError
from remixer_t5x.model.losses import token_logits
from remixer_t5x.model.seq2seq import Seq2Seq

# What other models are compared with.
BASELINE = 'attention'
COGS = 'cogs_v001'
EVALUATED_AT_ONCE = 250


@dataclasses.dataclass(frozen=True)
class Trial:
    """All that a result depends on. `percentage` of the training split, `inputs` and `targets` in tokens."""

    task: str
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


def rows_of(task: Any, split: str, inputs: int, targets: int, limit: int | None = None) -> Rows:
    """The examples of a split that fit, as padded rows; the longer ones are left out.

    Raises UserError where the data is missing, or nothing fits.
    """
    dataset = task.get_dataset(None, split=split, shuffle=False)
    lengths = {'inputs': inputs, 'targets': targets}
    found: dict[str, list[np.ndarray]] = {'inputs': [], 'targets': []}
    for example in tf_data.arrays(dataset):
        if all(len(example[name]) <= length for name, length in lengths.items()):
            for name, length in lengths.items():
                found[name].append(np.pad(example[name], (0, length - len(example[name]))))
        if limit and len(found['inputs']) == limit:
            break
    if not found['inputs']:
        raise UserError(f'no example of {task.name}, {split}, fits into {lengths}: give longer ones')
    return encoder_decoder(*(np.stack(found[name]) for name in lengths))


@functools.cache
def data_of(name: str, inputs: int, targets: int, validation_examples: int) -> tuple[Rows, Rows, int]:
    """Training rows, validation rows, and how many ids the vocabulary has."""
    from remixer_tasks import catalogue, vocabularies
    from remixer_tasks.benchmarks import cogs

    if name == COGS:
        vocabulary = cogs.words()
    else:
        path = os.environ.get('VOCABULARY_PATH', '')
        if not os.path.exists(path):
            raise UserError(f'the task {name} needs a SentencePiece model: set VOCABULARY_PATH to its file')
        vocabulary = vocabularies.sentencepiece(path)
    task = catalogue.task(name, vocabulary)
    return (
        rows_of(task, 'train', inputs, targets),
        rows_of(task, 'validation', inputs, targets, validation_examples),
        -(-vocabulary.vocab_size // 64) * 64,
    )


def model_of(trial: Trial, vocab_size: int) -> Seq2Seq:
    """The trial's model; every hidden size is twice the width, of GLU-like ones too."""
    variant, hidden = VARIANTS[trial.variant], 2 * trial.width
    sizes = {
        'EMBED_DIM': trial.width,
        **dict.fromkeys(('MLP_DIM', 'HYPER_MIXER_DIM', 'MIXER_DIM', 'REMIXER_DIM', 'GMLP_DIM'), hidden),
        'NUM_HEADS': 4,
        'HEAD_DIM': trial.width // 4,
        'NUM_ENCODER_LAYERS': trial.layers,
        'NUM_DECODER_LAYERS': 1,
        'MAX_INPUT_LENGTH': trial.inputs,
        'MAX_TARGET_LENGTH': trial.targets,
        'VOCAB_SIZE': vocab_size,
        'DROPOUT_RATE': trial.dropout,
        'REMAT_POLICY': 'None',
    }
    flags = [*((name, str(value)) for name, value in sizes.items()), *variant.flags]
    files = ['models/t5_1_1.gin', 'sizes/tiny.gin', *variant.files]
    (model,) = loading.values(loading.Given(files, flags), 'MODEL')
    return model


@functools.lru_cache(maxsize=4)
def compiled(trial: Trial, vocab_size: int) -> tuple[Program, Callable]:
    """The training, whose rate is an argument, and right(params, rows).

    `trial` is one without seed, percentage and learning rate: they are arguments of one program.
    """
    model = model_of(trial, vocab_size)
    shapes = {'encoder_input_tokens': (1, trial.inputs), 'decoder_target_tokens': (1, trial.targets)}

    def loss(params, rows, key):
        total, sums = model.loss(params, rows, key if trial.dropout else None)
        return total / sums['weights']

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, max(1, trial.steps // 10), trial.steps)
    program = training_loop.compiled(lambda key: nn.unbox(model.init(key, shapes)), loss, schedule)
    return program, right_tokens(model)


def right_tokens(model: Seq2Seq) -> Callable[[Any, Rows], jax.Array]:
    """(params, rows) -> bool [examples, targets], true where the likeliest token is the next one, and at padding."""

    def right(params, rows):
        targets = rows['decoder_target_tokens']
        inputs = rows['encoder_input_tokens'], rows['decoder_input_tokens'], targets
        hidden = model.module.apply({'params': params}, inputs[0], enable_dropout=False, method='encode')
        hidden = model.module.apply({'params': params}, hidden, *inputs, enable_dropout=False, method='decode_hidden')
        likeliest = jnp.argmax(token_logits(hidden, model.module.output_kernel(params)), axis=-1)
        return jnp.where(targets > 0, likeliest == targets, True)

    return jax.jit(right)


def program_of(trial: Trial, vocab_size: int) -> tuple[Program, Callable]:
    return compiled(dataclasses.replace(trial, seed=0, percentage=0.0, learning_rate=0.0), vocab_size)


def run(trial: Trial) -> dict[str, float]:
    """Trains and judges once. One seed gives the part of the training split, its order, parameters and dropout."""
    start = time.perf_counter()
    train_rows, validation_rows, vocab_size = data_of(
        trial.task, trial.inputs, trial.targets, trial.validation_examples
    )
    program, right = program_of(trial, vocab_size)
    rng = np.random.default_rng(trial.seed)
    everything = len(train_rows['encoder_input_tokens'])
    part = rng.permutation(everything)[: max(1, round(everything * trial.percentage / 100))]
    carry = program.init(jax.random.key(trial.seed))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(carry[0]))
    carry, loss = training_loop.run(
        program,
        carry,
        {name: array[part] for name, array in train_rows.items()},
        batches(rng, len(part), trial.batch),
        range(trial.steps),
        rate=trial.learning_rate,
        key=jax.random.key(trial.seed + 1),
        label=trial.variant,
    )
    judged = judge(functools.partial(right, carry[0]), validation_rows)
    seconds = round(time.perf_counter() - start, 1)
    return {**judged, 'loss': loss, 'examples': len(part), 'parameters': parameters, 'seconds': seconds}


def judge(right: Callable[[Rows], jax.Array], rows: Rows) -> dict[str, float]:
    """Percentages of the rows and of the target tokens that are right."""
    found = all_rows(right, rows)
    is_target = rows['decoder_target_tokens'] > 0
    return {
        'exact_match': 100 * float(np.mean(np.all(found, axis=1))),
        'token_accuracy': 100 * float(np.sum(found & is_target) / np.sum(is_target)),
    }


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
        print(
            f'{number:3d} of {len(missing)}  {trial.variant}, {result["examples"]:,} examples, seed {trial.seed}, '
            f'rate {trial.learning_rate:.2g}, dropout {trial.dropout:.2f}: exact match {result["exact_match"]:.2f}, '
            f'tokens {result["token_accuracy"]:.2f}, loss {result["loss"]:.3f}, {result["seconds"]:.0f} s',
            flush=True,
        )


def add_arguments(parser: argparse.ArgumentParser, out: str, seeds: int = 3) -> None:
    """The flags of every study of a small task."""
    parser.add_argument(
        '--task', default=COGS, help=f'a name of docs/tasks.md; others than {COGS} need VOCABULARY_PATH'
    )
    parser.add_argument('--seeds', type=int, default=seeds)
    parser.add_argument('--steps', type=int, default=800)
    parser.add_argument('--batch', type=int, default=32)
    parser.add_argument('--learning_rate', type=float, default=3e-3, help="Adam's highest")
    parser.add_argument('--dropout', type=float, default=0.0)
    parser.add_argument('--width', type=int, default=64)
    parser.add_argument('--layers', type=int, default=2, help='of the encoder; the decoder has one')
    parser.add_argument('--inputs', type=int, default=24, help='tokens; longer examples are left out')
    parser.add_argument('--targets', type=int, default=48, help='tokens; longer examples are left out')
    parser.add_argument('--validation_examples', type=int, default=1000)
    parser.add_argument('--out', default=out, help='results, one line each')
    parser.add_argument('--show', action='store_true', help='run nothing, show what is in --out')


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    counts = ('seeds', 'steps', 'batch', 'width', 'layers', 'inputs', 'targets', 'validation_examples')
    for name in counts:
        if getattr(args, name) < 1:
            parser.error(f'--{name} has {getattr(args, name)}; give 1 or more')
    if args.width % 4:
        parser.error(f'--width has {args.width}; give a multiple of 4, the number of heads')
    if not 0 <= args.dropout < 1:
        parser.error(f'--dropout has {args.dropout}; give at least 0 and less than 1')


def names_given(parser: argparse.ArgumentParser, flag: str, text: str) -> list[str]:
    """Names of variants, separated by semicolons (some have commas in them)."""
    names = [name.strip() for name in text.split(';') if name.strip()]
    return comparison.check_names(parser, flag, names, VARIANTS)


def trial_of(args: argparse.Namespace, variant: str, seed: int, **changed: float) -> Trial:
    given = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(Trial)}
    return Trial(**{**given, 'percentage': 100.0, **changed, 'variant': variant, 'seed': seed})


def describe(args: argparse.Namespace) -> str:
    return (
        f'{args.task}, width {args.width}, {args.layers} encoder layers, {args.inputs} + {args.targets} tokens, '
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
