"""`by_kernel` on a GPU, in Pallas for Triton: hidden units are in registers.

A program of the forward pass, and of the gradient of tokens, has one block of tokens and a tile of features, and takes
the hidden units one by one. A program of the gradient of the weights has one hidden unit and takes blocks and tiles one
by one. So no program adds to what another one writes, and a step gives the same bits each time.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from remixer_t5x.layers.compile_target import interprets_kernels
from remixer_t5x.layers.gelu import sigmoid_form, sigmoid_form_and_slope
from remixer_t5x.layers.window_mlp.by_kernel import BLOCK, Gradients, Operands, gradient_of_tokens

_FLOAT32 = jnp.float32
# The smallest side of a matmul in Triton, and the most features that leave registers for two tiles of float32.
_NARROWEST, _WIDEST = 16, 64
# Hidden units are few: with parts of the batch there are programs for all multiprocessors.
_PARTS_OF_BATCH = 16
_PARAMS = pltriton.CompilerParams(num_warps=4, num_stages=1)


class _TokenGradients(NamedTuple):
    """What the second kernel writes; those of `bias` and `out` are sums of one block and tile.

    Attributes:
        before, own: [batch, length, features] float32, gradients of the tokens before a block, and of its own.
        bias, out: [batch, blocks, tiles, hidden] float32.
    """

    before: Any
    own: Any
    bias: Any
    out: Any


def refusal(tokens: jax.Array) -> str | None:
    """Why the kernel cannot compute this call, or None."""
    return f'takes a multiple of {_NARROWEST} features' if tokens.shape[-1] % _NARROWEST else None


def forward(operands: Operands) -> jax.Array:
    """[batch, length, features] in tokens' dtype."""
    plan = _Plan(operands)
    return _call(
        plan,
        _forward_kernel,
        [plan.specs(operands), plan.before],
        plan.own,
        jax.ShapeDtypeStruct(operands.tokens.shape, operands.tokens.dtype),
        'window_mlp_forward',
    )(operands, operands.tokens)


def backward(operands: Operands, gradient: jax.Array) -> Gradients:
    """Gradients of the operands, given the gradient of the result."""
    plan = _Plan(operands)
    whole = jax.ShapeDtypeStruct(operands.tokens.shape, _FLOAT32)
    sums = jax.ShapeDtypeStruct((plan.batch, plan.blocks, plan.tiles, plan.hidden), _FLOAT32)
    of_tokens = _TokenGradients(
        *_call(
            plan,
            _tokens_kernel,
            [plan.specs(operands), plan.before, plan.own],
            tuple(_TokenGradients(plan.own, plan.own, plan.sums, plan.sums)),
            tuple(_TokenGradients(whole, whole, sums, sums)),
            'window_mlp_backward_tokens',
        )(operands, operands.tokens, gradient)
    )
    before, own = _weight_gradients(plan, operands, gradient)
    return Gradients(
        gradient_of_tokens(of_tokens.before, of_tokens.own, operands.tokens.dtype),
        before,
        own,
        of_tokens.bias.sum(axis=(0, 1, 2))[None],
        of_tokens.out.sum(axis=(1, 2)),
    )


def _weight_gradients(plan: '_Plan', operands: Operands, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of `before` and `own`, [parts, hidden, BLOCK, BLOCK] float32."""
    parts = math.gcd(plan.batch, _PARTS_OF_BATCH)
    spec = pl.BlockSpec((None, None, BLOCK, BLOCK), lambda unit, part: (part, unit, 0, 0))
    shape = jax.ShapeDtypeStruct((parts, plan.hidden, BLOCK, BLOCK), _FLOAT32)
    return pl.pallas_call(
        functools.partial(_weights_kernel, plan, plan.batch // parts),
        grid=(plan.hidden, parts),
        out_specs=(spec, spec),
        out_shape=(shape, shape),
        compiler_params=_PARAMS,
        interpret=interprets_kernels(),
        name='window_mlp_backward_weights',
    )(operands, gradient)


def _call(plan, kernel, in_specs, out_specs, out_shape, name):
    return pl.pallas_call(
        functools.partial(kernel, plan),
        grid=(plan.tiles, plan.blocks, plan.batch),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=_PARAMS,
        interpret=interprets_kernels(),
        name=name,
    )


class _Plan:
    """How the work is cut into programs."""

    def __init__(self, operands: Operands):
        self.batch, length, features = operands.tokens.shape
        self.hidden, self.blocks = operands.own.shape[0], length // BLOCK
        self.tile = min(_WIDEST, features & -features)
        self.tiles = features // self.tile
        block = (None, BLOCK, self.tile)
        self.own = pl.BlockSpec(block, lambda tile, at, row: (row, at, tile))
        self.before = pl.BlockSpec(block, lambda tile, at, row: (row, jnp.maximum(at - 1, 0), tile))
        self.sums = pl.BlockSpec((None, None, None, self.hidden), lambda tile, at, row: (row, at, tile, 0))

    def specs(self, operands: Operands) -> Operands:
        weights = pl.BlockSpec((self.hidden, BLOCK, BLOCK), lambda tile, at, row: (0, 0, 0))
        bias = pl.BlockSpec((self.hidden,), lambda tile, at, row: (0,))
        of_row = pl.BlockSpec((None, self.hidden), lambda tile, at, row: (row, 0))
        ids = None
        if operands.ids is not None:
            ids = pl.BlockSpec((None, operands.ids.shape[1]), lambda tile, at, row: (row, 0))
        return Operands(self.own, weights, weights, bias, of_row, ids)


class _Seen(NamedTuple):
    """What a block of tokens sees: the block before it and itself [BLOCK, tile], and which tokens belong together."""

    before: jax.Array
    own: jax.Array
    meets_before: jax.Array | None
    meets_own: jax.Array | None


def _seen(operands: Operands, ids, before: jax.Array, own: jax.Array, at) -> _Seen:
    """Of block `at`; `ids` are of its row."""
    before = jnp.where(at > 0, before, jnp.zeros_like(before))
    if ids is None:
        return _Seen(before, own, None, None)
    earlier, here = (ids[pl.ds(block * BLOCK, BLOCK)] for block in (jnp.maximum(at - 1, 0), at))
    return _Seen(before, own, here[:, None] == earlier[None, :], here[:, None] == here[None, :])


def _weights(operands: Operands, seen: _Seen, unit) -> tuple[jax.Array, jax.Array]:
    """[BLOCK, BLOCK] of a hidden unit, for the block before and the block itself; zero between examples."""
    before, own = operands.before[unit], operands.own[unit]
    if seen.meets_own is None:
        return before, own
    zeros = jnp.zeros_like(own)
    return jnp.where(seen.meets_before, before, zeros), jnp.where(seen.meets_own, own, zeros)


def _hidden(operands: Operands, seen: _Seen, weights: tuple[jax.Array, jax.Array], unit) -> jax.Array:
    """[BLOCK, tile] float32 of one hidden unit, before the activation."""
    before, own = weights
    total = _dot(before, seen.before) + _dot(own, seen.own)
    return total + operands.bias[unit]


def _divided(index: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder; Triton has no `%` of JAX's, which takes signs into account."""
    return jax.lax.div(index, jnp.int32(count)), jax.lax.rem(index, jnp.int32(count))


def _dot(a: jax.Array, b: jax.Array, **transposed: bool) -> jax.Array:
    return pltriton.dot(a, b, **transposed).astype(_FLOAT32)


def _forward_kernel(plan: _Plan, operands: Operands, before_ref, mixed_ref):
    seen = _seen(operands, operands.ids, before_ref[...], operands.tokens[...], pl.program_id(1))

    def add_unit(unit, total):
        hidden = _hidden(operands, seen, _weights(operands, seen, unit), unit)
        return total + operands.out[unit] * sigmoid_form(hidden)

    total = jax.lax.fori_loop(0, plan.hidden, add_unit, jnp.zeros((BLOCK, plan.tile), _FLOAT32))
    mixed_ref[...] = total.astype(mixed_ref.dtype)


def _tokens_kernel(plan: _Plan, operands: Operands, before_ref, gradient_ref, *results_refs):
    results = _TokenGradients(*results_refs)
    seen = _seen(operands, operands.ids, before_ref[...], operands.tokens[...], pl.program_id(1))
    gradient = gradient_ref[...].astype(_FLOAT32)

    def add_unit(unit, totals):
        before, own = weights = _weights(operands, seen, unit)
        units, slope = sigmoid_form_and_slope(_hidden(operands, seen, weights, unit))
        of_hidden = operands.out[unit] * gradient * slope
        results.out[unit] = jnp.sum(units * gradient)
        results.bias[unit] = jnp.sum(of_hidden)
        low = of_hidden.astype(own.dtype)
        return totals[0] + _dot(before, low, trans_a=True), totals[1] + _dot(own, low, trans_a=True)

    zeros = jnp.zeros((BLOCK, plan.tile), _FLOAT32)
    results.before[...], results.own[...] = jax.lax.fori_loop(0, plan.hidden, add_unit, (zeros, zeros))


def _weights_kernel(plan: _Plan, rows: int, operands: Operands, gradient_ref, before_ref, own_ref):
    unit, first = pl.program_id(0), pl.program_id(1) * rows

    def add_tile(index, totals):
        place, tile = _divided(index, plan.tiles)
        row, at = _divided(place, plan.blocks)
        row = first + row
        features = pl.ds(tile * plan.tile, plan.tile)
        earlier, here = (pl.ds(block * BLOCK, BLOCK) for block in (jnp.maximum(at - 1, 0), at))
        ids = None if operands.ids is None else operands.ids.at[row]
        seen = _seen(operands, ids, operands.tokens[row, earlier, features], operands.tokens[row, here, features], at)
        _, slope = sigmoid_form_and_slope(_hidden(operands, seen, _weights(operands, seen, unit), unit))
        of_hidden = operands.out[row, unit] * gradient_ref[row, here, features].astype(_FLOAT32) * slope
        low = of_hidden.astype(seen.own.dtype)
        parts = _dot(low, seen.before, trans_b=True), _dot(low, seen.own, trans_b=True)
        if seen.meets_own is not None:
            parts = jnp.where(seen.meets_before, parts[0], 0.0), jnp.where(seen.meets_own, parts[1], 0.0)
        return totals[0] + parts[0], totals[1] + parts[1]

    zeros = jnp.zeros((BLOCK, BLOCK), _FLOAT32)
    before_ref[...], own_ref[...] = jax.lax.fori_loop(0, rows * plan.blocks * plan.tiles, add_tile, (zeros, zeros))
