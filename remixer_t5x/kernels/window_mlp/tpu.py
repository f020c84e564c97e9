"""The MLP along windows of tokens on a TPU as Pallas kernels: hidden units stay in on-chip memory.

    y_t[d] = sum_s out[s] gelu(sum_j wi[j, s] x[t - w + 1 + j, d] + bias[s])

A block of tokens reads itself and the block before it, so that its windows are never written: all hidden units of a
block and a tile of features are one product, [hidden * BLOCK, 2 * BLOCK] weights times both blocks. The weights have
wi[:, s] along their diagonals; the zeros in them double the products. The backward pass recomputes hidden units.
Programs run one after another, so that gradients of weights are summed on the chip.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from remixer_t5x.kernels import compile_target
from remixer_t5x.kernels.attention.formula import ATTENTION_OUTPUT
from remixer_t5x.kernels.compile_target import interprets_kernels, on_each_device, rows_and_heads
from remixer_t5x.kernels.diagonals import spread_over_diagonals
from remixer_t5x.kernels.gelu import sigmoid_form, sigmoid_form_and_slope

_FLOAT32 = jnp.float32
_LANES = 128
# Tokens of a block, and the most by which a window reaches back.
BLOCK = 32
# Bytes of the hidden units of a program in float32; the backward pass has them a second time.
_LARGEST_UNITS = 2 * 2**20


class _Operands(NamedTuple):
    """What the kernels differentiate, and the examples of packed rows.

    Attributes:
        tokens: [batch, length, features], zero at padding; the length is a multiple of BLOCK.
        weights: [hidden * BLOCK, 2 * BLOCK] in tokens' dtype: for each hidden unit and token of a block, the weights of
            the tokens of the block before it and of the block itself.
        bias: [hidden] float32.
        out: [batch, hidden] float32.
        ids: [batch, length] int32, the example of each token in packed rows; None if a row is one example.
    """

    tokens: Any
    weights: Any
    bias: Any
    out: Any
    ids: Any


class _Blocks(NamedTuple):
    """What both kernels read.

    Attributes:
        before, current: [BLOCK, tile] tokens.
        weights, bias, out: as in `_Operands`; the last two are in scalar memory.
        meets: [BLOCK, 2 * BLOCK] in tokens' dtype, 1 where two tokens are of one example; None for ones.
    """

    before: Any
    current: Any
    weights: Any
    meets: Any
    bias: Any
    out: Any


def refusal(wi: jax.Array, tokens: jax.Array) -> str | None:
    """Returns why the kernel does not support this call, or None."""
    if wi.shape[0] > BLOCK + 1:
        return f'takes windows of at most {BLOCK + 1} tokens'
    if tokens.shape[-1] % _LANES:
        return f'takes a multiple of {_LANES} features'
    return compile_target.bfloat16_refusal(tokens.dtype)


def mix(wi: jax.Array, bias: jax.Array, out: jax.Array, tokens: jax.Array, ids: jax.Array | None) -> jax.Array:
    """Computes the equation above for all tokens.

    Args:
        wi: [window, hidden], a window of at most BLOCK + 1; the last row is a token's own.
        bias: [hidden].
        out: [batch, hidden].
        tokens, ids: as in `_Operands`, of any length.

    Returns:
        [batch, length, features] in tokens' dtype; hidden units are float32.
    """
    (window, hidden), length = wi.shape, tokens.shape[1]
    fill = ((0, 0), (0, -length % BLOCK))
    by_distance = jnp.pad(wi.astype(tokens.dtype).T, ((0, 0), (2 * BLOCK - window, 2 * BLOCK - 1)))
    weights = spread_over_diagonals(by_distance, 2 * BLOCK)[:, BLOCK:].reshape(hidden * BLOCK, 2 * BLOCK)
    tokens = jnp.pad(tokens, (*fill, (0, 0)))
    ids = None if ids is None else jnp.pad(ids, fill)
    return _mix(_Operands(tokens, weights, bias.astype(_FLOAT32), out.astype(_FLOAT32), ids))[:, :length]


@jax.custom_vjp
def _mix(operands: _Operands) -> jax.Array:
    return _forward_rule(operands)[0]


def _forward_rule(operands: _Operands) -> tuple[jax.Array, _Operands]:
    by_row, specs = _partition_specs(operands)
    return checkpoint_name(on_each_device(_forward, (specs,), by_row)(operands), ATTENTION_OUTPUT), operands


def _backward_rule(operands: _Operands, gradient: jax.Array) -> tuple[_Operands]:
    by_row, specs = _partition_specs(operands)
    # One gradient of weights and bias from each device.
    run = on_each_device(_backward, (specs, by_row), (by_row, by_row, by_row, by_row))
    tokens, weights, bias, out = run(operands, gradient)
    weights, bias = jnp.sum(weights, axis=0).astype(operands.weights.dtype), jnp.sum(bias, axis=0)
    return (_Operands(tokens, weights, bias, out, None),)


_mix.defvjp(_forward_rule, _backward_rule)


def _partition_specs(operands: _Operands) -> tuple[PartitionSpec, _Operands]:
    """How rows and operands are split over devices."""
    rows, _ = rows_and_heads(operands.tokens.shape[0], 1)
    by_row, whole = PartitionSpec(rows), PartitionSpec()
    return by_row, _Operands(by_row, whole, whole, by_row, None if operands.ids is None else by_row)


def _forward(operands: _Operands) -> jax.Array:
    plan, blocks = _Plan(operands), _blocks(operands)
    return pl.pallas_call(
        functools.partial(_forward_kernel, plan),
        grid=plan.grid,
        in_specs=[plan.specs(blocks)],
        out_specs=plan.current,
        out_shape=jax.ShapeDtypeStruct(operands.tokens.shape, operands.tokens.dtype),
        scratch_shapes=[plan.scratch(_FLOAT32)],
        cost_estimate=plan.cost(1, blocks, blocks.current),
        interpret=interprets_kernels(),
        name='window_mlp_forward',
    )(blocks)


def _backward(operands: _Operands, gradient: jax.Array) -> tuple[jax.Array, ...]:
    """Gradients of the operands, given the gradient of the result; of weights and bias with a leading axis of 1."""
    plan, blocks = _Plan(operands), _blocks(operands)
    of_tokens = operands.tokens.shape
    of_bias = (plan.hidden, plan.tile)
    shapes = of_tokens, of_tokens, blocks.weights.shape, of_bias, (plan.batch, *of_bias)
    before, current, weights, bias, out = pl.pallas_call(
        functools.partial(_backward_kernel, plan),
        grid=plan.grid,
        in_specs=[plan.specs(blocks), plan.current],
        out_specs=(plan.current, plan.current, plan.whole(blocks.weights.shape), plan.whole(of_bias), plan.of_row),
        out_shape=tuple(jax.ShapeDtypeStruct(shape, _FLOAT32) for shape in shapes),
        scratch_shapes=[plan.scratch(_FLOAT32), plan.scratch(operands.tokens.dtype)],
        cost_estimate=plan.cost(3, blocks, (blocks.current, blocks.current, blocks.current)),
        interpret=interprets_kernels(),
        name='window_mlp_backward',
    )(blocks, gradient)
    # A block's gradient of the block before it belongs to the tokens there; before the first block there are none.
    earlier = jnp.pad(before[:, BLOCK:], ((0, 0), (0, BLOCK), (0, 0)))
    return (earlier + current).astype(operands.tokens.dtype), weights[None], bias.sum(axis=-1)[None], out.sum(axis=-1)


def _blocks(operands: _Operands) -> _Blocks:
    tokens, weights, bias, out, ids = operands
    if ids is None:
        return _Blocks(tokens, tokens, weights, None, bias, out)
    here = ids.reshape(ids.shape[0], -1, BLOCK)
    earlier = jnp.pad(here[:, :-1], ((0, 0), (1, 0), (0, 0)))
    reach = jnp.concatenate([earlier, here], axis=-1)
    meets = (here[..., None] == reach[:, :, None]).reshape(*ids.shape, -1)  # [batch, length, 2 * BLOCK]
    return _Blocks(tokens, tokens, weights, meets.astype(tokens.dtype), bias, out)


class _Plan:
    """Divides the work into programs: a block of tokens and a tile of features for each."""

    def __init__(self, operands: _Operands):
        self.batch, self.length, self.features = operands.tokens.shape
        self.hidden = operands.bias.shape[0]
        most = _LARGEST_UNITS // (4 * self.hidden * BLOCK)
        tiles = (tile for tile in (512, 256) if self.features % tile == 0 and tile <= most)
        self.tile = next(tiles, min(_LANES, self.features))
        self.grid = (self.batch, self.length // BLOCK, self.features // self.tile)
        block = (None, BLOCK, self.tile)
        self.current = pl.BlockSpec(block, lambda row, at, tile: (row, at, tile))
        self.before = pl.BlockSpec(block, lambda row, at, tile: (row, jnp.maximum(at - 1, 0), tile))
        self.of_row = pl.BlockSpec((None, self.hidden, self.tile), lambda row, at, tile: (row, 0, 0))

    def whole(self, shape: tuple[int, int]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda row, at, tile: (0, 0))

    def specs(self, blocks: _Blocks) -> _Blocks:
        meets = None
        if blocks.meets is not None:
            meets = pl.BlockSpec((None, BLOCK, 2 * BLOCK), lambda row, at, tile: (row, at, 0))
        scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
        return _Blocks(self.before, self.current, self.whole(blocks.weights.shape), meets, scalars, scalars)

    def scratch(self, dtype: Any) -> Any:
        return pltpu.VMEM((self.hidden * BLOCK, self.tile), dtype)

    def cost(self, products: int, *arrays: Any) -> pl.CostEstimate:
        units = self.batch * self.length * self.features * self.hidden
        moved = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arrays))
        return pl.CostEstimate(flops=products * 4 * BLOCK * units, transcendentals=units, bytes_accessed=moved)


def _weights_and_reach(plan: _Plan, blocks: _Blocks) -> tuple[jax.Array, jax.Array]:
    """Weights that do not reach into another example, and the tokens of both blocks, [2 * BLOCK, tile]."""
    weights, before = blocks.weights[...], blocks.before[...]
    if blocks.meets is not None:
        weights *= jnp.tile(blocks.meets[...], (plan.hidden, 1))
    before = jnp.where(pl.program_id(1) > 0, before, jnp.zeros_like(before))
    return weights, jnp.concatenate([before, blocks.current[...]], axis=0)


def _dot(a: jax.Array, b: jax.Array, contracted: tuple[int, int] = (1, 0)) -> jax.Array:
    ((of_a, of_b), precision) = contracted, jax.lax.Precision.HIGHEST if a.dtype == _FLOAT32 else None
    return jax.lax.dot_general(
        a, b, (((of_a,), (of_b,)), ((), ())), precision=precision, preferred_element_type=_FLOAT32
    )


def _forward_kernel(plan: _Plan, blocks: _Blocks, mixed_ref, hidden_ref):
    row = pl.program_id(0)
    hidden_ref[...] = _dot(*_weights_and_reach(plan, blocks))

    def add_unit(unit, total):
        hidden = hidden_ref[pl.ds(pl.multiple_of(unit * BLOCK, BLOCK), BLOCK)] + blocks.bias[unit]
        return total + blocks.out[row, unit] * sigmoid_form(hidden)

    total = jax.lax.fori_loop(0, plan.hidden, add_unit, jnp.zeros((BLOCK, plan.tile), _FLOAT32))
    mixed_ref[...] = total.astype(mixed_ref.dtype)


def _backward_kernel(
    plan: _Plan, blocks: _Blocks, gradient_ref, of_before, of_current, of_weights, of_bias, of_out, hidden_ref, low_ref
):
    """Writes gradients; those of weights and bias are sums over all programs, of `out` over the programs of a row."""
    row, at, tile = (pl.program_id(axis) for axis in range(3))
    first_of_row = (at == 0) & (tile == 0)

    @pl.when(first_of_row)
    def start_row():
        of_out[...] = jnp.zeros_like(of_out)

    @pl.when(first_of_row & (row == 0))
    def start():
        of_weights[...] = jnp.zeros_like(of_weights)
        of_bias[...] = jnp.zeros_like(of_bias)

    weights, reach = _weights_and_reach(plan, blocks)
    hidden_ref[...] = _dot(weights, reach)
    gradient = gradient_ref[...].astype(_FLOAT32)

    def unit_gradients(unit, _):
        rows, own = pl.ds(pl.multiple_of(unit * BLOCK, BLOCK), BLOCK), pl.ds(unit, 1)
        units, slope = sigmoid_form_and_slope(hidden_ref[rows] + blocks.bias[unit])
        of_hidden = blocks.out[row, unit] * gradient * slope
        of_out[own] += jnp.sum(units * gradient, axis=0, keepdims=True)
        of_bias[own] += jnp.sum(of_hidden, axis=0, keepdims=True)
        low_ref[rows] = of_hidden.astype(low_ref.dtype)
        return 0

    jax.lax.fori_loop(0, plan.hidden, unit_gradients, 0)
    of_reach = _dot(weights, low_ref[...], (0, 0))
    of_before[...], of_current[...] = of_reach[:BLOCK], of_reach[BLOCK:]
    of_block = _dot(low_ref[...], reach, (1, 1))
    if blocks.meets is not None:
        of_block *= jnp.tile(blocks.meets[...], (plan.hidden, 1)).astype(_FLOAT32)
    of_weights[...] += of_block
