"""`remixer-t5x train` and `finetune`: train a model, or resume an interrupted run.

The commands are configured by configs/runs/pretrain.gin and finetune.gin; `finetune` requires tasks to evaluate.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import shlex
import signal
import sys
from typing import TYPE_CHECKING

from remixer_t5x import lazy_imports
from remixer_t5x.cli import arguments, process_flags
from remixer_t5x.cli.arguments import Command
from remixer_t5x.errors import UserError

if TYPE_CHECKING:
    from remixer_t5x.train.settings import Run, TrainResult

ROOT = 'remixer_t5x.train.settings.Run'
TRAINING_TASK = 'remixer_t5x.data.pipeline.DatasetConfig.mixture_or_task_name'
EVALUATION_TASKS = 'remixer_t5x.evaluate.task_evaluation.TaskEvaluation.mixture_or_task_name'
FILES = {'train': 'runs/pretrain.gin', 'finetune': 'runs/finetune.gin'}
LOSS_PICTURE = 'loss.png'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin_flags(parser)
    arguments.add_macro_flag(parser, '--mesh', 'MESH', arguments.MESH_HELP, metavar='AXES')
    restore = '`previous`: if the newest checkpoint is damaged, resume from the one before it'
    arguments.add_macro_flag(parser, '--restore', 'RESTORE', restore, metavar='WHICH')
    hugging_face = 'start from this Hugging Face folder or Hub model; its sizes and vocabulary override the gin files'
    parser.add_argument('--from_hf', metavar='NAME', help=hugging_face)
    process_flags.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Trains a model, prints the paths of the results, and returns the exit code."""
    # Report missing libraries before MODEL_DIR is created.
    lazy_imports.check_libraries_installed()
    if args.from_hf is not None:
        _start_from_hugging_face(args)
    arguments.load_config(args, ROOT, partial=False)
    import jax

    from remixer_t5x.config import loading, reference_resolver
    from remixer_t5x.testing import check_custom_sublayers
    from remixer_t5x.train import loop

    steps, start = (
        reference_resolver.get_unevaluated_macro(name) for name in ('TRAIN_STEPS', 'INITIAL_CHECKPOINT_PATH')
    )
    if args.command == 'finetune' and isinstance(steps, int) and isinstance(start, str):
        raise UserError(
            f'TRAIN_STEPS is {steps} and INITIAL_CHECKPOINT_PATH is set; in T5X, TRAIN_STEPS includes the steps of '
            'that checkpoint, but here it counts only the steps of this run; pass --gin.TRAIN_STEPS_RELATIVE=10000'
        )
    # Keep our signal handlers installed until the summary is printed.
    with process_flags.connect_processes(args, saves=True), contextlib.ExitStack() as signals:
        # The train step starts compiling before the tasks are created, because creating tasks imports TensorFlow.
        settings: Run = reference_resolver.call_configured(ROOT, deferred=(TRAINING_TASK, EVALUATION_TASKS))
        if args.command == 'finetune' and settings.tasks is None:
            raise UserError(f'the gin files configure pretraining, like {FILES["train"]}; run remixer-t5x train')
        lines = check_custom_sublayers(settings.step_config.model, settings.dataset.pack)
        if jax.process_index() == 0:
            for line in lines:
                print(f'checked      {line}', file=sys.stderr)
        flops = functools.partial(_count_flops_per_step, settings)
        result = loop.train(settings, config_text=loading.get_config_text(), flops_per_step=flops, signals=signals)
        if jax.process_index() == 0:
            _print_summary(result)
            _plot_loss(result, settings.recovery.on_save_failure)
            if result.stopped:
                print('run the same command again to continue')
    # This exit code signals to a supervising process that the run has not finished.
    return 128 + signal.Signals[result.stopped] if result.stopped else 0


def _start_from_hugging_face(args: argparse.Namespace) -> None:
    """Converts the model of `--from_hf`, and adds the gin file and checkpoint to `args`; gin flags override both."""
    advice = f'run remixer-t5x convert --from_hf={args.from_hf} --to=DIR once, and pass --gin_file=DIR/model.gin and '
    advice += '--gin.INITIAL_CHECKPOINT_PATH=DIR instead'
    process_flags.require_single_process(args, '--from_hf', advice)
    from remixer_t5x.cli import conversions
    from remixer_t5x.run_folder import model_dir

    folder = conversions.get_or_convert_model_dir(args.from_hf)
    args.gin_file = [*args.gin_file, f'{folder}/{model_dir.CONVERTED}']
    args.gin_flags = [('INITIAL_CHECKPOINT_PATH', str(folder)), *args.gin_flags]


def _count_flops_per_step(settings: Run) -> float:
    from remixer_t5x.costs import model_counts

    count = model_counts.count_model_costs(settings.step_config.model, settings.dataset.task_feature_lengths)
    return count.training_flops * settings.dataset.batch_size


def _print_summary(result: TrainResult) -> None:
    from remixer_t5x.evaluate import checkpoint_ranking
    from remixer_t5x.run_folder import model_dir
    from remixer_t5x.train import progress

    state = f'stopped by {result.stopped} and saved at' if result.stopped else 'finished at'
    numbers = [f'{state} step {result.step}']
    # Values that are not finite are stored as None.
    loss, held_out = result.train.get('loss'), result.evaluation
    if loss is not None:
        numbers.append(f'train loss {loss:.4f}')
    if held_out.get('loss') is not None:
        numbers.append(f'held-out loss {held_out["loss"]:.4f}')
        if held_out.get('constant_loss') is not None and held_out.get('perplexity') is not None:
            numbers[-1] += (
                f' (best constant prediction {held_out["constant_loss"]:.4f}), perplexity {held_out["perplexity"]:.2f}'
            )
    print(' · '.join(numbers))
    if result.seconds_by_activity:
        duration = progress.format_duration(sum(result.seconds_by_activity.values()))
        print(f'time         {duration}: {progress.format_activity_shares(result.seconds_by_activity)}')
    print(f'checkpoint   {result.checkpoint}')
    best_checkpoints = checkpoint_ranking.find_best_checkpoints(result.folder)
    for task, record in best_checkpoints.items():
        print(f'best         {task}: {record["metric"]} {record["value"]:.2f} at {record["path"]}')
    ranks = {
        task: checkpoint_ranking.compute_signed_score(record['metric'], record['value'])
        for task, record in best_checkpoints.items()
        if task != checkpoint_ranking.AVERAGE_TASK
    }
    if len(ranks) > 1:
        average = checkpoint_ranking.compute_mean_score(ranks)
        print(f'             average over {len(ranks)} tasks, each at its best step: {average:.2f}')
    tensorboard = f'{result.folder}/{model_dir.TENSORBOARD}'
    if model_dir.to_absolute_path(tensorboard).exists():
        print(f'TensorBoard  {tensorboard}  (tensorboard --logdir {shlex.quote(result.folder)})')
    print(f'metrics      {result.folder}/{model_dir.METRICS}')


def _plot_loss(result: TrainResult, on_save_failure: str) -> None:
    """Saves a plot of the loss curve as a PNG file, and prints the path of the file."""
    from remixer_t5x.run_folder import model_dir
    from remixer_t5x.train import settings

    if result.train.get('loss') is None or not lazy_imports.has_extra('reports'):
        return
    try:
        metrics, picture = f'{result.folder}/{model_dir.METRICS}', f'{result.folder}/{LOSS_PICTURE}'
        picture = lazy_imports.import_extra('reports.curves').plot_loss(metrics, picture)
        print(f'loss curve   {picture}')
    except UserError as error:
        if on_save_failure != settings.CONTINUE:
            raise
        print(f'warning: {error}')


TRAIN = Command(
    'train',
    'train a model; run the same command again to resume',
    add_arguments,
    run,
    (
        'remixer-t5x train --gin_file=experiments/quickstart.gin',
        'remixer-t5x train --gin_file=experiments/python_docs.gin --gin.MODEL_DIR=/tmp/run --gin.TRAIN_STEPS=2000',
    ),
    keeps_buffers=True,
)
FINETUNE = Command(
    'finetune',
    "train a model on tasks, compute their metrics, and keep each task's best checkpoint",
    add_arguments,
    run,
    (
        'remixer-t5x finetune --gin_file=experiments/papers/remixer_base_super_glue.gin '
        '--gin.MODEL_DIR=runs/super_glue --gin.INITIAL_CHECKPOINT_PATH=runs/pretrained',
        'remixer-t5x finetune --gin_file=task.gin --from_hf=downloads/flan-t5-small --gin.LORA="query|value" '
        '--gin.MODEL_DIR=runs/adapted',
    ),
    keeps_buffers=True,
)
