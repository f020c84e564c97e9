"""Makes every model of a sweep before its first run, so that a mistake in the last one stops the sweep at once."""

import argparse
import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence

from remixer_t5x.cli import arguments, train
from remixer_t5x.errors import UserError


def build(args: argparse.Namespace, models: Sequence[str], folder: pathlib.Path) -> Iterator[str]:
    """Reads the configuration of each model as its run will, and makes the shapes of its parameters;
    gives a line about each.

    Raises UserError, with the model's name, for the first mistake.
    """
    # The runs keep the accelerator to themselves: this process computes shapes alone, and they get its environment.
    with arguments.libraries(args), _on_cpu():
        import jax

        from remixer_t5x.config import loading, resolved
        from remixer_t5x.data import frames
        from remixer_t5x.models import interface
    flags = [*args.gin_flags, ('SEED', '0'), ('MODEL_DIR', str(folder))]
    for name in models:
        given = loading.Given(args.gin_file, flags, args.gin_search_paths, loading.model_files(name))
        try:
            loading.load(given, train.ROOT, partial=False)
            model, lengths = resolved.macro('MODEL'), resolved.macro('TASK_FEATURE_LENGTHS')
            shapes = frames.batch_shapes(model.frame, lengths)
            params = interface.param_shapes(model, shapes)
        except UserError as error:
            raise UserError(f'{name}: {error}') from error
        yield f'{name}: {sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters'


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
