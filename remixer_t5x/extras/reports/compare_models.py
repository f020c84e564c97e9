"""Makes every model of a sweep before its first run, so that a mistake in the last one stops the sweep at once."""

import argparse
import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from remixer_t5x.cli import arguments, train
from remixer_t5x.errors import UserError


def build(args: argparse.Namespace, models: Sequence[str], folder: pathlib.Path) -> Iterator[tuple[str, int, float]]:
    """Reads the configuration of each model as its run will, and counts it.

    Yields the name of each model, its parameters, and the FLOPs of its forward pass for one example.

    Raises UserError, with the model's name, for the first mistake.
    """
    # The runs keep the accelerator to themselves: this process computes shapes alone, and they get its environment.
    with arguments.libraries(args), _on_cpu():
        from remixer_t5x.config import loading, resolved
        from remixer_t5x.costs import counts
    flags = [*args.gin_flags, ('SEED', '0'), ('MODEL_DIR', str(folder))]
    for name in models:
        given = loading.Given(args.gin_file, flags, args.gin_search_paths, loading.model_files(name))
        try:
            loading.load(given, train.ROOT, partial=False)
            model, lengths = resolved.macro('MODEL'), resolved.macro('TASK_FEATURE_LENGTHS')
            counted = counts.count(model, lengths)
        except UserError as error:
            raise UserError(f'{name}: {error}') from error
        yield name, counted.total_parameters, counted.total_forward_flops


def unequal(costs: Mapping[str, tuple[int, float]]) -> str:
    """A warning if the numbers of parameters differ by more than 5%; empty otherwise."""
    if len(costs) < 2:
        return ''
    least, most = (of(costs, key=lambda name: costs[name][0]) for of in (min, max))
    ratio = costs[most][0] / costs[least][0] - 1
    return f'{most} has {ratio:.0%} more parameters than {least}; the sizes are not matched' if ratio > 0.05 else ''


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """JAX, if it is imported within, uses the CPU; the environment is as before afterwards."""
    before = os.environ.get('JAX_PLATFORMS')
    os.environ['JAX_PLATFORMS'] = 'cpu'
    try:
        yield
    finally:
        if before is None:
            del os.environ['JAX_PLATFORMS']
        else:
            os.environ['JAX_PLATFORMS'] = before
