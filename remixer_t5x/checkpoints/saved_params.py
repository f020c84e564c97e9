"""Finds checkpoints and restores their parameters on any mesh.

LoRA checkpoints (`models.lora`) contain adapters, which are merged into the kernels if the model has no adapters. A
checkpoint written by `convert --to_adapters` contains only the parameters that differ from those of another checkpoint,
its base. The run record of such a checkpoint contains the fingerprint and a parameter hash of the base, and `base.txt`
in MODEL_DIR contains the path of the base.
"""

import contextlib
import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from remixer_t5x import untrusted_files
from remixer_t5x.checkpoints import checkpoint_paths, compatibility, durable_folders, untrusted_checkpoints
from remixer_t5x.devices import collectives
from remixer_t5x.devices.partition import Partitioner, unbox
from remixer_t5x.errors import UserError, to_one_line
from remixer_t5x.models import interface, lora
from remixer_t5x.models.layers import dense
from remixer_t5x.optim import parameter_averages, train_state
from remixer_t5x.run_folder import model_dir, object_store

# Keys in the run records of adapter checkpoints: the fingerprint of the base, the hash of its parameters, the Hugging
# Face model that `--from_hf` converted to the base in the cache, and the base's arrays that the model does not have.
BASE_KEYS = 'base', 'base_params', 'base_source', 'base_unused'
BASE_KEY, BASE_PARAMS_KEY, BASE_SOURCE_KEY, BASE_UNUSED_KEY = BASE_KEYS
# Key in the record of a model saved from Python for the maximum numbers of tokens, which TASK_FEATURE_LENGTHS does not
# determine: a causal language model has one length for prompt and answer, and the model's gin text may set the lengths
# of its run.
LENGTHS_KEY = 'lengths'
# File in MODEL_DIR with the path of the base checkpoint. The path is absolute or relative to MODEL_DIR.
BASE_FILE = 'base.txt'
# File in a checkpoint folder with the run record, which Orbax writes for the item `run`.
RUN_RECORD = 'run/metadata'
UNREADABLE_ADVICE = 'copy the checkpoint again, or use another'
Arrays = dict[str, jax.Array]


class SavedParams:
    """Reads named parameters, such as `encoder/run_0/layer/...`, from a checkpoint and its base.

    `step` is the folder of the checkpoint, and `record` is its run record. Arrays in the checkpoint take precedence
    over arrays in the base. If the optimizer averages parameters (`parameter_averages`), the averages are used.
    """

    def __init__(self, step: epath.Path, record: Mapping[str, Any], base: 'SavedParams | None' = None):
        self.step, self.record, self._base = step, record, base
        # Read the shapes only once, because Orbax sends a separate request to the bucket for each array.
        self._state = read_saved_shapes(step / 'state')
        params = parameter_averages.PARAMS
        self.saved_shapes = {
            name.removeprefix(params): shape for name, shape in self._state.items() if name.startswith(params)
        }
        self.shapes: dict[str, tuple[int, ...]] = {**(base.shapes if base else {}), **self.saved_shapes}
        for name in record.get(BASE_UNUSED_KEY, ()):
            self.shapes.pop(name, None)

    def select_shapes(self, names: Any) -> dict[str, tuple[int, ...]]:
        """Returns `shapes` without adapters that are not in `names`. Loading merges the omitted adapters."""
        return {
            name: shape
            for name, shape in self.shapes.items()
            if name in names or not lora.is_adapter(name) or lora.get_adapted_kernel_name(name) not in names
        }

    def read(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        """Reads the arrays named in `abstract`, with the given shapes and shardings. All names must be in `shapes`.

        Raises UserError if an array cannot be read, and durable_folders.DamagedCheckpointError if it contains NaN or
        infinity.
        """
        in_checkpoint = {name: leaf for name, leaf in abstract.items() if name in self.saved_shapes}
        in_base = {name: leaf for name, leaf in abstract.items() if name not in in_checkpoint}
        arrays = self._base.read(in_base) if self._base else {}
        merged, matrices = {}, {}
        for kernel in abstract:
            pair, sharding = lora.get_adapter_names(kernel), abstract[kernel].sharding
            if (
                lora.get_adapted_kernel_name(kernel) != kernel
                or pair[0] not in self.saved_shapes
                or {*pair} & abstract.keys()
            ):
                continue
            merged[kernel] = pair
            # Replicate adapter matrices on all devices that hold the kernel, because the matrices are small.
            if isinstance(sharding, NamedSharding):
                sharding = NamedSharding(sharding.mesh, PartitionSpec())
            for name in pair:
                matrices[name] = jax.ShapeDtypeStruct(self.saved_shapes[name], jnp.float32, sharding=sharding)
        arrays |= self._read_arrays({**in_checkpoint, **matrices})
        for kernel, pair in merged.items():
            add = jax.jit(dense.merge_adapter, out_shardings=abstract[kernel].sharding, donate_argnums=0)
            arrays[kernel] = add(arrays[kernel], *(arrays.pop(name) for name in pair))
        return arrays

    def read_on_one_device(self, shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
        """Reads arrays as float32 to one device; `shapes` maps their names to shapes. Raises like `read`."""
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return self.read({n: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=device) for n, shape in shapes.items()})

    def _read_arrays(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        if not abstract:
            return {}
        item = traverse_util.unflatten_dict(parameter_averages.select_saved_arrays(abstract, self._state), sep='/')
        with (
            checkpoint_paths.report_removal(self.step),
            wrap_checkpoint_errors(self.step, 'read'),
            ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader,
        ):
            restore_args = ocp.checkpoint_utils.construct_restore_args(item)
            args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
            arrays = traverse_util.flatten_dict(reader.restore(self.step / 'state', args=args), sep='/')
            params = parameter_averages.compute_eval_params(arrays)
        check_arrays_finite(self.step, params)
        return params


def describe_root_cause(error: BaseException) -> str:
    """Describes the original exception at the start of a chain of exceptions."""
    while error.__cause__ is not None:
        error = error.__cause__
    if 'No space left' in str(error):
        return 'no space left on the disk'
    return object_store.describe_error(error)


@contextlib.contextmanager
def wrap_checkpoint_errors(path: epath.Path, operation: str) -> Iterator[None]:
    """Converts Orbax errors to a UserError that names `path` and the failed `operation`, such as 'read'.

    Does not convert failed connections to other processes.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if collectives.is_connection_error(error):
            raise
        reason = describe_root_cause(error)
        if operation == 'read' and isinstance(error, AttributeError | KeyError | TypeError | json.JSONDecodeError):
            reason = f'one of its metadata files is damaged ({type(error).__name__}: {reason}); {UNREADABLE_ADVICE}'
        raise UserError(f'the checkpoint at {path} cannot be {operation}: {reason}') from error


def verify_checkpoint_files(folder: epath.Path) -> None:
    """Checks the files of a checkpoint in the first process, before any process reads them.

    Does nothing for a bucket. Raises durable_folders.DamagedCheckpointError if a file is damaged, and UserError if a
    link or a listed file name points outside of the folder. A checkpoint copied from a bucket has no list of files.
    """
    damage = None
    if jax.process_index() == 0 and not object_store.is_remote(folder):
        untrusted_files.check_links_inside(folder)
        try:
            if (folder / durable_folders.FILE_LIST).exists():
                durable_folders.verify_file_checksums(folder)
            elif not (folder / RUN_RECORD).exists():
                raise durable_folders.DamagedCheckpointError(
                    f'the checkpoint at {folder} is damaged: {RUN_RECORD} is missing'
                )
            # Check the checksums first, so that a damaged array description is reported as damage.
            untrusted_checkpoints.check_array_metadata(folder)
        except durable_folders.DamagedCheckpointError as error:
            damage = str(error)
    if damage := collectives.broadcast(damage):
        raise durable_folders.DamagedCheckpointError(damage)


def check_arrays_finite(folder: epath.Path, tree: Any) -> None:
    """Raises durable_folders.DamagedCheckpointError if an array contains NaN or infinity."""
    if not bool(train_state.all_finite(tree)):
        raise durable_folders.DamagedCheckpointError(f'the checkpoint at {folder} contains NaN or infinity')


def get_array_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Maps the name of each array in a tree, such as `params/encoder/run_0/layer/...`, to the array's shape.

    The shape of a PRNG key, such as in the state of `optax.add_noise`, is that of its key data, because a checkpoint
    stores the key data.
    """
    shapes = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        data = jax.eval_shape(jax.random.key_data, leaf) if is_key else leaf
        shapes[jax.tree_util.keystr(path, simple=True, separator='/')] = tuple(data.shape)
    return shapes


def read_saved_shapes(path: epath.Path) -> dict[str, tuple[int, ...]]:
    """Maps the name of each array saved at `path`, such as `params/encoder/run_0/...`, to its shape."""
    with wrap_checkpoint_errors(path, 'read'):
        metadata = ocp.StandardCheckpointer().metadata(path)
        described = getattr(metadata, 'item_metadata', metadata)
        if described is None:
            # If Orbax cannot read the metadata, it returns None and logs the reason with a traceback.
            raise UserError(
                f'the checkpoint at {path.parent} cannot be read: _METADATA, _sharding or manifest.ocdbt in its folder '
                f'{path.name} is missing or damaged; {UNREADABLE_ADVICE}'
            )
        return get_array_shapes(described.tree)


def check_shapes_fit_model(
    checkpoint: epath.Path,
    saved: compatibility.Shapes,
    current: compatibility.Shapes,
    advice: str = 'use the same model and sizes, or another checkpoint',
) -> None:
    """Raises UserError if the names or shapes of a checkpoint's arrays differ from the model's."""
    if difference := compatibility.describe_shape_difference(saved, current):
        raise UserError(f'the checkpoint at {checkpoint} does not fit this model: {difference}; {advice}')


def read_record(step: epath.Path) -> dict[str, Any]:
    """Reads the run record from the checkpoint folder `step`, without reading arrays."""
    with wrap_checkpoint_errors(step, 'read'):
        return untrusted_files.read_json_object(step / RUN_RECORD, UNREADABLE_ADVICE)


def fingerprint_checkpoint(step: epath.Path) -> str:
    """Returns the SHA-256 of the manifest of the arrays. Copies of a checkpoint have the same fingerprint."""
    with wrap_checkpoint_errors(step, 'read'):
        return hashlib.sha256(untrusted_files.read_bytes(step / 'state' / 'manifest.ocdbt')).hexdigest()


def hash_params(arrays: Mapping[str, Any]) -> str:
    """Returns a SHA-256 hash of named parameters. Repeated conversions of the same weights have the same hash."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(np.asarray(arrays[name]).tobytes())
    return digest.hexdigest()


def read_base_path(step: epath.Path) -> epath.Path:
    """Reads the base path of the adapter checkpoint `step` from BASE_FILE. Raises UserError if the file is missing."""
    file, advice = step.parent.parent / BASE_FILE, 'write the path of the base checkpoint into it'
    text = untrusted_files.read_text(file, advice).strip()
    if not text or not text.isprintable():
        raise UserError(f'{file} must contain one line; {advice}')
    return epath.Path(text) if '://' in text or text.startswith('/') else file.parent / text


def get_abstract_params(model: Any, batch_shapes: Any, partitioner: Partitioner) -> Any:
    """Returns the shapes and shardings of a model's float32 parameters, without initializing them."""
    boxed = interface.compute_param_shapes(model, batch_shapes)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=sharding),
        unbox(boxed),
        partitioner.param_shardings(boxed),
    )


def open_checkpoint(path: str, setting: str = 'INITIAL_CHECKPOINT_PATH') -> SavedParams:
    """Verifies the checkpoint at `path`, or the newest one in a MODEL_DIR, and reads the run record, but no arrays.

    Raises UserError if the checkpoint is missing or damaged, or if the base of its adapters cannot be found.
    """
    step = checkpoint_paths.find_checkpoint(path, setting)
    model_dir.check_checkpoint_path(step)
    with checkpoint_paths.report_removal(step):
        verify_checkpoint_files(step)
        if collectives.is_distributed():
            collectives.check_same_on_processes({f'the checkpoint {step}': fingerprint_checkpoint(step)})
        record = read_record(step)
        return SavedParams(step, record, _open_base_checkpoint(step, record) if BASE_KEY in record else None)


def _open_base_checkpoint(step: epath.Path, record: Mapping[str, Any]) -> SavedParams:
    file = step.parent.parent / BASE_FILE
    try:
        base = checkpoint_paths.find_checkpoint(str(read_base_path(step)), f'{file} refers to a base checkpoint, but')
    except UserError as error:
        if BASE_SOURCE_KEY not in record:
            raise
        # Quote the name, because it comes from an adapter checkpoint, which may be untrusted.
        source = shlex.quote(to_one_line(str(record[BASE_SOURCE_KEY])))
        command = f'remixer-t5x convert --from_hf={source} --to=MODEL_DIR'
        raise UserError(
            f'{error}; to convert the base model again, run {command}, and write the path of that MODEL_DIR to {file}'
        ) from error
    verify_checkpoint_files(base)
    # The base is never an adapter checkpoint, because `convert --to_adapters` compares complete sets of parameters.
    saved = SavedParams(base, read_record(base))
    if fingerprint_checkpoint(base) != record[BASE_KEY]:
        shapes = saved.select_shapes({name for name in saved.shapes if not lora.is_adapter(name)})
        if hash_params(saved.read_on_one_device(shapes)) != record.get(BASE_PARAMS_KEY):
            raise UserError(
                f'{base} is not the base checkpoint of the adapters in {step}; write the path of the correct base '
                f'checkpoint to {file}'
            )
    return saved


def check_same_vocabulary(saved: SavedParams, vocabulary: str, setting: str = 'INITIAL_CHECKPOINT_PATH') -> None:
    """Raises UserError if the vocabulary record of the checkpoint differs from `vocabulary`."""
    if saved.record.get('vocabulary') != vocabulary:
        raise UserError(
            f'{setting} {saved.step} was trained with vocabulary {saved.record.get("vocabulary")}, but this run uses '
            f'{vocabulary}; use the vocabulary of the checkpoint'
        )


def restore_params(
    path: str,
    abstract_params: Any,
    vocabulary: str | None = None,
    setting: str = 'INITIAL_CHECKPOINT_PATH',
) -> Any:
    """Restores the parameters of a checkpoint with the shapes and shardings of `abstract_params`.

    If the optimizer averages parameters (`parameter_averages`), the averages are restored. Adapters that are not in
    `abstract_params` are merged into their kernels.

    Raises UserError if `path` contains no checkpoint, or if the checkpoint is damaged or has a different vocabulary or
    different shapes. `setting` is the text before the path in error messages.
    """
    saved = open_checkpoint(path, setting)
    if vocabulary is not None:
        check_same_vocabulary(saved, vocabulary, setting)
    abstract = traverse_util.flatten_dict(abstract_params, sep='/')
    check_shapes_fit_model(
        saved.step, saved.select_shapes(abstract), {name: leaf.shape for name, leaf in abstract.items()}
    )
    return traverse_util.unflatten_dict(saved.read(abstract), sep='/')
