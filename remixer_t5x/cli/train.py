"""`remixer-t5x train`: pretrains or goes on; gin builds the arguments (configs/runs/pretrain.gin)."""

from __future__ import annotations

import sys

import jax
from rich.console import Console

from remixer_t5x.config import loading
from remixer_t5x.costs import counts
from remixer_t5x.data import pipeline
from remixer_t5x.evaluation.held_out_loss import Evaluation
from remixer_t5x.reports import curves
from remixer_t5x.run_folder import model_dir
from remixer_t5x.training import loop, settings

LOSS_PICTURE = 'loss.png'


def run(
    learner: settings.Learner,
    dataset: pipeline.DatasetConfig,
    folder: settings.Folder,
    periods: settings.Periods,
    evaluation: Evaluation | None = None,
    recovery: settings.Recovery | None = None,
) -> settings.Result:
    """Trains and says at the end where things lie.

    Args:
        learner: model, optimizer, partitioner and the numbers of a step.
        dataset: training data.
        folder: MODEL_DIR and what it keeps.
        periods: how long, and how often what happens.
        evaluation: held-out data; None needs EVAL_PERIOD = None.
        recovery: what happens when something fails; None stops.
    """
    result = loop.train(
        settings.Run(learner, dataset, folder, periods, evaluation, recovery=recovery or settings.Recovery()),
        config_text=loading.operative_config(),
        flops_per_step=_flops_per_step(learner, dataset),
    )
    if jax.process_index() == 0:
        _say_end(result)
    return result


def _flops_per_step(learner: settings.Learner, dataset: pipeline.DatasetConfig) -> float:
    counted = counts.count(learner.model, dataset.task_feature_lengths)
    return counted.training_flops * dataset.batch_size


def _say_end(result: settings.Result) -> None:
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, markup=False)
    done = f'stopped by {result.stopped} and saved at' if result.stopped else 'finished at'
    numbers = []
    if result.train:
        numbers.append(f'train loss {result.train["loss"]:.4f}')
    if result.evaluation:
        held_out = result.evaluation
        numbers.append(f'held-out loss {held_out["loss"]:.4f}, perplexity {held_out["perplexity"]:.2f}')
    console.print(f'{done} step {result.step}' + ''.join(f' · {text}' for text in numbers))
    console.print(f'checkpoint   {result.checkpoint}')
    console.print(f'TensorBoard  {result.folder}/{model_dir.TENSORBOARD}  (tensorboard --logdir {result.folder})')
    console.print(f'metrics      {result.folder}/{model_dir.METRICS}')
    if result.train and '://' not in result.folder:
        # It costs a second and is what people look at; the numbers it is drawn from stay in the file above.
        picture = curves.plot_loss(f'{result.folder}/{model_dir.METRICS}', f'{result.folder}/{LOSS_PICTURE}')
        console.print(f'loss curve   {picture}')
    if result.stopped:
        console.print('run the same command again to go on')
