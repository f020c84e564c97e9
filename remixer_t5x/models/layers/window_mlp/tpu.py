"""`by_kernel` on a TPU, in Pallas: the hidden units of a block of tokens are in on-chip memory.

All hidden units of a block and a tile of features come from one product, [hidden * BLOCK, 2 * BLOCK] weights times the
block before and the block itself. Programs run one after another, so that gradients of weights add up on the chip.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from remixer_t5x.models.layers.compile_target import interprets_kernels, target_chip
from remixer_t5x.models.layers.gelu import sigmoid_form, sigmoid_form_and_slope
from remixer_t5x.models.layers.window_mlp import by_kernel
from remixer_t5x.models.layers.window_mlp.by_kernel import BLOCK, Gradients, Operands, gradient_of_tokens

_FLOAT32 = jnp.float32
_LANES = 128
# Of these the compiler of kernels knows no product of bfloat16.
_WITHOUT_BFLOAT16 = ('v2', 'v3')
# Bytes of the hidden units of a program in float32; the backward pass has them a second time.
_LARGEST_UNITS = 2 * 2**20


class _Blocks(NamedTuple):
    """What both kernels read.

    Attributes:
        before, own: [BLOCK, tile] tokens.
        weights: [hidden * BLOCK, 2 * BLOCK] in tokens' dtype, `before` and `own` of `Operands`.
        meets: [BLOCK, 2 * BLOCK] in tokens' dtype, 1 where two tokens are of one example; None for ones.
        bias: [hidden] float32, in scalar memory.
        out: [batch, hidden] float32, in scalar memory.
    """

    before: Any
    own: Any
    weights: Any
    meets: Any
    bias: Any
    out: Any


class _Results(NamedTuple):
    """What the backward kernel writes, in float32.

    Attributes:
        before, own: [BLOCK, tile], gradients of the tokens.
        weights: [hidden * BLOCK, 2 * BLOCK], sums over all programs.
        bias: [hidden, tile], sums over all programs.
        out: [hidden, tile], sums over the programs of a row.
    """

    before: Any
    own: Any
    weights: Any
    bias: Any
    out: Any


def refusal(wi: jax.Array, tokens: jax.Array) -> str | None:
    """Returns why the kernel cannot compute this call, or None."""
    if wi.shape[0] > BLOCK + 1:
        return f'takes windows of at most {BLOCK + 1} tokens'
    if target_chip() in _WITHOUT_BFLOAT16 and tokens.dtype == jnp.bfloat16:
        return f'multiplies bfloat16 on a TPU v4 or newer and not on a {target_chip()}'
    return None if tokens.shape[-1] % _LANES == 0 else f'takes a multiple of {_LANES} features'


def mix(wi: jax.Array, bias: jax.Array, out: jax.Array, tokens: jax.Array, ids: jax.Array | None) -> jax.Array:
    """Computes `by_kernel.mix` with this kernel."""
    return by_kernel.mix(by_kernel.Kernel(forward, backward), wi, bias, out, tokens, ids)


def forward(operands: Operands) -> jax.Array:
    """[batch, length, features] in tokens' dtype."""
    plan, blocks = _Plan(operands), _blocks(operands)
    return pl.pallas_call(
        functools.partial(_forward_kernel, plan),
        grid=plan.grid,
        in_specs=[plan.specs(blocks)],
        out_specs=plan.own,
        out_shape=jax.ShapeDtypeStruct(operands.tokens.shape, operands.tokens.dtype),
        scratch_shapes=[plan.scratch(_FLOAT32)],
        cost_estimate=plan.cost(1, blocks, blocks.own),
        interpret=interprets_kernels(),
        name='window_mlp_forward',
    )(blocks)


def backward(operands: Operands, gradient: jax.Array) -> Gradients:
    """Gradients of the operands, given the gradient of the result."""
    plan, blocks = _Plan(operands), _blocks(operands)
    shapes = (operands.tokens.shape, operands.tokens.shape, blocks.weights.shape)
    sums = (plan.hidden, plan.tile)
    [results] = pl.pallas_call(
        functools.partial(_backward_kernel, plan),
        grid=plan.grid,
        in_specs=[plan.specs(blocks), plan.own],
        out_specs=[_Results(plan.own, plan.own, plan.whole(blocks.weights.shape), plan.whole(sums), plan.of_row)],
        out_shape=[_Results(*(jax.ShapeDtypeStruct(s, _FLOAT32) for s in (*shapes, sums, (plan.batch, *sums))))],
        scratch_shapes=[plan.scratch(_FLOAT32), plan.scratch(operands.tokens.dtype)],
        cost_estimate=plan.cost(3, blocks, (blocks.own, blocks.own, blocks.own)),
        interpret=interprets_kernels(),
        name='window_mlp_backward',
    )(blocks, gradient)
    weights = results.weights.reshape(1, plan.hidden, BLOCK, 2 * BLOCK)
    return Gradients(
        gradient_of_tokens(results.before, results.own, operands.tokens.dtype),
        weights[..., :BLOCK],
        weights[..., BLOCK:],
        results.bias.sum(axis=-1)[None],
        results.out.sum(axis=-1),
    )


def _blocks(operands: Operands) -> _Blocks:
    weights = jnp.concatenate([operands.before, operands.own], axis=-1)
    tokens = operands.tokens
    meets = None if operands.ids is None else _meets(operands.ids).astype(tokens.dtype)
    return _Blocks(tokens, tokens, weights.reshape(-1, 2 * BLOCK), meets, operands.bias, operands.out)


def _meets(ids: jax.Array) -> jax.Array:
    """[batch, length, 2 * BLOCK] bool."""
    here = ids.reshape(ids.shape[0], -1, BLOCK)
    earlier = jnp.pad(here[:, :-1], ((0, 0), (1, 0), (0, 0)))
    reach = jnp.concatenate([earlier, here], axis=-1)
    return (here[..., None] == reach[:, :, None]).reshape(*ids.shape, -1)


class _Plan:
    """How the work is cut into programs."""

    def __init__(self, operands: Operands):
        self.batch, self.length, self.features = operands.tokens.shape
        self.hidden = operands.own.shape[0]
        most = _LARGEST_UNITS // (4 * self.hidden * BLOCK)
        self.tile = next(
            (tile for tile in (512, 256) if self.features % tile == 0 and tile <= most), min(_LANES, self.features)
        )
        self.grid = (self.batch, self.length // BLOCK, self.features // self.tile)
        block = (None, BLOCK, self.tile)
        self.own = pl.BlockSpec(block, lambda row, at, tile: (row, at, tile))
        self.before = pl.BlockSpec(block, lambda row, at, tile: (row, jnp.maximum(at - 1, 0), tile))
        self.of_row = pl.BlockSpec((None, self.hidden, self.tile), lambda row, at, tile: (row, 0, 0))

    def whole(self, shape: tuple[int, int]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda row, at, tile: (0, 0))

    def specs(self, blocks: _Blocks) -> _Blocks:
        meets = None
        if blocks.meets is not None:
            meets = pl.BlockSpec((None, BLOCK, 2 * BLOCK), lambda row, at, tile: (row, at, 0))
        scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
        return _Blocks(self.before, self.own, self.whole(blocks.weights.shape), meets, scalars, scalars)

    def scratch(self, dtype: Any) -> Any:
        return pltpu.VMEM((self.hidden * BLOCK, self.tile), dtype)

    def cost(self, products: int, *arrays: Any) -> pl.CostEstimate:
        units = self.batch * self.length * self.features * self.hidden
        moved = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arrays))
        return pl.CostEstimate(flops=products * 4 * BLOCK * units, transcendentals=units, bytes_accessed=moved)


def _reach(blocks: _Blocks) -> jax.Array:
    """[2 * BLOCK, tile]: the block before, zero for the first block, and the block itself."""
    before = blocks.before[...]
    before = jnp.where(pl.program_id(1) > 0, before, jnp.zeros_like(before))
    return jnp.concatenate([before, blocks.own[...]], axis=0)


def _weights(plan: _Plan, blocks: _Blocks) -> jax.Array:
    weights = blocks.weights[...]
    return weights if blocks.meets is None else weights * jnp.tile(blocks.meets[...], (plan.hidden, 1))


def _dot(a: jax.Array, b: jax.Array, contracted: tuple[int, int] = (1, 0)) -> jax.Array:
    ((of_a, of_b), precision) = contracted, jax.lax.Precision.HIGHEST if a.dtype == _FLOAT32 else None
    return jax.lax.dot_general(
        a, b, (((of_a,), (of_b,)), ((), ())), precision=precision, preferred_element_type=_FLOAT32
    )


def _forward_kernel(plan: _Plan, blocks: _Blocks, mixed_ref, hidden_ref):
    row = pl.program_id(0)
    hidden_ref[...] = _dot(_weights(plan, blocks), _reach(blocks))

    def add_unit(unit, total):
        hidden = hidden_ref[pl.ds(pl.multiple_of(unit * BLOCK, BLOCK), BLOCK)] + blocks.bias[unit]
        return total + blocks.out[row, unit] * sigmoid_form(hidden)

    total = jax.lax.fori_loop(0, plan.hidden, add_unit, jnp.zeros((BLOCK, plan.tile), _FLOAT32))
    mixed_ref[...] = total.astype(mixed_ref.dtype)


def _backward_kernel(plan: _Plan, blocks: _Blocks, gradient_ref, results: _Results, hidden_ref, low_ref):
    row, at, tile = (pl.program_id(axis) for axis in range(3))
    first_of_row = (at == 0) & (tile == 0)

    @pl.when(first_of_row)
    def start_row():
        results.out[...] = jnp.zeros_like(results.out)

    @pl.when(first_of_row & (row == 0))
    def start():
        results.weights[...] = jnp.zeros_like(results.weights)
        results.bias[...] = jnp.zeros_like(results.bias)

    weights, reach = _weights(plan, blocks), _reach(blocks)
    hidden_ref[...] = _dot(weights, reach)
    gradient = gradient_ref[...].astype(_FLOAT32)

    def unit_gradients(unit, _):
        rows, one = pl.ds(pl.multiple_of(unit * BLOCK, BLOCK), BLOCK), pl.ds(unit, 1)
        units, slope = sigmoid_form_and_slope(hidden_ref[rows] + blocks.bias[unit])
        of_hidden = blocks.out[row, unit] * gradient * slope
        results.out[one] += jnp.sum(units * gradient, axis=0, keepdims=True)
        results.bias[one] += jnp.sum(of_hidden, axis=0, keepdims=True)
        low_ref[rows] = of_hidden.astype(low_ref.dtype)
        return 0

    jax.lax.fori_loop(0, plan.hidden, unit_gradients, 0)
    of_reach = _dot(weights, low_ref[...], (0, 0))
    results.before[...], results.own[...] = of_reach[:BLOCK], of_reach[BLOCK:]
    of_weights = _dot(low_ref[...], reach, (1, 1))
    if blocks.meets is not None:
        of_weights *= jnp.tile(blocks.meets[...], (plan.hidden, 1)).astype(_FLOAT32)
    results.weights[...] += of_weights
