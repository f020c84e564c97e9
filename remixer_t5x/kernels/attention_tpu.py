"""Attention on TPUs: makes the Pallas kernels in `attention_tpu_kernel` a differentiable function of sharded arrays."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from remixer_t5x.kernels import attention_tpu_kernel
from remixer_t5x.kernels.attention_formula import ATTENTION_OUTPUT, Bias, DistanceBias, Visibility
from remixer_t5x.kernels.attention_tpu_kernel import AttentionOperands, AttentionPlan
from remixer_t5x.kernels.compile_target import get_batch_and_head_axes, wrap_in_shard_map


def unsupported_reason(
    query: jax.Array, key: jax.Array, value: jax.Array, visibility: Visibility, bias: Bias
) -> str | None:
    """Returns the reason why the kernel does not support this call, or None if the call is supported."""
    is_array = isinstance(bias, jax.Array)
    return 'requires a relative position bias (DistanceBias), got an array' if is_array else None


def attend(query: jax.Array, key: jax.Array, value: jax.Array, visibility: Visibility, bias: Bias) -> jax.Array:
    """Computes the same result as `attention.attention`; `unsupported_reason` must return None for this call."""
    by_distance = bias.by_distance if isinstance(bias, DistanceBias) else None
    if query.shape[2] != key.shape[2]:
        key, value = (jnp.repeat(array, query.shape[2] // array.shape[2], axis=2) for array in (key, value))
    joined = (array.reshape(*array.shape[:2], -1) for array in (query, key, value))
    segments = visibility.query_segments, visibility.key_segments
    return _differentiable_attention(
        query.shape[-1], visibility.causal, visibility.window, *joined, *segments, by_distance
    ).reshape(query.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _differentiable_attention(head_dim: int, causal: bool, window: int | None, *arrays: Any) -> jax.Array:
    """Computes softmax(query key^T + bias) value, [batch, queries, heads * kv].

    The arrays are query, key and value, [batch, length, heads * kv]; query segments, [batch, queries] or None; key
    segments, [batch, keys]; relative position bias, [heads, distances] or None.
    """
    return _forward_rule(head_dim, causal, window, *arrays)[0]


def _forward_rule(head_dim: int, causal: bool, window: int | None, *arrays: Any) -> tuple[jax.Array, Any]:
    *specs, log_total_spec = _build_partition_specs(head_dim, arrays)

    def forward(*arrays: Any) -> tuple[jax.Array, jax.Array]:
        plan, operands = _build_plan_and_operands(head_dim, causal, window, *arrays)
        mixed, log_total = attention_tpu_kernel.forward(plan, operands)
        return mixed, log_total.reshape(mixed.shape[0], plan.heads, -1)

    results = wrap_in_shard_map(forward, (*specs,), (specs[0], log_total_spec))(*arrays)
    mixed, log_total = (checkpoint_name(array, ATTENTION_OUTPUT) for array in results)
    return mixed, (arrays, mixed, log_total)


def _backward_rule(
    head_dim: int, causal: bool, window: int | None, residuals: Any, gradient: jax.Array
) -> tuple[jax.Array | None, ...]:
    arrays, mixed, log_total = residuals
    *specs, log_total_spec = _build_partition_specs(head_dim, arrays)

    def backward(*inputs: Any) -> tuple[jax.Array | None, ...]:
        *arrays, mixed, log_total, gradient = inputs
        plan, operands = _build_plan_and_operands(head_dim, causal, window, *arrays)
        log_total = log_total.reshape(mixed.shape[0], -1, plan.heads_per_program, plan.queries)
        *gradients, bias_gradient = attention_tpu_kernel.backward(plan, operands, mixed, log_total, gradient)
        if bias_gradient is not None:
            spread = functools.partial(attention_tpu_kernel.shift_bias, plan)
            bias_gradient = jax.linear_transpose(spread, arrays[-1])(bias_gradient)[0][None]
        return *gradients, bias_gradient

    query_spec, key_spec, *_, bias_spec = specs
    bias_spec = PartitionSpec(query_spec[0], *bias_spec)
    in_specs = (*specs, query_spec, log_total_spec, query_spec)
    run = wrap_in_shard_map(backward, in_specs, (query_spec, key_spec, key_spec, bias_spec))
    *gradients, bias_gradient = run(*arrays, mixed, log_total, gradient)
    # Sum the bias gradients of all batch shards.
    return *gradients, None, None, None if bias_gradient is None else bias_gradient.sum(axis=0)


_differentiable_attention.defvjp(_forward_rule, _backward_rule)


def _build_partition_specs(head_dim: int, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the partition specs of `arrays` and of the log-sum-exp, [batch, heads, queries]."""
    rows, heads = get_batch_and_head_axes(arrays[0].shape[0], arrays[0].shape[-1] // head_dim)
    by_head, by_row = PartitionSpec(rows, None, heads), PartitionSpec(rows, None)
    return by_head, by_head, by_head, by_row, by_row, PartitionSpec(heads, None), PartitionSpec(rows, heads, None)


def _build_plan_and_operands(head_dim, causal, window, query, key, value, query_segments, key_segments, by_distance):
    """Builds the arguments of the kernels from the shards of one device."""
    plan = AttentionPlan(query.shape[1], key.shape[1], query.shape[2] // head_dim, head_dim, causal, window)
    segments = None if query_segments is None else query_segments[:, None, :]
    bias = None if by_distance is None else attention_tpu_kernel.shift_bias(plan, by_distance)
    return plan, AttentionOperands(query, key, value, segments, key_segments[:, :, None], bias)
