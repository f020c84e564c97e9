"""When the TPU's kernel computes a call, and how its arrays lie."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from remixer_t5x.models.layers.attention import by_kernel, tpu_bias, tpu_kernel, tpu_plan
from remixer_t5x.models.layers.attention.bias import Bias, DistanceBias
from remixer_t5x.models.layers.attention.visibility import Visibility
from remixer_t5x.models.layers.compile_target import target_chip

# Of these the compiler of kernels knows no product of bfloat16.
_WITHOUT_BFLOAT16 = ('v2', 'v3')


def refusal(query: jax.Array, key: jax.Array, value: jax.Array, visibility: Visibility, bias: Bias) -> str | None:
    """Why the kernel cannot compute this call, or None."""
    if isinstance(bias, jax.Array):
        return 'takes a bias by distance and not one for each query and key'
    if target_chip() in _WITHOUT_BFLOAT16 and query.dtype == jnp.bfloat16:
        return f'multiplies bfloat16 on a TPU v4 or newer and not on a {target_chip()}'
    if jax.default_backend() == 'tpu':
        _, length, heads, head_dim = query.shape
        plan = tpu_plan.make_plan(length, key.shape[1], heads, head_dim, visibility.causal)
        needed, available = plan.memory, pltpu.get_tpu_info().vmem_capacity_bytes
        if needed > available:
            return (
                f'takes {needed / 2**20:.0f} MiB of on-chip memory for rows of {query.shape[1]} tokens, '
                f'and this TPU has {available / 2**20:.0f}'
            )
    return None


def attend(query: jax.Array, key: jax.Array, value: jax.Array, visibility: Visibility, bias: Bias) -> jax.Array:
    """`choice.attention` of a call for which `refusal` is None."""
    by_distance = bias.by_distance if isinstance(bias, DistanceBias) else None
    heads, head_dim = query.shape[2:]
    call = by_kernel.Call(_forward, _backward, heads, head_dim, visibility.causal)
    joined = (array.reshape(*array.shape[:2], -1) for array in (query, key, value))
    mixed = by_kernel.attend(call, *joined, visibility.query_segments, visibility.key_segments, by_distance)
    return mixed.reshape(query.shape)


def _plan(call: by_kernel.Call, query: jax.Array, key: jax.Array) -> tpu_plan.Plan:
    """The plan of a device's part of the heads."""
    _, length, width = query.shape
    return tpu_plan.make_plan(length, key.shape[1], width // call.head_dim, call.head_dim, call.causal)


def _forward(call: by_kernel.Call, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    plan = _plan(call, *arrays[:2])
    mixed, log_total = tpu_kernel.forward(plan, _operands(plan, *arrays))
    return mixed, log_total.reshape(mixed.shape[0], plan.heads, -1)


def _backward(call: by_kernel.Call, *arrays: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    *given, mixed, log_total, gradient = arrays
    plan = _plan(call, *given[:2])
    log_total = log_total.reshape(mixed.shape[0], -1, plan.group, plan.queries)
    *gradients, of_bias = tpu_kernel.backward(plan, _operands(plan, *given), mixed, log_total, gradient)
    if of_bias is not None:
        spread = functools.partial(_bias_blocks, plan)
        of_bias = jax.linear_transpose(spread, given[-1])(of_bias)[0][None]
    return *gradients, of_bias


def _operands(plan, query, key, value, query_segments, key_segments, by_distance) -> tpu_plan.Operands:
    return tpu_plan.Operands(
        query,
        key,
        value,
        None if query_segments is None else query_segments[:, None, :],
        key_segments[:, :, None],
        None if by_distance is None else _bias_blocks(plan, by_distance),
    )


def _bias_blocks(plan: tpu_plan.Plan, by_distance: jax.Array) -> jax.Array:
    copies = tpu_bias.shifted_copies(by_distance, plan.blocks_q * plan.block_q, plan.blocks_k * plan.block_k)
    return copies.reshape(-1, plan.group, *copies.shape[1:])
