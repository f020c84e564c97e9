"""Implements `convert --to_shared` and `--push_to_hub`: writes a self-contained folder with a model card."""

import argparse
import pathlib
import tempfile
from typing import Any

import jax

from remixer_t5x.api import saved_models, trained_model
from remixer_t5x.cli.conversions import check_no_difference, describe_size, export_transformers_model, print_line
from remixer_t5x.config import foreign_gin
from remixer_t5x.data import task_vocabulary
from remixer_t5x.extras.hub import client, model_card
from remixer_t5x.extras.reports import records
from remixer_t5x.interop import converted, safetensors_files, shared_folder
from remixer_t5x.interop.huggingface import folders
from remixer_t5x.interop.huggingface.traced_modules import UnsupportedModelError
from remixer_t5x.models import interface
from remixer_t5x.run_folder import model_dir


def to_folder(args: argparse.Namespace) -> None:
    """Writes the shared folder for `--checkpoint=PATH --to_shared=DIR`."""
    folder = folders.check_folder_is_empty(args.to_shared)
    _write(args, folder, folder.name, str(folder))
    print_line('wrote', f'{folder}, with its model card: {folder / model_card.CARD_FILE}')


def push(args: argparse.Namespace) -> None:
    """Uploads the model for `--checkpoint=PATH --push_to_hub=NAME`."""
    name = client.check_upload_name(args.push_to_hub)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary, 'model')
        step = _write(args, folder, name, name)
        address = client.upload_model(folder, name, bool(args.private), f'Upload the checkpoint of step {step}')
    print_line('pushed', address)


def _write(args: argparse.Namespace, folder: pathlib.Path, name: str, address: str) -> int:
    """Writes a checkpoint's weights, configuration, vocabulary and model card to `folder`, and returns its step."""
    checkpoint = saved_models.find_checkpoint(args.checkpoint)
    model, vocabulary, lengths = saved_models.read_model(checkpoint)
    gin_text = trained_model.gin_text(model, lengths)
    task_vocabulary.check_vocabulary_size('VOCABULARY', vocabulary, model.vocab_size)
    print_line('reading', checkpoint)
    params, record, step = converted.read_checkpoint(checkpoint)
    library, packages, missing = 'transformers', [], []
    try:
        target = {**vars(args), 'checkpoint': checkpoint, 'to_hf': str(folder)}
        export_transformers_model(argparse.Namespace(**target), model, vocabulary)
    except UnsupportedModelError as refusal:
        library = 'remixer_t5x'
        print_line('format', f'{library}, because {refusal.reason}')
        _write_shared(folder, model, vocabulary, gin_text, params, step, record)
        if foreign_gin.find_disallowed_statement(gin_text, checkpoint):
            packages = foreign_gin.imported_packages(gin_text)
            missing = shared_folder.copy_code(folder, packages)
            for package in missing:
                print_line('warning', f'{package}, which model.gin imports, is not copied; the model card lists it')
    sublayers = {
        side: list(dict.fromkeys(type(factory()).__name__ for factory in factories))
        for side, factories in interface.sublayer_factories(model).items()
    }
    card = model_card.ModelCard(
        name=name,
        address=address,
        library=library,
        model_type=model.model_type,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        sublayers=sublayers,
        vocabulary=f'{type(vocabulary).__name__}, {vocabulary.vocab_size:,} ids',
        step=step,
        versions=record.get('versions', {}),
        origin=client.describe_origin(str(record['converted_from'])) if record.get('converted_from') else '',
        needs_trust=bool(packages),
        code=sorted(set(packages) - set(missing)),
        missing=missing,
    )
    run = saved_models.containing_model_dir(checkpoint)
    # Converted models have no metrics.jsonl.
    runs = records.read_runs([str(run)]) if (run / model_dir.METRICS).exists() else [None]
    model_card.write_model_card(folder, card, runs[0])
    return step


def _write_shared(
    folder: pathlib.Path, model: Any, vocabulary: Any, gin_text: str, params: Any, step: int, record: dict[str, Any]
) -> None:
    """Writes a shared folder in this package's format, and verifies the weights by reading them back."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {**record, 'vocabulary': task_vocabulary.vocabulary_record(vocabulary)}
    shared_folder.write_shared_folder(folder, model, vocabulary, gin_text, params, step, record)
    print_line('wrote', describe_size(params))
    check_no_difference(
        safetensors_files.first_difference(params, shared_folder.open_shared_folder(folder).params()[0]), folder
    )
    print_line('check', 'the parameters in the folder are bit-identical to those of the checkpoint')
