"""Attention on a TPU as one kernel forward and one backward, in Pallas: logits never leave the chip's own memory.

The blocks of FlashAttention (Dao et al. 2022), for T5: the logits have a bias that all rows of the batch share. The
kernel makes the bias of a block from values by distance (`tpu_bias`) and adds the bias's gradient up over the batch.

Heads stay side by side in the last axis, as the projections leave them, so that no array is transposed in HBM: a
program reads `group` heads whose features together fill the 128 lanes of a register. Logits are [key, query], so that
the maximum and the sum over keys are taken over sublanes, and what belongs to a query is one row.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from remixer_t5x.kernels.attention import tpu_bias, tpu_plan
from remixer_t5x.kernels.attention.formula import MASKED
from remixer_t5x.kernels.attention.tpu_plan import Operands, Plan
from remixer_t5x.kernels.compile_target import interprets_kernels

_FLOAT32 = jnp.float32


def forward(plan: Plan, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """[batch, queries, heads * kv] in value's dtype, and the log-sum-exp of logits [batch, groups, group, queries]."""
    batch, groups = operands.query.shape[0], plan.heads // plan.group
    specs = tpu_plan.Specs(plan, q_axis=2, k_axis=3)
    return pl.pallas_call(
        functools.partial(_forward_kernel, plan),
        grid=(groups, batch, plan.blocks_q, plan.blocks_k),
        in_specs=[specs.operands(operands)],
        out_specs=(specs.of_query, specs.log_total),
        out_shape=(
            jax.ShapeDtypeStruct(operands.query.shape, operands.value.dtype),
            jax.ShapeDtypeStruct((batch, groups, plan.group, plan.queries), _FLOAT32),
        ),
        scratch_shapes=[
            _ForwardScratch(
                bias=tpu_plan.block_scratch(plan) if operands.bias is not None else None,
                largest=pltpu.VMEM((plan.group, 1, plan.block_q), _FLOAT32),
                total=pltpu.VMEM((plan.group, 1, plan.block_q), _FLOAT32),
                mixed=pltpu.VMEM((plan.width, plan.block_q), _FLOAT32),
            )
        ],
        cost_estimate=tpu_plan.cost(plan, batch, operands, matmuls=2, reads=1),
        compiler_params=tpu_plan.compiler_params(plan),
        interpret=interprets_kernels(),
        name='attention_forward',
    )(operands)


def backward(
    plan: Plan,
    operands: Operands,
    mixed: jax.Array,
    log_total: jax.Array,
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Gradients of query, key, value and bias, given `forward`'s results and the gradient of the first of them."""
    batch, groups = operands.query.shape[0], plan.heads // plan.group
    specs = tpu_plan.Specs(plan, q_axis=3, k_axis=2)
    has_bias = operands.bias is not None
    of_query, of_key, of_value = (jax.ShapeDtypeStruct(array.shape, array.dtype) for array in operands[:3])
    of_bias = None if operands.bias is None else jax.ShapeDtypeStruct(operands.bias.shape, _FLOAT32)
    results = pl.pallas_call(
        functools.partial(_backward_kernel, plan),
        grid=(groups, batch, plan.blocks_k, plan.blocks_q),
        in_specs=[specs.operands(operands), specs.of_query, specs.log_total, specs.of_query],
        out_specs=[
            _Gradients(specs.all_queries, specs.of_key, specs.of_key, specs.bias if has_bias else None),
        ],
        out_shape=[
            _Gradients(of_query, of_key, of_value, of_bias),
        ],
        scratch_shapes=[
            _BackwardScratch(
                bias=tpu_plan.block_scratch(plan) if has_bias else None,
                bias_gradient=tpu_plan.block_scratch(plan) if has_bias and plan.one_block else None,
                query=pltpu.VMEM((plan.width, plan.blocks_q * plan.block_q), _FLOAT32),
                key=pltpu.VMEM((plan.block_k, plan.width), _FLOAT32),
                value=pltpu.VMEM((plan.block_k, plan.width), _FLOAT32),
            )
        ],
        cost_estimate=tpu_plan.cost(plan, batch, operands, matmuls=5, reads=2),
        compiler_params=tpu_plan.compiler_params(plan),
        interpret=interprets_kernels(),
        name='attention_backward',
    )(operands, mixed, log_total, gradient)[0]
    return tuple(results)


class _ForwardScratch(NamedTuple):
    bias: Any
    largest: Any
    total: Any
    mixed: Any


class _Gradients(NamedTuple):
    query: Any
    key: Any
    value: Any
    bias: Any


class _BackwardScratch(NamedTuple):
    bias: Any
    bias_gradient: Any
    query: Any
    key: Any
    value: Any


def _forward_kernel(plan: Plan, operands: Operands, mixed_ref, log_total_ref, scratch: _ForwardScratch):
    row, q_block, k_block = (pl.program_id(axis) for axis in (1, 2, 3))

    @pl.when(k_block == 0)
    def start():
        scratch.largest[...] = jnp.full_like(scratch.largest, 4 * MASKED)
        scratch.total[...] = jnp.zeros_like(scratch.total)
        scratch.mixed[...] = jnp.zeros_like(scratch.mixed)

    @pl.when(_is_seen(plan, q_block, k_block))
    def add_block():
        _prepare_bias(plan, operands.bias, scratch.bias, row, q_block, k_block)
        query = operands.query[0]
        key = _rows(operands.key, k_block, plan.keys)
        value = _rows(operands.value, k_block, plan.keys).T
        visible = _visible(plan, operands, q_block, k_block)
        for head in range(plan.group):
            rows = pl.ds(head * plan.head_dim, plan.head_dim)
            logits = _logits(plan, query, key, scratch.bias, visible, k_block, head)
            largest = jnp.maximum(scratch.largest[head], jnp.max(logits, axis=0, keepdims=True))
            weights = jnp.exp(logits - largest)
            shrink = jnp.exp(scratch.largest[head] - largest)
            scratch.largest[head] = largest
            scratch.total[head] = scratch.total[head] * shrink + jnp.sum(weights, axis=0, keepdims=True)
            of_head = value[head * plan.head_dim : (head + 1) * plan.head_dim]
            scratch.mixed[rows] = scratch.mixed[rows] * shrink + _dot(of_head, weights.astype(value.dtype))

    @pl.when(k_block == plan.blocks_k - 1)
    def finish():
        for head in range(plan.group):
            rows = pl.ds(head * plan.head_dim, plan.head_dim)
            scratch.mixed[rows] = scratch.mixed[rows] / scratch.total[head]
            log_total_ref[0, 0, head : head + 1] = scratch.largest[head] + jnp.log(scratch.total[head])
        mixed_ref[0] = scratch.mixed[...].T.astype(mixed_ref.dtype)


def _backward_kernel(
    plan: Plan,
    operands: Operands,
    mixed_ref,
    log_total_ref,
    gradient_ref,
    results: _Gradients,
    scratch: _BackwardScratch,
):
    row, k_block, q_block = (pl.program_id(axis) for axis in (1, 2, 3))
    last_row = pl.num_programs(1) - 1

    @pl.when(q_block == 0)
    def start_keys():
        scratch.key[...] = jnp.zeros_like(scratch.key)
        scratch.value[...] = jnp.zeros_like(scratch.value)

    @pl.when((q_block == 0) & (k_block == 0))
    def start_row():
        scratch.query[...] = jnp.zeros_like(scratch.query)

    if operands.bias is not None:

        @pl.when((row == 0) & (q_block == 0) & (k_block == 0))
        def start_bias():
            total = scratch.bias_gradient if plan.one_block else results.bias
            total[...] = jnp.zeros_like(total)

    @pl.when(_is_seen(plan, q_block, k_block))
    def add_block():
        _prepare_bias(plan, operands.bias, scratch.bias, row, q_block, k_block)
        _add_gradients(plan, q_block, k_block, operands, mixed_ref, log_total_ref, gradient_ref, results, scratch)

    @pl.when(q_block == plan.blocks_q - 1)
    def finish_keys():
        results.key[0] = scratch.key[...].astype(results.key.dtype)
        results.value[0] = scratch.value[...].astype(results.value.dtype)

    @pl.when((q_block == plan.blocks_q - 1) & (k_block == plan.blocks_k - 1))
    def finish_row():
        results.query[0] = scratch.query[...].T.astype(results.query.dtype)

    if operands.bias is not None and plan.one_block:

        @pl.when(row == last_row)
        def finish_bias():
            for head in range(plan.group):
                results.bias[0, head] = tpu_bias.sum_over_diagonals(scratch.bias_gradient[head])


def _add_gradients(plan, q_block, k_block, operands, mixed_ref, log_total_ref, gradient_ref, results, scratch):
    """Adds what one block of queries and one block of keys contribute to all gradients."""
    query = _rows(operands.query, q_block, plan.queries)
    mixed = _rows(mixed_ref, q_block, plan.queries)
    gradient = _rows(gradient_ref, q_block, plan.queries)
    key = _rows(operands.key, k_block, plan.keys)
    value = _rows(operands.value, k_block, plan.keys)
    key_rows = key.T
    visible = _visible(plan, operands, q_block, k_block)
    product = (mixed.astype(_FLOAT32) * gradient.astype(_FLOAT32)).T  # [width, queries]
    of_block = pl.ds(pl.multiple_of(q_block * plan.block_q, tpu_plan.LANES), plan.block_q)
    for head in range(plan.group):
        rows = slice(head * plan.head_dim, (head + 1) * plan.head_dim)
        logits = _logits(plan, query, key, scratch.bias, visible, k_block, head)
        weights = jnp.exp(logits - log_total_ref[0, 0, head : head + 1])
        if plan.queries % plan.block_q:
            weights = jnp.where(_query_index(plan, q_block) < plan.queries, weights, 0.0)
        weights_gradient = _dot_transposed(_only_head(plan, value, head), gradient)
        delta = jnp.sum(product[rows], axis=0, keepdims=True)
        logits_gradient = weights * (weights_gradient - delta)
        low = logits_gradient.astype(query.dtype)
        scratch.value[...] += _only_head(plan, _dot(weights.astype(gradient.dtype), gradient), head)
        scratch.key[...] += _only_head(plan, _dot(low, query), head)
        scratch.query[rows, of_block] += _dot(key_rows[rows], low)
        if operands.bias is not None:
            if plan.one_block:
                scratch.bias_gradient[head] += logits_gradient
            else:
                window = _window(plan, q_block, k_block)
                results.bias[0, head, :, window] += tpu_bias.sum_over_diagonals(logits_gradient)


def _prepare_bias(plan: Plan, bias_ref, block_ref, row, q_block, k_block) -> None:
    """Spreads the bias of each head over the block of logits; if a row is one block, for the first row only."""
    if bias_ref is None:
        return

    @pl.when((row == 0) | (not plan.one_block))
    def spread():
        for head in range(plan.group):
            window = bias_ref[0, head, :, _window(plan, q_block, k_block)]
            block_ref[head] = tpu_bias.spread(window, plan.block_k, plan.block_q)


def _window(plan: Plan, q_block, k_block):
    """The distances between a block of queries and a block of keys."""
    start = q_block * plan.block_q + (plan.blocks_k - 1 - k_block) * plan.block_k
    return pl.ds(pl.multiple_of(start, tpu_plan.LANES), plan.block_q + plan.block_k)


def _is_seen(plan: Plan, q_block, k_block):
    return k_block <= tpu_plan.last_k(plan, q_block) if plan.causal else True


def _logits(plan: Plan, query, key, bias_ref, visible, k_block, head: int) -> jax.Array:
    """[keys, queries] float32 of one head."""
    logits = _dot_transposed(_only_head(plan, key, head), query)
    if bias_ref is not None:
        logits += bias_ref[head]
    logits = jnp.where(visible, logits, MASKED)
    if plan.keys % plan.block_k:
        # Keys past the end do not even count where a query sees nothing and averages all keys.
        logits = jnp.where(_key_index(plan, k_block) < plan.keys, logits, 2 * MASKED)
    return logits


def _visible(plan: Plan, operands: Operands, q_block, k_block) -> jax.Array:
    """Which keys the queries of a block see, bool, broadcastable to [keys, queries]."""
    keys = operands.key_segments[0]
    visible = keys > 0 if operands.query_segments is None else keys == operands.query_segments[0]
    if plan.causal:
        visible = visible & (_key_index(plan, k_block) <= _query_index(plan, q_block))
    return visible


def _key_index(plan: Plan, k_block) -> jax.Array:
    return k_block * plan.block_k + jax.lax.broadcasted_iota(jnp.int32, (plan.block_k, plan.block_q), 0)


def _query_index(plan: Plan, q_block) -> jax.Array:
    return q_block * plan.block_q + jax.lax.broadcasted_iota(jnp.int32, (plan.block_k, plan.block_q), 1)


def _rows(ref, block, length: int) -> jax.Array:
    """The block's rows, with zeros past the end of the array, where memory holds anything."""
    rows = ref[0]
    if length % rows.shape[0] == 0:
        return rows
    index = block * rows.shape[0] + jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    return jnp.where(index < length, rows, jnp.zeros_like(rows))


def _only_head(plan: Plan, features: jax.Array, head: int) -> jax.Array:
    """[., width] with zeros in the features of other heads; the matrix unit multiplies 128 lanes at a time anyway."""
    if plan.group == 1:
        return features
    lane = jax.lax.broadcasted_iota(jnp.int32, features.shape, 1)
    of_head = (lane >= head * plan.head_dim) & (lane < (head + 1) * plan.head_dim)
    return jnp.where(of_head, features, jnp.zeros_like(features))


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.lax.dot(a, b, preferred_element_type=_FLOAT32)


def _dot_transposed(a: jax.Array, b: jax.Array) -> jax.Array:
    """a b^T."""
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=_FLOAT32)
