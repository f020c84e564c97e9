"""Applies optax transformations to each layer of a stacked parameter separately.

`nn.scan` stacks the parameters of its layers in arrays with a leading `layers` axis. Adafactor's factored moments, RMS
clipping and RMS scaling would treat the stacked layers as a single matrix or vector.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from remixer_t5x import axes

# Logical axes that do not index features, hidden units, heads or vocabulary entries.
_NON_FEATURE_AXES = {axes.POSITIONS_OUT, axes.POSITIONS_IN, axes.RELPOS_BUCKETS, axes.OUTPUTS, None}


def apply_per_layer(inner: optax.GradientTransformation, logical_axes: Any) -> optax.GradientTransformation:
    """Returns a transformation that applies `inner` to every layer of stacked parameters separately.

    `logical_axes` is a tree of PartitionSpecs of logical axis names (`nn.get_partition_spec(boxed_params)`). The state
    maps each group of parameters with the same number of layers ('single', 'layers_3', ...) to the state of `inner`,
    whose arrays have a leading layers axis, except step counters, which are scalars.
    """
    stacked = find_stacked_params(logical_axes)

    def count_layers(params):
        return jax.tree.map(lambda has_layers_axis, leaf: leaf.shape[0] if has_layers_axis else 0, stacked, params)

    def init(params):
        lengths = count_layers(params)
        state = {}
        for length in sorted(set(jax.tree.leaves(lengths))):
            members = _mask_other_groups(params, lengths, length)
            init_group = jax.vmap(inner.init, out_axes=_find_state_axes(inner, members)) if length else inner.init
            state[_layer_group_name(length)] = init_group(members)
        return state

    def update(updates, state, params):
        lengths = count_layers(updates)
        results, new_state = [], {}
        for length in sorted(set(jax.tree.leaves(lengths))):
            members, group = _mask_other_groups(params, lengths, length), _layer_group_name(length)
            update_group = inner.update
            if length:
                state_axes = _find_state_axes(inner, members)
                update_group = jax.vmap(inner.update, in_axes=(0, state_axes, 0), out_axes=(0, state_axes))
            group_updates = _mask_other_groups(updates, lengths, length)
            result, new_state[group] = update_group(group_updates, state[group], members)
            results.append(result)

        def select_unmasked_leaf(_, *leaves):
            return next(leaf for leaf in leaves if not isinstance(leaf, optax.MaskedNode))

        return jax.tree.map(select_unmasked_leaf, lengths, *results), new_state

    return optax.GradientTransformation(init, update)


def _layer_group_name(length: int) -> str:
    return f'layers_{length}' if length else 'single'


def _mask_other_groups(tree: Any, lengths: Any, length: int) -> Any:
    """Replaces the leaves of other groups with `optax.MaskedNode`, which preserves the structure of the tree."""
    return jax.tree.map(lambda layers, leaf: leaf if layers == length else optax.MaskedNode(), lengths, tree)


def _find_state_axes(inner: optax.GradientTransformation, members: Any) -> Any:
    """Returns the vmap axis of each leaf of the state of `inner`: 0 (layers), or None for step counters."""
    one_layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), members)
    state = jax.eval_shape(inner.init, one_layer)
    # Moments of scalar parameters are also scalars, so only integer scalars are step counters.
    return jax.tree.map(lambda leaf: None if leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.integer) else 0, state)


def find_stacked_params(logical_axes: Any) -> Any:
    """Returns a tree of booleans, True for parameters whose first axis is the layers axis.

    Raises ValueError if a layers axis is repeated or is not the first axis.
    """

    def has_layers_axis(path: Any, spec: PartitionSpec) -> bool:
        if axes.LAYERS in spec[1:]:
            name = jax.tree_util.keystr(path)
            raise ValueError(f'{axes.LAYERS!r} must be the first axis of {name} and not be repeated, got {tuple(spec)}')
        return axes.LAYERS in spec

    return jax.tree_util.tree_map_with_path(has_layers_axis, logical_axes)


def find_params_near_zero(logical_axes: Any) -> Any:
    """Returns a tree of booleans, True for parameters that may start near zero and grow large during training.

    Such parameters have no axis for features, hidden units, heads or vocabulary entries: scalars (Remixer's alpha,
    ReZero's scales), matrices between positions (Remixer's H, gMLP's free W), vectors over distances (gMLP's Toeplitz
    W), vectors whose axis has no name (Remixer's vector alpha), and biases of a head's outputs. The second matrix of a
    LoRA adapter is also included. T5 has no such parameters.
    """

    def may_start_near_zero(spec: PartitionSpec) -> bool:
        names = {name for name in spec if name != axes.LAYERS}
        return names <= _NON_FEATURE_AXES or axes.LORA_RANK in spec[-2:-1]

    return jax.tree.map(may_start_near_zero, logical_axes)


def scale_by_parameter_rms(logical_axes: Any, min_rms: float, min_rms_near_zero: float) -> optax.GradientTransformation:
    """Multiplies each update by the RMS of its parameter in the layer, as in Adafactor with relative steps.

    An RMS below `min_rms` is replaced by `min_rms`; for the parameters of `find_params_near_zero`, the minimum is
    `min_rms_near_zero`.
    """
    stacked, near_zero = find_stacked_params(logical_axes), find_params_near_zero(logical_axes)

    def scale_update(is_stacked: bool, is_near_zero: bool, update: jax.Array, param: jax.Array) -> jax.Array:
        axes_of_layer = tuple(range(1 if is_stacked else 0, param.ndim))
        rms = jnp.sqrt(jnp.mean(jnp.square(param), axis=axes_of_layer, keepdims=True))
        return update * jnp.maximum(rms, min_rms_near_zero if is_near_zero else min_rms)

    def update(updates: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        return jax.tree.map(scale_update, stacked, near_zero, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
