"""Converts between MODEL_DIRs, safetensors files, T5X checkpoints, adapters and Hugging Face folders.

Also defines helpers that are shared with `convert --to_shared`.
"""

import argparse
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from flax import traverse_util

from remixer_t5x import lazy_imports
from remixer_t5x.api import saved_models
from remixer_t5x.api.model_building import build_model
from remixer_t5x.checkpoints import checkpoint_paths, compatibility, durable_folders, saved_params
from remixer_t5x.cli import arguments
from remixer_t5x.cli.console import print_labeled_line
from remixer_t5x.config import loading
from remixer_t5x.data import batch_formats, task_vocabulary
from remixer_t5x.errors import UserError, format_count
from remixer_t5x.interop import converted_checkpoint, safetensors_files, shared_folder
from remixer_t5x.interop.huggingface import model_folders, pytorch_export, tokenizer_export
from remixer_t5x.interop.huggingface.model_family import ModelFamily
from remixer_t5x.interop.huggingface.t5 import T5
from remixer_t5x.interop.huggingface.traced_modules import TracedModules, UnsupportedModelError
from remixer_t5x.interop.t5x import checkpoint as t5x_checkpoint
from remixer_t5x.models import interface
from remixer_t5x.models.interface import Model
from remixer_t5x.models.seq2seq import Seq2Seq
from remixer_t5x.run_folder import model_dir
from remixer_tasks import vocabularies
from remixer_tasks.files import cache

INSTALL = "pip install 'remixer-t5x[hf]'"


def describe_params(params: Any) -> str:
    """Returns the numbers of parameters and arrays in a tree, as text."""
    leaves = jax.tree.leaves(params)
    return f'{format_count(sum(leaf.size for leaf in leaves), "parameter")} in {format_count(len(leaves), "array")}'


def write_model_dir(
    folder: epath.Path,
    params: Any,
    step: int,
    record: Mapping[str, Any],
    gin_text: str,
    name: str = model_dir.CONFIG,
    expected: Any = None,
) -> None:
    """Writes a checkpoint to a MODEL_DIR, and `gin_text`, unless empty, to the file `name`; prints their paths.

    Raises UserError unless the parameters, read back from the output, equal `expected`, by default `params`.
    """
    if gin_text:
        (folder / name).write_text(gin_text)
    checkpoint = converted_checkpoint.write_checkpoint(folder, params, step, record)
    print_labeled_line('read', describe_params(params))
    print_labeled_line('checkpoint', str(checkpoint))
    if gin_text:
        print_labeled_line('model', str(folder / name))
    written = converted_checkpoint.read_checkpoint(str(folder))[0]
    check_params_equal(params if expected is None else expected, written, folder)


def restore_params(checkpoint: str, model: Model, vocabulary: Any) -> Any:
    """Reads the parameters of a checkpoint, after checking the vocabulary size."""
    task_vocabulary.check_vocabulary_size('VOCABULARY', vocabulary, model.vocab_size)
    print_labeled_line('reading', str(checkpoint_paths.find_checkpoint(checkpoint, '--checkpoint')))
    record = task_vocabulary.get_vocabulary_record(vocabulary)
    params = saved_params.restore_params(checkpoint, saved_models.get_abstract_params(model), record, '--checkpoint')
    print_labeled_line('read', describe_params(params))
    return params


def check_params_equal(before: Any, after: Any, output: str | os.PathLike[str]) -> None:
    """Raises UserError unless two parameter trees are bit-identical."""
    check_no_array_differs(safetensors_files.find_differing_array(before, after), output)
    print_labeled_line('check', 'all parameters, read back from the output, are bit-identical to those written')


def check_no_array_differs(name: str | None, output: str | os.PathLike[str]) -> None:
    """Raises UserError if an array in `output` differs from the input; `name` is its name, or None if all are equal."""
    if name:
        raise UserError(f'{name} in {output} differs from the input; do not use the output, and report the problem')


def convert_from_safetensors(args: argparse.Namespace) -> None:
    """Converts a safetensors file to a MODEL_DIR (`--from_safetensors=FILE --to=MODEL_DIR`)."""
    params, step, record = safetensors_files.read_params(args.from_safetensors)
    folder = converted_checkpoint.create_model_dir(args.to)
    origin = pathlib.Path(args.from_safetensors).expanduser().resolve()
    vocabulary = _get_vocabulary_folder(origin)
    write_model_dir(folder, params, step, {**record, 'converted_from': str(origin)}, record['config'])
    if not converted_checkpoint.copy_vocabulary_files(vocabulary, folder / task_vocabulary.VOCABULARY_FOLDER):
        advice = 'copy it next to the file and convert again, or pass VOCABULARY to each command'
        print_labeled_line('warning', f'{vocabulary} was not found, so {folder} contains no vocabulary; {advice}')


def convert_to_safetensors(args: argparse.Namespace) -> None:
    """Converts a checkpoint to a safetensors file (`--checkpoint=PATH --to_safetensors=FILE`)."""
    vocabulary = _get_vocabulary_folder(pathlib.Path(args.to_safetensors).expanduser())
    converted_checkpoint.check_folder_is_empty(vocabulary)
    params, record, step = converted_checkpoint.read_checkpoint(args.checkpoint, '--checkpoint')
    dtype = args.dtype or 'float32'
    file = safetensors_files.write_params(args.to_safetensors, params, step, record, dtype)
    print_labeled_line('read', f'{describe_params(params)}, step {step}')
    print_labeled_line('wrote', f'{file}, {dtype}, {file.stat().st_size / 2**20:,.1f} MiB')
    if converted_checkpoint.copy_vocabulary(args.checkpoint, vocabulary):
        print_labeled_line('vocabulary', f'{vocabulary}; keep it next to the file for --from_safetensors')
    else:
        print_labeled_line('warning', 'the checkpoint contains no vocabulary; keep the files that VOCABULARY reads')
    check_params_equal(safetensors_files.round_params(params, dtype), safetensors_files.read_params(str(file))[0], file)


def _get_vocabulary_folder(file: pathlib.Path) -> epath.Path:
    """Returns the path of the vocabulary folder, which is next to the safetensors file."""
    return epath.Path(file.with_name(f'{file.name.removesuffix(".safetensors")}.vocabulary'))


def merge_adapters(args: argparse.Namespace) -> None:
    """Merges adapters into their base model (`--checkpoint=PATH --to=MODEL_DIR`)."""
    _write_mean([str(checkpoint_paths.find_checkpoint(args.checkpoint, '--checkpoint'))], '--checkpoint', args.to)


def average_checkpoints(args: argparse.Namespace) -> None:
    """Averages the parameters of checkpoints in float32 (`--average=A,B,C --to=MODEL_DIR`)."""
    paths = arguments.split_names(args.average)
    if len(paths) < 2:
        raise UserError(f'--average must list two or more checkpoints, got {args.average!r}; pass --average=A,B')
    checkpoints = [str(checkpoint_paths.find_checkpoint(path, '--average')) for path in paths]
    print_labeled_line('averaging', f'{len(paths)} checkpoints: {", ".join(checkpoints)}')
    _write_mean(checkpoints, '--average', args.to)


def _write_mean(checkpoints: Sequence[str], setting: str, target: str) -> None:
    """Writes the mean of the parameters to the MODEL_DIR `target`, with adapters merged into their base models."""
    total, record, step = converted_checkpoint.read_checkpoint(checkpoints[0], setting)
    for checkpoint in checkpoints[1:]:
        params, other, other_step = converted_checkpoint.read_checkpoint(checkpoint, setting)
        difference = compatibility.describe_shape_difference(
            shared_folder.map_names_to_shapes(params), shared_folder.map_names_to_shapes(total)
        )
        if not difference and other.get('vocabulary') != record.get('vocabulary'):
            difference = f'the vocabulary is {other.get("vocabulary")}, expected {record.get("vocabulary")}'
        if difference:
            raise UserError(
                f'{setting} must list checkpoints of the same model, got {checkpoints[0]} and {checkpoint}: '
                f'{difference}; omit one of them'
            )
        total, step = jax.tree.map(np.add, total, params), max(step, other_step)
    mean = jax.tree.map(lambda array: array / np.float32(len(checkpoints)), total)
    folder = converted_checkpoint.create_model_dir(target)
    converted_checkpoint.copy_vocabulary(checkpoints[0], folder / task_vocabulary.VOCABULARY_FOLDER)
    record = {**record, 'converted_from': ','.join(checkpoints)}
    write_model_dir(folder, mean, step, record, str(record.get('config') or ''))


def extract_adapters(args: argparse.Namespace) -> None:
    """Writes the arrays that differ from the base model, and the base model's path.

    Implements `--checkpoint=PATH --to_adapters=MODEL_DIR`.
    """
    params, record, step = converted_checkpoint.read_checkpoint(args.checkpoint, '--checkpoint', merge=False)
    config = str(record.get('config') or '')
    path = args.base or compatibility.parse_bindings(config).get('INITIAL_CHECKPOINT_PATH', 'None').strip('\'"')
    if path == 'None':
        raise UserError('the run started from random parameters, not from a checkpoint; pass --base=CHECKPOINT')
    base = checkpoint_paths.find_checkpoint(path, '--base')
    base_params, base_record, _ = converted_checkpoint.read_checkpoint(str(base), '--base')
    base_arrays = traverse_util.flatten_dict(base_params, sep='/')
    arrays = traverse_util.flatten_dict(params, sep='/')
    changed = {
        name: array
        for name, array in arrays.items()
        if name not in base_arrays or not np.array_equal(base_arrays[name], array, equal_nan=True)
    }
    if not changed:
        raise UserError(
            f'{args.checkpoint} has the same parameters as {base}, so there is nothing to write; use another checkpoint'
        )
    folder = converted_checkpoint.create_model_dir(args.to_adapters)
    print_labeled_line('differing', f'{describe_params(changed)}, of {describe_params(params)}')
    converted_checkpoint.copy_vocabulary(args.checkpoint, folder / task_vocabulary.VOCABULARY_FOLDER)
    (folder / saved_params.BASE_FILE).write_text(f'{base}\n')
    record[saved_params.BASE_KEY] = saved_params.fingerprint_checkpoint(base)
    record[saved_params.BASE_PARAMS_KEY] = saved_params.hash_params(base_arrays)
    record[saved_params.BASE_UNUSED_KEY] = sorted(base_arrays.keys() - arrays.keys())
    # If --from_hf converted the base model to the cache, record its Hugging Face name: the cache may be removed.
    if base.is_relative_to(model_dir.to_absolute_path(cache.get_cache_root())):
        client = lazy_imports.import_extra('hub.client')
        record[saved_params.BASE_SOURCE_KEY] = client.format_model_name(base_record['converted_from'])
    merged, _, _ = converted_checkpoint.read_checkpoint(args.checkpoint)
    write_model_dir(folder, traverse_util.unflatten_dict(changed, sep='/'), step, record, config, expected=merged)
    print_labeled_line('base', f'{base}; if you move it, write its new path to {folder / saved_params.BASE_FILE}')


def convert_from_t5x(args: argparse.Namespace, model: Seq2Seq, vocabulary: Any) -> None:
    """Converts a T5X checkpoint to a MODEL_DIR (`--from_t5x=DIR --to=MODEL_DIR`)."""
    interface.require_model_type(model, batch_formats.ENCODER_DECODER, '--from_t5x')
    task_vocabulary.check_vocabulary_size('VOCABULARY', vocabulary, model.vocab_size)
    folder = converted_checkpoint.create_model_dir(args.to)
    print_labeled_line('reading', args.from_t5x)
    params, step = t5x_checkpoint.read_t5x_checkpoint(args.from_t5x, saved_models.get_abstract_params(model))
    config = loading.get_config_text()
    task_vocabulary.save_vocabulary(vocabulary, folder / task_vocabulary.VOCABULARY_FOLDER)
    record = converted_checkpoint.build_checkpoint_record(
        task_vocabulary.get_vocabulary_record(vocabulary), config, args.from_t5x
    )
    write_model_dir(folder, params, step, record, config)


def build_model_from_gin(gin_text: str) -> Any:
    """Builds the model that `gin_text` configures."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, 'model.gin')
        file.write_text(gin_text, encoding='utf-8')
        return build_model(str(file))


def convert_to_t5x(args: argparse.Namespace, model: Seq2Seq, vocabulary: Any) -> None:
    """Converts a checkpoint to a T5X checkpoint (`--checkpoint=PATH --to_t5x=DIR`)."""
    interface.require_model_type(model, batch_formats.ENCODER_DECODER, '--to_t5x')
    if not args.own_names:
        _check_t5x_network(model, vocabulary)
    step = durable_folders.get_step(checkpoint_paths.find_checkpoint(args.checkpoint, '--checkpoint'))
    t5x_checkpoint.check_folder_is_new(args.to_t5x, step)
    params = restore_params(args.checkpoint, model, vocabulary)
    checkpoint = t5x_checkpoint.write_t5x_checkpoint(args.to_t5x, params, step, bool(args.own_names))
    print_labeled_line('checkpoint', checkpoint)
    check_params_equal(
        params, t5x_checkpoint.read_t5x_checkpoint(checkpoint, saved_models.get_abstract_params(model))[0], checkpoint
    )


def _check_t5x_network(model: Seq2Seq, vocabulary: Any) -> None:
    """Raises UserError if the model differs from T5X's network, whose norms and position biases are fixed.

    `write_t5x_checkpoint` raises UserError for stacks with several runs, whose parameters have other names.
    """
    advice = t5x_checkpoint.KEEP_NAMES_ADVICE
    try:
        t5 = T5.from_model(model, vocabulary, TracedModules(model), build_model_from_gin)
    except UnsupportedModelError as refusal:
        raise UserError(f"T5X's network cannot represent this model: {refusal.reason}; {advice}") from refusal
    if t5.layer_biases or t5.activation not in (None, 'gelu'):
        raise UserError(
            "T5X's network has one position bias for each stack, and the activations ReLU or gated GELU, got "
            f'{"a bias in each layer" if t5.layer_biases else t5.activation}; {advice}'
        )


def convert_to_model_dir(args: argparse.Namespace) -> None:
    """Converts a Hugging Face model or a shared folder to a MODEL_DIR (`--from_hf=NAME --to=MODEL_DIR`)."""
    folder = lazy_imports.import_extra('hub.client').resolve_folder(args.from_hf, print_labeled_line)
    if shared_folder.is_shared_folder(folder):
        _convert_shared_folder(args, folder)
        return
    source = model_folders.open_model_folder(folder)
    function, options = source.family.find_tokenizer(source.folder, args.vocabulary)
    vocabulary = getattr(vocabularies, function)(**options)
    source.family.check_vocabulary(vocabulary, str(source.folder))
    target = converted_checkpoint.create_model_dir(args.to)
    print_labeled_line('reading', str(source.folder))
    origin = str(source.folder.resolve())
    task_vocabulary.save_vocabulary(vocabulary, target / task_vocabulary.VOCABULARY_FOLDER)
    text = source.family.build_gin_text(f'Converted from the Hugging Face folder {origin}.')
    text = f'{text}\n{task_vocabulary.build_vocabulary_statements(target)}'
    # Loads the gin text in the same way as other commands.
    model: Any = build_model_from_gin(text)
    abstract, record = saved_models.get_abstract_params(model), task_vocabulary.get_vocabulary_record(vocabulary)
    run = converted_checkpoint.build_checkpoint_record(record, text, origin)
    params = source.read_params(abstract)
    write_model_dir(target, params, 0, run, text, model_dir.CONVERTED)
    check_no_array_differs(source.find_differing_weight(params), target)
    print_labeled_line('check', 'all weights in the output equal those in the input')
    _compare_with_reference(source, model, params, vocabulary)


def _convert_shared_folder(args: argparse.Namespace, folder: pathlib.Path) -> None:
    """Converts the shared model in `folder` to a MODEL_DIR.

    The gin text must be checked or trusted, because later commands load it from MODEL_DIR and gin can run code.
    """
    if args.vocabulary is not None:
        raise UserError(
            f'--vocabulary must be omitted, because {folder} was shared by this package and contains its own vocabulary'
        )
    advice = f'remixer-t5x convert --from_hf={folder} --to={args.to} --trust_gin'
    saved_models.check_shared_folder(folder, bool(args.trust_gin), advice)
    target = converted_checkpoint.create_model_dir(args.to)
    print_labeled_line('reading', str(folder))
    params, step, record = shared_folder.read_checkpoint(folder)
    shutil.copytree(folder / task_vocabulary.VOCABULARY_FOLDER, target / task_vocabulary.VOCABULARY_FOLDER)
    if args.trust_gin and (folder / shared_folder.CODE).is_dir():
        code = target / shared_folder.CODE
        shutil.copytree(folder / shared_folder.CODE, code)
        print_labeled_line('code', f'{code}; set PYTHONPATH={code} for commands that use it')
    text = f'{shared_folder.read_gin_text(folder)}\n{task_vocabulary.build_vocabulary_statements(target)}'
    run = {**record, 'config': text, 'converted_from': str(folder)}
    write_model_dir(target, params, step, run, text, model_dir.CONVERTED)


def export_transformers_model(
    checkpoint: str, target: str, dtype: str | None, model: Any, vocabulary: Any, requires_tokenizer: bool = False
) -> ModelFamily:
    """Writes a transformers model with weights of `dtype` (default: float32) to `target`, and returns its family.

    Raises UnsupportedModelError and writes no file if there is no equivalent model or, with `requires_tokenizer`, no
    equivalent tokenizer.
    """
    family = model_folders.find_equivalent_model(model, vocabulary, build_model_from_gin)
    if requires_tokenizer and not tokenizer_export.has_tokenizer(vocabulary, bool(family.id_offset)):
        raise UnsupportedModelError(f'Hugging Face has no tokenizer for this {type(vocabulary).__name__}')
    params = restore_params(checkpoint, model, vocabulary)
    dtype = dtype or 'float32'
    folder = model_folders.write_model_folder(target, family, params, dtype)
    print_labeled_line('wrote', f'{folder}, {dtype}')
    files = tokenizer_export.write_tokenizer(vocabulary, folder, bool(family.id_offset), family.tokenizer_outputs)
    print_labeled_line('tokenizer', files)
    params, source = safetensors_files.round_params(params, dtype), model_folders.open_model_folder(folder)
    check_no_array_differs(source.find_differing_weight(params), folder)
    print_labeled_line('check', 'all weights, read back from the output, equal those written')
    _compare_with_reference(source, model, params, vocabulary)
    return family


def export_any_model(args: argparse.Namespace, model: Any, vocabulary: Any) -> None:
    """Writes a transformers model, or weights and PyTorch code as a fallback (`--checkpoint=PATH --to_hf=DIR`).

    Raises UnsupportedModelError before writing any file if a module of the model has no PyTorch code.
    """
    try:
        export_transformers_model(args.checkpoint, args.to_hf, args.dtype, model, vocabulary)
        return
    except UnsupportedModelError as refusal:
        config = pytorch_export.to_config(model, vocabulary)
        print_labeled_line('code', f'{refusal.reason}, so PyTorch code is written next to the weights')
    folder = converted_checkpoint.check_folder_is_empty(args.to_hf)
    params = restore_params(args.checkpoint, model, vocabulary)
    dtype = args.dtype or 'float32'
    pytorch_export.write_pytorch_model(folder, config, params, dtype)
    print_labeled_line('wrote', f'{folder}, {dtype}')
    print_labeled_line('tokenizer', tokenizer_export.write_tokenizer(vocabulary, folder))
    if missing := model_folders.find_missing_packages():
        print_labeled_line('check', f'without {" and ".join(missing)}, logits are not compared; {INSTALL}')
    else:
        difference = pytorch_export.compare_logits(folder, model, safetensors_files.round_params(params, dtype))
        print_labeled_line('check', f'logits of the PyTorch code and ours differ by {difference}')
    auto_class = pytorch_export.MODEL_CLASSES[model.model_type][1]
    print_labeled_line('load', f'transformers.{auto_class}.from_pretrained({str(folder)!r}, trust_remote_code=True)')


def _compare_with_reference(source: model_folders.HuggingFaceFolder, model: Any, params: Any, vocabulary: Any) -> None:
    """Compares logits and token ids with transformers, if it is installed. Raises UserError if the logits differ."""
    if missing := model_folders.find_missing_packages():
        print_labeled_line('check', f'without {" and ".join(missing)}, logits are not compared; {INSTALL}')
        return
    difference = model_folders.describe_logits_difference(*model_folders.compute_logits_pair(source, model, params))
    print_labeled_line('check', f"logits of Hugging Face's model and ours differ by {difference}")
    print_labeled_line('check', model_folders.compare_token_ids(source.folder, vocabulary))


def get_or_convert_model_dir(path: str) -> pathlib.Path:
    """Returns the cached MODEL_DIR of the Hugging Face model `path`. Converts each revision or folder on first use."""
    source = lazy_imports.import_extra('hub.client').resolve_folder(path, print_labeled_line).resolve()
    # Subfolders contain, for example, the dense layers of sentence-transformers.
    files = sorted(str(file) for file in source.rglob('*') if file.is_file())
    key = cache.hash_cache_key(str(source), [cache.read_file_state(file) for file in files])
    folder = cache.get_cache_root() / 'huggingface' / key
    entry = folder.with_suffix('.state')
    with cache.lock_cache_entry(entry, path) as is_incomplete:
        if is_incomplete:
            # An interrupted conversion, or one whose check failed, may have left a complete checkpoint.
            shutil.rmtree(folder, ignore_errors=True)
            args = argparse.Namespace(from_hf=str(source), to=str(folder), vocabulary=None, trust_gin=None)
            convert_to_model_dir(args)
            cache.mark_entry_complete(entry)
    return folder
