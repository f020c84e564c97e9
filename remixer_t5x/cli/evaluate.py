"""`remixer-t5x eval`: computes task metrics for checkpoints or saved predictions (configs/runs/eval.gin)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from remixer_t5x import lazy_imports
from remixer_t5x.cli import arguments, console, process_flags
from remixer_t5x.cli.arguments import Command
from remixer_t5x.errors import UserError, format_count

if TYPE_CHECKING:
    from remixer_t5x.evaluate.checkpoint_evaluation import CheckpointEvaluation
    from remixer_t5x.evaluate.task_evaluation import TaskReport

BASE = ('runs/eval.gin',)
ROOT = 'remixer_t5x.evaluate.checkpoint_evaluation.CheckpointEvaluation'
_TASK_MACROS = ('EVAL_MIXTURE_OR_TASK_NAME', 'TASK_FEATURE_LENGTHS', 'EVAL_SPLIT', 'EVAL_TASKS', 'EVAL_EXAMPLES')
_FOLLOW_HELP = (
    'evaluate each new checkpoint of a MODEL_DIR, until TRAIN_STEPS or this many seconds without one (default 3600)'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin_flags(parser)
    several = f'{arguments.RUN_HELP}; or several checkpoints, separated by commas'
    arguments.add_macro_flag(parser, '--checkpoint', arguments.CHECKPOINT_MACRO, several, metavar='PATH')
    tasks = 'tasks of the mixture to evaluate, separated by commas (default: all)'
    arguments.add_macro_flag(parser, '--task', 'EVAL_TASKS', tasks, metavar='NAME')
    arguments.add_macro_flag(
        parser, '--split', 'EVAL_SPLIT', "split to evaluate (default 'validation')", metavar='NAME'
    )
    arguments.add_decoder_flags(parser, 'EVAL_BATCH_SIZE')
    output = "folder for metrics and predictions (default 'eval' in MODEL_DIR)"
    arguments.add_macro_flag(parser, '--output', 'EVAL_OUTPUT_DIR', output, metavar='DIR')
    arguments.add_macro_flag(parser, '--follow', 'FOLLOW', _FOLLOW_HELP, alone='3600', metavar='SECONDS')
    arguments.add_macro_flag(parser, '--mesh', 'MESH', arguments.MESH_HELP, metavar='AXES')
    submission = 'folder for files for the leaderboards of GLUE and SuperGLUE'
    arguments.add_macro_flag(parser, '--submission', 'SUBMISSION_DIR', submission, metavar='DIR')
    parser.add_argument('--quantize', choices=('int8',), help='evaluate the model that export --quantize writes')
    parser.add_argument('--predictions', metavar='FILE', help='evaluate the predictions in this file, without a model')
    process_flags.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Evaluates checkpoints, prints a table of metrics, and writes metrics, predictions and leaderboard submissions."""
    arguments.apply_decoder_flags(args)
    defaults = {'VALIDATION_PAIRS': None}
    held_out, split = arguments.load_macro_values(args, *defaults, 'EVAL_SPLIT', base=BASE, defaults=defaults)
    if held_out and split != 'train' and 'PAIRS' not in dict(args.gin_flags):
        # Evaluation does not need the training examples, which may no longer exist.
        args.gin_flags = [('PAIRS', 'None'), *args.gin_flags]
    if args.predictions is not None:
        process_flags.require_single_process(args, '--predictions')
        flags = {name for name, _ in args.gin_flags} | ({'--quantize'} if args.quantize else set())
        if ignored := sorted(flags & {'--quantize', 'EVAL_OUTPUT_DIR', 'FOLLOW', 'SUBMISSION_DIR'}):
            raise UserError(
                f'{ignored[0]} must be omitted with --predictions, which only prints metrics; pass --checkpoint instead'
            )
        _score_predictions(args)
        return
    arguments.load_config(args, ROOT, base=BASE)
    from remixer_t5x.config import reference_resolver

    with process_flags.connect_processes(args):
        _evaluate_checkpoints(reference_resolver.call_configured(ROOT), args.quantize)


def _score_predictions(args: argparse.Namespace) -> None:
    """Computes the metrics of a task for the predictions in a file, without a model.

    Each line of the file is a JSON object for one example of the split, in order. The object contains the string
    `prediction` and optionally the example's `input`, which must match the data. `remixer-t5x eval` and `infer` write
    files in this format.
    """
    defaults = {'EVAL_TASKS': None, 'EVAL_EXAMPLES': None}
    mixture, lengths, split, name, limit = arguments.load_macro_values(
        args, *_TASK_MACROS, base=BASE, defaults=defaults
    )
    from remixer_t5x.evaluate import checkpoint_evaluation, task_evaluation, task_examples

    path = args.predictions
    tasks, _ = task_examples.find_tasks(mixture, split, name)
    if len(tasks) > 1:
        names = ', '.join(task.name for task in tasks)
        raise UserError(f'{path} must contain the predictions of one task, got {names}; select one with --task')
    if task_evaluation.needs_target_scores(tasks[0]):
        raise UserError(
            f'{tasks[0].name} is scored by likelihood, but the file has no likelihoods; evaluate a checkpoint instead'
        )
    examples = task_examples.read_examples(tasks[0], split, lengths, limit)
    rows = checkpoint_evaluation.read_predictions(path)
    for number, (row, text) in enumerate(zip(rows, examples.get_texts('inputs'), strict=False), 1):
        if row.get('input', text) != text:
            raise UserError(
                f'{path} line {number} does not match {tasks[0].name}, split {split}: '
                f'its input is {row["input"][:40]!r}, and the input of the example is {text[:40]!r}'
            )
    scores = [row.get('score') or 0.0 for row in rows]
    metrics = task_evaluation.compute_metrics(examples, [row['prediction'] for row in rows], scores)
    print(f'{tasks[0].name}, {split}, {format_count(len(rows), "prediction")} of {path}')
    for metric, value in metrics.items():
        print(f'  {metric:<24} {value:.2f}')


def _evaluate_checkpoints(settings: CheckpointEvaluation, quantize: str | None = None) -> None:
    """Evaluates checkpoints. With `quantize`, rounds the weights first, and writes the results to a separate folder."""
    import jax

    from remixer_t5x.checkpoints import checkpoint_paths, saved_params
    from remixer_t5x.evaluate import task_evaluation
    from remixer_t5x.evaluate.checkpoint_evaluation import (
        PREDICTIONS,
        CheckpointEvaluator,
        ReportWriter,
        evaluate_and_write_reports,
    )
    from remixer_t5x.run_folder import model_dir
    from remixer_tasks.benchmarks import submissions

    if quantize and jax.process_count() > 1:
        raise UserError('--quantize works only in a single process; omit it, or use --process_count=1')
    if settings.follow is None:
        # Report a wrong path before reading examples.
        checkpoint_paths.find_checkpoints(settings.checkpoint_path)
    evaluator = CheckpointEvaluator(settings, submissions.get_file_name)
    for note in evaluator.notes:
        _print_on_first_process(note)
    suffix = f'_{quantize}' if quantize else ''
    # Only the first process writes results.
    writers: dict[str, ReportWriter] = {}
    try:
        for folder in settings.find_checkpoint_folders(evaluator.read_evaluated_steps(suffix)):
            params = evaluator.restore_params(folder)
            if params is None:
                _print_on_first_process(
                    f'step {folder.name} was removed before it was evaluated; increase KEEP_CHECKPOINTS'
                )
                continue
            results_folder = settings.get_results_folder(folder) + suffix
            if quantize:
                exported_functions = lazy_imports.import_extra('export.exported_functions')
                params = exported_functions.round_params_on_devices(settings.model, params)
            if results_folder not in writers and jax.process_index() == 0:
                run_record = saved_params.read_record(folder)
                writers[results_folder] = ReportWriter(results_folder, run_record.get('examples_hashes'))
            reports = evaluate_and_write_reports(evaluator.task_evaluator, params, folder, writers.get(results_folder))
            if reports:
                _print_on_first_process(_build_table(reports, f'step {folder.name}, {reports[0].split}'))
            for report in reports:
                for line in task_evaluation.format_answers(report, settings.tasks.shown):
                    _print_on_first_process(line)
            for report in evaluate_and_write_reports(
                evaluator.submission_evaluator, params, folder, writers.get(results_folder)
            ):
                if jax.process_index() == 0:
                    _print_on_first_process(
                        submissions.write_submission(settings.submission_dir or '', report.task, report.rows)
                    )
        for writer in writers.values():
            for note in dict.fromkeys(writer.notes):
                _print_on_first_process(note)
            _print_on_first_process(f'metrics      {writer.folder / model_dir.METRICS}')
            _print_on_first_process(f'predictions  {writer.folder / PREDICTIONS}')
    finally:
        for writer in writers.values():
            writer.close()


def _print_on_first_process(part: Any) -> None:
    import jax

    if jax.process_index() == 0:
        console.print_with_rich(part, pipe_width=100)


def _build_table(reports: Sequence[TaskReport], title: str) -> Any:
    table = console.build_table('task', 'examples', 'metric', 'value', 'seconds', words=('task', 'metric'), title=title)
    table.title_justify = 'left'
    for report in reports:
        head = (report.task, f'{len(report.rows):,}')
        metrics = list(report.metrics.items()) or [('no labels', float('nan'))]
        for number, (name, value) in enumerate(metrics):
            first = number == 0
            cells = (f'{value:.2f}' if report.metrics else '', f'{report.seconds:.1f}' if first else '')
            table.add_row(*(head if first else ('', '')), name, *cells)
    return table


COMMAND = Command(
    'eval',
    'evaluate checkpoints by the metrics of tasks, and write leaderboard files',
    add_arguments,
    run,
    (
        'remixer-t5x eval --checkpoint=runs/super_glue',
        'remixer-t5x eval --gin_file=data/cogs.gin --predictions=cogs_test.jsonl --split=test',
    ),
    # TensorFlow caches the existence of bucket objects for five seconds, but --follow must notice deleted checkpoints.
    {'GCS_STAT_CACHE_MAX_AGE': '0'},
    keeps_buffers=True,
)
