"""An MLP along the tokens of an example: `y_i = w_out[i] . f(sum_j w_in[j] (x) v[j] + bias)`.

Every token j adds the outer product of its weights and its value to the hidden units [hidden, features] of its own
example; every token i reads them with its own weights. Cost and memory are linear in length: there is no
[length, length] array and, in packed rows, no hidden units for a guessed number of examples.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from remixer_t5x.kernels.attention.formula import ATTENTION_OUTPUT
from remixer_t5x.kernels.compile_target import on_cpu
from remixer_t5x.models.layers import example_blocks

Activation = Callable[[jax.Array], jax.Array]


def mix_through_hidden(
    w_in: jax.Array,
    value: jax.Array,
    w_out: jax.Array,
    ids_in: jax.Array,
    ids_out: jax.Array,
    *,
    packed: bool,
    hidden_bias: jax.Array | None = None,
    activation: Activation = jax.nn.gelu,
) -> jax.Array:
    """Mixes the tokens of each example through hidden units that depend on all of them, in independent heads.

    Args:
        w_in: [batch, n, heads, hidden] weights of the tokens that are read; those at padding must be finite if not
            `packed`, and otherwise do not matter.
        value: [batch, n, heads, features], the values that are read.
        w_out: [batch, m, heads, hidden] weights of the tokens that are written.
        ids_in: [batch, n] int32, 1.. names the example of a token, 0 is padding.
        ids_out: [batch, m] int32, the same for the tokens written.
        packed: False promises at most one example in a row; True takes blocks of each example (`example_blocks`).
        hidden_bias: [heads, hidden] added before the activation, or None.
        activation: elementwise function of the hidden units, by default GELU in its tanh form.

    Returns:
        [batch, m, heads, features] in value's dtype; the hidden units are summed in float32.
    """
    if packed:
        mixed = _mix_examples(activation, w_in, value, w_out, hidden_bias, ids_in, ids_out)
    else:
        # A mask of w_in would be a pass over an array that is often larger than all others.
        value = jnp.where((ids_in > 0)[..., None, None], value, 0)
        mixed = _mix_example(activation, w_in, value, w_out, hidden_bias, None)
    return checkpoint_name(mixed, ATTENTION_OUTPUT)


def hidden_units(
    w_in: jax.Array,
    value: jax.Array,
    take: jax.Array | None,
    hidden_bias: jax.Array | None = None,
    activation: Activation = jax.nn.gelu,
) -> jax.Array:
    """`f(sum_j w_in[j] (x) v[j] + bias)` over the tokens where `take` [batch, n] is True, None for all.

    Returns float32 [batch, heads, hidden, features]; other arguments as in `mix_through_hidden`.
    """
    total = sum_of_products(w_in, value, take)
    return activation(total if hidden_bias is None else total + hidden_bias.astype(jnp.float32)[:, :, None])


def read_hidden(w_out: jax.Array, units: jax.Array) -> jax.Array:
    """`w_out[i] . units`, [batch, m, heads, features] in w_out's dtype."""
    units = units.astype(w_out.dtype)
    if _has_one_head(w_out):
        return jnp.einsum('bmk,bkf->bmf', w_out[:, :, 0], units[:, 0])[:, :, None]
    return jnp.einsum('bmhk,bhkf->bmhf', w_out, units)


def sum_of_products(w_in: jax.Array, value: jax.Array, take: jax.Array | None) -> jax.Array:
    """`sum_j w_in[j] (x) v[j]` over the tokens where `take` is True, float32 [batch, heads, hidden, features]."""
    if take is not None:
        # Both are masked, because a non-finite value would remain non-finite if it were only multiplied by 0.
        w_in, value = (jnp.where(take[..., None, None], array, 0) for array in (w_in, value))
    if on_cpu():
        total = jnp.einsum('bnhk,bnhf->bhkf', w_in, value, preferred_element_type=jnp.float32)
        return checkpoint_name(total, ATTENTION_OUTPUT)
    # An accelerator accumulates in float32 anyway. With a result in the dtype of the operands, the gradients are also
    # matmuls in that dtype. The result has no checkpoint name, because saving it takes longer than recomputing it.
    if _has_one_head(w_in):
        total = jnp.einsum('bnk,bnf->bkf', w_in[:, :, 0], value[:, :, 0])[:, None]
    else:
        total = jnp.einsum('bnhk,bnhf->bhkf', w_in, value)
    return total.astype(jnp.float32)


def _has_one_head(weights: jax.Array) -> bool:
    # XLA:GPU copies the operands of a matmul if a heads axis follows the tokens, even an axis of size 1.
    return weights.shape[2] == 1 and not on_cpu()


def _mix_example(activation, w_in, value, w_out, hidden_bias, take):
    return read_hidden(w_out, hidden_units(w_in, value, take, hidden_bias, activation))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix_examples(activation, w_in, value, w_out, hidden_bias, ids_in, ids_out):
    """Computes one example after another, so that only one example's hidden units exist at a time."""
    weights = w_in, value, w_out, hidden_bias

    def mix_one():
        mixed = _mix_example(activation, *weights, ids_in == 1)
        return jnp.where((ids_out == 1)[..., None, None], mixed, 0)

    # Without a row of two examples, sorting is not needed and would take a third longer.
    cut = functools.partial(example_blocks.sort_by_example, ids_in, ids_out)
    return jax.lax.cond(jnp.max(ids_out) > 1, lambda: _mix_ranks(activation, *cut(), *weights), mix_one)


def _mix_ranks(activation, into, out, ranks, w_in, value, w_out, hidden_bias):
    sorted_in, sorted_w_out = (into.sort(w_in), into.sort(value)), out.sort(w_out)

    def mix_rank(rank, mixed):
        units = activation(_total(into, rank, *sorted_in, hidden_bias))

        def read_block(read, write, take, mixed):
            return write(mixed, read_hidden(read(sorted_w_out), units))

        return out.loop(rank, read_block, mixed)

    shape = jax.ShapeDtypeStruct((*w_out.shape[:-1], value.shape[-1]), value.dtype)
    return out.back(jax.lax.fori_loop(0, ranks, mix_rank, out.nothing(shape)))


def _total(into, rank, w_in, value, hidden_bias):
    """Returns the pre-activation sum of the example with a given rank in each row, [batch, heads, hidden, features]."""
    batch, _, heads, hidden = w_in.shape
    start = jnp.zeros((batch, heads, hidden, value.shape[-1]), jnp.float32)
    if hidden_bias is not None:
        start += hidden_bias.astype(jnp.float32)[:, :, None]
    return into.loop(
        rank, lambda read, write, take, total: total + sum_of_products(read(w_in), read(value), take), start
    )


def _mix_examples_forward(activation, *arguments):
    return _mix_examples(activation, *arguments), arguments


def _mix_examples_backward(activation, arguments, gradient):
    *weights, ids_in, ids_out = arguments

    def of_one_example():
        mix = functools.partial(_mix_example, activation, take=ids_in == 1)
        return jax.vjp(mix, *weights)[1](jnp.where((ids_out == 1)[..., None, None], gradient, 0))

    def of_ranks():
        return _gradients_of_ranks(activation, example_blocks.sort_by_example(ids_in, ids_out), weights, gradient)

    return *jax.lax.cond(jnp.max(ids_out) > 1, of_ranks, of_one_example), None, None


def _gradients_of_ranks(activation, blocks, weights, gradient):
    into, out, ranks = blocks
    w_in, value, w_out, hidden_bias = weights
    sorted_in, sorted_out = (into.sort(w_in), into.sort(value)), (out.sort(w_out), out.sort(gradient))

    def add_rank(rank, gradients):
        *of_in, of_w_out, of_bias = gradients
        total = _total(into, rank, *sorted_in, hidden_bias)
        units, pull_back = jax.vjp(activation, total)

        def read_block(read, write, take, carry):
            of_w_out, of_units = carry
            block_w_out, of_mixed = (jnp.where(take[..., None, None], read(array), 0) for array in sorted_out)
            _, pull_back = jax.vjp(read_hidden, block_w_out, units)
            of_block, more = pull_back(of_mixed)
            return write(of_w_out, of_block), of_units + more

        of_w_out, of_units = out.loop(rank, read_block, (of_w_out, jnp.zeros_like(units)))
        [of_total] = pull_back(of_units)

        def add_block(read, write, take, of_in):
            _, pull_back = jax.vjp(functools.partial(sum_of_products, take=take), *map(read, sorted_in))
            return [write(*both) for both in zip(of_in, pull_back(of_total), strict=True)]

        of_in = into.loop(rank, add_block, of_in)
        if hidden_bias is not None:
            of_bias += jnp.sum(of_total, axis=(0, 3))
        return [*of_in, of_w_out, of_bias]

    of_bias = None if hidden_bias is None else jnp.zeros(hidden_bias.shape, jnp.float32)
    zeros = [into.nothing(w_in), into.nothing(value), out.nothing(w_out), of_bias]
    of_w_in, of_value, of_w_out, of_bias = jax.lax.fori_loop(0, ranks, add_rank, zeros)
    if hidden_bias is not None:
        of_bias = of_bias.astype(hidden_bias.dtype)
    return into.back(of_w_in), into.back(of_value), out.back(of_w_out), of_bias


_mix_examples.defvjp(_mix_examples_forward, _mix_examples_backward)
