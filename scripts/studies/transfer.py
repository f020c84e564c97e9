"""Pretrained, then finetuned: the models of REMIXERS with equally many parameters, on text and then on labelled tasks.

    python scripts/studies/transfer.py --text '/data/wikinews_en/AA/*' --figure transfer.png
    python scripts/studies/transfer.py --text '...' --steps 0   # finetuned from random parameters, to compare with

Each model restores spans of text, and is then finetuned on each task, with the same pieces and a fresh state of Adam.
All train with a warm-up over a tenth of the steps and a cosine to 0, in float32. Inputs are cut to --inputs tokens;
examples with longer targets are left out. A task's number is the exact match of greedy decoding on its validation
split, which for labels is the accuracy. COGS is judged on its split `gen` too, for each of the 21 kinds of
generalization; there the share of the tokens that are right, each given the right tokens before it, is printed as well,
because a small model gets no answer right as a whole. One seed gives parameters and the order of the examples. Results
are appended to --out as they are known; started again, the study does what is missing.
"""

import argparse
import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from library import comparison, damaged_text, dot_panels, sized_models, small_task, text_answers, training_loop
from library.epochs import batches
from library.near_zero_params import movement, watched
from library.records import summary
from library.rows import Rows, encoder_decoder, totals
from library.training_loop import Program

from remixer_t5x import tf_data
from remixer_t5x.config import loading
from remixer_t5x.data import batch_formats
from remixer_t5x.errors import UserError
from remixer_t5x.models import interface

COGS = small_task.COGS
TASKS = f'{COGS}:1500,conj_nli_v001:500,glue_sst2_v002:500,super_glue_rte_v102:500'


def composition(name: str) -> tuple[tuple[str, str], ...]:
    return (('COMPOSITION', f'@remixer.{name}'),)


# A file of configs/models, and flags. REMIXERS compares the first eight; the others are its table 5, with alpha fixed.
MODELS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    't5_1_1': ('t5_1_1', ()),
    'remixer': ('remixer', ()),
    'mixer_enc': ('mixer_enc', ()),
    'mixer_enc_dec': ('mixer_enc_dec', ()),
    'hyper_mixer': ('hyper_mixer', ()),
    'gmlp': ('gmlp', ()),
    'fnet': ('fnet', ()),
    'linear_transformer': ('linear_transformer', ()),
    'remixer, no composition': ('remixer', composition('NoComposition')),
    'remixer, fixed alpha': ('remixer', composition('FixedAlpha')),
    'remixer, gated alpha': ('remixer', composition('GatedAlpha')),
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """All that a result depends on; `inputs` and `targets` in tokens, `tasks` as names with steps, by comma."""

    model: str
    seed: int
    text: str
    tasks: str
    steps: int
    batch: int
    inputs: int
    targets: int
    width: int
    layers: int
    vocabulary: int
    rows: int
    learning_rate: float
    finetune_rate: float
    of_a_kind: int


@dataclasses.dataclass(frozen=True)
class Labelled:
    """Rows of a task, what kind of generalization each row of `gen` is, and how many had too long targets there."""

    train: Rows
    validation: Rows
    gen: Rows | None = None
    kinds: tuple[str, ...] = ()
    left_out: int = 0


def steps_by_task(tasks: str) -> dict[str, int]:
    """'a:10,b:20' as {'a': 10, 'b': 20}. Raises ValueError for anything else."""
    return {name: int(steps) for name, steps in (part.split(':') for part in tasks.split(','))}


def rows_of(task: Any, split: str, inputs: int, targets: int, of_a_kind: int = 0) -> tuple[Rows, tuple[str, ...], int]:
    """The rows of a split, the `type` of each where examples have one, and how many had too long targets.

    Args:
        of_a_kind: the most examples of one type; 0 takes all.
    """
    # Targets longer than this do not exist; seqio would cut them without a word.
    dataset = task.get_dataset({'inputs': inputs, 'targets': 4096}, split=split, shuffle=False)
    found: list[Mapping[str, Any]] = []
    kinds: list[str] = []
    counts: collections.Counter[str] = collections.Counter()
    left_out = 0
    for example in tf_data.arrays(dataset):
        kind = example.get('type', b'').decode()
        counts[kind] += 1
        if of_a_kind and counts[kind] > of_a_kind:
            continue
        if len(example['targets']) > targets:
            left_out += 1
            continue
        found.append(example)
        kinds.append(kind)
    if not found:
        raise UserError(f'no target of {task.name}, {split}, has at most {targets} tokens: give a larger --targets')
    longest = max(len(example['targets']) for example in found)
    padded = [
        np.stack([np.pad(example[name], (0, length - len(example[name]))) for example in found])
        for name, length in (('inputs', inputs), ('targets', -(-longest // 8) * 8))
    ]
    return encoder_decoder(*padded), tuple(kinds), left_out


@functools.cache
def labelled(name: str, text: str, vocabulary: int, inputs: int, targets: int, of_a_kind: int) -> Labelled:
    from remixer_tasks import catalogue

    task = catalogue.task(name, damaged_text.corpus_of(text, vocabulary)[1])
    train, validation = (rows_of(task, split, inputs, targets)[0] for split in ('train', 'validation'))
    if name != COGS:
        return Labelled(train, validation)
    return Labelled(train, validation, *rows_of(task, 'gen', inputs, targets, of_a_kind))


@functools.cache
def model_of(trial: Trial) -> Any:
    name, flags = MODELS[trial.model]
    lengths = {'inputs': trial.inputs, 'targets': trial.targets}
    given = sized_models.given(name, trial.width, trial.layers, lengths, trial.vocabulary, flags)
    return loading.values(given, 'MODEL')[0]


def shapes_of(trial: Trial, targets: int) -> dict[str, tuple[int, ...]]:
    return batch_formats.batch_shapes(model_of(trial).model_type, {'inputs': trial.inputs, 'targets': targets})


@functools.cache
def program_of(trial: Trial, targets: int, steps: int, rate: float) -> Program:
    """The training on rows with this many target tokens; the trial's seed and tasks do not matter."""
    model, shapes = model_of(trial), shapes_of(trial, targets)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 10), max(2, steps))
    return training_loop.compiled(
        lambda key: nn.unbox(model.init(key, shapes)), training_loop.loss_per_token(model), schedule
    )


@functools.cache
def judges_of(trial: Trial) -> tuple[Callable, Callable]:
    """judge(params, rows) -> sums, and right(params, rows), see `text_answers.right_answers`."""
    model = model_of(trial)
    return jax.jit(lambda params, rows: model.loss(params, rows)[1]), text_answers.right_answers(model)


def trained(program: Program, carry: Any, rows: Rows, steps: int, trial: Trial, label: str) -> Any:
    order = batches(np.random.default_rng(trial.seed), len(rows['encoder_input_tokens']), trial.batch)
    label = f'{trial.model}, seed {trial.seed}, {label}'
    return training_loop.run(program, carry, rows, order, range(steps), label=label)[0][0]


def pretrained(trial: Trial) -> tuple[Any, dict[str, float]]:
    """Parameters, and what is known of them: the held-out loss, and how far H and alpha have moved."""
    text, held_out = damaged_text.data_of(trial.text, trial.inputs, trial.vocabulary, trial.rows)
    shared = dataclasses.replace(trial, seed=0, tasks='')
    targets = text['decoder_target_tokens'].shape[1]
    program = program_of(shared, targets, trial.steps, trial.learning_rate)
    axes = nn.get_partition_spec(interface.param_shapes(model_of(shared), shapes_of(shared, targets)))
    carry = program.init(jax.random.key(trial.seed))
    start = watched(carry[0], axes)
    params = trained(program, carry, text, trial.steps, trial, 'text')
    sums = totals(judges_of(shared)[0], params, held_out, trial.batch)
    moved = {f'moved {path}': how_far for path, how_far in movement(start, watched(params, axes)).items()}
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    return params, {'held-out loss': sums['loss'] / sums['weights'], **moved, 'parameters': parameters}


def finetuned(trial: Trial, params: Any, name: str, steps: int) -> dict[str, float]:
    """Percentages of examples that are right; of COGS, also of the examples and of the tokens of `gen`."""
    data = labelled(name, trial.text, trial.vocabulary, trial.inputs, trial.targets, trial.of_a_kind)
    shared = dataclasses.replace(trial, seed=0, tasks='')
    program = program_of(shared, data.train['decoder_target_tokens'].shape[1], steps, trial.finetune_rate)
    carry = program.begin(jax.tree.map(jnp.copy, params))
    tuned = trained(program, carry, data.train, steps, trial, name)
    right = functools.partial(judges_of(shared)[1], tuned)
    result = {name: float(np.mean(right_share(small_task.all_rows(right, data.validation))))}
    if data.gen is not None:
        tokens = small_task.all_rows(right, data.gen)
        result |= by_kind('gen', right_share(tokens), data.kinds)
        result |= by_kind('gen tokens', token_share(tokens, data.gen), data.kinds)
    return result


def right_share(tokens: np.ndarray) -> np.ndarray:
    """100 for each row whose tokens [rows, length] are all right, 0 for the others."""
    return 100.0 * np.all(tokens, axis=1)


def token_share(tokens: np.ndarray, rows: Rows) -> np.ndarray:
    """The percentage of each row's tokens that is right, without padding."""
    counts = rows['decoder_target_tokens'] > 0
    return 100.0 * np.sum(tokens & counts, axis=1) / np.sum(counts, axis=1)


def by_kind(what: str, right: np.ndarray, kinds: tuple[str, ...]) -> dict[str, float]:
    """The mean of each kind of generalization, and the means over the lexical and the structural kinds, each named
    after `what`."""
    from remixer_tasks.benchmarks import cogs

    means = {kind: float(np.mean(right[np.asarray(kinds) == kind])) for kind in sorted(set(kinds))}
    groups = {'lexical': cogs.LEXICAL, 'structural': cogs.STRUCTURAL}
    found = {group: [means[kind] for kind in members if kind in means] for group, members in groups.items()}
    return {
        **{f'{what} {kind}': mean for kind, mean in means.items()},
        **{f'{what} {group}': float(np.mean(values)) for group, values in found.items() if values},
    }


def run(trial: Trial) -> dict[str, float]:
    begun = time.perf_counter()
    params, result = pretrained(trial)
    for name, steps in steps_by_task(trial.tasks).items():
        result |= finetuned(trial, params, name, steps)
    return {**result, 'seconds': round(time.perf_counter() - begun, 1)}


def metrics_of(tasks: str, found: Mapping[str, list[dict[str, float]]]) -> list[str]:
    """What the tables show. Of `gen`, groups that have an example: all structural kinds may have too long targets."""
    known = {metric for results in found.values() for result in results for metric in result}
    gen = [f'{what} {group}' for what in ('gen', 'gen tokens') for group in ('lexical', 'structural')]
    return ['held-out loss', *steps_by_task(tasks), *(metric for metric in gen if metric in known)]


def print_tables(found: Mapping[str, list[dict[str, float]]], tasks: str) -> None:
    """Each model's results, and how they differ from T5.1.1's with the same seed; then COGS by kind."""
    metrics = metrics_of(tasks, found)
    first, baseline = next(iter(found.items()))
    title = 'mean over seeds (standard deviation) [seeds]'
    comparison.print_table(title, found, metrics, lambda rs, m: summary([r[m] for r in rs if m in r]))
    title = f'difference from {first} with the same seed, mean ± half of its 90% interval'
    comparison.print_table(title, found, metrics, lambda rs, m: comparison.difference(rs, baseline, m))
    print_kinds(found)
    print('how far H, alpha and W moved while the model trained on text, root mean square, mean over seeds')
    for model, results in found.items():
        for path in [key for key in (results[0] if results else {}) if key.startswith('moved ')]:
            print(f'{model}: {path.removeprefix("moved ")} {np.mean([r[path] for r in results]):.4f}')


def print_kinds(found: Mapping[str, list[dict[str, float]]]) -> None:
    """What is right of each kind of generalization, once in answers and once in tokens."""
    keys = {key for results in found.values() for result in results for key in result}
    for what, title in (('gen tokens ', 'tokens'), ('gen ', 'answers')):
        kinds = sorted(key for key in keys if key.startswith(what))
        keys -= set(kinds)
        if kinds:
            print(f'right {title} of each kind of generalization, percent, mean over seeds')
            print('| ' + ' | '.join(['', *found]) + ' |')
            print('|---' * (len(found) + 1) + '|')
        for kind in kinds:
            cells = [f'{np.mean([r[kind] for r in rs]):.1f}' if rs else '' for rs in found.values()]
            print('| ' + ' | '.join([kind.removeprefix(what), *cells]) + ' |')


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--text', required=True, help='JSON lines with `text`: a path or glob')
    parser.add_argument('--models', default=';'.join(MODELS), help='by semicolon; the first is compared with')
    parser.add_argument('--tasks', default=TASKS, help='names of docs/tasks.md with steps, by comma')
    for name, default, meaning in (
        ('seeds', 3, ''), ('steps', 2000, 'on the text; 0 finetunes from random parameters'), ('batch', 32, ''),
        ('inputs', 64, 'tokens'), ('targets', 128, 'tokens'), ('width', 64, ''),
        ('layers', 2, 'of the encoder, and of the decoder'), ('vocabulary', 2048, 'pieces'),
        ('rows', 64_000, 'segments of text to train on'), ('of_a_kind', 200, "examples of each kind of COGS's gen"),
    ):  # fmt: skip
        parser.add_argument(f'--{name}', type=int, default=default, help=meaning)
    parser.add_argument('--learning_rate', type=float, default=3e-3, help="Adam's highest")
    parser.add_argument('--finetune_rate', type=float, default=1e-3)
    parser.add_argument('--out', default='runs/studies/transfer.jsonl', help='results, one line each')
    parser.add_argument('--figure', default='', help='write a PNG here')
    parser.add_argument('--show', action='store_true', help='run nothing, show what is in --out')
    args = parser.parse_args(given)
    args.models = comparison.check_names(parser, '--models', [name.strip() for name in args.models.split(';')], MODELS)
    try:
        steps_by_task(args.tasks)
    except ValueError:
        parser.error(f'--tasks is {args.tasks!r}; give names with steps, as in {TASKS}')
    return args


def main() -> None:
    args = parse_arguments()
    found = comparison.compare(args, Trial, 'model', args.models, run)
    print_tables(found, args.tasks)
    if args.figure:
        dot_panels.draw(found, [(metric, {'': metric}) for metric in metrics_of(args.tasks, found)], args.figure)


if __name__ == '__main__':
    small_task.exit_with_one_line(main)
