"""Steps that the conversions of `remixer-t5x convert` share: print, write and read MODEL_DIRs, compare."""

import argparse
import os
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from remixer_t5x.checkpoints import saved_params
from remixer_t5x.data import frames, task_vocabulary
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.interop import converted
from remixer_t5x.interop.safetensors import export
from remixer_t5x.models.interface import Model
from remixer_t5x.run_folder import model_dir


def say(label: str, text: str) -> None:
    """Prints a line at once: the conversion of a large model takes minutes."""
    print(f'{label:<12} {text}', flush=True)


def describe_size(params: Any) -> str:
    """Number of parameters and arrays, in words."""
    leaves = jax.tree.leaves(params)
    return f'{sum(leaf.size for leaf in leaves):,} parameters in {len(leaves)} arrays'


def write_model_dir(
    folder: epath.Path, params: Any, step: int, record: Mapping[str, Any], gin_text: str, name: str = model_dir.CONFIG
) -> None:
    """Writes a checkpoint and the gin file `name` into a MODEL_DIR, and prints their places.

    Args:
        folder: from `converted.claim`.
        params: our parameters.
        step: number of the checkpoint.
        record: record of the checkpoint.
        gin_text: content of the gin file; none is written if it is empty.
        name: of the gin file.
    """
    if gin_text:
        (folder / name).write_text(gin_text)
    checkpoint = converted.write(folder, params, step, record)
    say('read', describe_size(params))
    say('checkpoint', str(checkpoint))
    if gin_text:
        say('model', str(folder / name))


def abstract_params(model: Model) -> Any:
    """Shapes of the model's parameters, on one device."""
    return saved_params.abstract_params(model, frames.smallest_shapes(model.frame), Partitioner())


def restore(args: argparse.Namespace, model: Model, vocabulary: Any) -> Any:
    """Reads the parameters of `--checkpoint`, after a check of the vocabulary's ids."""
    task_vocabulary.check_ids('VOCABULARY', vocabulary, model.vocab_size)
    say('reading', str(saved_params.find_step(args.checkpoint, '--checkpoint')))
    record = task_vocabulary.record(vocabulary)
    params = saved_params.restore_params(args.checkpoint, abstract_params(model), record, '--checkpoint')
    say('read', describe_size(params))
    return params


def check_equal(before: Any, after: Any, where: str | os.PathLike[str]) -> None:
    """Compares two trees of parameters bit by bit. Raises UserError if they differ."""
    check_no_difference(export.first_difference(before, after), where)
    say('check', 'every parameter, read back, is what was read, bit by bit')


def check_no_difference(name: str | None, where: str | os.PathLike[str]) -> None:
    """Raises UserError if there is an array `name` in `where` that differs from what was read."""
    if name:
        raise UserError(f'{name} in {where} differs from what was read; do not use it, and report the problem')
