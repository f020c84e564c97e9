"""A causal MLP along the tokens of an example: `y_t = w_out[t] . gelu(c_t A_t)`, `A_t = sum_{j <= t} w_in[j] (x) v[j]`.

The output of a token depends on the preceding tokens only through the state A [heads, hidden, features], a sum of
outer products. Storing A for every token would take too much memory, so the backward pass recomputes A one block at a
time (`block_loop`). Blocks are computed with a loop over tokens on CPUs (`token_loop`), Pallas kernels on TPUs (`tpu`),
and operations that XLA fuses on GPUs (`unrolled`).
"""

import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from remixer_t5x.kernels import self_check
from remixer_t5x.kernels.compile_target import on_cpu, target_platform
from remixer_t5x.kernels.running_token_mlp import token_loop, tpu, unrolled
from remixer_t5x.kernels.running_token_mlp.block_loop import mix_by_blocks


def mix_through_running_hidden(
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
        ids: [batch, length] int32, the example id of each token, starting with 1; 0 is padding.
        packed: whether rows may contain more than one example.
        hidden_scale: [batch, length] float32, factor c_t of each token, treated as a constant; None for 1.

    Returns:
        [batch, length, heads, features] in value's dtype; the state A is computed in float32.
    """
    is_token = (ids > 0)[..., None, None]
    operands = jnp.where(is_token, w_in, 0), jnp.where(is_token, value, 0), w_out, ids, hidden_scale
    kernel = token_loop if on_cpu() else unrolled
    if target_platform() == 'tpu':
        unsupported_reason = tpu.unsupported_reason(w_in, value)
        if unsupported_reason is None:
            unsupported_reason = self_check.failure_reason(_build_check(packed, *operands))
        if unsupported_reason is None:
            kernel = tpu
        else:
            self_check.log_fallback('the running token MLP', 'the tpu kernel', unsupported_reason)
    return _mix_with_kernel(kernel, packed, *operands)


def _mix_with_kernel(kernel: ModuleType, packed: bool, w_in, value, w_out, ids, scale) -> jax.Array:
    keep = None
    if packed:
        is_continued = jnp.pad(ids[:, 1:] == ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        keep = is_continued.astype(jnp.float32)
    return mix_by_blocks(kernel, w_in, value, w_out, keep, scale)


def _build_check(packed: bool, w_in, value, w_out, ids, scale) -> self_check.KernelCheck:
    _, length, heads, hidden = w_in.shape
    return self_check.KernelCheck(
        'running_token_mlp_tpu',
        f'{length} tokens, {heads} heads of {hidden} units and {value.shape[-1]} features{", packed" * packed}',
        functools.partial(_mix_with_kernel, tpu, packed),
        functools.partial(_mix_with_kernel, token_loop, packed),
        self_check.operand_shapes((w_in, value, w_out, ids, scale), self_check.NUM_CHECK_ROWS),
    )
