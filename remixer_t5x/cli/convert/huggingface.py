"""Implements `convert --from_hf` and `--to_hf` for Hugging Face models and folders written by `--to_shared`."""

import argparse
import pathlib
import shutil
from typing import Any

from remixer_t5x import lazy
from remixer_t5x.api import saved_models
from remixer_t5x.api.building import build_model
from remixer_t5x.checkpoints import saved_params
from remixer_t5x.cli.convert import conversions
from remixer_t5x.cli.convert.conversions import print_line
from remixer_t5x.data import task_vocabulary
from remixer_t5x.errors import UserError
from remixer_t5x.interop import converted, safetensors_files, shared_folder
from remixer_t5x.interop.huggingface import folders, pytorch_export
from remixer_t5x.interop.huggingface.traced_modules import UnsupportedModelError
from remixer_t5x.run_folder import model_dir
from remixer_tasks import vocabularies
from remixer_tasks.files import cache

INSTALL = "pip install 'remixer-t5x[hf]'"


def convert_to_model_dir(args: argparse.Namespace) -> None:
    """Converts a Hugging Face model or a shared folder to a MODEL_DIR (`--from_hf=NAME --to=MODEL_DIR`)."""
    folder = lazy.import_extra('hub.client').resolve_folder(args.from_hf, print_line)
    if shared_folder.is_shared_folder(folder):
        _shared_to_model_dir(args, folder)
        return
    source = folders.read(str(folder))
    tokenizer = source.family.find_tokenizer(source.folder, args.vocabulary)
    vocabulary = getattr(vocabularies, tokenizer.function)(**tokenizer.arguments)
    source.family.check_vocabulary(vocabulary, tokenizer.name, str(source.folder))
    target = converted.claim_model_dir(args.to)
    print_line('reading', str(source.folder))
    params, origin = source.params(), str(source.folder.resolve())
    task_vocabulary.save_vocabulary(vocabulary, target / task_vocabulary.VOCABULARY_FOLDER)
    text = source.family.gin_text(f'Converted from the Hugging Face folder {origin}.')
    text = f'{text}\n{task_vocabulary.gin_statements(target)}'
    record = task_vocabulary.vocabulary_record(vocabulary)
    run = converted.build_record(record, text, origin)
    conversions.write_model_dir(target, params, 0, run, text, model_dir.CONVERTED)
    del params
    # Loads the gin file in the same way as other commands.
    model: Any = build_model(str(target / model_dir.CONVERTED))
    params = saved_params.restore_params(str(target), conversions.abstract_params(model), record)
    conversions.check_no_difference(source.first_difference(params), target)
    print_line('check', 'all weights in the output equal those in the input')
    _compare_with_reference(source, model, params, vocabulary)


def _shared_to_model_dir(args: argparse.Namespace, folder: pathlib.Path) -> None:
    """Converts the shared model in `folder` to a MODEL_DIR.

    The gin text must be checked or trusted, because later commands load it from MODEL_DIR and gin can run code.
    """
    if args.vocabulary is not None:
        raise UserError(
            f'--vocabulary is only for Hugging Face models, but {folder} contains its vocabulary; omit --vocabulary'
        )
    shared = shared_folder.open_shared_folder(folder)
    if not args.trust_gin:
        saved_models.check_gin(shared, f'remixer-t5x convert --from_hf={folder} --to={args.to} --trust_gin')
    target = converted.claim_model_dir(args.to)
    print_line('reading', str(folder))
    params, step, record = shared.params()
    shutil.copytree(folder / task_vocabulary.VOCABULARY_FOLDER, target / task_vocabulary.VOCABULARY_FOLDER)
    if args.trust_gin and (folder / shared_folder.CODE).is_dir():
        code = target / shared_folder.CODE
        shutil.copytree(folder / shared_folder.CODE, code)
        print_line('code', f'{code}; set PYTHONPATH={code} for commands that use it')
    text = f'{shared.gin_text()}\n{task_vocabulary.gin_statements(target)}'
    run = {**record, 'config': text, 'converted_from': str(folder)}
    conversions.write_model_dir(target, params, step, run, text, model_dir.CONVERTED)
    conversions.check_params_equal(params, converted.read_checkpoint(str(target))[0], target)


def export_transformers_model(args: argparse.Namespace, model: Any, vocabulary: Any) -> None:
    """Writes a transformers model, or raises UnsupportedModelError and writes no file if there is no equivalent."""
    family, runs = folders.describe(model, vocabulary, conversions.build_from_text)
    folders.check_folder_is_empty(args.to_hf)
    params = conversions.restore_params(args, model, vocabulary)
    dtype = args.dtype or 'float32'
    folder = folders.write(args.to_hf, family, params, runs, dtype)
    print_line('wrote', f'{folder}, {dtype}')
    print_line('tokenizer', family.write_tokenizer(vocabulary, folder))
    params, source = safetensors_files.round_params(params, dtype), folders.read(str(folder))
    conversions.check_no_difference(source.first_difference(params, runs), folder)
    print_line('check', 'all weights, read back from the output, equal those written')
    _compare_with_reference(source, model, params, vocabulary)


def export_any_model(args: argparse.Namespace, model: Any, vocabulary: Any) -> None:
    """Writes a transformers model, or weights and PyTorch code as a fallback (`--checkpoint=PATH --to_hf=DIR`).

    Raises UnsupportedModelError before writing any file if a module of the model has no PyTorch code.
    """
    try:
        export_transformers_model(args, model, vocabulary)
        return
    except UnsupportedModelError as refusal:
        config = pytorch_export.to_config(model, vocabulary)
        print_line('code', f'{refusal.reason}, so PyTorch code is written next to the weights')
    folder = folders.check_folder_is_empty(args.to_hf)
    params = conversions.restore_params(args, model, vocabulary)
    dtype = args.dtype or 'float32'
    pytorch_export.write(folder, config, params, dtype)
    print_line('wrote', f'{folder}, {dtype}')
    print_line('tokenizer', pytorch_export.write_tokenizer(vocabulary, folder))
    if missing := folders.missing_packages():
        print_line('check', f'without {" and ".join(missing)}, logits are not compared; {INSTALL}')
    else:
        difference = pytorch_export.compare_logits(folder, model, safetensors_files.round_params(params, dtype))
        print_line('check', f'logits of the PyTorch code and ours differ by {difference}')
    auto_class = pytorch_export.MODEL_CLASSES[model.model_type][1]
    print_line('load', f'transformers.{auto_class}.from_pretrained({str(folder)!r}, trust_remote_code=True)')


def _compare_with_reference(source: folders.HuggingFaceSource, model: Any, params: Any, vocabulary: Any) -> None:
    """Compares logits and token ids with transformers, if it is installed. Raises UserError if the logits differ."""
    if missing := folders.missing_packages():
        print_line('check', f'without {" and ".join(missing)}, logits are not compared; {INSTALL}')
        return
    difference = folders.describe_difference(*folders.compute_both_logits(source, model, params))
    print_line('check', f"logits of Hugging Face's model and ours differ by {difference}")
    print_line('check', folders.compare_token_ids(source.folder, vocabulary))


def cached_model_dir(path: str) -> pathlib.Path:
    """Returns the cached MODEL_DIR of the Hugging Face model in `path`. Converts the model on first use."""
    source = pathlib.Path(path).expanduser().resolve()
    files = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in source.glob('*.*'))
    folder = cache.cache_root() / 'huggingface' / cache.hash_values(str(source), files)
    if not saved_params.list_steps(model_dir.absolute_path(str(folder)) / model_dir.CHECKPOINTS):
        convert_to_model_dir(argparse.Namespace(from_hf=path, to=str(folder), vocabulary=None, trust_gin=None))
    return folder
