"""Runs an optax transformation that looks at whole parameters once for each layer of a stacked parameter.

Layers executed by `nn.scan` share one array with a leading `layers` axis. Adafactor's factored moments, RMS
clipping and RMS scaling look at a parameter as one matrix or vector, and would mix the layers; under `jax.vmap` each
layer is the matrix that it would be without stacking, and gets the same update. Elementwise and global transformations
do not need this. `scale_by_parameter_rms` multiplies updates by the size of each layer's parameter.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from remixer_t5x import axes

LAYERS_AXIS = 'layers'
# Logical axes without features.
_NO_FEATURES = {axes.POSITIONS_OUT, axes.POSITIONS_IN, axes.RELPOS_BUCKETS, axes.OUTPUTS, None}


def per_layer(inner: optax.GradientTransformation, logical_axes: Any) -> optax.GradientTransformation:
    """`inner`, applied to every layer of stacked parameters as if they were not stacked.

    `logical_axes` is the parameters' tree with a PartitionSpec of logical axis names at each leaf
    (`nn.get_partition_spec(boxed_params)`). The state is a dict from group ('single', 'layers_3', ...) to the
    state of `inner` for that group; in it, arrays of stacked groups have a leading layers axis and step
    counters are scalars.

    Raises:
        ValueError: a parameter has its layers axis more than once, or not first.
    """
    stacked = is_stacked(logical_axes)

    def lengths_of(params):
        return jax.tree.map(lambda has_layers, leaf: leaf.shape[0] if has_layers else 0, stacked, params)

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
                state_axes = _state_axes(inner, of_params)
                step = jax.vmap(inner.update, in_axes=(0, state_axes, 0), out_axes=(0, state_axes))
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
        lambda leaf: None if leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.integer) else 0,
        state,
    )


def is_stacked(logical_axes: Any) -> Any:
    """Tree of bool: whether a parameter has the layers of a run as its first axis.

    Raises:
        ValueError: a parameter has its layers axis more than once, or not first.
    """
    return jax.tree_util.tree_map_with_path(_is_stacked, logical_axes, is_leaf=_is_spec)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def _is_stacked(path: Any, spec: PartitionSpec) -> bool:
    names = tuple(spec)
    if names.count(LAYERS_AXIS) > 1 or LAYERS_AXIS in names[1:]:
        raise ValueError(f'{jax.tree_util.keystr(path)} has axes {names}: {LAYERS_AXIS!r} must come first, and once')
    return LAYERS_AXIS in names


def starts_near_zero(logical_axes: Any) -> Any:
    """Tree of bool: whether a parameter may start near zero although its natural size is not small.

    These have no axis of features, hidden units, heads or words: scalars (Remixer's alpha, ReZero's scales), matrices
    between positions (Remixer's H, gMLP's free W), one number for each distance (gMLP's Toeplitz W), and vectors whose
    axis has no name (Remixer's vector alpha), biases of a head's outputs. T5 has no such parameter. The second matrix
    of an adapter (LoRA) starts at zero too.
    """

    def may_start_near_zero(spec: PartitionSpec) -> bool:
        names = {name for name in spec if name != LAYERS_AXIS}
        return names <= _NO_FEATURES or axes.LORA_RANK in spec[-2:-1]

    return jax.tree.map(may_start_near_zero, logical_axes, is_leaf=_is_spec)


def scale_by_parameter_rms(logical_axes: Any, min_rms: float, min_rms_near_zero: float) -> optax.GradientTransformation:
    """Multiplies the update of each layer's parameter by max(RMS of that parameter, a minimum), as Adafactor with
    relative steps does. With the minimum, a parameter at zero can leave it.

    Args:
        logical_axes: tree of PartitionSpec of logical axis names.
        min_rms: the minimum of most parameters.
        min_rms_near_zero: the minimum of the parameters that `starts_near_zero` selects.
    """
    stacked, near_zero = is_stacked(logical_axes), starts_near_zero(logical_axes)

    def scale(is_stacked: bool, is_near_zero: bool, update: jax.Array, param: jax.Array) -> jax.Array:
        own = tuple(range(1 if is_stacked else 0, param.ndim))
        rms = jnp.sqrt(jnp.mean(jnp.square(param), axis=own, keepdims=True))
        return update * jnp.maximum(rms, min_rms_near_zero if is_near_zero else min_rms)

    def update(updates: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        return jax.tree.map(scale, stacked, near_zero, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
