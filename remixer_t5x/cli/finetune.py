"""`remixer-t5x finetune`: trains on tasks and judges by their metrics; gin builds the arguments
(configs/runs/finetune.gin)."""

from __future__ import annotations

import sys

import jax
from rich.console import Console

from remixer_t5x.config import loading
from remixer_t5x.costs import counts
from remixer_t5x.data import pipeline
from remixer_t5x.evaluation import best
from remixer_t5x.evaluation.task_evaluation import TaskEvaluation
from remixer_t5x.run_folder import model_dir
from remixer_t5x.training import loop, settings


def run(
    learner: settings.Learner,
    dataset: pipeline.DatasetConfig,
    folder: settings.Folder,
    periods: settings.Periods,
    tasks: TaskEvaluation | None = None,
    recovery: settings.Recovery | None = None,
) -> settings.Result:
    """Finetunes and says at the end which checkpoint was best on which task.

    Args:
        learner: model, optimizer, partitioner and the numbers of a step.
        dataset: training data.
        folder: MODEL_DIR, and INITIAL_CHECKPOINT_PATH (None trains from random parameters).
        periods: how long, and how often what happens.
        tasks: what the model is judged on; None needs EVAL_PERIOD = None.
        recovery: what happens when something fails; None stops.
    """
    flops = counts.count(learner.model, dataset.task_feature_lengths).training_flops * dataset.batch_size
    result = loop.train(
        settings.Run(learner, dataset, folder, periods, tasks=tasks, recovery=recovery or settings.Recovery()),
        config_text=loading.operative_config(),
        flops_per_step=flops,
    )
    if jax.process_index() == 0:
        _say_end(result)
    return result


def _say_end(result: settings.Result) -> None:
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, markup=False)
    done = f'stopped by {result.stopped} and saved at' if result.stopped else 'finished at'
    loss = f' · train loss {result.train["loss"]:.4f}' if result.train else ''
    console.print(f'{done} step {result.step}{loss}')
    console.print(f'checkpoint   {result.checkpoint}')
    for task, found in best.kept_in(result.folder).items():
        console.print(f'best         {task}: {found["metric"]} {found["value"]:.2f} at {found["path"]}')
    console.print(f'TensorBoard  {result.folder}/{model_dir.TENSORBOARD}  (tensorboard --logdir {result.folder})')
    console.print(f'metrics      {result.folder}/{model_dir.METRICS}')
    if result.stopped:
        console.print('run the same command again to go on')
