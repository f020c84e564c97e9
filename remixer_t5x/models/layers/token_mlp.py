"""An MLP along the tokens of an example: `y_i = w_out[i] . f(sum_j w_in[j] (x) v[j] + bias)`.

Each token j adds the outer product of its input weights and its value to the hidden units [hidden, features] of its
example. Compute and memory are linear in the sequence length; packed rows store the hidden units of one example at a
time.

A packed row is processed one example at a time, starting with the longest example (rank 0). Step k of a loop processes
the example of rank k in every row, in as many blocks as the longest of these examples requires. The k-th longest
example of a row of n tokens has at most n / k tokens, so the loop processes at most `n (1 + 1/2 + ... + 1/E) + E *
BLOCK_LENGTH` tokens for E examples, instead of `n E` in a separate pass over the row for each example. A block may
contain tokens of other examples, which `is_member` masks.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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
        ids_in, ids_out: [batch, n] and [batch, m] int32, example ids starting at 1; 0 is padding. The tokens of an
            example must be contiguous.
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

    # If every row contains one example, a single pass takes a quarter less time.
    return jax.lax.cond(
        jnp.max(ids_out) > 1,
        lambda: _mix_multiple_examples(activation, weights, _find_examples(ids_in, ids_out)),
        mix_single_example,
    )


def _mix_multiple_examples(activation, weights, examples):
    w_in, value, w_out, hidden_bias = weights
    inputs, outputs, num_ranks = examples

    def mix_examples_of_rank(rank, mixed):
        units = activation(_sum_examples_of_rank(inputs, rank, w_in, value, hidden_bias))

        def project_block(read, write, is_member, mixed):
            return write(mixed, project_hidden_units(read(w_out), units))

        return outputs.loop_over_blocks(rank, project_block, mixed)

    zeros = jnp.zeros((*w_out.shape[:-1], value.shape[-1]), value.dtype)
    return jax.lax.fori_loop(0, num_ranks, mix_examples_of_rank, zeros)


def _sum_examples_of_rank(inputs, rank, w_in, value, hidden_bias):
    """Returns the pre-activations of the example with rank `rank` in each row, [batch, heads, hidden, features]."""
    batch, _, heads, hidden = w_in.shape
    start = jnp.zeros((batch, heads, hidden, value.shape[-1]), jnp.float32)
    if hidden_bias is not None:
        start += hidden_bias.astype(jnp.float32)[:, :, None]

    def add_block_sums(read, write, is_member, total):
        return total + sum_outer_products(read(w_in), read(value), is_member)

    return inputs.loop_over_blocks(rank, add_block_sums, start)


def _mix_examples_backward(activation, arguments, gradient):
    *weights, ids_in, ids_out = arguments

    def compute_single_example_gradients():
        mix = functools.partial(_mix_example, activation, mask=ids_in == 1)
        return jax.vjp(mix, *weights)[1](jnp.where((ids_out == 1)[..., None, None], gradient, 0))

    gradients = jax.lax.cond(
        jnp.max(ids_out) > 1,
        lambda: _compute_example_gradients(activation, weights, gradient, _find_examples(ids_in, ids_out)),
        compute_single_example_gradients,
    )
    return *gradients, None, None


def _compute_example_gradients(activation, weights, gradient, examples):
    w_in, value, w_out, hidden_bias = weights
    inputs, outputs, num_ranks = examples

    def add_rank_gradients(rank, gradients):
        *grad_in, grad_w_out, grad_bias = gradients
        total = _sum_examples_of_rank(inputs, rank, w_in, value, hidden_bias)
        units, pull_back = jax.vjp(activation, total)

        def compute_output_gradients(read, write, is_member, carry):
            grad_w_out, grad_units = carry
            _, pull_back = jax.vjp(project_hidden_units, read(w_out), units)
            grad_block, grad_block_units = pull_back(jnp.where(is_member[..., None, None], read(gradient), 0))
            return write(grad_w_out, grad_block), grad_units + grad_block_units

        grad_w_out, grad_units = outputs.loop_over_blocks(
            rank, compute_output_gradients, (grad_w_out, jnp.zeros_like(units))
        )
        [grad_total] = pull_back(grad_units)

        def compute_input_gradients(read, write, is_member, grad_in):
            _, pull_back = jax.vjp(functools.partial(sum_outer_products, mask=is_member), read(w_in), read(value))
            return [write(*pair) for pair in zip(grad_in, pull_back(grad_total), strict=True)]

        grad_in = inputs.loop_over_blocks(rank, compute_input_gradients, grad_in)
        if hidden_bias is not None:
            grad_bias += jnp.sum(grad_total, axis=(0, 3))
        return [*grad_in, grad_w_out, grad_bias]

    grad_bias = None if hidden_bias is None else jnp.zeros(hidden_bias.shape, jnp.float32)
    zeros = [*map(jnp.zeros_like, (w_in, value, w_out)), grad_bias]
    *gradients, grad_bias = jax.lax.fori_loop(0, num_ranks, add_rank_gradients, zeros)
    return *gradients, None if hidden_bias is None else grad_bias.astype(hidden_bias.dtype)


_mix_examples.defvjp(
    lambda activation, *arguments: (_mix_examples(activation, *arguments), arguments), _mix_examples_backward
)


class _ExampleSpans(NamedTuple):
    """The positions of the examples' input or output tokens in each row."""

    first: jax.Array  # [batch, ranks] int32, the position of the first token of each example
    count: jax.Array  # [batch, ranks] int32, the number of tokens of each example
    length: int  # number of tokens of a row

    def loop_over_blocks(
        self, rank: jax.Array, body: Callable[[Callable, Callable, jax.Array, Any], Any], start: Any
    ) -> Any:
        """Runs `body(read, write, is_member, carry) -> carry` for each block of the examples with this rank.

        `read` slices a block [batch, tokens, ...] from an array [batch, length, ...], `write` replaces the examples'
        tokens of a block, and `is_member` [batch, tokens] is False at tokens of other examples.
        """
        first, count, length = self.first[:, rank], self.count[:, rank], self.length

        def run_on_block(size, index, carry):
            block_start = first + index * size
            position = jnp.minimum(block_start, length - size)
            token = position[:, None] + jnp.arange(size)
            is_member = (token >= block_start[:, None]) & (token < (first + count)[:, None])

            def read_block(array):
                if size == length:
                    return array
                return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, size))(array, position)

            def write_block(array, values):
                values = jnp.where(is_member[..., None, None], values.astype(array.dtype), read_block(array))
                if size == length:
                    return values
                put = jax.vmap(lambda row, values, at: jax.lax.dynamic_update_slice_in_dim(row, values, at, 0))
                return put(array, values, position)

            return body(read_block, write_block, is_member, carry)

        longest, size = jnp.max(count), min(BLOCK_LENGTH, length)
        # One matmul for the whole row is faster than one for each of many blocks.
        return jax.lax.cond(
            2 * longest > length,
            functools.partial(run_on_block, length, 0),
            lambda carry: jax.lax.fori_loop(0, -(-longest // size), functools.partial(run_on_block, size), carry),
            start,
        )


def _find_examples(ids_in: jax.Array, ids_out: jax.Array) -> tuple[_ExampleSpans, _ExampleSpans, jax.Array]:
    """Returns the spans of the examples' input and output tokens, by decreasing length, and the number of ranks.

    `ids_in` [batch, n] and `ids_out` [batch, m] are example ids starting at 1; 0 is padding. The tokens of an example
    must be contiguous. Examples without output tokens have no span, because they need no computation.
    """
    num_ids = ids_in.shape[1] + ids_out.shape[1] + 1

    def find_spans(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the position of the first token of each example id of a row, and the number of its tokens."""
        index = jnp.arange(len(ids))
        return jnp.full(num_ids, len(ids)).at[ids].min(index), jnp.bincount(ids, length=num_ids)

    spans = [jax.vmap(find_spans)(ids) for ids in (ids_in, ids_out)]
    is_used = (spans[1][1] > 0) & (jnp.arange(num_ids) > 0)
    by_rank = jnp.argsort(jnp.where(is_used, -(spans[0][1] + spans[1][1]), 1), axis=1, stable=True)
    inputs, outputs = (
        _ExampleSpans(
            jnp.take_along_axis(first, by_rank, axis=1),
            jnp.take_along_axis(jnp.where(is_used, count, 0), by_rank, axis=1),
            ids.shape[1],
        )
        for (first, count), ids in zip(spans, (ids_in, ids_out), strict=True)
    )
    return inputs, outputs, jnp.max(jnp.sum(is_used, axis=1))
