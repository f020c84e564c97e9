"""A causal MLP over the tokens of an example: `y_t = w_out[t] . gelu(c_t A_t)`, `A_t = sum_{j <= t} w_in[j] (x) v[j]`.

The output of a token depends on the preceding tokens only through the state A [heads, hidden, features], a sum of
outer products. Storing A for every token would take too much memory, so the backward pass recomputes A one block at a
time, and the loop over blocks stores A only between blocks. A matmul computes the contribution of a block to A; the
kernel module computes outputs and gradients within a block. Blocks are computed with a loop over tokens on CPUs
(`running_token_mlp_loop`), Pallas kernels on TPUs (`running_token_mlp_tpu`), and operations that XLA fuses on GPUs
(`running_token_mlp_unrolled`).
"""

import functools
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from remixer_t5x.kernels import running_token_mlp_loop, running_token_mlp_tpu, running_token_mlp_unrolled, self_check
from remixer_t5x.kernels.attention_formula import ATTENTION_OUTPUT
from remixer_t5x.kernels.compile_target import (
    get_batch_and_head_axes,
    get_target_platform,
    targets_cpu,
    wrap_in_shard_map,
)
from remixer_t5x.kernels.reshaping import join_blocks, split_blocks
from remixer_t5x.kernels.running_token_mlp_loop import TokenArrays, zero_state


def apply_running_token_mlp(
    w_in: jax.Array,
    value: jax.Array,
    w_out: jax.Array,
    ids: jax.Array,
    *,
    packed: bool,
    hidden_scale: jax.Array | None = None,
) -> jax.Array:
    """Mixes each token with the preceding tokens of its example through hidden units.

    Args:
        w_in, w_out: [batch, length, heads, hidden], input and output weights of each token; w_in is ignored at padding.
        value: [batch, length, heads, features], values of each token; ignored at padding.
        ids: [batch, length] int32, the example id of each token, starting at 1; 0 is padding.
        packed: whether rows may contain more than one example.
        hidden_scale: [batch, length] float32, factor c_t of each token, treated as a constant; None for 1.

    Returns:
        [batch, length, heads, features] in value's dtype; the state A is computed in float32.
    """
    is_token = (ids > 0)[..., None, None]
    operands = jnp.where(is_token, w_in, 0), jnp.where(is_token, value, 0), w_out, ids, hidden_scale
    kernel = running_token_mlp_loop if targets_cpu() else running_token_mlp_unrolled
    if get_target_platform() == 'tpu':
        failure_reason = self_check.failure_reason(_build_kernel_check(packed, *operands))
        if failure_reason is None:
            kernel = running_token_mlp_tpu
        else:
            self_check.log_fallback('the running token MLP', 'the tpu kernel', failure_reason)
    return _mix_with_kernel(kernel, packed, *operands)


def _mix_with_kernel(kernel: ModuleType, packed: bool, w_in, value, w_out, ids, scale) -> jax.Array:
    keep = None
    if packed:
        is_continued = jnp.pad(ids[:, 1:] == ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        keep = is_continued.astype(jnp.float32)
    return mix_by_blocks(kernel, TokenArrays(w_in, value, w_out, keep, scale))


def _build_kernel_check(packed: bool, w_in, value, w_out, ids, scale) -> self_check.KernelCheck:
    _, length, heads, hidden = w_in.shape
    return self_check.KernelCheck(
        'running_token_mlp_tpu',
        f'{length} tokens, {heads} heads of {hidden} units and {value.shape[-1]} features{", packed" * packed}',
        functools.partial(_mix_with_kernel, running_token_mlp_tpu, packed),
        functools.partial(_mix_with_kernel, running_token_mlp_loop, packed),
        self_check.get_operand_shapes((w_in, value, w_out, ids, scale), self_check.NUM_CHECK_ROWS),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def mix_by_blocks(kernel: ModuleType, tokens: TokenArrays) -> jax.Array:
    """Mixes each token with the preceding tokens of its example; w_in and value must be zero at padding.

    `kernel` is the module that computes blocks.
    """
    return _forward_rule(kernel, tokens)[0]


def _forward_rule(kernel, tokens):
    specs = _build_partition_specs(tokens)
    mixed = wrap_in_shard_map(functools.partial(_forward, kernel), (specs,), specs.value)(tokens)
    return checkpoint_name(mixed, ATTENTION_OUTPUT), tokens


def _backward_rule(kernel, tokens, gradient):
    specs = _build_partition_specs(tokens)
    run = wrap_in_shard_map(functools.partial(_backward, kernel), (specs, specs.value), specs[:3])
    w_in, value, w_out = run(tokens, gradient)
    return (TokenArrays(w_in, value, w_out, None, None),)


mix_by_blocks.defvjp(_forward_rule, _backward_rule)


def _build_partition_specs(tokens: TokenArrays) -> TokenArrays:
    rows, heads = get_batch_and_head_axes(tokens.value.shape[0], tokens.value.shape[2])
    by_head, by_row = PartitionSpec(rows, None, heads, None), PartitionSpec(rows, None)
    return TokenArrays(by_head, by_head, by_head, by_row, by_row)


def _forward(kernel: ModuleType, tokens: TokenArrays) -> jax.Array:
    length, block = tokens.value.shape[1], kernel.choose_block_length(tokens.w_in, tokens.value)
    if block == length:
        return kernel.forward(tokens, None)

    def mix_block(start, tokens):
        return _add_block_to_state(start, tokens), kernel.forward(tokens, start)

    _, mixed = jax.lax.scan(mix_block, zero_state(tokens), split_blocks(tokens, block))
    return join_blocks(mixed, length)


def _backward(kernel: ModuleType, tokens: TokenArrays, gradient: jax.Array) -> tuple[jax.Array, ...]:
    length, block = tokens.value.shape[1], kernel.choose_block_length(tokens.w_in, tokens.value)
    if block == length:
        return tuple(kernel.backward(tokens, None, None, gradient)[:3])

    def compute_block_gradients(later, inputs):
        tokens, start, gradient = inputs
        *gradients, later = kernel.backward(tokens, start, later, gradient)
        return later, gradients

    zeros, blocks = zero_state(tokens), split_blocks(tokens, block)
    _, starts = jax.lax.scan(lambda start, tokens: (_add_block_to_state(start, tokens), start), zeros, blocks)
    inputs = blocks, starts, split_blocks(gradient, block)
    _, gradients = jax.lax.scan(compute_block_gradients, zeros, inputs, reverse=True)
    return tuple(join_blocks(array, length) for array in gradients)


def _add_block_to_state(start: jax.Array, tokens: TokenArrays) -> jax.Array:
    """Computes the state A after a block: the sum over the tokens of the last example in the block."""
    w_in = tokens.w_in
    if tokens.keep is not None:
        keep = tokens.keep
        from_start = jnp.cumprod(keep[:, ::-1], axis=1)[:, ::-1]  # 1 if no example starts at this or a later token
        is_added = jnp.concatenate([from_start[:, 1:], jnp.ones_like(keep[:, :1])], axis=1)
        w_in = w_in * is_added[..., None, None].astype(w_in.dtype)
        start = start * from_start[:, 0, None, None, None]
    return start + jnp.einsum(
        'bthk,bthf->bhkf', w_in, tokens.value, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST
    )
