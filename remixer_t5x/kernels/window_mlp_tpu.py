"""Pallas kernels for the window MLP on TPUs, which keep the hidden units in on-chip memory.

A kernel program loads a block of tokens and the previous block, and computes all hidden units of the block for a tile
of features with a single matmul of the weights, [hidden * BLOCK, 2 * BLOCK], and both blocks. For each hidden unit s,
the diagonals of the weight matrix contain wi[:, s]; its other entries are 0, which doubles the FLOPs. The backward pass
recomputes the hidden units. Programs run sequentially and accumulate the gradients of the weights.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from remixer_t5x.kernels.attention_formula import ATTENTION_OUTPUT
from remixer_t5x.kernels.compile_target import get_batch_and_head_axes, is_interpreting_kernels, wrap_in_shard_map
from remixer_t5x.kernels.gelu import sigmoid_gelu, sigmoid_gelu_and_slope
from remixer_t5x.kernels.reshaping import build_same_example_mask, expand_window_weights

_FLOAT32 = jnp.float32
_LANES = 128
# Number of tokens in a block, which is also the maximum distance between two tokens of a window.
BLOCK = 32
# Maximum size of a program's float32 hidden units, in bytes; the backward pass stores two arrays of this size.
_MAX_HIDDEN_BYTES = 2 * 2**20


class _KernelOperands(NamedTuple):
    """Operands of the kernels."""

    tokens: Any  # [batch, length, features], zero at padding; the length is a multiple of BLOCK
    weights: Any  # [hidden * BLOCK, 2 * BLOCK] in tokens' dtype
    # [batch, length, 2 * BLOCK] in tokens' dtype: 1 for tokens of the same example, otherwise 0; None without packing
    same_example: Any
    bias: Any  # [hidden] float32, in scalar memory
    out: Any  # [batch, hidden] float32, in scalar memory


def unsupported_reason(wi: jax.Array, tokens: jax.Array) -> str | None:
    """Returns the reason why the kernel does not support this call, or None if the call is supported."""
    if wi.shape[0] > BLOCK + 1:
        return f'supports windows of at most {BLOCK + 1} tokens'
    return f'requires a multiple of {_LANES} features' if tokens.shape[-1] % _LANES else None


def apply_mlp(wi: jax.Array, bias: jax.Array, out: jax.Array, tokens: jax.Array, ids: jax.Array | None) -> jax.Array:
    """Computes the window MLP without the output bias.

    Args:
        wi: input weights, [window, hidden]; the last row is for the current token. The window is at most BLOCK + 1.
        bias: bias of each hidden unit, [hidden].
        out: output weight of each hidden unit for each row of the batch, [batch, hidden].
        tokens: features of each token, [batch, length, features], zero at padding.
        ids: [batch, length] int32, the example id of each token in packed rows; None if each row is a single example.

    Returns:
        [batch, length, features] in tokens' dtype; hidden units are computed in float32.
    """
    length = tokens.shape[1]
    fill = ((0, 0), (0, -length % BLOCK))
    weights = expand_window_weights(wi.astype(tokens.dtype), BLOCK).reshape(-1, 2 * BLOCK)
    tokens = jnp.pad(tokens, (*fill, (0, 0)))
    same_example = None
    if ids is not None:
        same_example = (
            build_same_example_mask(jnp.pad(ids, fill), BLOCK).reshape(*tokens.shape[:2], -1).astype(tokens.dtype)
        )
    operands = _KernelOperands(tokens, weights, same_example, bias.astype(_FLOAT32), out.astype(_FLOAT32))
    return _differentiable_window_mlp(operands)[:, :length]


@jax.custom_vjp
def _differentiable_window_mlp(operands: _KernelOperands) -> jax.Array:
    return _forward_rule(operands)[0]


def _forward_rule(operands: _KernelOperands) -> tuple[jax.Array, _KernelOperands]:
    by_row, specs = _build_partition_specs(operands)
    return checkpoint_name(wrap_in_shard_map(_forward, (specs,), by_row)(operands), ATTENTION_OUTPUT), operands


def _backward_rule(operands: _KernelOperands, gradient: jax.Array) -> tuple[_KernelOperands]:
    by_row, specs = _build_partition_specs(operands)
    # Each device returns the gradients of the weights and the bias for its rows; their sums are computed below.
    run = wrap_in_shard_map(_backward, (specs, by_row), (by_row, by_row, by_row, by_row))
    tokens, weights, bias, out = run(operands, gradient)
    weights, bias = jnp.sum(weights, axis=0).astype(operands.weights.dtype), jnp.sum(bias, axis=0)
    return (_KernelOperands(tokens, weights, None, bias, out),)


_differentiable_window_mlp.defvjp(_forward_rule, _backward_rule)


def _build_partition_specs(operands: _KernelOperands) -> tuple[PartitionSpec, _KernelOperands]:
    """Returns the partition spec of arrays [batch, ...] and the partition specs of the operands."""
    rows, _ = get_batch_and_head_axes(operands.tokens.shape[0], 1)
    by_row, whole = PartitionSpec(rows), PartitionSpec()
    return by_row, _KernelOperands(by_row, whole, by_row, whole, by_row)


def _forward(operands: _KernelOperands) -> jax.Array:
    plan = _KernelPlan(operands)
    return pl.pallas_call(
        functools.partial(_forward_kernel, plan),
        grid=plan.grid,
        in_specs=plan.in_specs,
        out_specs=plan.current,
        out_shape=jax.ShapeDtypeStruct(operands.tokens.shape, operands.tokens.dtype),
        scratch_shapes=[plan.build_hidden_scratch_shape(_FLOAT32)],
        cost_estimate=plan.estimate_cost(1, operands, operands.tokens, operands.tokens),
        interpret=is_interpreting_kernels(),
        name='window_mlp_forward',
    )(operands.tokens, operands)


def _backward(operands: _KernelOperands, gradient: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the gradients of tokens, weights [1, ...], bias [1, ...] and out for the rows of one device."""
    plan = _KernelPlan(operands)
    token_shape, bias_shape = operands.tokens.shape, (plan.hidden, plan.tile)
    shapes = token_shape, token_shape, operands.weights.shape, bias_shape, (plan.batch, *bias_shape)
    before, current, weights, bias, out = pl.pallas_call(
        functools.partial(_backward_kernel, plan),
        grid=plan.grid,
        in_specs=[*plan.in_specs, plan.current],
        out_specs=(
            plan.current,
            plan.current,
            plan.weights,
            pl.BlockSpec(bias_shape, lambda row, block_index, tile: (0, 0)),
            pl.BlockSpec((None, *bias_shape), lambda row, block_index, tile: (row, 0, 0)),
        ),
        out_shape=tuple(jax.ShapeDtypeStruct(shape, _FLOAT32) for shape in shapes),
        scratch_shapes=[
            plan.build_hidden_scratch_shape(_FLOAT32),
            plan.build_hidden_scratch_shape(operands.tokens.dtype),
        ],
        cost_estimate=plan.estimate_cost(3, operands, *[operands.tokens] * 4),
        interpret=is_interpreting_kernels(),
        name='window_mlp_backward',
    )(operands.tokens, operands, gradient)
    # Each token is read twice, in the previous block and in the current block: add both gradients.
    earlier = jnp.pad(before[:, BLOCK:], ((0, 0), (0, BLOCK), (0, 0)))
    return (earlier + current).astype(operands.tokens.dtype), weights[None], bias.sum(axis=-1)[None], out.sum(axis=-1)


class _KernelPlan:
    """Division of the computation into kernel programs, each for one block of tokens and one tile of features."""

    def __init__(self, operands: _KernelOperands):
        self.batch, self.length, self.features = operands.tokens.shape
        self.hidden = operands.bias.shape[0]
        max_tile = _MAX_HIDDEN_BYTES // (4 * self.hidden * BLOCK)
        tiles = (tile for tile in (512, 256) if self.features % tile == 0 and tile <= max_tile)
        self.tile = next(tiles, min(_LANES, self.features))
        self.grid = (self.batch, self.length // BLOCK, self.features // self.tile)
        block = (None, BLOCK, self.tile)
        self.current = pl.BlockSpec(block, lambda row, block_index, tile: (row, block_index, tile))
        before = pl.BlockSpec(block, lambda row, block_index, tile: (row, jnp.maximum(block_index - 1, 0), tile))
        self.weights = pl.BlockSpec(operands.weights.shape, lambda row, block_index, tile: (0, 0))
        same_example = None
        if operands.same_example is not None:
            same_example = pl.BlockSpec((None, BLOCK, 2 * BLOCK), lambda row, block_index, tile: (row, block_index, 0))
        scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
        # The tokens are passed twice: as the previous block and as the current block.
        self.in_specs = [before, _KernelOperands(self.current, self.weights, same_example, scalars, scalars)]

    def build_hidden_scratch_shape(self, dtype: Any) -> Any:
        return pltpu.VMEM((self.hidden * BLOCK, self.tile), dtype)

    def estimate_cost(self, products: int, *arrays: Any) -> pl.CostEstimate:
        units = self.batch * self.length * self.features * self.hidden
        moved = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arrays))
        return pl.CostEstimate(flops=products * 4 * BLOCK * units, transcendentals=units, bytes_accessed=moved)


def _load_weights_and_tokens(plan: _KernelPlan, before_ref, operands: _KernelOperands) -> tuple[jax.Array, jax.Array]:
    """Loads the weights, masked in packed rows, and the tokens of both blocks, [2 * BLOCK, tile]."""
    weights, before = operands.weights[...], before_ref[...]
    if operands.same_example is not None:
        weights *= jnp.tile(operands.same_example[...], (plan.hidden, 1))
    before = jnp.where(pl.program_id(1) > 0, before, jnp.zeros_like(before))
    return weights, jnp.concatenate([before, operands.tokens[...]], axis=0)


def _matmul(a: jax.Array, b: jax.Array, contracted: tuple[int, int] = (1, 0)) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == _FLOAT32 else None
    return jax.lax.dot_general(
        a, b, (((contracted[0],), (contracted[1],)), ((), ())), precision=precision, preferred_element_type=_FLOAT32
    )


def _forward_kernel(plan: _KernelPlan, before_ref, operands: _KernelOperands, mixed_ref, hidden_ref):
    row = pl.program_id(0)
    hidden_ref[...] = _matmul(*_load_weights_and_tokens(plan, before_ref, operands))

    def add_hidden_unit(unit, total):
        hidden = hidden_ref[pl.ds(pl.multiple_of(unit * BLOCK, BLOCK), BLOCK)] + operands.bias[unit]
        return total + operands.out[row, unit] * sigmoid_gelu(hidden)

    total = jax.lax.fori_loop(0, plan.hidden, add_hidden_unit, jnp.zeros((BLOCK, plan.tile), _FLOAT32))
    mixed_ref[...] = total.astype(mixed_ref.dtype)


def _backward_kernel(
    plan: _KernelPlan,
    before_ref,
    operands: _KernelOperands,
    gradient_ref,
    before_gradient_ref,
    current_gradient_ref,
    weights_gradient_ref,
    bias_gradient_ref,
    out_gradient_ref,
    hidden_ref,
    hidden_gradient_ref,
):
    """Computes a block's gradients; sums those of `weights` and `bias` over all rows, and those of `out` per row."""
    row, block_index, tile = (pl.program_id(axis) for axis in range(3))
    is_row_start = (block_index == 0) & (tile == 0)

    @pl.when(is_row_start)
    def initialize_row_sums():
        out_gradient_ref[...] = jnp.zeros_like(out_gradient_ref)

    @pl.when(is_row_start & (row == 0))
    def initialize_weight_sums():
        weights_gradient_ref[...] = jnp.zeros_like(weights_gradient_ref)
        bias_gradient_ref[...] = jnp.zeros_like(bias_gradient_ref)

    weights, tokens = _load_weights_and_tokens(plan, before_ref, operands)
    hidden_ref[...] = _matmul(weights, tokens)
    gradient = gradient_ref[...].astype(_FLOAT32)

    def add_unit_gradients(unit, _):
        rows, unit_row = pl.ds(pl.multiple_of(unit * BLOCK, BLOCK), BLOCK), pl.ds(unit, 1)
        units, slope = sigmoid_gelu_and_slope(hidden_ref[rows] + operands.bias[unit])
        hidden_gradient = operands.out[row, unit] * gradient * slope
        out_gradient_ref[unit_row] += jnp.sum(units * gradient, axis=0, keepdims=True)
        bias_gradient_ref[unit_row] += jnp.sum(hidden_gradient, axis=0, keepdims=True)
        hidden_gradient_ref[rows] = hidden_gradient.astype(hidden_gradient_ref.dtype)
        return 0

    jax.lax.fori_loop(0, plan.hidden, add_unit_gradients, 0)
    token_gradient = _matmul(weights, hidden_gradient_ref[...], (0, 0))
    before_gradient_ref[...], current_gradient_ref[...] = token_gradient[:BLOCK], token_gradient[BLOCK:]
    weight_gradient = _matmul(hidden_gradient_ref[...], tokens, (1, 1))
    if operands.same_example is not None:
        weight_gradient *= jnp.tile(operands.same_example[...], (plan.hidden, 1)).astype(_FLOAT32)
    weights_gradient_ref[...] += weight_gradient
