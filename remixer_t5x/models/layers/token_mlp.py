"""An MLP along the tokens of an example: `y_i = w_out[i] . f(sum_j w_in[j] (x) v[j] + bias)`.

Each token j adds the outer product of its input weights and its value to the hidden units [hidden, features] of its
example. Compute and memory are linear in the sequence length; packed rows store the hidden units of one example at a
time.

Packed rows are split into blocks with tokens of a single example. The tokens of a row are sorted by example, starting
with the longest example (rank 0). Step k of a loop processes the example of rank k in every row, in as many blocks as
the longest of these examples requires. The k-th longest example of a row of n tokens has at most n / k tokens, so the
loop processes at most `n (1 + 1/2 + ... + 1/E) + E * BLOCK_LENGTH` tokens for E examples, instead of `n E` in a
separate pass over the row for each example.

For example, with blocks of 2 tokens, a row with the ids `1 1 2 2 2 0` is sorted to `2 2 2 1 1 0`. Rank 0 is example 2
at the sorted positions 0 to 2, which takes the blocks (0, 1) and (2, 3). Position 3 belongs to example 1: sums skip it
(`is_member`), and rank 1, with the block (3, 4), overwrites the output that rank 0 wrote there.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from remixer_t5x.kernels.attention_formula import ATTENTION_OUTPUT
from remixer_t5x.kernels.compile_target import targets_cpu

Activation = Callable[[jax.Array], jax.Array]
# Number of tokens in a block. Smaller blocks need less padding for short examples, but more steps for long examples.
BLOCK_LENGTH = 64


def apply_token_mlp(
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
        ids_in, ids_out: [batch, n] and [batch, m] int32, example ids starting at 1; 0 is padding.
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
    if targets_cpu():
        total = jnp.einsum('bnhk,bnhf->bhkf', w_in, value, preferred_element_type=jnp.float32)
        return checkpoint_name(total, ATTENTION_OUTPUT)
    # Accelerators accumulate in float32 in any case. If the result has the dtype of the operands, the backward pass
    # also multiplies in this dtype. The result is not passed to `checkpoint_name`: recomputing is faster than saving.
    if _can_drop_heads_axis(w_in):
        total = jnp.einsum('bnk,bnf->bkf', w_in[:, :, 0], value[:, :, 0])[:, None]
    else:
        total = jnp.einsum('bnhk,bnhf->bhkf', w_in, value)
    return total.astype(jnp.float32)


def _can_drop_heads_axis(weights: jax.Array) -> bool:
    # XLA:GPU copies the operands of a matmul if a heads axis follows the token axis, even if its size is 1.
    return weights.shape[2] == 1 and not targets_cpu()


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
        return _mix_sorted_examples(activation, *sort_by_example(ids_in, ids_out), *weights)

    # If every row contains one example, skip the sort, which would increase the run time by a third.
    return jax.lax.cond(jnp.max(ids_out) > 1, mix_sorted_examples, mix_single_example)


def _mix_sorted_examples(activation, in_order, out_order, ranks, w_in, value, w_out, hidden_bias):
    sorted_in, sorted_w_out = (in_order.sort_tokens(w_in), in_order.sort_tokens(value)), out_order.sort_tokens(w_out)

    def mix_examples_of_rank(rank, mixed):
        units = activation(_sum_examples_of_rank(in_order, rank, *sorted_in, hidden_bias))

        def project_block(read, write, is_member, mixed):
            return write(mixed, project_hidden_units(read(sorted_w_out), units))

        return out_order.loop_over_blocks(rank, project_block, mixed)

    shape = jax.ShapeDtypeStruct((*w_out.shape[:-1], value.shape[-1]), value.dtype)
    return out_order.restore_token_order(
        jax.lax.fori_loop(0, ranks, mix_examples_of_rank, out_order.make_sorted_zeros(shape))
    )


def _sum_examples_of_rank(in_order, rank, w_in, value, hidden_bias):
    """Returns the pre-activations of the example with rank `rank` in each row, [batch, heads, hidden, features]."""
    batch, _, heads, hidden = w_in.shape
    start = jnp.zeros((batch, heads, hidden, value.shape[-1]), jnp.float32)
    if hidden_bias is not None:
        start += hidden_bias.astype(jnp.float32)[:, :, None]

    def add_block_sums(read, write, is_member, total):
        return total + sum_outer_products(read(w_in), read(value), is_member)

    return in_order.loop_over_blocks(rank, add_block_sums, start)


def _mix_examples_backward(activation, arguments, gradient):
    *weights, ids_in, ids_out = arguments

    def compute_single_example_gradients():
        mix = functools.partial(_mix_example, activation, mask=ids_in == 1)
        return jax.vjp(mix, *weights)[1](jnp.where((ids_out == 1)[..., None, None], gradient, 0))

    def compute_multiple_example_gradients():
        return _compute_sorted_example_gradients(activation, sort_by_example(ids_in, ids_out), weights, gradient)

    return (
        *jax.lax.cond(jnp.max(ids_out) > 1, compute_multiple_example_gradients, compute_single_example_gradients),
        None,
        None,
    )


def _compute_sorted_example_gradients(activation, blocks, weights, gradient):
    in_order, out_order, ranks = blocks
    w_in, value, w_out, hidden_bias = weights
    sorted_in = in_order.sort_tokens(w_in), in_order.sort_tokens(value)
    sorted_out = out_order.sort_tokens(w_out), out_order.sort_tokens(gradient)

    def add_rank_gradients(rank, gradients):
        *grad_in, grad_w_out, grad_bias = gradients
        total = _sum_examples_of_rank(in_order, rank, *sorted_in, hidden_bias)
        units, pull_back = jax.vjp(activation, total)

        def compute_output_gradients(read, write, is_member, carry):
            grad_w_out, grad_units = carry
            block_w_out, grad_mixed = (jnp.where(is_member[..., None, None], read(array), 0) for array in sorted_out)
            _, pull_back = jax.vjp(project_hidden_units, block_w_out, units)
            grad_block, grad_block_units = pull_back(grad_mixed)
            return write(grad_w_out, grad_block), grad_units + grad_block_units

        grad_w_out, grad_units = out_order.loop_over_blocks(
            rank, compute_output_gradients, (grad_w_out, jnp.zeros_like(units))
        )
        [grad_total] = pull_back(grad_units)

        def compute_input_gradients(read, write, is_member, grad_in):
            _, pull_back = jax.vjp(functools.partial(sum_outer_products, mask=is_member), *map(read, sorted_in))
            return [write(*pair) for pair in zip(grad_in, pull_back(grad_total), strict=True)]

        grad_in = in_order.loop_over_blocks(rank, compute_input_gradients, grad_in)
        if hidden_bias is not None:
            grad_bias += jnp.sum(grad_total, axis=(0, 3))
        return [*grad_in, grad_w_out, grad_bias]

    grad_bias = None if hidden_bias is None else jnp.zeros(hidden_bias.shape, jnp.float32)
    zeros = [
        in_order.make_sorted_zeros(w_in),
        in_order.make_sorted_zeros(value),
        out_order.make_sorted_zeros(w_out),
        grad_bias,
    ]
    grad_w_in, grad_value, grad_w_out, grad_bias = jax.lax.fori_loop(0, ranks, add_rank_gradients, zeros)
    if hidden_bias is not None:
        grad_bias = grad_bias.astype(hidden_bias.dtype)
    return (
        in_order.restore_token_order(grad_w_in),
        in_order.restore_token_order(grad_value),
        out_order.restore_token_order(grad_w_out),
        grad_bias,
    )


_mix_examples.defvjp(
    lambda activation, *arguments: (_mix_examples(activation, *arguments), arguments), _mix_examples_backward
)


@dataclasses.dataclass(frozen=True)
class TokenOrder:
    """Indices that sort each row's input or output tokens by the rank of their example.

    Attributes:
        order: [batch, n] int32, the row position of each sorted token.
        inverse: [batch, n] int32, the sorted position of each token in the row.
        is_used: [batch, n] bool, whether each token's example has an output token, and therefore a rank.
        first: [batch, ranks] int32, the sorted position of the first token of each example.
        count: [batch, ranks] int32, the number of tokens of each example.
    """

    order: jax.Array
    inverse: jax.Array
    is_used: jax.Array
    first: jax.Array
    count: jax.Array

    def sort_tokens(self, array: jax.Array) -> jax.Array:
        """Sorts the tokens of an array [batch, n, ...] by example, and pads it to [batch, n + BLOCK_LENGTH, ...].

        With the padding, the last block does not extend beyond the array.
        """
        rest = ((0, 0),) * (array.ndim - 2)
        return jnp.pad(_take_tokens(array, self.order), ((0, 0), (0, BLOCK_LENGTH), *rest))

    def restore_token_order(self, array: jax.Array) -> jax.Array:
        """Inverts `sort_tokens`, and zeroes the tokens of examples without a rank."""
        return jnp.where(_append_axes(self.is_used, array), _take_tokens(array, self.inverse), 0)

    def make_sorted_zeros(self, like: jax.Array) -> jax.Array:
        """Returns zeros with the shape and dtype of `sort_tokens(like)`."""
        batch, length = self.order.shape
        return jnp.zeros((batch, length + BLOCK_LENGTH, *like.shape[2:]), like.dtype)

    def loop_over_blocks(
        self, rank: jax.Array, body: Callable[[Callable, Callable, jax.Array, Any], Any], start: Any
    ) -> Any:
        """Runs `body(read, write, is_member, carry) -> carry` for each block of the examples with this rank.

        `read` slices a block [batch, tokens, ...] from a sorted array, `write` writes a block to a sorted array, and
        `is_member` [batch, tokens] is False at tokens of other examples. Call this method for all ranks in order, so
        that later blocks overwrite what `body` writes for tokens of other examples.
        """
        first, count = self.first[:, rank], self.count[:, rank]
        length = self.order.shape[1]

        def run_on_block(index, carry):
            position = jnp.minimum(first + index * BLOCK_LENGTH, length)
            is_member = position[:, None] + jnp.arange(BLOCK_LENGTH) < (first + count)[:, None]

            def read_block(array):
                return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, BLOCK_LENGTH))(array, position)

            def write_block(array, values):
                put = jax.vmap(lambda row, values, at: jax.lax.dynamic_update_slice_in_dim(row, values, at, 0))
                return put(array, values.astype(array.dtype), position)

            return body(read_block, write_block, is_member, carry)

        def run_on_whole_row(carry):
            position = jnp.arange(length)
            is_member = (position >= first[:, None]) & (position < (first + count)[:, None])

            def write_block(array, values):
                updated = jnp.where(_append_axes(is_member, values), values.astype(array.dtype), array[:, :length])
                return array.at[:, :length].set(updated)

            return body(lambda array: array[:, :length], write_block, is_member, carry)

        longest = jnp.max(count)
        blocks = (longest + BLOCK_LENGTH - 1) // BLOCK_LENGTH
        # One matmul for the whole row is faster than one for each of many blocks.
        return jax.lax.cond(
            2 * longest > length,
            run_on_whole_row,
            lambda carry: jax.lax.fori_loop(0, blocks, run_on_block, carry),
            start,
        )


def sort_by_example(ids_in: jax.Array, ids_out: jax.Array) -> tuple[TokenOrder, TokenOrder, jax.Array]:
    """Returns a `TokenOrder` of the input tokens, one of the output tokens, and the number of ranks.

    `ids_in` [batch, n] and `ids_out` [batch, m] are example ids starting at 1; 0 is padding. The tokens of an example
    need not be contiguous.
    """
    num_ids = ids_in.shape[1] + ids_out.shape[1] + 1
    counts = [jax.vmap(lambda row: jnp.bincount(row, length=num_ids))(ids) for ids in (ids_in, ids_out)]
    # Examples without output tokens need no computation.
    used = (counts[1] > 0) & (jnp.arange(num_ids) > 0)
    by_rank = jnp.argsort(jnp.where(used, -(counts[0] + counts[1]), 1), axis=1, stable=True)
    rank = jnp.argsort(by_rank, axis=1)
    sides = []
    for ids, count in zip((ids_in, ids_out), counts, strict=True):
        order = jnp.argsort(_take_tokens(rank, ids), axis=1, stable=True)
        count = _take_tokens(jnp.where(used, count, 0), by_rank)
        first = jnp.cumsum(count, axis=1) - count
        sides.append(TokenOrder(order, jnp.argsort(order, axis=1), _take_tokens(used, ids), first, count))
    return *sides, jnp.max(jnp.sum(used, axis=1))


def _take_tokens(array: jax.Array, positions: jax.Array) -> jax.Array:
    return jnp.take_along_axis(array, _append_axes(positions, array), axis=1)


def _append_axes(array: jax.Array, like: jax.Array) -> jax.Array:
    return array.reshape(*array.shape, *(1,) * (like.ndim - 2))
