"""`convert --to_shared` and `--push_to_hub`: a folder that others load, with a model card made from the run."""

import argparse
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen as nn

from remixer_t5x.api import saved_models, trained_model
from remixer_t5x.cli.convert import huggingface
from remixer_t5x.cli.convert.conversion import check_no_difference, describe_size, say
from remixer_t5x.config import foreign_gin
from remixer_t5x.data import task_vocabulary
from remixer_t5x.extras.hub import client, download, model_card
from remixer_t5x.extras.reports import run_folders
from remixer_t5x.interop import converted, shared_folder
from remixer_t5x.interop.huggingface import folders
from remixer_t5x.interop.huggingface.description import Refusal
from remixer_t5x.interop.safetensors import export
from remixer_t5x.models import interface
from remixer_t5x.run_folder import model_dir


def to_folder(args: argparse.Namespace) -> None:
    """`--checkpoint=PATH --to_shared=DIR`."""
    folder = folders.check_free(args.to_shared)
    _write(args, folder, folder.name, str(folder))
    say('wrote', f'{folder}, with its card: {folder / model_card.FILE}')


def push(args: argparse.Namespace) -> None:
    """`--checkpoint=PATH --push_to_hub=NAME`."""
    name = client.check_upload(args.push_to_hub)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary, 'model')
        step = _write(args, folder, name, name)
        address = client.upload(folder, name, bool(args.private), f'Upload the checkpoint of step {step}')
    say('pushed', address)


def _write(args: argparse.Namespace, folder: pathlib.Path, name: str, address: str) -> int:
    """Writes weights, configuration, vocabulary and card. Returns the step of the checkpoint."""
    checkpoint = saved_models.find(args.checkpoint)
    model, vocabulary, lengths = saved_models.described(checkpoint)
    gin_text = trained_model.gin_text(model, lengths)
    task_vocabulary.check_ids('VOCABULARY', vocabulary, model.vocab_size)
    say('reading', checkpoint)
    library = 'transformers'
    try:
        target = {**vars(args), 'checkpoint': checkpoint, 'to_hf': str(folder)}
        huggingface.from_model(argparse.Namespace(**target), model, vocabulary)
    except Refusal as reason:
        say('format', f'ours, since {reason.reason}')
        library = 'remixer_t5x'
    params, record, step = converted.read(checkpoint)
    packages: list[str] = []
    missing: list[str] = []
    if library == 'remixer_t5x':
        _write_own(folder, model, vocabulary, gin_text, (params, step, record))
        if foreign_gin.first_foreign(gin_text, checkpoint):
            packages = foreign_gin.imported_packages(gin_text)
            missing = shared_folder.copy_code(folder, packages)
            for name in missing:
                say('warning', f'{name}, which model.gin imports, is not in {folder}; the card asks to install it')
    card = model_card.Card(
        name=name,
        address=address,
        library=library,
        frame=model.frame,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        sublayers={side: _names(factories) for side, factories in interface.sublayers(model).items()},
        vocabulary=f'{type(vocabulary).__name__}, {vocabulary.vocab_size:,} ids',
        step=step,
        versions=record.get('versions', {}),
        origin=download.origin(str(record['converted_from'])) if record.get('converted_from') else '',
        needs_trust=bool(packages),
        code=sorted(set(packages) - set(missing)),
        missing=missing,
    )
    run = saved_models.run_of(checkpoint)
    # A converted model has no metrics.
    found = run_folders.read_all([str(run)])[0] if (run / model_dir.METRICS).exists() else None
    model_card.write(folder, card, found)
    return step


def _write_own(folder: pathlib.Path, model: Any, vocabulary: Any, gin_text: str, saved: tuple[Any, int, Any]) -> None:
    params, step, record = saved
    folder.mkdir(parents=True, exist_ok=True)
    ours = {**record, 'vocabulary': task_vocabulary.record(vocabulary)}
    shared_folder.write(folder, model, vocabulary, gin_text, params, step, ours)
    say('wrote', describe_size(params))
    check_no_difference(export.first_difference(params, shared_folder.read(folder).params()[0]), folder)
    say('check', 'every parameter, read back, is what was written, bit by bit')


def _names(factories: Sequence[Callable[..., nn.Module]]) -> list[str]:
    return list(dict.fromkeys(type(factory()).__name__ for factory in factories))
