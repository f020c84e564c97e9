"""Computes the cost of each compared model, and scales model widths to match costs."""

import argparse
import contextlib
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remixer_t5x.cli import arguments, train
from remixer_t5x.errors import UserError

# Maps each value of `--equal` to its name in messages, and to an attribute of `model_counts.ModelCounts`.
COST_NAMES = {'parameters': 'parameters', 'flops': 'FLOPs', 'time': 'training time'}
_ATTRIBUTES = {'parameters': 'total_parameters', 'flops': 'total_forward_flops'}
# Maximum relative difference between matched costs, and the largest relative difference without a warning.
TOLERANCE, WARNING = 0.01, 0.05
# Macros that `--equal` scales; EMBED_DIM only if the model has no other.
WIDTHS = re.compile(r'\w*MLP_DIM|REMIXER_DIM|EMBED_DIM')
# Widths are scaled by a factor in this range.
_MIN_FACTOR, _MAX_FACTOR = 1 / 16, 16
# If the largest width is at least 32 times this number, widths are scaled to multiples of it if possible, for speed.
_UNIT = 8

Flags = Sequence[tuple[str, str]]


def import_jax_on_cpu() -> None:
    """Lets JAX use only the CPU in this process, so that the runs can use the accelerator."""
    import jax

    jax.config.update('jax_platforms', 'cpu')


def build_config_flags(args: argparse.Namespace, files: Sequence[str]) -> list[str]:
    """Returns the flags that pass gin files, search paths and the TFDS folder to the command of a run."""
    data_dir = [f'--tfds_data_dir={args.tfds_data_dir}'] if args.tfds_data_dir else []
    search_paths = [f'--gin_search_paths={paths}' for paths in args.gin_search_paths]
    return [*search_paths, *(f'--gin_file={file}' for file in files), *data_dir]


def count_cost(args: argparse.Namespace, label: str, model: str, flags: Flags) -> Any:
    """Loads the configuration of a model (`--model`) as a run would, and returns its `model_counts.ModelCounts`."""
    from remixer_t5x.config import reference_resolver
    from remixer_t5x.costs import model_counts

    flags = [*args.gin_flags, *flags, ('SEED', '0'), ('MODEL_DIR', args.folder)]
    try:
        sources = argparse.Namespace(**{**vars(args), 'model': model, 'gin_flags': flags})
        arguments.load_config(sources, train.ROOT, partial=False)
        return model_counts.count_model_costs(
            reference_resolver.evaluate_macro('MODEL'), reference_resolver.evaluate_macro('TASK_FEATURE_LENGTHS')
        )
    except UserError as error:
        raise UserError(f'{label}: {error}') from error


def get_cost(counts: Any, measure: str) -> float:
    """Returns the number of parameters, or the FLOPs of a forward pass for one example."""
    return getattr(counts, _ATTRIBUTES[measure])


def find_feed_forward_widths() -> dict[str, int]:
    """Maps the macros of the loaded model's feed-forward widths to their values; uses EMBED_DIM if there are none.

    Raises UserError if the configuration sets neither.
    """
    from remixer_t5x.checkpoints import compatibility
    from remixer_t5x.config import loading

    settings = compatibility.parse_bindings(loading.get_config_text(absolute_paths=False)).items()
    widths = {name: int(value) for name, value in settings if WIDTHS.fullmatch(name) and value.isdecimal()}
    if not widths:
        raise UserError(
            '--equal=parameters and --equal=flops change the macros that end in MLP_DIM, or EMBED_DIM, but this model '
            'sets none of them to a number; read such a macro in its gin file, or omit --equal'
        )
    return {name: width for name, width in widths.items() if name != 'EMBED_DIM'} or widths


def match_widths(
    cost_of: Callable[[Mapping[str, int]], float], start: Mapping[str, int], target: float
) -> dict[str, int]:
    """Scales the widths `start` by a common factor, so that the cost is within `TOLERANCE` of `target`.

    Args:
        cost_of: function that computes the cost for given widths; the cost must increase with the widths.

    Raises:
        UserError: no width reaches the target.
    """
    from scipy import optimize

    largest = max(start.values())
    for unit in (_UNIT, 1) if largest >= 32 * _UNIT else (1,):

        def scale_widths(factor: float, unit: int = unit) -> dict[str, int]:
            return {name: unit * max(1, round(factor * width / unit)) for name, width in start.items()}

        def compute_excess_cost(factor: float, scale_widths: Any = scale_widths) -> float:
            difference = cost_of(scale_widths(factor)) / target - 1
            # `brentq` stops as soon as the function returns 0.
            return 0.0 if abs(difference) <= TOLERANCE / 4 else difference

        # `brentq` raises ValueError if the target is out of reach.
        with contextlib.suppress(ValueError):
            precision = unit / (4 * largest)
            widths = scale_widths(optimize.brentq(compute_excess_cost, _MIN_FACTOR, _MAX_FACTOR, xtol=precision))
            if abs(cost_of(widths) / target - 1) <= TOLERANCE:
                return widths
    names = ' and '.join(start)
    raise UserError(f'no {names} has a cost within {TOLERANCE:.0%} of {target:,.0f}; change the number of layers')


def describe_cost_differences(costs: Mapping[str, Any]) -> list[str]:
    """Returns warnings if parameters or FLOPs differ by more than `WARNING` between models."""
    lines = []
    for measure in _ATTRIBUTES:
        values = {model: get_cost(counts, measure) for model, counts in costs.items()}
        smallest, largest = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
        if (excess := values[largest] / values[smallest] - 1) > WARNING:
            lines.append(
                f'warning: {largest} has {excess:.0%} more {COST_NAMES[measure]} than {smallest} (see --equal)'
            )
    return lines


def compute_seconds_per_step(run: Any) -> float:
    """Returns the median step time of a short run, excluding the first logged time, which includes the compilation."""
    times = [seconds for _, seconds in run.select_metric_points('train', 'seconds_per_step')]
    return statistics.median(times[1:] or times)
