"""Parameters of a model whose gin files are known: written next to a gin file of their own, and read."""

import argparse
from typing import Any

from etils import epath

from remixer_t5x.api.building import build_model
from remixer_t5x.checkpoints import saved_params
from remixer_t5x.cli.convert.checks import say, size
from remixer_t5x.data import frames, task_vocabulary
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.interop import converted
from remixer_t5x.models.interface import Model
from remixer_t5x.run_folder import model_dir

SETTING = '--checkpoint'


def write(folder: epath.Path, params: Any, vocabulary: Any, gin_text: str, origin: str) -> None:
    """Writes the gin file and the checkpoint of step 0, and says where they are."""
    (folder / model_dir.CONVERTED).write_text(gin_text)
    task_vocabulary.save(vocabulary, folder / task_vocabulary.FOLDER)
    record = converted.record(task_vocabulary.record(vocabulary), gin_text, origin)
    written = converted.write(folder, params, 0, record)
    say('read', size(params))
    say('checkpoint', str(written))
    say('model', f'{folder / model_dir.CONVERTED}')


def read(folder: epath.Path, vocabulary: Any) -> tuple[Any, Any]:
    """The model and its parameters, read as a user's command reads them."""
    model: Any = build_model(str(folder / model_dir.CONVERTED))
    record = task_vocabulary.record(vocabulary)
    return model, saved_params.restore_params(str(folder), abstract_params(model), record)


def abstract_params(model: Model) -> Any:
    """Shapes of the model's parameters, on one device."""
    return saved_params.abstract_params(model, frames.smallest_shapes(model.frame), Partitioner())


def restored(args: argparse.Namespace, model: Model, vocabulary: Any) -> Any:
    """The parameters of `--checkpoint`."""
    record = task_vocabulary.record(vocabulary)
    return saved_params.restore_params(args.checkpoint, abstract_params(model), record, SETTING)
