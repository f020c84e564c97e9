"""The parameters that a checkpoint gives to a model: with its adapters merged, and with the base that it adds to.

A checkpoint of a run with adapters (`adapters.lora`) has their matrices next to the kernels; a model without adapters
gets the sums. A checkpoint that `convert --to_adapters` wrote has only the parameters that differ from another
checkpoint, its base: its record says so under BASE, and the file BASE_FILE in its MODEL_DIR says where the base is.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from remixer_t5x import untrusted_files
from remixer_t5x.checkpoints import durable, manager
from remixer_t5x.errors import UserError
from remixer_t5x.models import lora
from remixer_t5x.models.layers import dense
from remixer_t5x.optim import parameter_averages

# In the record: what identifies the base.
BASE = 'base'
# One line, the path of the base, from the folder that the file is in.
BASE_FILE = 'base.txt'
MOST_BYTES = 10_000
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
        self._state = manager.saved_shapes(step / 'state')
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
        with manager.user_errors(self.step, 'read'), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            restore_args = ocp.checkpoint_utils.construct_restore_args(item)
            args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
            found = traverse_util.flatten_dict(reader.restore(self.step / 'state', args=args), sep='/')
            params = parameter_averages.from_saved(found)
        manager.check_finite(self.step, params)
        return params


def read_record(step: epath.Path) -> dict[str, Any]:
    """The record of the run in the checkpoint at `step`; does not read arrays."""
    with manager.user_errors(step, 'read'):
        return untrusted_files.read_object(step / 'run' / 'metadata', manager.UNREADABLE)


def fingerprint(step: epath.Path) -> str:
    """What identifies the checkpoint at `step` wherever it is: the hash of the list of its files' hashes."""
    with manager.user_errors(step, 'read'):
        return hashlib.sha256(untrusted_files.read_bytes(step / durable.LIST)).hexdigest()


def base_path(step: epath.Path) -> epath.Path:
    """Where the base of the adapters in `step` is. Raises UserError if BASE_FILE does not say it."""
    file, advice = step.parent.parent / BASE_FILE, 'write the path of the base of these adapters into it'
    text = untrusted_files.read_text(file, advice, limit=MOST_BYTES).strip()
    if not text or not text.isprintable():
        raise UserError(f'{file} has not one line; {advice}')
    return epath.Path(text) if '://' in text or text.startswith('/') else file.parent / text
