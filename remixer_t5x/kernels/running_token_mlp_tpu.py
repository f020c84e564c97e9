"""Computes one block of the running token MLP on TPUs, with Pallas kernels that keep the state A in registers.

For one hidden unit, A is a tile [features, lanes] that fills a dozen registers. Each lane is one head of one row, so
sums over features and hidden units are additions of registers instead of reductions over lanes. The operands must be
transposed, so that their last axis combines rows and heads.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from remixer_t5x.kernels.compile_target import is_interpreting_kernels
from remixer_t5x.kernels.running_token_mlp_loop import BlockGradients, TokenArrays

_LANES = 128
_FLOAT32 = jnp.float32
_MAX_BLOCK_LENGTH = 128
_MAX_UNITS = 16  # maximum number of hidden units per kernel program
# VMEM sizes in bytes: the kernels' limit, the state A before and after a block, and the weights.
_MAX_VMEM, _STATE_BYTES, _WEIGHT_BYTES = 56 * 2**20, 4 * 2**20, 4 * 2**20
# Axis orders in the kernels, for weights [batch, tokens, heads, hidden], values [batch, tokens, heads, features] and A
# [batch, heads, hidden, features]. The last two axes, batch and heads, are merged into lanes.
_HIDDEN_AXES, _FEATURE_AXES, _STATE_AXES = (3, 1, 0, 2), (1, 3, 0, 2), (2, 3, 0, 1)


def choose_block_length(w_in: jax.Array, value: jax.Array) -> int:
    """Returns the number of tokens per block that fit into VMEM: a multiple of 8, or the whole row."""
    _, length, _, features = value.shape
    # Each token needs VMEM for a float32 copy of A, a double-buffered float32 output and two double-buffered inputs.
    bytes_per_token = _LANES * features * (4 + 2 * 4 + 4 * value.dtype.itemsize)
    available = _MAX_VMEM - _STATE_BYTES - _WEIGHT_BYTES
    return min(length, max(8, available // bytes_per_token // 8 * 8), _MAX_BLOCK_LENGTH)


class _KernelOperands(NamedTuple):
    """The fields of `TokenArrays` and the state A before the block, as operands of the kernels; None if unused."""

    w_in: Any  # [hidden, tokens, lanes]
    value: Any  # [tokens, features, lanes]
    w_out: Any  # [hidden, tokens, lanes]
    keep: Any  # [tokens, lanes] float32
    scale: Any  # [tokens, lanes] float32
    start: Any  # [hidden, features, lanes] float32


def forward(tokens: TokenArrays, start: jax.Array | None) -> jax.Array:
    """Computes the outputs of a block, [batch, tokens, heads, features], in value's dtype.

    `start` is the state A before the block, or None for zeros.
    """
    operands = _build_operands(tokens, start)
    plan = _KernelPlan(operands)
    mixed = pl.pallas_call(
        _forward_kernel,
        grid=plan.grid,
        in_specs=[plan.build_operand_specs(operands)],
        out_specs=plan.by_feature,
        out_shape=jax.ShapeDtypeStruct(operands.value.shape, _FLOAT32),
        scratch_shapes=[plan.row_scratch] * 2,
        name='running_token_mlp_forward',
        **plan.build_call_options(operations=12, arrays=operands),
    )(operands)
    return _lanes_to_heads(mixed, _FEATURE_AXES, tokens.value)


def backward(
    tokens: TokenArrays, start: jax.Array | None, later: jax.Array | None, gradient: jax.Array
) -> BlockGradients:
    """Computes the gradients of a block.

    Args:
        tokens: the tokens of the block.
        start: the state A before the block, or None for zeros.
        later: gradient with respect to A after the block; None if `start` is None.
        gradient: gradient with respect to the output of the block.
    """
    operands = _build_operands(tokens, start)
    plan = _KernelPlan(operands)
    later = None if later is None else _heads_to_lanes(later, _STATE_AXES)
    state = None if start is None else plan.state
    # The gradient of `value` is float32, because several programs add to it.
    dtypes = operands.w_in.dtype, _FLOAT32, operands.w_out.dtype, _FLOAT32
    shapes = [
        None if array is None else jax.ShapeDtypeStruct(array.shape, dtype)
        for array, dtype in zip((*operands[:3], operands.start), dtypes, strict=True)
    ]
    w_in_gradient, value_gradient, w_out_gradient, start_gradient = pl.pallas_call(
        _backward_kernel,
        grid=plan.grid,
        in_specs=[plan.build_operand_specs(operands), state, plan.by_feature],
        out_specs=[plan.by_unit, plan.by_feature, plan.by_unit, state],
        out_shape=shapes,
        scratch_shapes=[*[plan.row_scratch] * 4, pltpu.VMEM(plan.tile, _FLOAT32)],
        name='running_token_mlp_backward',
        **plan.build_call_options(operations=30, arrays=(operands, operands)),
    )(operands, later, _heads_to_lanes(gradient, _FEATURE_AXES))
    return (
        _lanes_to_heads(w_in_gradient, _HIDDEN_AXES, tokens.w_in),
        _lanes_to_heads(value_gradient, _FEATURE_AXES, tokens.value),
        _lanes_to_heads(w_out_gradient, _HIDDEN_AXES, tokens.w_out),
        None if start is None else _lanes_to_heads(start_gradient, _STATE_AXES, start),
    )


class _KernelPlan:
    """Division of the computation into kernel programs, each for at most 128 lanes and a few hidden units."""

    def __init__(self, operands: _KernelOperands):
        hidden, length, lanes = operands.w_in.shape
        width, features = min(lanes, _LANES), operands.value.shape[1]
        bytes_per_unit = 6 * features * _LANES * 4  # three double-buffered float32 arrays [features, lanes]
        max_units = min(_MAX_UNITS, hidden, max(1, _STATE_BYTES // bytes_per_unit))
        units = next(count for count in range(max_units, 0, -1) if hidden % count == 0)
        self.grid = (pl.cdiv(lanes, width), hidden // units)
        self.tile = (length, features, width)
        self.row_scratch = pltpu.VMEM((length, width), _FLOAT32)
        self.by_unit = pl.BlockSpec((units, length, width), lambda lane, unit: (unit, 0, lane))
        self.by_feature = pl.BlockSpec(self.tile, lambda lane, unit: (0, 0, lane))
        self.by_token = pl.BlockSpec((length, width), lambda lane, unit: (0, lane))
        self.state = pl.BlockSpec((units, features, width), lambda lane, unit: (unit, 0, lane))
        self.num_activations = hidden * length * features * lanes

    def build_operand_specs(self, operands: _KernelOperands) -> _KernelOperands:
        specs = (self.by_unit, self.by_feature, self.by_unit, self.by_token, self.by_token, self.state)
        return _KernelOperands(*(None if array is None else spec for array, spec in zip(operands, specs, strict=True)))

    def build_call_options(self, operations: int, arrays: Any) -> dict[str, Any]:
        moved = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arrays))
        return {
            'cost_estimate': pl.CostEstimate(
                flops=operations * self.num_activations, transcendentals=self.num_activations, bytes_accessed=moved
            ),
            'compiler_params': pltpu.CompilerParams(
                dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=_MAX_VMEM
            ),
            'interpret': is_interpreting_kernels(),
        }


def _forward_kernel(operands: _KernelOperands, mixed_ref, w_in_rows, w_out_rows):
    @pl.when(pl.program_id(1) == 0)
    def initialize_output():
        mixed_ref[...] = jnp.zeros_like(mixed_ref)

    def add_hidden_unit(unit, _):
        first = _load_hidden_unit(operands, w_in_rows, w_out_rows, unit)

        def add_token(token, hidden):
            row = pl.ds(token, 1)
            hidden = _add_token_to_state(operands, w_in_rows, hidden, token)
            mixed_ref[token] += w_out_rows[row] * jax.nn.gelu(_scale_state(operands, hidden, row))
            return hidden

        jax.lax.fori_loop(0, operands.value.shape[0], add_token, first)
        return 0

    jax.lax.fori_loop(0, operands.w_in.shape[0], add_hidden_unit, 0)


def _backward_kernel(
    operands: _KernelOperands,
    later_ref,
    gradient_ref,
    w_in_gradient_ref,
    value_gradient_ref,
    w_out_gradient_ref,
    start_gradient_ref,
    w_in_rows,
    w_out_rows,
    w_in_gradient_rows,
    w_out_gradient_rows,
    states,
):
    length = operands.value.shape[0]

    @pl.when(pl.program_id(1) == 0)
    def initialize_value_gradient():
        value_gradient_ref[...] = jnp.zeros_like(value_gradient_ref)

    def add_unit_gradients(unit, _):
        first = _load_hidden_unit(operands, w_in_rows, w_out_rows, unit)

        def update_state(token, hidden):
            states[token] = _add_token_to_state(operands, w_in_rows, hidden, token)
            return states[token]

        def compute_token_gradients(back, later):
            token = length - 1 - back
            row = pl.ds(token, 1)
            gradient = gradient_ref[token].astype(_FLOAT32)
            units, pull_back = jax.vjp(lambda hidden: jax.nn.gelu(_scale_state(operands, hidden, row)), states[token])
            w_out_gradient_rows[row] = jnp.sum(units * gradient, axis=0, keepdims=True)
            later = later + pull_back(w_out_rows[row] * gradient)[0]
            w_in_gradient_rows[row] = jnp.sum(later * operands.value[token].astype(_FLOAT32), axis=0, keepdims=True)
            value_gradient_ref[token] += w_in_rows[row] * later
            return later if operands.keep is None else later * operands.keep[row]

        jax.lax.fori_loop(0, length, update_state, first)
        later = jnp.zeros_like(first) if later_ref is None else later_ref[unit]
        later = jax.lax.fori_loop(0, length, compute_token_gradients, later)
        w_in_gradient_ref[unit] = w_in_gradient_rows[...].astype(w_in_gradient_ref.dtype)
        w_out_gradient_ref[unit] = w_out_gradient_rows[...].astype(w_out_gradient_ref.dtype)
        if start_gradient_ref is not None:
            start_gradient_ref[unit] = later
        return 0

    jax.lax.fori_loop(0, operands.w_in.shape[0], add_unit_gradients, 0)


def _load_hidden_unit(operands: _KernelOperands, w_in_rows, w_out_rows, unit) -> jax.Array:
    """Copies a hidden unit's weights to scratch memory, and returns the unit's state before the block."""
    w_in_rows[...] = operands.w_in[unit].astype(_FLOAT32)
    w_out_rows[...] = operands.w_out[unit].astype(_FLOAT32)
    return jnp.zeros(operands.value.shape[1:], _FLOAT32) if operands.start is None else operands.start[unit]


def _add_token_to_state(operands: _KernelOperands, w_in_rows, hidden: jax.Array, token) -> jax.Array:
    """Adds the outer product of a token's `w_in` and `value` to the state A of a hidden unit."""
    row = pl.ds(token, 1)
    hidden_before = hidden if operands.keep is None else hidden * operands.keep[row]
    return hidden_before + w_in_rows[row] * operands.value[token].astype(_FLOAT32)


def _scale_state(operands: _KernelOperands, hidden: jax.Array, row) -> jax.Array:
    return hidden if operands.scale is None else hidden * operands.scale[row]


def _build_operands(tokens: TokenArrays, start: jax.Array | None) -> _KernelOperands:
    heads = tokens.value.shape[2]
    return _KernelOperands(
        _heads_to_lanes(tokens.w_in, _HIDDEN_AXES),
        _heads_to_lanes(tokens.value, _FEATURE_AXES),
        _heads_to_lanes(tokens.w_out, _HIDDEN_AXES),
        None if tokens.keep is None else jnp.repeat(tokens.keep.T, heads, axis=1),
        None if tokens.scale is None else jnp.repeat(tokens.scale.T, heads, axis=1),
        None if start is None else _heads_to_lanes(start, _STATE_AXES),
    )


def _heads_to_lanes(array: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Transposes an array to the axis order `axes`, and merges the last two axes into lanes."""
    array = array.transpose(axes)
    return array.reshape(*array.shape[:2], -1)


def _lanes_to_heads(lanes: jax.Array, axes: tuple[int, ...], like: jax.Array) -> jax.Array:
    """Inverts `_heads_to_lanes`; the result has the shape and dtype of `like`."""
    transposed = lanes.reshape([like.shape[axis] for axis in axes])
    return transposed.transpose([axes.index(axis) for axis in range(4)]).astype(like.dtype)
