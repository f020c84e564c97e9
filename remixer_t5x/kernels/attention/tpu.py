"""Attention by the Pallas kernel of `tpu_kernel` as a differentiable function of sharded arrays.

XLA's partitioner cannot look into a kernel, so each device runs it on its own rows of the batch and its own heads.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from remixer_t5x.kernels import compile_target
from remixer_t5x.kernels.attention import tpu_kernel
from remixer_t5x.kernels.attention.formula import ATTENTION_OUTPUT, Bias, DistanceBias, Visibility
from remixer_t5x.kernels.attention.tpu_kernel import Operands, Plan
from remixer_t5x.kernels.compile_target import on_each_device, rows_and_heads


def refusal(query: jax.Array, key: jax.Array, value: jax.Array, visibility: Visibility, bias: Bias) -> str | None:
    """Returns why the kernel does not support this call, or None."""
    if isinstance(bias, jax.Array):
        return 'takes a bias by distance and not one for each query and key'
    _, length, heads, head_dim = query.shape
    needed = Plan(length, key.shape[1], heads, head_dim, visibility.causal).memory
    available = compile_target.on_chip_memory(default=needed)
    if needed > available:
        return (
            f'takes {needed / 2**20:.0f} MiB of on-chip memory for rows of {length} tokens, '
            f'and this TPU has {available / 2**20:.0f}'
        )
    return compile_target.bfloat16_refusal(query.dtype)


def attend(query: jax.Array, key: jax.Array, value: jax.Array, visibility: Visibility, bias: Bias) -> jax.Array:
    """Computes `api.attention` of a call for which `refusal` is None."""
    by_distance = bias.by_distance if isinstance(bias, DistanceBias) else None
    if query.shape[2] != key.shape[2]:
        key, value = (jnp.repeat(array, query.shape[2] // array.shape[2], axis=2) for array in (key, value))
    joined = (array.reshape(*array.shape[:2], -1) for array in (query, key, value))
    segments = visibility.query_segments, visibility.key_segments
    return _attend(query.shape[-1], visibility.causal, visibility.window, *joined, *segments, by_distance).reshape(
        query.shape
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(head_dim: int, causal: bool, window: int | None, *arrays: Any) -> jax.Array:
    """softmax(query key^T + bias) value, shaped like the queries, in value's dtype.

    Args:
        head_dim: width of a head.
        causal: a query sees no key after it.
        window: see `Visibility`.
        arrays: query, key and value, [batch, length, heads * kv]; the segments of queries, [batch, queries] or None,
            and of keys, [batch, keys]; the bias, [heads, distances] or None.
    """
    return _forward_rule(head_dim, causal, window, *arrays)[0]


def _forward_rule(head_dim: int, causal: bool, window: int | None, *arrays: Any) -> tuple[jax.Array, Any]:
    *specs, of_log_total = _partition_specs(head_dim, arrays)

    def forward(*arrays: Any) -> tuple[jax.Array, jax.Array]:
        plan, operands = _plan_and_operands(head_dim, causal, window, *arrays)
        mixed, log_total = tpu_kernel.forward(plan, operands)
        return mixed, log_total.reshape(mixed.shape[0], plan.heads, -1)

    results = on_each_device(forward, (*specs,), (specs[0], of_log_total))(*arrays)
    mixed, log_total = (checkpoint_name(array, ATTENTION_OUTPUT) for array in results)
    return mixed, (arrays, mixed, log_total)


def _backward_rule(
    head_dim: int, causal: bool, window: int | None, residuals: Any, gradient: jax.Array
) -> tuple[jax.Array | None, ...]:
    arrays, mixed, log_total = residuals
    *specs, of_log_total = _partition_specs(head_dim, arrays)

    def backward(*inputs: Any) -> tuple[jax.Array | None, ...]:
        *arrays, mixed, log_total, gradient = inputs
        plan, operands = _plan_and_operands(head_dim, causal, window, *arrays)
        log_total = log_total.reshape(mixed.shape[0], -1, plan.group, plan.queries)
        *gradients, of_bias = tpu_kernel.backward(plan, operands, mixed, log_total, gradient)
        if of_bias is not None:
            of_bias = jax.linear_transpose(functools.partial(tpu_kernel.bias_blocks, plan), arrays[-1])(of_bias)[0]
        return *gradients, None if of_bias is None else of_bias[None]

    of_query, of_key, *_, of_bias = specs
    of_bias = None if of_bias is None else PartitionSpec(of_query[0], *of_bias)
    in_specs = (*specs, of_query, of_log_total, of_query)
    run = on_each_device(backward, in_specs, (of_query, of_key, of_key, of_bias))
    *gradients, bias_gradient = run(*arrays, mixed, log_total, gradient)
    # One gradient of the bias from each part of the batch.
    return *gradients, None, None, None if bias_gradient is None else bias_gradient.sum(axis=0)


_attend.defvjp(_forward_rule, _backward_rule)


def _partition_specs(head_dim: int, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """How the arrays and the log-sum-exp of the logits, [batch, heads, queries], are split: by rows and heads."""
    rows, heads = rows_and_heads(arrays[0].shape[0], arrays[0].shape[-1] // head_dim)
    by_head, by_row = PartitionSpec(rows, None, heads), PartitionSpec(rows, None)
    specs = (by_head, by_head, by_head, by_row, by_row, PartitionSpec(heads, None))
    used = (None if array is None else spec for array, spec in zip(arrays, specs, strict=True))
    return *used, PartitionSpec(rows, heads, None)


def _plan_and_operands(head_dim, causal, window, query, key, value, query_segments, key_segments, by_distance):
    """The kernel's arguments for the rows and heads of one device."""
    plan = Plan(query.shape[1], key.shape[1], query.shape[2] // head_dim, head_dim, causal, window)
    segments = None if query_segments is None else query_segments[:, None, :]
    bias = None if by_distance is None else tpu_kernel.bias_blocks(plan, by_distance)
    return plan, Operands(query, key, value, segments, key_segments[:, :, None], bias)
