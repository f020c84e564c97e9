"""Applies optax transformations to each layer of a stacked parameter separately.

Layers executed by `nn.scan` share one array with a leading `layers` axis. Adafactor's factored moments, RMS clipping
and RMS scaling treat a parameter as one matrix or vector, and would mix the layers. Under `jax.vmap`, each layer gets
the update that it would get without stacking. Elementwise and global transformations do not need this.
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
    """Returns a transformation that applies `inner` to every layer of stacked parameters separately.

    `logical_axes` is a tree of PartitionSpecs of logical axis names (`nn.get_partition_spec(boxed_params)`). The state
    is a dict from group ('single', 'layers_3', ...) to the state of `inner` for that group. Arrays of stacked groups
    have a leading layers axis; step counters are scalars.

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
            init_group = jax.vmap(inner.init, out_axes=_state_axes(inner, members)) if length else inner.init
            state[_group(length)] = init_group(members)
        return state

    def update(updates, state, params):
        lengths = lengths_of(updates)
        results, new_state = [], {}
        for length in sorted(set(jax.tree.leaves(lengths))):
            members, group = _members(params, lengths, length), _group(length)
            update_group = inner.update
            if length:
                state_axes = _state_axes(inner, members)
                update_group = jax.vmap(inner.update, in_axes=(0, state_axes, 0), out_axes=(0, state_axes))
            result, new_state[group] = update_group(_members(updates, lengths, length), state[group], members)
            results.append(result)
        return jax.tree.map(_select_group, lengths, *results), new_state

    return optax.GradientTransformation(init, update)


def _group(length: int) -> str:
    return f'layers_{length}' if length else 'single'


def _members(tree: Any, lengths: Any, length: int) -> Any:
    """Returns `tree` with the leaves of other groups replaced by `optax.MaskedNode`, which keeps all paths."""
    return jax.tree.map(lambda layers, leaf: leaf if layers == length else optax.MaskedNode(), lengths, tree)


def _select_group(_: int, *leaves: Any) -> Any:
    return next(leaf for leaf in leaves if not isinstance(leaf, optax.MaskedNode))


def _state_axes(inner: optax.GradientTransformation, members: Any) -> Any:
    """Returns the layers axis of each state leaf of a stacked group: 0, or None for step counters, which are shared."""
    one_layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), members)
    state = jax.eval_shape(inner.init, one_layer)
    # Scalar parameters (gates) have scalar moments, so only integer scalars are counters.
    return jax.tree.map(lambda leaf: None if leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.integer) else 0, state)


def is_stacked(logical_axes: Any) -> Any:
    """Returns a tree of bool: True for parameters whose first axis is the layers axis.

    Raises:
        ValueError: a parameter has its layers axis more than once, or not first.
    """

    def has_layers(path: Any, spec: PartitionSpec) -> bool:
        if LAYERS_AXIS in spec[1:]:
            name = jax.tree_util.keystr(path)
            raise ValueError(f'axes of {name} must have {LAYERS_AXIS!r} first and only once, got {tuple(spec)}')
        return LAYERS_AXIS in spec

    return jax.tree_util.tree_map_with_path(has_layers, logical_axes, is_leaf=is_spec)


def is_spec(leaf: Any) -> bool:
    """Returns whether a leaf is a PartitionSpec, which JAX would otherwise treat as a tuple."""
    return isinstance(leaf, PartitionSpec)


def starts_near_zero(logical_axes: Any) -> Any:
    """Returns a tree of bool: True for parameters that may start near zero although their trained values are large.

    These parameters have no axis of features, hidden units, heads or vocabulary entries: scalars (Remixer's alpha,
    ReZero's scales), matrices between positions (Remixer's H, gMLP's free W), one number per distance (gMLP's Toeplitz
    W), vectors whose axis has no name (Remixer's vector alpha), and biases of a head's outputs. T5 has no such
    parameter. The second matrix of a LoRA adapter also starts at zero.
    """

    def may_start_near_zero(spec: PartitionSpec) -> bool:
        names = {name for name in spec if name != LAYERS_AXIS}
        return names <= _NO_FEATURES or axes.LORA_RANK in spec[-2:-1]

    return jax.tree.map(may_start_near_zero, logical_axes, is_leaf=is_spec)


def scale_by_parameter_rms(logical_axes: Any, min_rms: float, min_rms_near_zero: float) -> optax.GradientTransformation:
    """Multiplies updates by max(RMS of the layer's parameter, a minimum), as Adafactor with relative steps does.

    Because of the minimum, a parameter can move away from zero.

    Args:
        logical_axes: tree of PartitionSpec of logical axis names.
        min_rms: the minimum for most parameters.
        min_rms_near_zero: the minimum for parameters selected by `starts_near_zero`.
    """
    stacked, near_zero = is_stacked(logical_axes), starts_near_zero(logical_axes)

    def scale(is_stacked: bool, is_near_zero: bool, update: jax.Array, param: jax.Array) -> jax.Array:
        axes_of_layer = tuple(range(1 if is_stacked else 0, param.ndim))
        rms = jnp.sqrt(jnp.mean(jnp.square(param), axis=axes_of_layer, keepdims=True))
        return update * jnp.maximum(rms, min_rms_near_zero if is_near_zero else min_rms)

    def update(updates: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        return jax.tree.map(scale, stacked, near_zero, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
