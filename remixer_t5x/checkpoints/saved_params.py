"""Finds a checkpoint of another run and reads its parameters, into a model that may be on another mesh.

The adapters of a checkpoint of a run with adapters (`adapters.lora`) are next to the kernels; a model without adapters
gets the sums. A checkpoint that `convert --to_adapters` wrote has only the parameters that differ from another
checkpoint, its base: its record has the base's fingerprint under BASE, and the file BASE_FILE in its MODEL_DIR has the
base's path.
"""

import contextlib
import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from remixer_t5x import safe_paths, untrusted_files
from remixer_t5x.checkpoints import durable, model_changes, untrusted
from remixer_t5x.devices import collectives
from remixer_t5x.devices.partition import Partitioner, unbox
from remixer_t5x.errors import UserError
from remixer_t5x.models import interface, lora
from remixer_t5x.models.layers import dense
from remixer_t5x.optim import finite, parameter_averages
from remixer_t5x.run_folder import model_dir, object_store

# In the record: what identifies the base.
BASE = 'base'
# One line, the path of the base, from the folder that the file is in.
BASE_FILE = 'base.txt'
MOST_BYTES = 10_000
UNREADABLE = 'copy the checkpoint again, or use another'
Arrays = dict[str, jax.Array]


class Saved:
    """The arrays of a checkpoint and of its base by name, such as `encoder/run_0/layer/...`; averages in place of the
    last values, where the optimizer kept them (`parameter_averages`).

    Attributes:
        step: the folder of the checkpoint.
        record: the record of the run in it.
        shapes: shapes of all arrays; an array of the checkpoint has precedence over the base's.
    """

    def __init__(self, step: epath.Path, record: Mapping[str, Any], base: 'Saved | None' = None):
        self.step, self.record, self._base = step, record, base
        # Asked once: Orbax opens every array for it, each of which is a request to a bucket.
        self._state = saved_shapes(step / 'state')
        params = parameter_averages.PARAMS
        self.own = {name.removeprefix(params): x for name, x in self._state.items() if name.startswith(params)}
        self.shapes: dict[str, tuple[int, ...]] = {**(base.shapes if base else {}), **self.own}

    def shapes_for(self, names: Any) -> dict[str, tuple[int, ...]]:
        """`shapes` for a model that has the parameters `names`: without the adapters that are merged for it."""
        return {
            name: shape
            for name, shape in self.shapes.items()
            if name in names or not lora.is_adapter(name) or lora.kernel_of(name) not in names
        }

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        """The arrays of these names, all of which `shapes` has, in these shapes and shardings.

        Raises UserError if they cannot be read, durable.Damaged if a number is not finite.
        """
        here = {name: leaf for name, leaf in wanted.items() if name in self.own}
        found = self._base.read({n: leaf for n, leaf in wanted.items() if n not in here}) if self._base else {}
        merged = {name: lora.matrices_of(name) for name in wanted if self._is_merged(name, wanted)}
        matrices = {name: self._matrix(name, wanted[kernel]) for kernel, pair in merged.items() for name in pair}
        found |= self._read({**here, **matrices})
        for kernel, pair in merged.items():
            add = jax.jit(dense.merged, out_shardings=wanted[kernel].sharding, donate_argnums=0)
            found[kernel] = add(found[kernel], *(found.pop(name) for name in pair))
        return found

    def _is_merged(self, kernel: str, wanted: Mapping[str, Any]) -> bool:
        matrices = lora.matrices_of(kernel)
        return lora.kernel_of(kernel) == kernel and matrices[0] in self.own and not {*matrices} & wanted.keys()

    def _matrix(self, name: str, kernel: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """A matrix of an adapter, on every device of its kernel: it is small."""
        sharding = kernel.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(self.own[name], jnp.float32, sharding=sharding)

    def _read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        if not wanted:
            return {}
        saved = parameter_averages.saved_as(wanted, self._state)
        item = traverse_util.unflatten_dict(saved, sep='/')
        with user_errors(self.step, 'read'), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            restore_args = ocp.checkpoint_utils.construct_restore_args(item)
            args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
            found = traverse_util.flatten_dict(reader.restore(self.step / 'state', args=args), sep='/')
            params = parameter_averages.from_saved(found)
        check_finite(self.step, params)
        return params


def cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    if 'No space left' in str(error):
        return 'no space left on the disk'
    return object_store.reason(error)


@contextlib.contextmanager
def user_errors(path: epath.Path, done: str) -> Iterator[None]:
    """Converts errors of the checkpoint library into a UserError that says why `path` cannot be `done` ('read')."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = cause(error)
        if done == 'read' and isinstance(error, AttributeError | KeyError | TypeError | json.JSONDecodeError):
            reason = f'a file that describes it is damaged ({type(error).__name__}: {reason}); {UNREADABLE}'
        raise UserError(f'the checkpoint at {path} cannot be {done}: {reason}') from error


def verify(folder: epath.Path, listed: bool = False) -> None:
    """Raises durable.Damaged if a file of the checkpoint differs from what was written, UserError if it is malicious.

    `listed` requires a list of files. The first process reads the files for all processes.
    """
    damage = None
    model_dir.check_name(folder)
    if jax.process_index() == 0:
        safe_paths.check_inside(folder)
        try:
            if listed or (folder / durable.LIST).exists():
                durable.check(folder)
            # This comes after the comparison, or a damaged checkpoint would be reported as malicious.
            untrusted.check_descriptions(folder)
        except durable.Damaged as error:
            damage = str(error)
    damage = collectives.broadcast(damage)
    if damage:
        raise durable.Damaged(damage)


def check_finite(folder: epath.Path, tree: Any) -> None:
    """Raises durable.Damaged with the name of an array that contains NaN or infinity."""
    name = finite.first_nonfinite(tree)
    if name:
        raise durable.Damaged(f'the checkpoint at {folder} contains numbers that are not finite, first in {name}')


def array_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator='/'): tuple(leaf.shape) for path, leaf in leaves}


def saved_shapes(path: epath.Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the checkpoint's arrays by name, such as `params/encoder/run_0/layer/...`."""
    with user_errors(path, 'read'):
        found = ocp.StandardCheckpointer().metadata(path)
        described = getattr(found, 'item_metadata', found)
        if described is None:
            # Orbax has logged why, with a traceback.
            raise UserError(
                f'the checkpoint at {path.parent} cannot be read: _METADATA, _sharding or manifest.ocdbt in its folder '
                f'{path.name} is missing or damaged; {UNREADABLE}'
            )
        return array_shapes(described.tree)


def check_fit(checkpoint: epath.Path, saved: model_changes.Shapes, given: model_changes.Shapes) -> None:
    """Raises UserError with what differs between the arrays of a checkpoint and of the model, by their shapes."""
    if changes := model_changes.describe(saved, given):
        raise UserError(
            f'the checkpoint at {checkpoint} does not fit this model: {changes}; '
            'give the same model and sizes, or another checkpoint'
        )


def read_record(step: epath.Path) -> dict[str, Any]:
    """The record of the run in the checkpoint at `step`; does not read arrays."""
    with user_errors(step, 'read'):
        return untrusted_files.read_object(step / 'run' / 'metadata', UNREADABLE)


def fingerprint(step: epath.Path) -> str:
    """What identifies the checkpoint at `step` wherever it is: the hash of the list of its files' hashes."""
    with user_errors(step, 'read'):
        return hashlib.sha256(untrusted_files.read_bytes(step / durable.LIST)).hexdigest()


def base_path(step: epath.Path) -> epath.Path:
    """Where the base of the adapters in `step` is. Raises UserError if BASE_FILE does not say it."""
    file, advice = step.parent.parent / BASE_FILE, 'write the path of the base of these adapters into it'
    text = untrusted_files.read_text(file, advice, limit=MOST_BYTES).strip()
    if not text or not text.isprintable():
        raise UserError(f'{file} has not one line; {advice}')
    return epath.Path(text) if '://' in text or text.startswith('/') else file.parent / text


def abstract_params(model: Any, batch_shapes: Any, partitioner: Partitioner) -> Any:
    """Shapes and shardings of the float32 parameters, for `restore_params`. Does not compute any array."""
    boxed = interface.param_shapes(model, batch_shapes)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=sharding),
        unbox(boxed),
        partitioner.param_shardings(boxed),
    )


def find_step(path: str, setting: str = 'INITIAL_CHECKPOINT_PATH') -> epath.Path:
    """The folder of one checkpoint, from a MODEL_DIR or its `checkpoints` (then the newest step), or from one step's
    folder. Errors call the path `setting`.
    """
    given = model_dir.absolute(path)
    with object_store.reading(given):
        for folder in (given, given / model_dir.CHECKPOINTS):
            if is_complete(folder):
                return folder
            steps = steps_in(folder)
            if steps:
                return folder / str(steps[-1])
    raise UserError(f'{setting} {given} does not contain a checkpoint; {_nearest_checkpoint(given)}')


def steps_in(folder: epath.Path) -> list[int]:
    """Steps of the complete checkpoints directly in `folder`, oldest first."""
    with object_store.reading(folder):
        if not folder.is_dir():
            return []
        names = [child.name for child in folder.iterdir() if durable.is_step(child.name) and is_complete(child)]
    return sorted(map(int, names))


def is_complete(step: epath.Path) -> bool:
    """Whether the folder `step` is a checkpoint. Orbax is asked, because a folder in a bucket has its name before it is
    complete.
    """
    return (step / 'state').exists() and ocp.utils.is_checkpoint_finalized(step)


def _nearest_checkpoint(given: epath.Path) -> str:
    """What to type instead of `given`: a checkpoint with a similar name, or one in the folder above."""
    neighbours = steps_in(given.parent)
    if neighbours and durable.is_step(given.name):
        nearest = min(neighbours, key=lambda step: abs(step - int(given.name)))
        return f'the nearest that exists is {given.parent / str(nearest)}'
    others = [child for child in given.parent.iterdir() if child.is_dir()] if given.parent.is_dir() else []
    holding = {child.name: child for child in others if steps_in(child) or steps_in(child / model_dir.CHECKPOINTS)}
    close = difflib.get_close_matches(given.name, holding, n=1, cutoff=0.0)
    if close:
        return f'the nearest that does is {holding[close[0]]}'
    above = given.parent
    if above != given and (neighbours or steps_in(above / model_dir.CHECKPOINTS)):
        return f'the nearest that does is {above}'
    return 'give the MODEL_DIR of a run that saved one, or one of the folders in its `checkpoints`'


def opened(path: str, setting: str = 'INITIAL_CHECKPOINT_PATH') -> Saved:
    """The parameters of another run's checkpoint by name; `path` as in `find_step`. Reads no array.

    Raises UserError if `path` has no checkpoint, if it is damaged, or if the base of its adapters is not where it was.
    """
    step = find_step(path, setting)
    verify(step)
    if collectives.several():
        listed = (step / durable.LIST).exists()
        collectives.check_same({f'the checkpoint {step}': fingerprint(step) if listed else 'unlisted'})
    record = read_record(step)
    if BASE not in record:
        return Saved(step, record)
    place = base_path(step)
    base = find_step(str(place), f'the base of the adapters in {step.parent.parent}, by its {BASE_FILE},')
    if fingerprint(base) != record[BASE]:
        raise UserError(
            f'{base} is not the checkpoint that {step} adds to; write the path of that one into '
            f'{step.parent.parent / BASE_FILE}'
        )
    verify(base)
    # One level: `convert --to_adapters` compares whole parameters.
    return Saved(step, record, Saved(base, read_record(base)))


def check_vocabulary(saved: Saved, vocabulary: str, setting: str = 'INITIAL_CHECKPOINT_PATH') -> None:
    """Raises UserError if the checkpoint was trained with another vocabulary than that with the record `vocabulary`."""
    if saved.record.get('vocabulary') != vocabulary:
        raise UserError(
            f'{setting} {saved.step} was trained with vocabulary {saved.record.get("vocabulary")} and this '
            f'run has {vocabulary}; give the vocabulary it was trained with'
        )


def restore_params(
    path: str,
    abstract_params: Any,
    vocabulary: str | None = None,
    setting: str = 'INITIAL_CHECKPOINT_PATH',
) -> Any:
    """Only the parameters of another run's checkpoint, in the shapes and shardings of `abstract_params`: their average,
    if its optimizer kept one (`parameter_averages`). Adapters are merged, unless `abstract_params` has them.

    Raises UserError if `path` has no checkpoint, has another vocabulary or other shapes than this run, or is damaged;
    the error calls the path `setting`.
    """
    saved = opened(path, setting)
    if vocabulary is not None:
        check_vocabulary(saved, vocabulary, setting)
    wanted = traverse_util.flatten_dict(abstract_params, sep='/')
    check_fit(saved.step, saved.shapes_for(wanted), {name: leaf.shape for name, leaf in wanted.items()})
    return traverse_util.unflatten_dict(saved.read(wanted), sep='/')
