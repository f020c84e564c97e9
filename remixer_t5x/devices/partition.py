"""Shards arrays over a mesh of `data` x `fsdp` x `tensor` using rules that map logical axis names to mesh axes.

`data` shards the rows of a batch and replicates parameters. `fsdp` shards the rows and the parameters, which are
gathered before use. `tensor` shards the hidden axes of a layer. As in `flax.linen.logical_axis_rules`, the rules are
pairs (logical name, mesh axes), earlier pairs take precedence, and each array uses a mesh axis at most once.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from remixer_t5x.devices import mesh as meshes
from remixer_t5x.devices.mesh import MESH_AXES
from remixer_t5x.errors import UserError

Rules = Sequence[tuple[str, str | tuple[str, ...] | None]]

# Axes without a rule are replicated. `activation_embed` has a different rule than `embed`, because the batch rows of
# activations already use `fsdp`.
DEFAULT_RULES: Rules = (
    ('batch', ('data', 'fsdp')),
    ('vocab', 'tensor'),
    ('mlp', 'tensor'),
    ('heads', 'tensor'),
    ('joined_kv', 'tensor'),
    ('kv', None),
    ('token_mlp', 'tensor'),
    ('embed', 'fsdp'),
    ('activation_embed', None),
    ('layers', None),
    ('length', None),
    ('lora_rank', None),
    ('outputs', None),
    ('mechanisms', None),
    ('positions_in', None),
    ('positions_out', None),
    ('relpos_buckets', None),
)


class ShardingRow(NamedTuple):
    """A parameter's row in `Partitioner.list_sharding_rows`. `note` states why an axis is replicated, or is empty."""

    name: str
    shape: tuple[int, ...]
    logical_axes: tuple[str | None, ...]
    mesh_axes: tuple[Any, ...]
    bytes_per_device: int
    note: str


@dataclasses.dataclass(frozen=True)
class Partitioner:
    """A device mesh and the rules that map logical axes to mesh axes.

    Attributes:
        data, fsdp, tensor: sizes of the mesh axes. At most one may be -1, which means all remaining devices.
        sizes: the mesh sizes as a string, such as 'data=2,fsdp=4', instead of `data`, `fsdp` and `tensor`.
        rules: pairs (logical axis, mesh axes), where the mesh axes are a name, several names or None. Earlier pairs
            take precedence.
        extra_rules: pairs that take precedence over `rules`, so that gin can change individual rules.
        devices: the devices to use, in JAX's order; None uses all. A number creates an abstract mesh of this size,
            which supports shardings and tables but cannot run programs. The first use of the mesh raises UserError if
            the mesh sizes do not match the devices or their slices.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    rules: Rules = DEFAULT_RULES
    extra_rules: Rules = ()
    devices: Sequence[jax.Device] | int | None = None
    sizes: str | None = None

    def __post_init__(self):
        sizes = (self.data, self.fsdp, self.tensor)
        if self.sizes is not None and sizes != (-1, 1, 1):
            raise UserError(
                f'MESH must be None if Partitioner.data, fsdp, tensor are set ({", ".join(map(str, sizes))}), got '
                f'{self.sizes!r}; use only MESH = {meshes.format_mesh_sizes(sizes)!r}'
            )
        for name, axes in self.all_rules:
            if unknown := {*_axes_as_tuple(axes)} - {*MESH_AXES}:
                raise UserError(
                    f'Partitioner.extra_rules and rules must map {name} to mesh axes ({", ".join(MESH_AXES)}), got '
                    f"{', '.join(sorted(unknown))}; write, for example, ('mlp', 'tensor')"
                )

    @property
    def all_rules(self) -> tuple[tuple[str, Any], ...]:
        """All rules in order of precedence, with hashable mesh axes: lists from gin are converted to tuples."""
        return tuple(
            (name, tuple(axes) if isinstance(axes, list | tuple) else axes)
            for name, axes in (*self.extra_rules, *self.rules)
        )

    @property
    def axis_sizes(self) -> tuple[int, int, int]:
        """The configured sizes of the mesh axes, which may include -1."""
        return (self.data, self.fsdp, self.tensor) if self.sizes is None else meshes.parse_mesh_sizes(self.sizes)

    @functools.cached_property
    def mesh(self) -> Mesh | AbstractMesh:
        """The device mesh with the axes `data`, `fsdp` and `tensor`. The mesh is abstract if `devices` is a number."""
        if isinstance(self.devices, int):
            return meshes.build_abstract_mesh(meshes.resolve_mesh_shape(self.axis_sizes, self.devices))
        devices = list(jax.devices() if self.devices is None else self.devices)
        return meshes.build_mesh(meshes.resolve_mesh_shape(self.axis_sizes, len(devices)), devices)

    @contextlib.contextmanager
    def activate_mesh(self) -> Iterator[Mesh]:
        """Makes logical constraints and PartitionSpecs in the block use this mesh. Enter the context outside of jit."""
        with jax.set_mesh(self.mesh), nn.logical_axis_rules(self.all_rules):
            yield self.mesh

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that shard the rows of a batch."""
        return next((_axes_as_tuple(axes) for name, axes in self.all_rules if name == 'batch'), ())

    @property
    def batch_shards(self) -> int:
        """The number of shards of the rows of a global batch."""
        return math.prod(self.mesh.shape[axis] for axis in self.batch_axes)

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of arrays whose first axis is the batch."""
        return NamedSharding(self.mesh, PartitionSpec(self.batch_axes or None))

    @property
    def replicated_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def check_batch_size(self, batch_size: int, microbatches: int = 1) -> None:
        """Raises UserError unless each microbatch can be split evenly over the batch shards."""
        multiple = self.batch_shards * microbatches
        if batch_size < 1 or batch_size % multiple:
            sizes = ' x '.join(f'{axis}={self.mesh.shape[axis]}' for axis in self.batch_axes)
            raise UserError(
                f'BATCH_SIZE must be a multiple of {multiple} for a mesh of {sizes} and MICROBATCHES = {microbatches}, '
                f'got {batch_size}; use {multiple * max(1, round(batch_size / multiple))}'
            )

    def get_data_shard(self) -> tuple[int, int]:
        """Returns (index, count): this process passes share `index` of `count` of each global batch to `shard_batch`.

        Processes that differ only along `tensor` load the same rows, so `count` may be less than the number of
        processes.
        """
        batch_axes = [MESH_AXES.index(axis) for axis in self.batch_axes]
        others = [i for i in range(len(MESH_AXES)) if i not in batch_axes]
        processes = np.vectorize(lambda device: device.process_index, otypes=[int])(self.mesh.devices)
        processes = processes.transpose(*batch_axes, *others).reshape(self.batch_shards, -1)
        return find_process_share(processes, jax.process_index())

    def shard_batch(self, host_batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Creates global arrays from this process's rows of each array, of shape [batch / get_data_shard()[1], ...]."""
        sharding = self.batch_sharding
        return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in host_batch.items()}

    def param_shardings(self, boxed_params: Any) -> Any:
        """Returns a tree with the NamedSharding of each unboxed parameter.

        `boxed_params` contains arrays or ShapeDtypeStructs in flax's `Partitioned` boxes. Leaves without a box are
        replicated, and so are axes that are not divisible by their mesh axes; `list_sharding_rows` lists these axes.
        """
        return jax.tree.map(
            lambda leaf: NamedSharding(self.mesh, self._build_partition_spec(leaf)[0]), boxed_params, is_leaf=is_boxed
        )

    def state_shardings(self, init: Callable[[Any], Any], params: Any, param_shardings: Any) -> Any:
        """Returns the shardings of the optimizer state `init(params)`; `params` contains shapes.

        If the path of a leaf ends with the path of a parameter of the same shape, the leaf is a moment and is sharded
        like the parameter. JAX's sharding types determine the sharding of all other leaves: factored moments keep the
        sharding of their remaining axes, and counters are replicated.
        """
        explicit = meshes.build_abstract_mesh(tuple(self.mesh.shape.values()), AxisType.Explicit)

        def attach_sharding(leaf, sharding):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(explicit, sharding.spec))

        with jax.sharding.use_abstract_mesh(explicit):
            typed = jax.eval_shape(init, jax.tree.map(attach_sharding, params, param_shardings))
        shardings = jax.tree_util.tree_leaves_with_path(param_shardings)
        known = {
            path: (leaf.shape, value) for leaf, (path, value) in zip(jax.tree.leaves(params), shardings, strict=True)
        }

        def get_sharding(path, leaf):
            for start in range(len(path)):
                shape, sharding = known.get(path[start:], (None, None))
                if shape == leaf.shape:
                    return sharding
            spec = PartitionSpec() if leaf.sharding is None else leaf.sharding.spec
            return NamedSharding(self.mesh, PartitionSpec(*spec))

        return jax.tree_util.tree_map_with_path(get_sharding, typed)

    def list_sharding_rows(self, boxed_params: Any) -> list[ShardingRow]:
        """Returns a table row for each parameter with its shape, mesh axes, bytes per device and a note."""
        rows = []
        for path, leaf in jax.tree_util.tree_flatten_with_path(boxed_params, is_leaf=is_boxed)[0]:
            spec, note = self._build_partition_spec(leaf)
            value = unbox(leaf)
            local = NamedSharding(self.mesh, spec).shard_shape(value.shape)
            size = math.prod(local) * np.dtype(value.dtype).itemsize
            name = '/'.join(str(getattr(key, 'key', key)) for key in path)
            rows.append(ShardingRow(name, tuple(value.shape), _get_logical_axis_names(leaf), tuple(spec), size, note))
        return rows

    def _build_partition_spec(self, leaf: Any) -> tuple[PartitionSpec, str]:
        """Returns the mesh axes of a boxed parameter, and a note on indivisible axes, which are replicated."""
        names, shape = _get_logical_axis_names(leaf), unbox(leaf).shape
        mesh_axes = nn.logical_to_mesh_axes(names, self.all_rules)
        spec, notes = [], []
        for name, size, axes in zip(names, shape, mesh_axes, strict=True):
            parts = math.prod(self.mesh.shape[axis] for axis in _axes_as_tuple(axes))
            if size % parts:
                notes.append(f'{name}={size} is not divisible by {parts}: replicated')
                axes = None
            elif name is not None and not any(name == rule for rule, _ in self.all_rules):
                notes.append(f'{name} has no rule: replicated')
            spec.append(axes)
        return PartitionSpec(*spec), '; '.join(notes)


def find_process_share(processes: np.ndarray, process: int) -> tuple[int, int]:
    """Returns (index, count): `process` loads share `index` of `count` equal shares of the batch rows.

    `processes` [batch shards, devices per shard] contains the process of each device. Shares are numbered in the order
    of their rows in the global array.
    """
    shards_by_process: dict[int, list[int]] = {}
    for shard, owners in enumerate(processes.tolist()):
        for owner in set(owners):
            shards_by_process.setdefault(owner, []).append(shard)
    shares = sorted({tuple(shards) for shards in shards_by_process.values()})
    if sum(map(len, shares)) != len(processes):
        raise UserError(
            'the size of tensor in MESH must divide the number of devices per process or be a multiple of it, got a '
            f'mesh in which {len(shards_by_process)} processes hold overlapping parts of the batch; use another size'
        )
    return shares.index(tuple(shards_by_process[process])), len(shares)


def is_boxed(leaf: Any) -> bool:
    """Returns whether `leaf` is a flax box with a parameter and its logical axis names."""
    return isinstance(leaf, nn.meta.AxisMetadata)


def unbox(tree: Any) -> Any:
    """Removes flax boxes. Unlike Flax's `unbox`, adds no sharding constraints, as axes may be indivisible."""
    return jax.tree.map(
        lambda leaf: leaf.unbox(apply_constraint=False) if isinstance(leaf, nn.Partitioned) else leaf,
        tree,
        is_leaf=is_boxed,
    )


def _get_logical_axis_names(leaf: Any) -> tuple[str | None, ...]:
    return tuple(leaf.names) if is_boxed(leaf) else (None,) * len(leaf.shape)


def _axes_as_tuple(axes: str | Sequence[str] | None) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)
