"""Attention on a GPU in Pallas for Triton: logits stay in the registers of a multiprocessor.

The blocks of FlashAttention (Dao et al. 2022), for T5: a logit reads its bias from the values by distance, and the
gradient of these values is summed over the batch. A kernel for each gradient computes the logits again, so that no
program adds to what another one writes and a step gives the same bits each time.

In packed rows a block takes the blocks in which its examples can be (`meeting_blocks`).

A gradient of the bias belongs to one distance. So one program takes the blocks of logits of one diagonal: the
same place in each of these blocks has the same distance, and their sum is one block.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from remixer_t5x.layers.attention.formula import MASKED
from remixer_t5x.layers.attention.meeting_blocks import Meetings, meetings
from remixer_t5x.layers.compile_target import interprets_kernels
from remixer_t5x.layers.diagonals import spread_over_diagonals

_FLOAT32 = jnp.float32
_LONGEST_BLOCK = 64
# The smallest side of a matmul in Triton.
_SHORTEST_BLOCK = 16
# Below every logit, also below a masked one.
_LOWEST = -1e30
# The diagonals of a short row are few: with parts of the batch there are programs for all multiprocessors.
_PARTS_OF_BATCH = 8


class Operands(NamedTuple):
    """What all kernels read; `None` for what a call does not have.

    Attributes:
        query: [batch, queries, heads, kv].
        key, value: [batch, keys, heads, kv].
        query_segments: [batch, queries] int32; None lets each query see every key of a segment above 0.
        key_segments: [batch, keys] int32; a query sees the keys of its own segment.
        by_distance: [heads, 2 * length - 1] float32, of `DistanceBias`.
        meetings: which blocks meet, of packed rows; the kernels add it.
    """

    query: Any
    key: Any
    value: Any
    query_segments: Any
    key_segments: Any
    by_distance: Any
    meetings: Meetings | None = None


class _Results(NamedTuple):
    """What `forward` wrote and the gradient of it: `log_total` and `delta` are [batch, heads, queries] float32."""

    gradient: Any
    log_total: Any
    delta: Any


def forward(causal: bool, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """[batch, queries, heads, kv] in value's dtype, and the log-sum-exp of logits, [batch, heads, queries] float32."""
    plan = _Plan(causal, operands)
    operands = plan.with_meetings(operands)
    return pl.pallas_call(
        functools.partial(_forward_kernel, plan),
        grid=(plan.blocks_q, plan.heads, plan.batch),
        in_specs=[plan.specs(operands)],
        out_specs=(plan.of_query, plan.by_query),
        out_shape=(
            jax.ShapeDtypeStruct(operands.query.shape, operands.value.dtype),
            jax.ShapeDtypeStruct((plan.batch, plan.heads, plan.queries), _FLOAT32),
        ),
        compiler_params=plan.params,
        interpret=interprets_kernels(),
        name='attention_forward',
    )(operands)


def backward(
    causal: bool, operands: Operands, mixed: jax.Array, log_total: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Gradients of query, key, value and `by_distance`, given `forward`'s results and the gradient of the first."""
    plan = _Plan(causal, operands)
    operands = plan.with_meetings(operands)
    delta = jnp.einsum('bqhd,bqhd->bhq', mixed, gradient, preferred_element_type=_FLOAT32)
    results = _Results(gradient, log_total, delta)
    call = functools.partial(
        pl.pallas_call,
        in_specs=[plan.specs(operands), _Results(plan.of_query, plan.by_query, plan.by_query)],
        compiler_params=plan.params,
        interpret=interprets_kernels(),
    )
    of_query, of_key, of_value = (jax.ShapeDtypeStruct(array.shape, array.dtype) for array in operands[:3])
    query_gradient = call(
        functools.partial(_query_kernel, plan),
        grid=(plan.blocks_q, plan.heads, plan.batch),
        out_specs=plan.of_query,
        out_shape=of_query,
        name='attention_backward_query',
    )(operands, results)
    key_gradient, value_gradient = call(
        functools.partial(_key_kernel, plan),
        grid=(plan.blocks_k, plan.heads, plan.batch),
        out_specs=(plan.of_key, plan.of_key),
        out_shape=(of_key, of_value),
        name='attention_backward_key',
    )(operands, results)
    bias_gradient = None if operands.by_distance is None else _bias_gradient(plan, operands, results)
    return query_gradient, key_gradient, value_gradient, bias_gradient


def _bias_gradient(plan: '_Plan', operands: Operands, results: _Results) -> jax.Array:
    """[heads, 2 * length - 1] float32."""
    diagonals, block = plan.blocks_q + plan.blocks_k - 1, plan.block
    parts = math.gcd(plan.batch, _PARTS_OF_BATCH)
    plan = _Plan(plan.causal, operands, rows=plan.batch // parts)
    blocks = pl.pallas_call(
        functools.partial(_bias_kernel, plan),
        grid=(diagonals, plan.heads, parts),
        in_specs=[plan.specs(operands), _Results(plan.of_query, plan.by_query, plan.by_query)],
        out_specs=pl.BlockSpec((None, None, None, block, block), lambda at, head, part: (part, head, at, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((parts, plan.heads, diagonals, block, block), _FLOAT32),
        compiler_params=plan.params,
        interpret=interprets_kernels(),
        name='attention_backward_bias',
    )(operands, results).sum(axis=0)
    # [heads, diagonals, 2 * block]: sums for key - query from -block to block - 1, of the block's own places.
    by_place = jax.linear_transpose(
        lambda values: spread_over_diagonals(values, block),
        jax.ShapeDtypeStruct((plan.heads * diagonals, 2 * block - 1), _FLOAT32),
    )(blocks.reshape(-1, block, block))[0]
    before, behind = jnp.split(jnp.pad(by_place, ((0, 0), (1, 0))).reshape(plan.heads, diagonals, -1), 2, axis=-1)
    # Diagonals of blocks are `block` distances apart, so that halves of neighbours overlap.
    totals = jnp.pad(before.reshape(plan.heads, -1), ((0, 0), (0, block)))
    totals += jnp.pad(behind.reshape(plan.heads, -1), ((0, 0), (block, 0)))
    first = plan.blocks_q * block - (plan.queries - 1)
    return totals[:, first : first + operands.by_distance.shape[1]]


class _Plan:
    """How the work is cut into programs; the grid is (blocks, heads, rows of the batch or parts of `rows` rows)."""

    def __init__(self, causal: bool, operands: Operands, rows: int | None = None):
        self.batch, self.queries, self.heads, width = operands.query.shape
        self.keys = operands.key.shape[1]
        self.causal, self.rows = causal, rows
        longest = max(self.queries, self.keys)
        self.block = min(max(pl.next_power_of_2(longest), _SHORTEST_BLOCK), _LONGEST_BLOCK)
        self.blocks_q, self.blocks_k = pl.cdiv(self.queries, self.block), pl.cdiv(self.keys, self.block)
        # With 4 warps, 128 float32 features of a token would not fit into the registers.
        wide = width * operands.query.dtype.itemsize > 256
        self.params = pltriton.CompilerParams(num_warps=8 if wide else 4, num_stages=2)
        self.of_query, self.of_key = (
            pl.BlockSpec((rows, length, None, width), lambda block, head, row: (row, 0, head, 0))
            for length in (self.queries, self.keys)
        )
        self.by_query = pl.BlockSpec((rows, None, self.queries), lambda block, head, row: (row, head, 0))

    def specs(self, operands: Operands) -> Operands:
        of_row, of_head = lambda block, head, row: (row, 0), lambda block, head, row: (head, 0)  # noqa: E731
        return Operands(
            self.of_query,
            self.of_key,
            self.of_key,
            None if operands.query_segments is None else pl.BlockSpec((self.rows, self.queries), of_row),
            pl.BlockSpec((self.rows, self.keys), of_row),
            None if operands.by_distance is None else pl.BlockSpec((None, operands.by_distance.shape[1]), of_head),
            operands.meetings and Meetings(*(self._of_blocks(array.shape[1]) for array in operands.meetings)),
        )

    def _of_blocks(self, count: int) -> pl.BlockSpec:
        return pl.BlockSpec((self.rows, count, 2), lambda block, head, row: (row, 0, 0))

    def with_meetings(self, operands: Operands) -> Operands:
        if operands.query_segments is None:
            return operands
        found = meetings(operands.query_segments, operands.key_segments, self.block, self.causal)
        return operands._replace(meetings=found)

    def keys_of(self, q_block, operands: Operands) -> tuple[Any, Any]:
        """The first block of keys that a block of queries sees, and the end of these blocks."""
        if operands.meetings is not None:
            return operands.meetings.of_queries[q_block, 0], operands.meetings.of_queries[q_block, 1]
        return 0, jnp.minimum(q_block + 1, self.blocks_k) if self.causal else self.blocks_k

    def queries_of(self, k_block, operands: Operands) -> tuple[Any, Any]:
        """The first block of queries that sees a block of keys, and the end of these blocks."""
        if operands.meetings is not None:
            return operands.meetings.of_keys[k_block, 0], operands.meetings.of_keys[k_block, 1]
        return k_block if self.causal else 0, self.blocks_q


def _forward_kernel(plan: _Plan, operands: Operands, mixed_ref, log_total_ref):
    q_block = pl.program_id(0)
    queries = _Tokens(plan, q_block, plan.queries)
    query = queries.load(operands.query)

    def add_keys(k_block, carry):
        mixed, largest, total = carry
        keys = _Tokens(plan, k_block, plan.keys)
        logits = _logits(plan, operands, queries, keys, query, keys.load(operands.key))
        following = jnp.maximum(largest, jnp.max(logits, axis=1))
        weights = jnp.exp(logits - following[:, None])
        kept = jnp.exp(largest - following)
        value = keys.load(operands.value)
        mixed = mixed * kept[:, None] + pltriton.dot(weights.astype(value.dtype), value)
        return mixed, following, total * kept + jnp.sum(weights, axis=1)

    start = (jnp.zeros(query.shape, _FLOAT32), jnp.full(plan.block, _LOWEST), jnp.zeros(plan.block, _FLOAT32))
    mixed, largest, total = jax.lax.fori_loop(*plan.keys_of(q_block, operands), add_keys, start)
    queries.store(mixed_ref, mixed / total[:, None])
    queries.store(log_total_ref, largest + jnp.log(total))


def _query_kernel(plan: _Plan, operands: Operands, results: _Results, gradient_ref):
    q_block = pl.program_id(0)
    queries = _Tokens(plan, q_block, plan.queries)

    def add_keys(k_block, total):
        keys = _Tokens(plan, k_block, plan.keys)
        _, of_logits = _weights_and_gradient(plan, operands, results, queries, keys)
        key = keys.load(operands.key)
        return total + pltriton.dot(of_logits.astype(key.dtype), key)

    start = jnp.zeros((plan.block, operands.query.shape[-1]), _FLOAT32)
    queries.store(gradient_ref, jax.lax.fori_loop(*plan.keys_of(q_block, operands), add_keys, start))


def _key_kernel(plan: _Plan, operands: Operands, results: _Results, key_gradient_ref, value_gradient_ref):
    k_block = pl.program_id(0)
    keys = _Tokens(plan, k_block, plan.keys)

    def add_queries(q_block, totals):
        of_key, of_value = totals
        queries = _Tokens(plan, q_block, plan.queries)
        weights, of_logits = _weights_and_gradient(plan, operands, results, queries, keys)
        query, gradient = queries.load(operands.query), queries.load(results.gradient)
        of_key += pltriton.dot(of_logits.astype(query.dtype), query, trans_a=True)
        return of_key, of_value + pltriton.dot(weights.astype(gradient.dtype), gradient, trans_a=True)

    zeros = jnp.zeros((plan.block, operands.key.shape[-1]), _FLOAT32)
    of_key, of_value = jax.lax.fori_loop(*plan.queries_of(k_block, operands), add_queries, (zeros, zeros))
    keys.store(key_gradient_ref, of_key)
    keys.store(value_gradient_ref, of_value)


def _bias_kernel(plan: _Plan, operands: Operands, results: _Results, sum_ref):
    # Block of keys - block of queries; a causal row has no block above the diagonal.
    offset = pl.program_id(0) - (plan.blocks_q - 1)
    first = jnp.maximum(0, -offset)
    count = jnp.maximum(0, jnp.minimum(plan.blocks_q, plan.blocks_k - offset) - first)
    if plan.causal:
        count = jnp.where(offset > 0, 0, count)

    def add_block(index, total):
        row, place = jax.lax.div(index, count), jax.lax.rem(index, count)
        q_block, k_block = first + place, first + place + offset

        def added():
            queries = _Tokens(plan, q_block, plan.queries, row)
            keys = _Tokens(plan, k_block, plan.keys, row)
            return total + _weights_and_gradient(plan, operands, results, queries, keys)[1]

        if operands.meetings is None:
            return added()
        met = operands.meetings.of_queries
        meets = (met[row, q_block, 0] <= k_block) & (k_block < met[row, q_block, 1])
        return jax.lax.cond(meets, added, lambda: total)

    sum_ref[...] = jax.lax.fori_loop(0, plan.rows * count, add_block, jnp.zeros((plan.block, plan.block), _FLOAT32))


class _Tokens:
    """The tokens of a block: their places in the row, and how their part of an array is read and written."""

    def __init__(self, plan: _Plan, block, length: int, row=None):
        self.index = block * plan.block + jax.lax.iota(jnp.int32, plan.block)
        self.exist = self.index < length
        self._slice, self._row = pl.ds(block * plan.block, plan.block), row

    def load(self, ref, other=0) -> jax.Array:
        """[block] or [block, kv]; `other` behind the end of the row."""
        mask = self.exist[:, None] if self._has_features(ref) else self.exist
        return pltriton.load(self._view(ref), mask=mask, other=jnp.asarray(other, ref.dtype))

    def store(self, ref, values: jax.Array) -> None:
        mask = self.exist[:, None] if self._has_features(ref) else self.exist
        pltriton.store(self._view(ref), values.astype(ref.dtype), mask=mask)

    def _has_features(self, ref) -> bool:
        return ref.ndim - (self._row is not None) == 2

    def _view(self, ref):
        place = (self._slice,) if self._row is None else (self._row, self._slice)
        return ref.at[(*place, slice(None))] if self._has_features(ref) else ref.at[place]


def _weights_and_gradient(plan, operands: Operands, results: _Results, queries: _Tokens, keys: _Tokens):
    """The weights of a block and the gradient of its logits, [block of queries, block of keys] float32."""
    logits = _logits(plan, operands, queries, keys, queries.load(operands.query), keys.load(operands.key))
    # A query behind the end of the row has no weight.
    weights = jnp.exp(logits - queries.load(results.log_total, jnp.inf)[:, None])
    of_weights = pltriton.dot(queries.load(results.gradient), keys.load(operands.value), trans_b=True)
    return weights, weights * (of_weights - queries.load(results.delta)[:, None])


def _logits(plan: _Plan, operands: Operands, queries: _Tokens, keys: _Tokens, query, key) -> jax.Array:
    """[block of queries, block of keys] float32; -inf behind the last key."""
    logits = pltriton.dot(query, key, trans_b=True).astype(_FLOAT32)
    q_index, k_index = queries.index[:, None], keys.index[None, :]
    if operands.by_distance is not None:
        exist = queries.exist[:, None] & keys.exist[None, :]
        distance = k_index - q_index + (plan.queries - 1)
        logits += pltriton.load(operands.by_distance.at[distance], mask=exist, other=0.0)
    key_segments = keys.load(operands.key_segments)[None, :]
    if operands.query_segments is None:
        visible = jnp.broadcast_to(key_segments > 0, logits.shape)
    else:
        visible = queries.load(operands.query_segments)[:, None] == key_segments
    if plan.causal:
        visible &= k_index <= q_index
    return jnp.where(keys.exist[None, :], jnp.where(visible, logits, MASKED), -jnp.inf)
