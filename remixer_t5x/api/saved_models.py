"""Loads trained models from a MODEL_DIR, a checkpoint, a Hugging Face folder, or the Hugging Face Hub."""

import contextlib
import dataclasses
import logging
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from remixer_t5x import lazy_imports
from remixer_t5x.api.token_batches import check_lengths
from remixer_t5x.api.trained_model import TrainedModel
from remixer_t5x.checkpoints import checkpoint_paths, compatibility, saved_params
from remixer_t5x.config import loading, reference_resolver, untrusted_gin
from remixer_t5x.data import batch_formats, pipeline, task_vocabulary
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError, to_one_line
from remixer_t5x.evaluate import checkpoint_ranking
from remixer_t5x.interop import shared_folder
from remixer_t5x.interop.huggingface import model_folders
from remixer_t5x.models.architecture.encoder_decoder import parse_dtype
from remixer_t5x.models.interface import Model
from remixer_t5x.run_folder import model_dir, object_store

# Default maximum numbers of tokens, for example for a Hugging Face folder that does not specify them.
DEFAULT_LENGTHS = {'inputs': 512, 'targets': 114}
# The name of the `path` argument in error messages.
PATH_SETTING = 'the path passed to load'


def load(
    path: str | os.PathLike[str],
    lengths: Mapping[str, int] | None = None,
    partitioner: Partitioner | None = None,
    vocabulary: str | None = None,
    trust_gin: bool = False,
    dtype: str | None = None,
) -> TrainedModel:
    """Loads a trained model with its parameters and vocabulary.

    **Loading a MODEL_DIR or a checkpoint runs code**: the model is rebuilt from the gin text that was saved with the
    run (`config.gin` or `model.gin` in MODEL_DIR), which can import any module and call any function. Read the gin
    file before you load a folder that someone else wrote. Loading a Hugging Face folder never runs code, and loading a
    shared folder runs code only with `trust_gin`. Replaces gin's global configuration.

    Args:
        path: a MODEL_DIR, a checkpoint such as `MODEL_DIR/checkpoints/1000` or `MODEL_DIR/best/TASK`, a Hugging Face
            folder with a supported model in safetensors (docs/interop.md), or a shared folder written by
            `convert --to_shared`. From a MODEL_DIR, the newest checkpoint is loaded or, if only best checkpoints exist,
            the best checkpoint of a task. `hf://NAME` downloads a Hugging Face folder or a shared folder from the Hub.
        lengths: maximum number of tokens of `inputs` and of `targets`; overrides the run's TASK_FEATURE_LENGTHS.
        partitioner: shards arrays across devices; None replicates the parameters on all devices of this machine.
        vocabulary: path of a SentencePiece model, a tokenizer.json or a vocab.txt, for a Hugging Face folder without a
            vocabulary.
        trust_gin: whether to load a shared folder whose model.gin refers to modules other than this package's models,
            and to import modules from the subfolder `code` of the shared folder.
        dtype: dtype of activations and parameters; 'bfloat16' halves the memory. None uses the run's DTYPE for
            activations and float32 for parameters.

    Raises:
        UserError: the folder, a checkpoint, the saved gin text, a module or a vocabulary is missing or damaged.
    """
    check_lengths(lengths)
    low_precision = None if dtype is None else parse_dtype(dtype)
    # Hide Orbax warnings about checkpoints without Orbax metadata, such as converted weights.
    logger, level = logging.getLogger('absl'), logging.getLogger('absl').level
    logger.setLevel(logging.ERROR)
    try:
        trained = _load_folder(os.fspath(path), partitioner or Partitioner(), vocabulary, trust_gin)
    finally:
        logger.setLevel(level)
    trained = dataclasses.replace(trained, lengths={**trained.lengths, **(lengths or {})})
    if low_precision is None:
        return trained
    model = dataclasses.replace(trained.model, module=trained.model.module.clone(dtype=low_precision.name))
    params = jax.tree.map(lambda array: jnp.asarray(array, low_precision), trained.params)
    return dataclasses.replace(trained, model=model, params=params)


def _load_folder(path: str, partitioner: Partitioner, vocabulary: str | None, trust_gin: bool) -> TrainedModel:
    advice = f'load({path!r}, trust_gin=True)'
    if path.startswith(shared_folder.HUB_SCHEME):
        path = str(lazy_imports.import_extra('hub.client').resolve_folder(path))
    folder = model_dir.to_absolute_path(path)
    with object_store.wrap_read_errors(folder):
        if not folder.is_dir():
            raise UserError(
                f'{folder} is not a folder; use a MODEL_DIR, a checkpoint, a Hugging Face folder, or hf://NAME for a '
                'model on the Hub, or convert a .safetensors file with `convert --from_safetensors`'
            )
        is_hugging_face = (folder / model_folders.CONFIG).is_file() and not checkpoint_paths.list_steps(
            folder / model_dir.CHECKPOINTS
        )
    is_shared = is_hugging_face and shared_folder.is_shared_folder(pathlib.Path(folder))
    if is_hugging_face and not is_shared:
        return _load_hugging_face_folder(str(folder), partitioner, vocabulary)
    if vocabulary is not None:
        raise UserError(f'{folder} contains a vocabulary, so vocabulary must be None, got {vocabulary}; omit it')
    if is_shared:
        check_shared_folder(pathlib.Path(folder), trust_gin, advice)
        return _load_shared_folder(pathlib.Path(folder), partitioner, trust_gin)
    checkpoint = find_checkpoint(str(folder))
    model, vocab, run_lengths = read_model(checkpoint)
    params = restore_params(checkpoint, model, vocab, partitioner)
    lengths = saved_params.read_record(epath.Path(checkpoint)).get(saved_params.LENGTHS_KEY)
    return _build_trained_model(model, params, vocab, checkpoint, partitioner, run_lengths, lengths)


def check_shared_folder(folder: pathlib.Path, trust_gin: bool, advice: str) -> None:
    """Raises UserError if a shared folder lacks files or, unless `trust_gin` is true, refers to foreign code.

    Foreign code is code other than this package's models. The error message ends with `advice`: the call or command
    that loads the folder despite this code.
    """
    shared_folder.check_shared_folder(folder)
    file, text = folder / shared_folder.GIN, shared_folder.read_gin_text(folder)
    if not trust_gin and (foreign := untrusted_gin.find_disallowed_statement(text, str(file))):
        raise UserError(
            f'{file} refers to {to_one_line(foreign):.200}, which is not part of the models of this package, and gin '
            f'files can run code; read the file and, if you trust it, use {advice}'
        )


def read_model(checkpoint: str) -> tuple[Any, Any, Mapping[str, int]]:
    """Reads the model, the vocabulary and TASK_FEATURE_LENGTHS from the gin file of the run that wrote `checkpoint`."""
    with ensure_local_gin_file(checkpoint) as gin_file:
        return _read_gin_file(gin_file, task_vocabulary.get_saved_vocabulary_flags(require_model_dir(checkpoint)))


def _read_gin_file(gin_file: str, flags: Sequence[tuple[str, str]] = ()) -> tuple[Any, Any, Mapping[str, int]]:
    """Returns the model (with gin text in `config`), vocabulary and feature lengths configured by a gin file."""
    sources = loading.ConfigSources(
        [gin_file], flags, defaults={'VOCABULARY': None, 'TASK_FEATURE_LENGTHS': DEFAULT_LENGTHS}
    )
    model, vocabulary, lengths = loading.load_macro_values(sources, 'MODEL', *sources.defaults, only_roots=True)
    if vocabulary is None:
        loading.load_gin_config(sources, '%MODEL')
        vocabulary = pipeline.get_vocabulary(reference_resolver.call_configured(pipeline.DatasetConfig, 'train'))
    if isinstance(model, Model):
        loading.load_gin_config(dataclasses.replace(sources, flags=()), '%MODEL', only_roots=True)
        model = dataclasses.replace(model, config=loading.get_config_text())
    return model, vocabulary, lengths


def restore_params(checkpoint: str, model: Any, vocabulary: Any, partitioner: Partitioner) -> Any:
    """Restores parameters to the partitioner's devices. Raises UserError if the parameters do not fit the model."""
    record = task_vocabulary.get_vocabulary_record(vocabulary)
    return saved_params.restore_params(checkpoint, get_abstract_params(model, partitioner), record, PATH_SETTING)


def get_abstract_params(model: Any, partitioner: Partitioner | None = None) -> Any:
    """Returns the shapes and shardings of the model's parameters, which do not depend on the batch shapes."""
    return saved_params.get_abstract_params(
        model, batch_formats.get_smallest_batch_shapes(model.model_type), partitioner or Partitioner()
    )


def find_checkpoint(path: str) -> str:
    """Returns the newest checkpoint at `path`, or the best checkpoint of a task if there is no other checkpoint."""
    try:
        return str(checkpoint_paths.find_checkpoint(path, PATH_SETTING))
    except UserError:
        if not (best_checkpoints := checkpoint_ranking.find_best_checkpoints(path)):
            raise
        return str(next(iter(best_checkpoints.values()))['path'])


@contextlib.contextmanager
def ensure_local_gin_file(checkpoint: str) -> Iterator[str]:
    """Yields the path of the gin file in the MODEL_DIR of `checkpoint` or, for a bucket, the path of a local copy."""
    run = require_model_dir(checkpoint)
    file = model_dir.find_gin_file(run)
    if file is None:
        names = f'{model_dir.CONFIG} or {model_dir.CONVERTED}'
        raise UserError(f'{run} must contain {names}, which describes the model, got neither; copy the whole folder')
    if not object_store.is_remote(file):
        yield str(file)
        return
    with tempfile.TemporaryDirectory() as folder:
        with object_store.wrap_read_errors(file):
            copy = file.copy(epath.Path(folder) / file.name)
        yield str(copy)


def require_model_dir(checkpoint: str) -> epath.Path:
    """Returns the MODEL_DIR that contains `checkpoint`. Raises UserError if the checkpoint is not in a MODEL_DIR."""
    folder = model_dir.find_model_dir(checkpoint)
    if folder is None:
        raise UserError(
            f'{checkpoint} must be inside a MODEL_DIR, whose {model_dir.CONFIG} describes the model; copy the whole '
            'MODEL_DIR'
        )
    return folder


def _build_trained_model(
    model: Any,
    params: Any,
    vocabulary: Any,
    source: str,
    partitioner: Partitioner,
    run_lengths: Mapping[str, int],
    max_lengths: Mapping[str, int] | None = None,
) -> TrainedModel:
    lengths = {**batch_formats.get_max_inference_lengths(run_lengths), **(max_lengths or {})}
    return TrainedModel(model, params, vocabulary, lengths, source, partitioner, ends_inputs='inputs' in run_lengths)


def _load_shared_folder(folder: pathlib.Path, partitioner: Partitioner, trust_gin: bool) -> TrainedModel:
    arrays, _, record = shared_folder.read_checkpoint(folder)
    # Without `trust_gin`, the modules in `code` must not be importable.
    with shared_folder.make_code_importable(folder) if trust_gin else contextlib.nullcontext():
        model, vocabulary, run_lengths = _read_gin_text(
            shared_folder.read_gin_text(folder), task_vocabulary.get_saved_vocabulary_flags(folder)
        )
    vocabulary_record = task_vocabulary.get_vocabulary_record(vocabulary)
    if record['vocabulary'] != vocabulary_record:
        raise UserError(
            f'the model in {folder} was trained with vocabulary {record["vocabulary"]}, but the folder contains '
            f'{vocabulary_record}; download the folder again'
        )
    abstract = get_abstract_params(model, partitioner)
    shapes = (shared_folder.map_names_to_shapes(tree) for tree in (arrays, abstract))
    if difference := compatibility.describe_shape_difference(*shapes):
        raise UserError(f'the parameters in {folder} do not fit the model in its {shared_folder.GIN}: {difference}')
    params = _put_params_on_devices(arrays, abstract)
    saved_params.check_arrays_finite(folder, params)
    return _build_trained_model(
        model, params, vocabulary, str(folder), partitioner, run_lengths, record.get(saved_params.LENGTHS_KEY)
    )


def _load_hugging_face_folder(path: str, partitioner: Partitioner, vocabulary_path: str | None) -> TrainedModel:
    source = model_folders.open_model_folder(path)
    function, arguments = source.family.find_tokenizer(source.folder, vocabulary_path)
    flags = task_vocabulary.build_vocabulary_flags(function, **arguments)
    model, vocabulary, run_lengths = _read_gin_text(source.family.build_gin_text(f'Made from {path}.'), flags)
    source.family.check_vocabulary(vocabulary, path)
    abstract = get_abstract_params(model, partitioner)
    params = _put_params_on_devices(source.read_params(abstract), abstract)
    return _build_trained_model(model, params, vocabulary, path, partitioner, run_lengths, source.family.max_lengths)


def _read_gin_text(text: str, flags: Sequence[tuple[str, str]] = ()) -> tuple[Any, Any, Mapping[str, int]]:
    """Returns the model, vocabulary and feature lengths configured by trusted gin text."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, model_dir.CONVERTED)
        file.write_text(text, encoding='utf-8')
        return _read_gin_file(str(file), flags)


def _put_params_on_devices(params: Any, abstract: Any) -> Any:
    return jax.tree.map(lambda array, leaf: jax.device_put(array, leaf.sharding), params, abstract)
