"""Encoders alone: masked language modelling on text, then labels with the same encoder and a fresh head.

    python scripts/studies/encoders.py --text '/data/wikinews_en/AA/wiki_0*' --figure encoders.png
    python scripts/studies/encoders.py --text '...' --layers 4 --mixers 'attention;tim;tim, no competition' \
        --tasks glue_sst2_v002,glue_mrpc_v002,glue_cola_v002

The papers of HyperMixer, gMLP and TIM compare encoders. Here each token mixer of `MIXERS` restores 15% of the tokens of
segments, and is then finetuned on each task; once more from random parameters, which shows what the text gave. Adam, a
warm-up over a tenth of the steps and a cosine to 0, float32. One seed gives parameters and the order of the examples.
Results are appended to --out as they are known; started again, it does what is missing.
"""

import argparse
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
from library import comparison, damaged_text, dot_panels, label_answers, training_loop, variants
from library.epochs import batches
from library.records import summary
from library.rows import Rows, Splits, totals
from library.small_task import exit_with_one_line
from library.training_loop import Program
from library.variants import LAYOUTS, VARIANTS, Variant, flagged

from remixer_t5x.data import batch_formats
from remixer_t5x.evaluate.held_out_loss import entropy

# TIM in all layers but the first and the last, as the paper has it, and its ablations. The feed-forwards make 4 layers
# of width 32 have as many parameters as attention; the attention between mechanisms is narrower with the model.
ENDS = '(@encoder/layer.make_layer, 1)'
TIM_MIDDLE = flagged(ENCODER_RUNS=f'({ENDS}, (@tim_encoder/layer.make_layer, %TIM_NUM_ENCODER_LAYERS), {ENDS})')


def tim(feed_forward: float, *files: str) -> Variant:
    """`feed_forward` over the width."""
    sizes = ('TIM_EMBED_DIM', 1), ('TIM_MLP_DIM', feed_forward), ('tim.InterMechanismAttention.head_dim', 1 / 8)
    return Variant(files, model='tim', proportions=sizes)


TIM_MIXERS = {
    'tim': tim(2.875) + TIM_MIDDLE,
    'tim, no competition': tim(2.875) + TIM_MIDDLE + flagged(COMPETITION='None'),
    'tim, four mechanisms': tim(3.75) + TIM_MIDDLE + flagged(NUM_MECHANISMS='4'),
    'tim, all layers': tim(4.625, 'ablations/tim_all_layers.gin'),
}
# FNet in its own layout: in a pre-norm layer its transform drowns the feed-forward.
MIXERS: dict[str, Variant] = {
    **{name: VARIANTS[name] for name in ('attention', 'hyper_mixer', 'mlp_mixer', 'gmlp')},
    # gMLP's own ablations: a weight for each pair of positions, and a single-head attention in the gate.
    'gmlp, free': VARIANTS['gmlp'] + flagged(SPATIAL_WEIGHTS='@gmlp.FreeSpatial'),
    'amlp': VARIANTS['gmlp'] + flagged(GATE_ATTENTION='@gmlp.TinyAttention'),
    'fnet, post-norm': VARIANTS['fnet'] + flagged(LAYOUT=LAYOUTS['post-norm']),
    **TIM_MIXERS,
}
# What runs when --mixers is not given; the others are ablations of gMLP, and TIM, which takes 3 layers or more.
COMPARED = ('attention', 'hyper_mixer', 'mlp_mixer', 'gmlp', 'fnet, post-norm')
VALIDATION_ROWS = 500


@dataclasses.dataclass(frozen=True)
class Trial:
    """All that a result depends on; `length` in tokens, `vocabulary` in pieces, `rows` of text to train on.

    `tasks` are names of tasks with labels, by comma.
    """

    mixer: str
    seed: int
    text: str
    tasks: str
    steps: int
    finetune_steps: int
    batch: int
    length: int
    width: int
    layers: int
    vocabulary: int
    rows: int
    learning_rate: float
    finetune_rate: float


def masked_rows(task: Any, split: str, length: int, limit: int) -> Rows:
    """Whole segments of damaged text, with the tokens to predict in their places."""
    lengths = {'inputs': length, 'targets': length}
    found = [row for row in damaged_text.examples(task, split, lengths, limit) if len(row['inputs']) == length]
    inputs, targets = (np.stack([row[name] for row in found]).astype(np.int32) for name in ('inputs', 'targets'))
    weights = (targets > 0).astype(np.int32)
    return {'encoder_input_tokens': inputs, 'encoder_target_tokens': targets, 'encoder_loss_weights': weights}


def names_of(tasks: str) -> list[str]:
    """Of tasks by comma; of '' none, which trains on text alone."""
    return [name for name in tasks.split(',') if name]


@functools.cache
def data_of(text: str, tasks: str, length: int, vocabulary: int, rows: int) -> tuple[Rows, Rows, dict[str, Splits]]:
    """Text to train on, text that is held out, and the tasks by name."""
    from remixer_tasks import catalogue, local_files, pretraining, vocabularies

    corpus = local_files.corpus(text, format='jsonl')
    pieces = vocabularies.trained(corpus, vocabulary)
    masked = pretraining.masked_lm(corpus, pieces)
    return (
        masked_rows(masked, 'train', length, rows),
        masked_rows(masked, 'validation', length, VALIDATION_ROWS),
        {name: label_answers.splits_of(catalogue.task(name, pieces), length) for name in names_of(tasks)},
    )


def model_of(trial: Trial, labels: tuple[str, ...] = ()) -> Any:
    """An encoder that restores text, or with `labels` one that chooses among them."""
    model_type, own = ('classifier', {'LABELS': labels}) if labels else ('encoder_only', {})
    return variants.model_of(
        MIXERS[trial.mixer],
        trial.width,
        trial.layers,
        type_files=(f'model_types/{model_type}.gin',),
        TIM_NUM_HEADS=4,
        TIM_NUM_ENCODER_LAYERS=trial.layers - 2,
        MAX_INPUT_LENGTH=trial.length,
        VOCAB_SIZE=trial.vocabulary,
        **own,
    )


@functools.cache
def program_of(trial: Trial, labels: tuple[str, ...] = ()) -> tuple[Program, Callable]:
    """The training, which does not depend on the trial's seed, and judge(params, rows) -> sums; labels: `model_of`."""
    model = model_of(trial, labels)
    steps, rate = (trial.finetune_steps, trial.finetune_rate) if labels else (trial.steps, trial.learning_rate)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 10), steps)
    shapes = batch_formats.smallest_shapes(model.model_type)

    program = training_loop.compiled(
        lambda key: nn.unbox(model.init(key, shapes)), training_loop.loss_per_token(model), schedule
    )
    return program, jax.jit(lambda params, rows: model.loss(params, rows)[1])


def trained(program: Program, carry: Any, rows: Rows, steps: int, batch: int, seed: int) -> Any:
    order = batches(np.random.default_rng(seed), len(rows['encoder_input_tokens']), batch)
    return training_loop.run(program, carry, rows, order, range(steps))[0][0]


def judged(judge: Callable, params: Any, rows: Rows, batch: int) -> tuple[float, float]:
    """Mean loss and the share of what is predicted right, over whole batches and the rest."""
    sums = totals(judge, params, rows, batch)
    return sums['loss'] / sums['weights'], sums['correct'] / sums['weights']


def run(trial: Trial) -> dict[str, float]:
    begun = time.perf_counter()
    text, held_out, tasks = data_of(trial.text, trial.tasks, trial.length, trial.vocabulary, trial.rows)
    shared = dataclasses.replace(trial, seed=0)
    masked, judge_masked = program_of(shared)
    random = masked.init(jax.random.key(trial.seed))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(random[0]))
    params = trained(masked, random, text, trial.steps, trial.batch, trial.seed)
    loss, accuracy = judged(judge_masked, params, held_out, trial.batch)
    scores = {}
    for name, task in tasks.items():
        classes, judge_classes = program_of(shared, task.labels)
        for start, taken in (('after text', params), ('from random', {})):
            given = {**classes.init(jax.random.key(trial.seed))[0], **jax.tree.map(jnp.copy, taken)}
            tuned = trained(classes, classes.begin(given), task.train, trial.finetune_steps, trial.batch, trial.seed)
            scores[f'{name} {start}'] = 100 * judged(judge_classes, tuned, task.validation, trial.batch)[1]
    return {
        'held-out loss': loss,
        'masked accuracy': 100 * accuracy,
        **scores,
        'parameters': parameters,
        'seconds': time.perf_counter() - begun,
    }


def metrics_of(tasks: str) -> list[str]:
    starts = [f'{name} {start}' for name in names_of(tasks) for start in ('after text', 'from random')]
    return ['held-out loss', 'masked accuracy', *starts]


def constant_loss(rows: Rows) -> float:
    """Loss of the best answer that is the same for every masked token: the entropy of these tokens, in nats."""
    targets, weights = rows['encoder_target_tokens'], rows['encoder_loss_weights']
    return entropy(np.bincount(targets[weights > 0]))


def print_table(found: Mapping[str, list[dict[str, float]]], tasks: str, constant: float) -> None:
    metrics = metrics_of(tasks)
    first, baseline = next(iter(found.items()))
    print(f'the best constant answer has a held-out loss of {constant:.2f}')
    title = 'mean over seeds (standard deviation) [seeds]'
    comparison.print_table(title, found, metrics, lambda rs, m: summary([result[m] for result in rs]))
    title = f'difference from {first} with the same seed: mean ± half of its 90% interval'
    cell = lambda rs, m: '' if rs is baseline else comparison.difference(rs, baseline, m)  # noqa: E731
    comparison.print_table(title, found, metrics, cell)


def draw(found: Mapping[str, list[dict[str, float]]], tasks: str, file: str, constant: float) -> None:
    """Held-out loss, and the accuracy of each task from both starts; a dotted line is the loss of the best constant
    answer.
    """
    loss = 'held-out loss of masked tokens'
    starts = ('after text', 'from random')
    panels: list[dot_panels.Panel] = [(loss, {'': 'held-out loss'})]
    panels += [(f'{name}, accuracy', {start: f'{name} {start}' for start in starts}) for name in names_of(tasks)]
    dot_panels.draw(found, panels, file, {loss: constant})


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--text', required=True, help='JSON lines with `text`: a path or glob')
    parser.add_argument('--mixers', default=';'.join(COMPARED), help=f'by semicolon, of {"; ".join(MIXERS)}')
    parser.add_argument('--tasks', default='glue_sst2_v002,conj_nli_v001', help='with labels, by comma; none if empty')
    for name, default in (
        ('seeds', 3), ('steps', 1000), ('finetune_steps', 500), ('batch', 32), ('length', 64), ('width', 64),
        ('layers', 2), ('vocabulary', 2048), ('rows', 20_000),
    ):  # fmt: skip
        parser.add_argument(f'--{name}', type=int, default=default)
    parser.add_argument('--learning_rate', type=float, default=3e-3, help="Adam's highest")
    parser.add_argument('--finetune_rate', type=float, default=1e-3)
    parser.add_argument('--out', default='runs/studies/encoders.jsonl', help='results, one line each')
    parser.add_argument('--figure', default='', help='write a PNG here')
    parser.add_argument('--show', action='store_true', help='run nothing, show what is in --out')
    args = parser.parse_args(given)
    args.mixers = comparison.check_names(parser, '--mixers', args.mixers.split(';'), MIXERS)
    return args


def main() -> None:
    args = parse_arguments()
    found = comparison.compare(args, Trial, 'mixer', args.mixers, run)
    held_out = data_of(args.text, args.tasks, args.length, args.vocabulary, args.rows)[1]
    constant = constant_loss(held_out)
    print_table(found, args.tasks, constant)
    if args.figure:
        draw(found, args.tasks, args.figure, constant)


if __name__ == '__main__':
    exit_with_one_line(main)
