"""`mix` on a GPU, in Pallas for Triton: A is in registers while the tokens of a block pass.

A program has one row, one head and a few of its hidden units, with all features of the head. It adds the tokens one by
one; the backward kernel subtracts them again, and starts a new sum where an example or a block ends, so that rounding
errors cannot accumulate. Triton's arrays are powers of two, so the features are cut into tiles of one.

Pallas's Triton backend is deprecated in JAX 0.12, and this is our only use of it. The file is obsolete once XLA fuses
several reductions of one large array without writing the array, or once Pallas's Mosaic GPU backend is stable. Without
it, the chunks of `mix.py` compute the call, which write A of every token to memory.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from remixer_t5x.kernels.compile_target import interprets_kernels
from remixer_t5x.kernels.gelu import sigmoid_form
from remixer_t5x.kernels.running_token_mlp.blocks import BlockGradients, Tokens

_FLOAT32 = jnp.float32
_LONGEST_BLOCK = 256
# Numbers of A in a program: 32 for each thread.
_LARGEST_PROGRAM = 8192
_SMALLEST_TILE = 16
_PARAMS = pltriton.CompilerParams(num_warps=8, num_stages=1)


def refusal(w_in: jax.Array, value: jax.Array) -> str | None:
    """Why the kernel cannot compute this call, or None."""
    units, tile = _tile(w_in, value)
    if min(units, tile) >= _SMALLEST_TILE and units * value.shape[-1] <= _LARGEST_PROGRAM:
        return None
    return f'takes heads of a multiple of {_SMALLEST_TILE} features and hidden units, and at most 512 features'


def block_length(w_in: jax.Array, value: jax.Array) -> int:
    """Tokens of a block."""
    return min(value.shape[1], _LONGEST_BLOCK)


def _tile(w_in: jax.Array, value: jax.Array) -> tuple[int, int]:
    """Hidden units of a program and features of a tile, powers of two."""
    hidden, features = w_in.shape[-1], value.shape[-1]
    units = hidden & -hidden
    while units > _SMALLEST_TILE and units * features > _LARGEST_PROGRAM:
        units //= 2
    return units, features & -features


def _cheap(activation):
    """GELU with one exponential: CUDA's tanh is two formulas, of which it selects one. Both are exact to rounding."""
    return sigmoid_form if activation is jax.nn.gelu else activation


class _Operands(NamedTuple):
    """What both kernels read; `None` for what a call does not have.

    Attributes:
        tokens: as they are.
        first: [batch, tokens] int32, the first token of a token's example in the block, -1 if it is before the block.
        start: [batch, heads, hidden, features] float32, A before the block.
    """

    tokens: Tokens
    first: Any
    start: Any


class _Results(NamedTuple):
    """What the backward kernel writes; the gradient of value once for each program that reads it."""

    w_in: Any
    value: Any
    w_out: Any
    start: Any


def forward(activation, tokens: Tokens, start: jax.Array | None) -> jax.Array:
    """[batch, tokens, heads, features] in value's dtype; `start` is A before the block, or None for zeros."""
    plan = _Plan(tokens)
    operands = _Operands(tokens, None, start)
    mixed = pl.pallas_call(
        functools.partial(_forward_kernel, plan, _cheap(activation)),
        grid=plan.grid,
        in_specs=[plan.specs(operands)],
        out_specs=plan.part,
        out_shape=plan.parts_shape,
        compiler_params=_PARAMS,
        interpret=interprets_kernels(),
        name='running_token_mlp_forward',
    )(operands)
    return mixed.sum(axis=0).astype(tokens.value.dtype)


def backward(
    activation, tokens: Tokens, start: jax.Array | None, later: jax.Array | None, gradient: jax.Array
) -> BlockGradients:
    """Gradients of a block, given the gradients of its output and of A behind it; `later` is None if `start` is."""
    plan = _Plan(tokens)
    operands = _Operands(tokens, None if tokens.keep is None else _first_of_example(tokens.keep), start)
    state = None if start is None else plan.state
    [results] = pl.pallas_call(
        functools.partial(_backward_kernel, plan, _cheap(activation)),
        grid=plan.grid,
        in_specs=[plan.specs(operands), state, plan.by_feature],
        out_specs=[_Results(plan.by_unit, plan.part, plan.by_unit, state)],
        out_shape=[
            _Results(
                jax.ShapeDtypeStruct(tokens.w_in.shape, tokens.w_in.dtype),
                plan.parts_shape,
                jax.ShapeDtypeStruct(tokens.w_out.shape, tokens.w_out.dtype),
                None if start is None else jax.ShapeDtypeStruct(start.shape, _FLOAT32),
            )
        ],
        compiler_params=_PARAMS,
        interpret=interprets_kernels(),
        name='running_token_mlp_backward',
    )(operands, later, gradient)
    of_value = results.value.sum(axis=0).astype(tokens.value.dtype)
    return BlockGradients(results.w_in, of_value, results.w_out, results.start)


def _first_of_example(keep: jax.Array) -> jax.Array:
    index = jnp.arange(keep.shape[1], dtype=jnp.int32)
    return jax.lax.cummax(jnp.where(keep == 0, index, -1), axis=1)


class _Plan:
    """How the work is cut into programs."""

    def __init__(self, tokens: Tokens):
        batch, self.length, heads, hidden = tokens.w_in.shape
        features = tokens.value.shape[-1]
        self.units, tile = _tile(tokens.w_in, tokens.value)
        self.tile = (self.units, tile)
        self.tiles = [pl.ds(first, tile) for first in range(0, features, tile)]
        programs = hidden // self.units
        self.grid = (programs, heads, batch)
        self.by_unit = pl.BlockSpec((None, self.length, None, self.units), lambda unit, head, row: (row, 0, head, unit))
        self.by_feature = pl.BlockSpec((None, self.length, None, features), lambda unit, head, row: (row, 0, head, 0))
        self.by_token = pl.BlockSpec((None, self.length), lambda unit, head, row: (row, 0))
        self.state = pl.BlockSpec((None, None, self.units, features), lambda unit, head, row: (row, head, unit, 0))
        self.part = pl.BlockSpec(
            (None, None, self.length, None, features), lambda unit, head, row: (unit, row, 0, head, 0)
        )
        self.parts_shape = jax.ShapeDtypeStruct((programs, *tokens.value.shape), _FLOAT32)

    def specs(self, operands: _Operands) -> _Operands:
        keep, scale, first = (
            None if array is None else self.by_token
            for array in (operands.tokens.keep, operands.tokens.scale, operands.first)
        )
        tokens = Tokens(self.by_unit, self.by_feature, self.by_unit, keep, scale)
        return _Operands(tokens, first, None if operands.start is None else self.state)


def _forward_kernel(plan: _Plan, activation, operands: _Operands, mixed_ref):
    tokens = operands.tokens

    def add_token(token, hidden):
        if tokens.keep is not None:
            hidden = [part * tokens.keep[token] for part in hidden]
        hidden = _add(plan, tokens, hidden, token)
        w_out = tokens.w_out[token].astype(_FLOAT32)[:, None]
        for columns, part in zip(plan.tiles, hidden, strict=True):
            mixed_ref[token, columns] = jnp.sum(w_out * activation(_scaled(tokens, part, token)), axis=0)
        return hidden

    jax.lax.fori_loop(0, plan.length, add_token, _first_sum(plan, operands, True))


def _backward_kernel(plan: _Plan, activation, operands: _Operands, later_ref, gradient_ref, results: _Results):
    tokens = operands.tokens

    def sum_up_to(at):
        """A at token `at`, from the start of its example or of the block, whichever is later."""
        first = -1 if operands.first is None else operands.first[at]
        return jax.lax.fori_loop(
            jnp.maximum(first, 0),
            at + 1,
            lambda token, hidden: _add(plan, tokens, hidden, token),
            _first_sum(plan, operands, first < 0),
        )

    def token_gradients(back, carry):
        hidden, later = carry
        token = plan.length - 1 - back
        w_in, w_out = (array[token].astype(_FLOAT32) for array in (tokens.w_in, tokens.w_out))
        # Tiles are added up first, as a sum over features passes numbers between threads.
        following, for_w_in, for_w_out = [], 0.0, 0.0
        for columns, sums, after in zip(plan.tiles, hidden, later, strict=True):
            gradient = gradient_ref[token, columns].astype(_FLOAT32)
            units, pull_back = jax.vjp(lambda sums: activation(_scaled(tokens, sums, token)), sums)
            for_w_out += units * gradient[None, :]
            after = after + pull_back(w_out[:, None] * gradient[None, :])[0]
            for_w_in += after * tokens.value[token, columns].astype(_FLOAT32)[None, :]
            results.value[token, columns] = jnp.sum(after * w_in[:, None], axis=0)
            following.append(after if tokens.keep is None else after * tokens.keep[token])
        results.w_in[token] = jnp.sum(for_w_in, axis=1).astype(results.w_in.dtype)
        results.w_out[token] = jnp.sum(for_w_out, axis=1).astype(results.w_out.dtype)
        take_off = lambda: _add(plan, tokens, hidden, token, -1.0)  # noqa: E731
        if tokens.keep is None:
            return take_off(), following
        starts = tokens.keep[token] == 0
        return jax.lax.cond(starts, lambda: sum_up_to(jnp.maximum(token - 1, 0)), take_off), following

    if later_ref is None:
        later = [jnp.zeros(plan.tile, _FLOAT32) for _ in plan.tiles]
    else:
        later = [later_ref[:, columns] for columns in plan.tiles]
    _, later = jax.lax.fori_loop(0, plan.length, token_gradients, (sum_up_to(plan.length - 1), later))
    if results.start is not None:
        for columns, part in zip(plan.tiles, later, strict=True):
            results.start[:, columns] = part


def _first_sum(plan: _Plan, operands: _Operands, continues) -> list[jax.Array]:
    """A before the block where an example continues, otherwise zeros; a tile for some of the features."""
    if operands.start is None:
        return [jnp.zeros(plan.tile, _FLOAT32) for _ in plan.tiles]
    return [jnp.where(continues, operands.start[:, columns], 0.0) for columns in plan.tiles]


def _add(plan: _Plan, tokens: Tokens, hidden: list[jax.Array], token, sign: float = 1.0) -> list[jax.Array]:
    """A with one more token, or with `sign` -1 without it."""
    w_in = sign * tokens.w_in[token].astype(_FLOAT32)[:, None]
    return [
        part + w_in * tokens.value[token, columns].astype(_FLOAT32)[None, :]
        for columns, part in zip(plan.tiles, hidden, strict=True)
    ]


def _scaled(tokens: Tokens, hidden: jax.Array, token) -> jax.Array:
    return hidden if tokens.scale is None else hidden * tokens.scale[token]
