"""An MLP along the tokens of an example: `y_i = w_out[i] . f(sum_j w_in[j] (x) v[j] + bias)`.

Each token j adds the outer product of its input weights and its value to the hidden units [hidden, features] of its
example. Compute and memory are linear in the sequence length; packed rows store the hidden units of one example at a
time.
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
    """Mixes the tokens of each example with the token MLP, separately for each head.

    Args:
        w_in: [batch, n, heads, hidden], weights of the input tokens; must be finite at padding unless `packed`.
        value: [batch, n, heads, features], values of the input tokens.
        w_out: [batch, m, heads, hidden], weights of the output tokens.
        ids_in, ids_out: [batch, n] and [batch, m] int32, example ids starting with 1; 0 is padding.
        packed: whether rows may contain more than one example.
        hidden_bias: [heads, hidden], or None.
        activation: elementwise function f; the default is the tanh approximation of GELU.

    Returns:
        [batch, m, heads, features] in value's dtype; the hidden units are summed in float32.
    """
    if packed:
        mixed = _mix_examples(activation, w_in, value, w_out, hidden_bias, ids_in, ids_out)
    else:
        # Mask the values instead of w_in, which is often the largest array.
        value = jnp.where((ids_in > 0)[..., None, None], value, 0)
        mixed = _mix_example(activation, w_in, value, w_out, hidden_bias, None)
    return checkpoint_name(mixed, ATTENTION_OUTPUT)


def compute_hidden_units(
    w_in: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    hidden_bias: jax.Array | None = None,
    activation: Activation = jax.nn.gelu,
) -> jax.Array:
    """Computes the hidden units `f(sum_j w_in[j] (x) v[j] + bias)`, float32 [batch, heads, hidden, features].

    The sum runs over the tokens j for which `mask` [batch, n] is True, or over all tokens if `mask` is None.
    """
    total = sum_outer_products(w_in, value, mask)
    return activation(total if hidden_bias is None else total + hidden_bias.astype(jnp.float32)[:, :, None])


def project_hidden_units(w_out: jax.Array, units: jax.Array) -> jax.Array:
    """Multiplies the hidden units by the output weights; returns [batch, m, heads, features] in w_out's dtype."""
    units = units.astype(w_out.dtype)
    if _can_drop_heads_axis(w_out):
        return jnp.einsum('bmk,bkf->bmf', w_out[:, :, 0], units[:, 0])[:, :, None]
    return jnp.einsum('bmhk,bhkf->bmhf', w_out, units)


def sum_outer_products(w_in: jax.Array, value: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Computes `sum_j w_in[j] (x) v[j]` as in `compute_hidden_units`, float32 [batch, heads, hidden, features]."""
    if mask is not None:
        # Mask both arrays, because a non-finite number times 0 is NaN.
        w_in, value = (jnp.where(mask[..., None, None], array, 0) for array in (w_in, value))
    if on_cpu():
        total = jnp.einsum('bnhk,bnhf->bhkf', w_in, value, preferred_element_type=jnp.float32)
        return checkpoint_name(total, ATTENTION_OUTPUT)
    # Accelerators accumulate in float32 in any case, and with a result in the dtype of the operands, the backward pass
    # multiplies in this dtype too. The result has no checkpoint name: recomputing it is faster than saving it.
    if _can_drop_heads_axis(w_in):
        total = jnp.einsum('bnk,bnf->bkf', w_in[:, :, 0], value[:, :, 0])[:, None]
    else:
        total = jnp.einsum('bnhk,bnhf->bhkf', w_in, value)
    return total.astype(jnp.float32)


def _can_drop_heads_axis(weights: jax.Array) -> bool:
    # XLA:GPU copies the operands of a matmul if a heads axis follows the token axis, even if its size is 1.
    return weights.shape[2] == 1 and not on_cpu()


def _mix_example(activation, w_in, value, w_out, hidden_bias, mask):
    return project_hidden_units(w_out, compute_hidden_units(w_in, value, mask, hidden_bias, activation))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix_examples(activation, w_in, value, w_out, hidden_bias, ids_in, ids_out):
    """Mixes packed rows one example at a time."""
    weights = w_in, value, w_out, hidden_bias

    def mix_single_example():
        mixed = _mix_example(activation, *weights, ids_in == 1)
        return jnp.where((ids_out == 1)[..., None, None], mixed, 0)

    def mix_sorted_examples():
        return _mix_sorted_examples(activation, *example_blocks.sort_by_example(ids_in, ids_out), *weights)

    # If every row contains only one example, skip sorting, which would take a third longer.
    return jax.lax.cond(jnp.max(ids_out) > 1, mix_sorted_examples, mix_single_example)


def _mix_sorted_examples(activation, in_order, out_order, ranks, w_in, value, w_out, hidden_bias):
    sorted_in, sorted_w_out = (in_order.sort(w_in), in_order.sort(value)), out_order.sort(w_out)

    def mix_rank(rank, mixed):
        units = activation(_sum_examples_of_rank(in_order, rank, *sorted_in, hidden_bias))

        def project_block(read, write, is_member, mixed):
            return write(mixed, project_hidden_units(read(sorted_w_out), units))

        return out_order.loop_over_blocks(rank, project_block, mixed)

    shape = jax.ShapeDtypeStruct((*w_out.shape[:-1], value.shape[-1]), value.dtype)
    return out_order.unsort(jax.lax.fori_loop(0, ranks, mix_rank, out_order.zeros_in_sorted_order(shape)))


def _sum_examples_of_rank(in_order, rank, w_in, value, hidden_bias):
    """Returns the pre-activations of the example with rank `rank` in each row, [batch, heads, hidden, features]."""
    batch, _, heads, hidden = w_in.shape
    start = jnp.zeros((batch, heads, hidden, value.shape[-1]), jnp.float32)
    if hidden_bias is not None:
        start += hidden_bias.astype(jnp.float32)[:, :, None]

    def add_block(read, write, is_member, total):
        return total + sum_outer_products(read(w_in), read(value), is_member)

    return in_order.loop_over_blocks(rank, add_block, start)


def _mix_examples_forward(activation, *arguments):
    return _mix_examples(activation, *arguments), arguments


def _mix_examples_backward(activation, arguments, gradient):
    *weights, ids_in, ids_out = arguments

    def single_example_gradients():
        mix = functools.partial(_mix_example, activation, mask=ids_in == 1)
        return jax.vjp(mix, *weights)[1](jnp.where((ids_out == 1)[..., None, None], gradient, 0))

    def multiple_example_gradients():
        return _sorted_example_gradients(activation, example_blocks.sort_by_example(ids_in, ids_out), weights, gradient)

    return *jax.lax.cond(jnp.max(ids_out) > 1, multiple_example_gradients, single_example_gradients), None, None


def _sorted_example_gradients(activation, blocks, weights, gradient):
    in_order, out_order, ranks = blocks
    w_in, value, w_out, hidden_bias = weights
    sorted_in = in_order.sort(w_in), in_order.sort(value)
    sorted_out = out_order.sort(w_out), out_order.sort(gradient)

    def add_rank_gradients(rank, gradients):
        *grad_in, grad_w_out, grad_bias = gradients
        total = _sum_examples_of_rank(in_order, rank, *sorted_in, hidden_bias)
        units, pull_back = jax.vjp(activation, total)

        def output_gradients(read, write, is_member, carry):
            grad_w_out, grad_units = carry
            block_w_out, grad_mixed = (jnp.where(is_member[..., None, None], read(array), 0) for array in sorted_out)
            _, pull_back = jax.vjp(project_hidden_units, block_w_out, units)
            grad_block, grad_block_units = pull_back(grad_mixed)
            return write(grad_w_out, grad_block), grad_units + grad_block_units

        grad_w_out, grad_units = out_order.loop_over_blocks(rank, output_gradients, (grad_w_out, jnp.zeros_like(units)))
        [grad_total] = pull_back(grad_units)

        def input_gradients(read, write, is_member, grad_in):
            _, pull_back = jax.vjp(functools.partial(sum_outer_products, mask=is_member), *map(read, sorted_in))
            return [write(*pair) for pair in zip(grad_in, pull_back(grad_total), strict=True)]

        grad_in = in_order.loop_over_blocks(rank, input_gradients, grad_in)
        if hidden_bias is not None:
            grad_bias += jnp.sum(grad_total, axis=(0, 3))
        return [*grad_in, grad_w_out, grad_bias]

    grad_bias = None if hidden_bias is None else jnp.zeros(hidden_bias.shape, jnp.float32)
    zeros = [
        in_order.zeros_in_sorted_order(w_in),
        in_order.zeros_in_sorted_order(value),
        out_order.zeros_in_sorted_order(w_out),
        grad_bias,
    ]
    grad_w_in, grad_value, grad_w_out, grad_bias = jax.lax.fori_loop(0, ranks, add_rank_gradients, zeros)
    if hidden_bias is not None:
        grad_bias = grad_bias.astype(hidden_bias.dtype)
    return in_order.unsort(grad_w_in), in_order.unsort(grad_value), out_order.unsort(grad_w_out), grad_bias


_mix_examples.defvjp(_mix_examples_forward, _mix_examples_backward)
