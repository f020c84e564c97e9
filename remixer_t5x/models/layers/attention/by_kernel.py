"""A kernel as a differentiable function of sharded arrays.

A kernel is opaque to XLA's partitioner: each device runs it on its own rows of the batch and its own heads.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from remixer_t5x.models.layers.attention.formula import ATTENTION_OUTPUT
from remixer_t5x.models.layers.each_device import on_each_device, rows_and_heads


class Call(NamedTuple):
    """A kernel, and what the shapes of its arrays do not say.

    Attributes:
        forward: maps this call and the arrays of `attend` to the mixed values, shaped like the queries, and the
            log-sum-exp of the logits, [batch, heads, queries] float32.
        backward: maps this call, the arrays of `attend`, what `forward` returned and the gradient of the mixed values
            to the gradients of query, key, value and `by_distance`, the last with a leading axis of 1.
        heads: number of heads.
        head_dim: width of a head.
        causal: a query sees no key behind it.
    """

    forward: Callable
    backward: Callable
    heads: int
    head_dim: int
    causal: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(call: Call, *arrays: Any) -> jax.Array:
    """softmax(query key^T + bias) value, shaped like the queries, in value's dtype.

    Args:
        call: the kernel.
        arrays: query, key and value, [batch, length, heads, kv] or with the last two axes joined; the segments of
            queries, [batch, queries] or None, and of keys, [batch, keys]; the bias, [heads, distances] or None.
    """
    return _attend_and_keep(call, *arrays)[0]


def _attend_and_keep(call: Call, *arrays: Any) -> tuple[jax.Array, Any]:
    specs = _specs(call, arrays)
    run = on_each_device(functools.partial(call.forward, call), specs, (specs[0], _log_total_spec(specs[0])))
    mixed, log_total = run(*arrays)
    mixed, log_total = (checkpoint_name(array, ATTENTION_OUTPUT) for array in (mixed, log_total))
    return mixed, (arrays, mixed, log_total)


def _gradients(call: Call, kept: Any, gradient: jax.Array) -> tuple[jax.Array | None, ...]:
    arrays, mixed, log_total = kept
    specs = _specs(call, arrays)
    query_spec, key_spec = specs[:2]
    bias_spec = None if specs[-1] is None else PartitionSpec(query_spec[0], *specs[-1])
    run = on_each_device(
        functools.partial(call.backward, call),
        (*specs, query_spec, _log_total_spec(query_spec), query_spec),
        (query_spec, key_spec, key_spec, bias_spec),
    )
    *gradients, of_bias = run(*arrays, mixed, log_total, gradient)
    # One gradient of the bias from each part of the batch.
    return *gradients, None, None, None if of_bias is None else of_bias.sum(axis=0)


attend.defvjp(_attend_and_keep, _gradients)


def _specs(call: Call, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """How query, key, value, both segments and the bias are split: rows of the batch, and heads."""
    rows, of_heads = rows_and_heads(arrays[0].shape[0], call.heads)
    by_head, by_row = PartitionSpec(rows, None, of_heads), PartitionSpec(rows, None)
    wanted = (by_head, by_head, by_head, by_row, by_row, PartitionSpec(of_heads, None))
    return tuple(None if array is None else spec for array, spec in zip(arrays, wanted, strict=True))


def _log_total_spec(query_spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(query_spec[0], query_spec[2], None)
