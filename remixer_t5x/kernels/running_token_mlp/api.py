"""A causal MLP along the tokens of an example: `y_t = w_out[t] . f(c_t A_t)`, `A_t = sum_{j <= t} w_in[j] (x) v[j]`.

The running sum A [heads, hidden, features] is all that a token needs from the tokens before it. Storing A for every
token would take length x hidden x features numbers. Instead it is recomputed in the backward pass: token by token on a
CPU (`token_loop`), and in blocks of tokens on an accelerator (`block_loop`), by a kernel on a TPU (`tpu`) and by
operations that XLA fuses on a GPU (`unrolled`).
"""

import functools

import jax
import jax.numpy as jnp

from remixer_t5x.kernels import compile_target, self_check
from remixer_t5x.kernels.compile_target import on_cpu, target_platform
from remixer_t5x.kernels.running_token_mlp import tpu, unrolled
from remixer_t5x.kernels.running_token_mlp.block_loop import mix_by_blocks
from remixer_t5x.kernels.running_token_mlp.token_loop import Activation, mix_by_tokens

_BLOCK_KERNELS = {'tpu': tpu, 'unrolled': unrolled}


def mix_through_running_hidden(
    w_in: jax.Array,
    value: jax.Array,
    w_out: jax.Array,
    ids: jax.Array,
    *,
    packed: bool,
    hidden_scale: jax.Array | None = None,
    activation: Activation = jax.nn.gelu,
) -> jax.Array:
    """Mixes each token with the tokens before it in its example, through hidden units.

    Args:
        w_in: [batch, length, heads, hidden] weights of the tokens as they are read; weights at padding do not matter.
        value: [batch, length, heads, features], the values that are read.
        w_out: [batch, length, heads, hidden] weights of the tokens as they are written.
        ids: [batch, length] int32, 1.. names the example of a token, 0 is padding.
        packed: False means at most one example in a row.
        hidden_scale: [batch, length] float32, c_t, without a gradient; None is 1.
        activation: elementwise function of the hidden units, by default GELU in its tanh form.

    Returns:
        [batch, length, heads, features] in value's dtype; A is float32.
    """
    is_token = (ids > 0)[..., None, None]
    operands = jnp.where(is_token, w_in, 0), jnp.where(is_token, value, 0), w_out, ids, hidden_scale
    if on_cpu():
        return _mix('token_loop', packed, activation, *operands)
    if target_platform() == 'tpu':
        refusal = tpu.refusal(w_in, value)
        if refusal is None:
            refusal = self_check.failure(_check(packed, activation, w_in, value, hidden_scale))
        if refusal is None:
            return _mix('tpu', packed, activation, *operands)
        self_check.warn_of_formula('the running token MLP', 'the tpu kernel', refusal)
    return _mix('unrolled', packed, activation, *operands)


def _mix(method: str, packed: bool, activation: Activation, w_in, value, w_out, ids, scale) -> jax.Array:
    # With one example in a row, A continues past its end, so the id before the first token may have any value.
    examples = ids if packed else jnp.zeros_like(ids)
    before = jnp.roll(examples, 1, axis=1).at[:, 0].set(examples[:, 0])
    if method == 'token_loop':
        return mix_by_tokens(packed, activation, w_in, value, w_out, examples, before, scale)
    keep = (examples == before).astype(jnp.float32) if packed else None
    return mix_by_blocks(_BLOCK_KERNELS[method], activation, w_in, value, w_out, keep, scale)


def _check(
    packed: bool, activation: Activation, w_in: jax.Array, value: jax.Array, scale: jax.Array | None
) -> self_check.Check:
    """The self-check of the TPU kernel for the heads of one device."""
    (batch, length, heads, hidden), features, rows = w_in.shape, value.shape[-1], self_check.ROWS
    heads = compile_target.heads_of_device(batch, heads)
    of_hidden = jax.ShapeDtypeStruct((rows, length, heads, hidden), w_in.dtype)
    of_value = jax.ShapeDtypeStruct((rows, length, heads, features), value.dtype)
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    of_scale = None if scale is None else jax.ShapeDtypeStruct((rows, length), scale.dtype)
    return self_check.Check(
        'running_token_mlp_tpu',
        f'{length} tokens, {heads} heads of {hidden} units and {features} features{", packed" * packed}',
        functools.partial(_mix, 'tpu', packed, activation),
        functools.partial(_mix, 'token_loop', packed, activation),
        (of_hidden, of_value, of_hidden, ids, of_scale),
        packed,
    )
