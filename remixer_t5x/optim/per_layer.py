"""Runs an optax transformation that looks at whole parameters once for each layer of a stacked parameter.

Layers executed by `nn.scan` share one array with a leading `layers` axis. Adafactor's factored moments, RMS
clipping and RMS scaling look at a parameter as one matrix or vector, and would mix the layers; under `jax.vmap` each
layer is the matrix that it would be without stacking, and gets the same update. Elementwise and global transformations
do not need this.
"""

from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

LAYERS_AXIS = 'layers'


def per_layer(inner: optax.GradientTransformation, logical_axes: Any) -> optax.GradientTransformation:
    """`inner`, applied to every layer of stacked parameters as if they were not stacked.

    `logical_axes` is the parameters' tree with a PartitionSpec of logical axis names at each leaf
    (`nn.get_partition_spec(boxed_params)`). The state is a dict from group ('single', 'layers_3', ...) to the
    state of `inner` for that group; in it, arrays of stacked groups have a leading layers axis and step
    counters are scalars.

    Raises:
        ValueError: a parameter has its layers axis more than once, or not first.
    """
    stacked = which_are_stacked(logical_axes)

    def lengths_of(params):
        return jax.tree.map(lambda is_stacked, leaf: leaf.shape[0] if is_stacked else 0, stacked, params)

    def init(params):
        lengths = lengths_of(params)
        state = {}
        for length in sorted(set(jax.tree.leaves(lengths))):
            members = _members(params, lengths, length)
            state[_group(length)] = (
                jax.vmap(inner.init, out_axes=_state_axes(inner, members))(members) if length else (inner.init(members))
            )
        return state

    def update(updates, state, params):
        lengths = lengths_of(updates)
        results, new_state = [], {}
        for length in sorted(set(jax.tree.leaves(lengths))):
            ours, group = _members(updates, lengths, length), _group(length)
            of_params = _members(params, lengths, length)
            step = inner.update
            if length:
                axes = _state_axes(inner, of_params)
                step = jax.vmap(inner.update, in_axes=(0, axes, 0), out_axes=(0, axes))
            result, new_state[group] = step(ours, state[group], of_params)
            results.append(result)
        return _merge(lengths, results), new_state

    return optax.GradientTransformation(init, update)


def _group(length: int) -> str:
    return f'layers_{length}' if length else 'single'


def _members(tree: Any, lengths: Any, length: int) -> Any:
    """`tree` with only the leaves of one group; optax's MaskedNode is an empty subtree, so that paths do not change."""
    return jax.tree.map(lambda own, leaf: leaf if own == length else optax.MaskedNode(), lengths, tree)


def _merge(lengths: Any, groups: list[Any]) -> Any:
    def pick(_, *leaves):
        return next(leaf for leaf in leaves if not isinstance(leaf, optax.MaskedNode))

    return jax.tree.map(pick, lengths, *groups)


def _state_axes(inner: optax.GradientTransformation, members: Any) -> Any:
    """For each leaf of the state of a stacked group: 0, or None for step counters, which the layers share."""
    one_layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), members)
    state = jax.eval_shape(inner.init, one_layer)
    # A scalar parameter (a gate) has scalar moments too: only integer scalars are counters.
    return jax.tree.map(
        lambda leaf: None if leaf.ndim == 0 and jax.numpy.issubdtype(leaf.dtype, jax.numpy.integer) else 0,
        state,
    )


def which_are_stacked(logical_axes: Any) -> Any:
    """Tree of bool: whether a parameter has the layers of a run as its first axis.

    Raises:
        ValueError: a parameter has its layers axis more than once, or not first.
    """
    return jax.tree_util.tree_map_with_path(_is_stacked, logical_axes, is_leaf=_is_spec)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def _is_stacked(path: Any, axes: PartitionSpec) -> bool:
    names = tuple(axes)
    if names.count(LAYERS_AXIS) > 1 or LAYERS_AXIS in names[1:]:
        raise ValueError(f'{jax.tree_util.keystr(path)} has axes {names}: {LAYERS_AXIS!r} must come first, and once')
    return LAYERS_AXIS in names
