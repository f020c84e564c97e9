"""Kernels on several devices: a kernel is opaque to XLA's partitioner, so each device runs it on its own part."""

import math
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import PartitionSpec

from remixer_t5x import axes


def rows_and_heads(batch: int, heads: int) -> tuple[Any, Any]:
    """The mesh axes that split rows of the batch and heads, each None where they do not divide the size."""
    mesh = jax.sharding.get_abstract_mesh()
    rules = nn.get_logical_axis_rules()
    names = nn.logical_to_mesh_axes((axes.BATCH, axes.HEADS)) if rules else PartitionSpec(None, None)
    return _dividing(mesh, names[0], batch), _dividing(mesh, names[1], heads)


def heads_of_device(batch: int, heads: int) -> int:
    """The number of heads for which each device runs a kernel."""
    mesh_axes = rows_and_heads(batch, heads)[1]
    return heads // _parts(jax.sharding.get_abstract_mesh(), mesh_axes)


def _dividing(mesh, mesh_axes, size: int):
    """The mesh axes if they split `size` evenly; otherwise None, which replicates."""
    parts = _parts(mesh, mesh_axes)
    return mesh_axes if parts > 1 and size % parts == 0 else None


def _parts(mesh, mesh_axes) -> int:
    names = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes or ()
    return math.prod(mesh.shape.get(name, 1) for name in names)


def on_each_device(run: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`run`, called on each device with its part of the arguments."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=False)
