"""`remixer-t5x compare`: trains several models with one recipe and several seeds, and reports significant
differences.

With `--over`, the first seed is used to search over settings, and the other seeds use the best setting of each model.
"""

import argparse
import dataclasses
import itertools
import pathlib
import random
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from remixer_t5x.cli import arguments, console, train
from remixer_t5x.cli.arguments import Command
from remixer_t5x.errors import UserError
from remixer_t5x.extras.reports import cost_matching, sweep

COMMANDS = (train.TRAIN.name, train.FINETUNE.name)
REPORT_FILE, CSV_FILE, FIGURES = 'report.html', 'runs.csv', 'figures'


@dataclasses.dataclass(frozen=True)
class ComparisonPlan:
    """The runs of a comparison.

    Attributes:
        models: maps the label of each model to the value of `--model`.
        settings: settings to try for each model; without a search, a single empty setting.
        seeds: seeds of the runs at the best setting; the search uses the first seed.
        folder: parent folder of all runs.
        recipe: the command and the flags that all runs share.
        changes: maps each model to the settings that match its cost to the cost of the first model.
    """

    models: Mapping[str, str]
    settings: Sequence[sweep.Setting]
    seeds: Sequence[int]
    folder: pathlib.Path
    recipe: tuple[str, ...]
    changes: Mapping[str, sweep.Setting] = dataclasses.field(default_factory=dict)

    def build_cell(
        self, model: str, setting: sweep.Setting, seed: int, extra: sweep.Setting = (), name: str = ''
    ) -> sweep.SweepCell:
        """Builds a run in the folder `<model>/[<setting>/]<name>`, where the default of `name` is `seed_<n>`.

        The macros in `extra` override `setting`.
        """
        texts = model, ','.join(f'{name}={value}' for name, value in setting)
        # Other characters are escaped, so that distinct settings have distinct folders.
        names = (urllib.parse.quote(text, safe='=,+@') for text in texts)
        folder = self.folder.joinpath(*names, name or f'seed_{seed}')
        flags = [*self.changes.get(model, ()), *setting, *extra, ('SEED', str(seed)), ('MODEL_DIR', str(folder))]
        gin_flags = (f'--gin.{macro}={value}' for macro, value in flags)
        return sweep.SweepCell(
            model, setting, seed, folder, (*self.recipe, f'--model={self.models[model]}', *gin_flags)
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin_flags(parser, model=False)
    parser.add_argument('compared', metavar='COMMAND', choices=COMMANDS, help='train or finetune')
    models = (
        'comma-separated names of files in models/, or paths such as mine.gin; remixer+NAME=VALUE overrides a setting'
    )
    parser.add_argument('--models', type=arguments.split_names, metavar='NAMES', required=True, help=models)
    parser.add_argument('--seeds', metavar='NUMBERS', default='0', help='comma-separated seeds (default 0)')
    folder = 'folder for the MODEL_DIR of each run and for report.html'
    parser.add_argument('--folder', type=arguments.parse_local_path, metavar='DIR', required=True, help=folder)
    over = (
        'a macro and values to try with the first seed, such as LEARNING_RATE=1e-3,3e-3; repeat the flag for a grid; '
        'the other seeds use the best setting of each model'
    )
    parser.add_argument('--over', action='append', default=[], metavar='NAME=VALUES', help=over)
    over_random = 'try only N random settings of the grid, the same for all models'
    parser.add_argument('--over_random', type=arguments.make_whole_number_type(1), metavar='N', help=over_random)
    make_equal = (
        'match the parameters or FLOPs of the first model within 1%% by changing the feed-forward width of the others, '
        'or its training time by changing TRAIN_STEPS'
    )
    parser.add_argument('--equal', choices=tuple(cost_matching.COST_NAMES), help=make_equal)


def run(args: argparse.Namespace) -> int:
    """Starts the runs that have not finished, then prints and writes the results; returns the exit code.

    Raises:
        UserError: a flag is invalid.
    """
    runs = build_plan(args)
    cost_matching.import_jax_on_cpu()
    best = dict.fromkeys(runs.models, runs.settings[0])
    runner = sweep.Sweep(runs.folder)
    # Counts costs first, so that an invalid model is reported before any other model is trained for hours.
    all_counts = _count_costs_and_check_runs(args, runs, None if args.equal else runner)
    try:
        notes: list[str] = []
        if args.equal:
            runs, notes = _equalize_costs(args, runs, runner, {model: all_counts[model, best[model]] for model in best})
            all_counts = _count_costs_and_check_runs(args, runs, runner)
        counts = {model: all_counts[model, setting] for model, setting in best.items()}
        for model, count in counts.items():
            sweep.print_progress_line(f'{model}: {count.total_parameters:,} parameters')
        for line in [*notes, *cost_matching.describe_cost_differences(counts)]:
            sweep.print_progress_line(line)
        search = _run_setting_search(runs, runner) if len(runs.settings) > 1 else None
        if search:
            best = {model: search.find_best_setting(model) for model in search.values}
            diverged = [model for model in runs.models if model not in best]
            notes += [
                f'{model} is not compared, because no run of its search has a finite result' for model in diverged
            ]
        # Runs are ordered by seed, so that a stopped sweep has the same number of runs for each model.
        cells = [runs.build_cell(model, setting, seed) for seed in runs.seeds for model, setting in best.items()]
        runner.run(cells)
    except sweep.SweepStopped as stop:
        return stop.args[0]
    if any(cell not in runner.failed for cell in cells):
        _show_results(runner, cells, all_counts, search, notes)
    for cell, line in runner.failed.items():
        sweep.print_progress_line(f'FAILED {cell.name}: {line}')
    return int(bool(runner.failed))


def build_plan(args: argparse.Namespace) -> ComparisonPlan:
    """Builds the plan from the flags. Raises UserError for an invalid flag."""
    sweep.reject_run_macros(args.gin_flags)
    if not args.models:
        raise UserError('--models must name at least one model; pass --models=t5_1_1,remixer')
    models = {_format_model_label(model): model for model in args.models}
    if len(models) < len(args.models):
        raise UserError(f'--models must not name a model twice, got {",".join(args.models)}; use distinct file names')
    shared = {*sweep.RUN_MACROS, *dict(args.gin_flags), *(text.partition('=')[0] for text in args.over)}
    for name in (part.partition('=')[0].strip() for model in args.models for part in model.split('+') if '=' in part):
        if name in shared:
            raise UserError(
                f'--models={",".join(args.models)} must not set {name}, which another flag sets for all models; remove '
                'one of the two'
            )
    if args.equal and len(models) < 2:
        raise UserError(f'--equal must be omitted for one model, got {args.models[0]}; name more models in --models')
    recipe = (
        args.compared,
        *cost_matching.build_config_flags(args, args.gin_file),
        *(f'--gin.{name}={value}' for name, value in args.gin_flags),
    )
    folder = pathlib.Path(args.folder).expanduser().absolute()
    return ComparisonPlan(models, _build_setting_grid(args), sweep.parse_seeds(args.seeds), folder, recipe)


def _format_model_label(model: str) -> str:
    """Returns a model's label in tables and folders, such as `mine+fnet` for `path/mine.gin+sublayers/fnet`."""
    parts = [part.strip().removesuffix('.gin') for part in model.split('+')]
    return '+'.join(part if '=' in part else part.rpartition('/')[2] for part in parts)


def _build_setting_grid(args: argparse.Namespace) -> list[sweep.Setting]:
    """Builds the grid of settings for `--over`; with `--over_random`, returns the start of the shuffled grid."""
    axes: dict[str, list[str]] = {}
    reserved = {'', *sweep.RUN_MACROS, *(sweep.STEPS if args.equal == 'time' else [])}
    for text in args.over:
        name, _, values = text.partition('=')
        if name in axes or name in reserved:
            raise UserError(
                f'--over={text} must name a macro that neither compare nor an earlier --over sets; '
                'pass --over LEARNING_RATE=1e-3,3e-3'
            )
        if name == 'BEST_METRICS':
            raise UserError(f'--over={text} must not change how results are compared; pass --gin.BEST_METRICS=VALUE')
        axes[name] = _split_macro_values(values)
        if not axes[name] or len(set(axes[name])) < len(axes[name]):
            raise UserError(f'--over={text} must list distinct values; pass --over {name}=1e-3,3e-3')
    if args.over_random is not None and not axes:
        raise UserError('--over_random must be omitted without --over; pass --over LEARNING_RATE=1e-3,3e-3')
    grid = [tuple(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    if args.over_random is not None:
        random.Random(0).shuffle(grid)
        grid = grid[: args.over_random]
    return grid


def _split_macro_values(text: str) -> list[str]:
    """Splits the values of a macro at commas outside of brackets and quotes."""
    values, depth, quote = [''], 0, ''
    for character in text:
        if quote or character in '"\'':
            quote = '' if character == quote else quote or character
        else:
            depth += (character in '([{') - (character in ')]}')
        if character == ',' and not depth and not quote:
            values.append('')
        else:
            values[-1] += character
    return [value.strip() for value in values if value.strip()]


def _equalize_costs(
    args: argparse.Namespace, runs: ComparisonPlan, runner: sweep.Sweep, counts: Mapping[str, Any]
) -> tuple[ComparisonPlan, list[str]]:
    """Returns a plan in which all models match the cost of the first model, and a sentence about each change."""
    from remixer_t5x.config import reference_resolver

    (first, model), *others = runs.models.items()
    setting, notes = runs.settings[0], []
    changes: dict[str, sweep.Setting] = {}
    if args.equal == 'time':
        cost_matching.count_cost(args, first, model, ())
        steps = reference_resolver.evaluate_macro('TRAIN_STEPS')
        # Setting TRAIN_STEPS would leave TRAIN_STEPS_RELATIVE unread, which is an error if a flag sets it.
        macro = sweep.STEPS[str(reference_resolver.get_unevaluated_macro('TRAIN_STEPS')) == f'%{sweep.STEPS[1]}']
        timed = str(3 * reference_resolver.evaluate_macro('LOG_PERIOD', 100))
        short = ((macro, timed), ('WARMUP_STEPS', '1'), ('CHECKPOINT_PERIOD', timed))
        # The timing runs do not use the search's settings, because a setting such as a high learning rate may fail.
        cells = [runs.build_cell(label, (), runs.seeds[0], short, 'timing') for label in runs.models]
        for cell in cells:
            cost_matching.count_cost(args, cell.name, runs.models[cell.model], short)
            runner.check_existing_run(cell.folder)
        runner.run(cells)
        for cell, line in runner.failed.items():
            raise UserError(f'--equal=time needs the step time of each model, but {cell.name} failed: {line}')
        seconds = {
            cell.model: cost_matching.compute_seconds_per_step(run) for cell, run in _read_runs(cells, runner).items()
        }
        for label, _ in others:
            ratio = seconds[label] / seconds[first]
            changes[label] = ((macro, str(max(1, round(steps / ratio)))),)
            notes.append(
                f'{label} was trained for {changes[label][0][1]} steps instead of {steps}, to equal the training time '
                f'of {first}: a step takes {ratio:.2f} times as long.'
            )
    else:
        target = cost_matching.get_cost(counts[first], args.equal)
        for label, model in others:

            def count_cost_of_widths(widths: Mapping[str, int], label: str = label, model: str = model) -> float:
                flags = [*setting, *((name, str(width)) for name, width in widths.items())]
                return cost_matching.get_cost(cost_matching.count_cost(args, label, model, flags), args.equal)

            before = count_cost_of_widths({}) / target - 1
            if abs(before) > cost_matching.TOLERANCE:
                start = cost_matching.find_feed_forward_widths()
                widths = cost_matching.match_widths(count_cost_of_widths, start, target)
                changes[label] = tuple((name, str(width)) for name, width in widths.items())
                words = ' and '.join(f'{name} {widths[name]} instead of {start[name]}' for name in start)
                notes.append(
                    f'{label} has {words}, to equal the {cost_matching.COST_NAMES[args.equal]} of {first}: '
                    f'the difference is {count_cost_of_widths(widths) / target - 1:+.1%} instead of {before:+.1%}.'
                )
    for name in {name for change in changes.values() for name, _ in change} & {name for name, _ in setting}:
        raise UserError(f'--over must not set {name}, which --equal={args.equal} changes; remove one of the two flags')
    return dataclasses.replace(runs, changes=changes), notes


def _count_costs_and_check_runs(
    args: argparse.Namespace, runs: ComparisonPlan, runner: sweep.Sweep | None
) -> dict[tuple[str, sweep.Setting], Any]:
    """Counts the parameters and FLOPs of each model at each setting.

    If `runner` is not None, also compares the configurations with those of existing runs.
    """
    counts = {}
    for label, setting in itertools.product(runs.models, runs.settings):
        flags = [*runs.changes.get(label, ()), *setting]
        counts[label, setting] = cost_matching.count_cost(
            args, sweep.join_run_name(label, setting), runs.models[label], flags
        )
        if runner is not None:
            for seed in runs.seeds:
                runner.check_existing_run(runs.build_cell(label, setting, seed).folder)
    return counts


def _run_setting_search(runs: ComparisonPlan, runner: sweep.Sweep) -> Any:
    """Runs all settings with the first seed, and returns a `comparison.SettingSearch`."""
    sweep.print_progress_line(f'search: {len(runs.settings)} settings of each model with seed {runs.seeds[0]}')
    cells = [runs.build_cell(model, setting, runs.seeds[0]) for setting in runs.settings for model in runs.models]
    runner.run(cells)
    if all(cell in runner.failed for cell in cells):
        raise UserError(f'every run of the search failed: {runner.failed[cells[0]]}')
    from remixer_t5x.extras.reports import comparison

    return comparison.collect_search_results(cells, _read_runs(cells, runner))


def _read_runs(cells: Sequence[sweep.SweepCell], runner: sweep.Sweep) -> dict[sweep.SweepCell, Any]:
    """Reads the results of the runs in `cells` that have not failed."""
    from remixer_t5x.extras.reports import run_records

    cells = [cell for cell in dict.fromkeys(cells) if cell not in runner.failed]
    return dict(zip(cells, run_records.read_runs([str(cell.folder) for cell in cells]), strict=True))


def _show_results(
    runner: sweep.Sweep,
    cells: Sequence[sweep.SweepCell],
    all_counts: Mapping[tuple[str, sweep.Setting], Any],
    search: Any,
    notes: Sequence[str],
) -> None:
    """Prints the tables and conclusions, and writes the report, figures and CSV file."""
    from remixer_t5x.extras.reports import comparison, report_writer
    from remixer_t5x.extras.reports.pictures import drawing
    from remixer_t5x.extras.reports.run_records import RunGroup

    runs = _read_runs([*(search.cells if search else ()), *cells], runner)
    counts = {cell.model: all_counts[cell.model, cell.setting] for cell in cells}
    by_model = {model: [runs[cell] for cell in cells if cell.model == model and cell in runs] for model in counts}
    groups = [RunGroup(model, members) for model, members in by_model.items() if members]
    failed = {cell.name: line for cell, line in runner.failed.items()}
    result = comparison.ModelComparison(groups, counts, search, notes, failed)
    tables = []
    for heading, rows in (
        ('', result.results_table),
        (f'search: {search.measure}' if search else '', result.search_table),
    ):
        if rows:
            tables.append(console.build_table(heading, *(group.name for group in groups), words=(heading,)))
            for name, texts in rows:
                tables[-1].add_row(name, *texts)
    console.print_with_rich(*tables, *notes, *result.difference_sentences, '')
    comparison.write_csv(runs, runner.failed, all_counts, runner.folder / CSV_FILE)
    for picture in result.draw_pictures():
        drawing.save_picture(picture, runner.folder / FIGURES)
    print(f'files        {runner.folder}: {CSV_FILE}, {FIGURES}/')
    report_writer.write_page(
        report_writer.render_page([run for group in groups for run in group.runs], comparison=result),
        runner.folder / REPORT_FILE,
    )


COMMAND = Command(
    'compare',
    'train one recipe with several models and seeds, and report significant differences; run it again to continue',
    add_arguments,
    run,
    (
        'remixer-t5x compare train --gin_file=experiments/python_docs.gin --models=t5_1_1,remixer,hyper_mixer '
        '--seeds=0,1,2 --folder=runs/compared --over LEARNING_RATE=5e-3,2e-2 --equal=flops',
    ),
)
