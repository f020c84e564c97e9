"""Pallas kernels for attention on TPUs, which keep the logits in on-chip memory (VMEM).

The kernels combine the block algorithm of FlashAttention (Dao et al. 2022) with T5's relative position bias, which they
expand to the size of a block of logits. All rows of the batch share the bias, so its gradient is summed over the batch.

The heads remain packed in the last axis, as in the output of the projections, which avoids transposing arrays in HBM.
Each kernel program loads a group of heads whose features fill the 128 lanes of a register. Blocks of logits have the
shape [keys, queries], so that reductions over keys are reductions over sublanes.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from remixer_t5x.kernels.attention_formula import MASKED_LOGIT
from remixer_t5x.kernels.compile_target import is_interpreting_kernels

_FLOAT32 = jnp.float32
_LANES, _SUBLANES = 128, 8
# Maximum number of tokens in a block. With 512, a block of float32 logits takes 1 MiB of VMEM.
_MAX_BLOCK_LENGTH = 512
# Upper bound on the VMEM usage of blocks of logits and operands, and the compiler's default limit, in bytes.
_BLOCK_BYTES, _DEFAULT_VMEM_LIMIT = 8 * 2**20, 16 * 2**20


class AttentionOperands(NamedTuple):
    """Operands of the forward and backward kernels; unused operands are None."""

    query: jax.Array  # [batch, queries, heads * kv]
    key: jax.Array  # [batch, keys, heads * kv]
    value: jax.Array  # [batch, keys, heads * kv]
    query_segments: jax.Array | None  # [batch, 1, queries] int32; None if rows are not packed
    key_segments: jax.Array  # [batch, keys, 1] int32; 0 is padding
    bias: jax.Array | None  # [heads // group, group, 8, distances] float32, from `shift_bias`


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """Sizes and flags (`Visibility`) of an attention call, and its division into kernel programs."""

    queries: int
    keys: int
    heads: int
    head_dim: int
    causal: bool
    window: int | None = None

    @property
    def heads_per_program(self) -> int:
        """Number of heads per program: the smallest number that fills whole registers, or all if none does."""
        whole = (g for g in range(1, self.heads) if self.heads % g == 0 and g * self.head_dim % _LANES == 0)
        return next(whole, self.heads)

    # Number of tokens per block (a multiple of 128, at most 512), and number of blocks.
    block_q = property(lambda self: _choose_block_length(self.queries))
    block_k = property(lambda self: _choose_block_length(self.keys))
    blocks_q = property(lambda self: pl.cdiv(self.queries, self.block_q))
    blocks_k = property(lambda self: pl.cdiv(self.keys, self.block_k))
    # If one block contains all logits of a row, the bias is expanded only once for the whole batch.
    one_block = property(lambda self: self.blocks_q == self.blocks_k == 1)
    # Number of features per program, and number of distances between padded queries and keys.
    width = property(lambda self: self.heads_per_program * self.head_dim)
    distances = property(lambda self: self.blocks_q * self.block_q + self.blocks_k * self.block_k)

    @property
    def vmem_usage(self) -> int:
        """Upper bound on the VMEM usage of the backward kernel, in bytes."""
        gradient = self.blocks_q * self.block_q * self.width * (4 + 2 * 2)
        bias = 4 * self.heads_per_program * _SUBLANES * self.distances * 4
        return _BLOCK_BYTES + gradient + bias

    def last_visible_key_block(self, q_block):
        """Returns the last key block that is visible to a query block in causal attention."""
        return jax.lax.div((q_block + 1) * self.block_q - 1, self.block_k)


def _choose_block_length(length: int) -> int:
    blocks = pl.cdiv(length, _MAX_BLOCK_LENGTH)
    return pl.cdiv(pl.cdiv(length, blocks), _LANES) * _LANES


def shift_bias(plan: AttentionPlan, by_distance: jax.Array) -> jax.Array:
    """Creates eight copies of a bias, shifted by 0 to 7 positions, one for each sublane of a register.

    Maps the bias for each distance `key - query`, [heads, 2 * length - 1], to [groups, group, 8, distances]. From these
    copies, `_expand_bias` computes the bias of a block of logits.
    """
    length = (by_distance.shape[1] + 1) // 2
    by_query = by_distance[:, ::-1]  # indexed by `query - key`
    padded = jnp.pad(by_query, ((0, 0), (plan.blocks_k * plan.block_k - length, plan.distances + _SUBLANES)))
    copies = jnp.stack([padded[:, _SUBLANES - 1 - i :][:, : plan.distances] for i in range(_SUBLANES)], axis=1)
    return copies.reshape(-1, plan.heads_per_program, *copies.shape[1:])


def _expand_bias(window: jax.Array, num_keys: int, num_queries: int) -> jax.Array:
    """Expands eight shifted copies of a bias, [8, num_keys + num_queries], to a block [num_keys, num_queries].

    Each row equals the next row shifted by one, so prepending a shifted copy of all rows doubles their number.
    """
    rows, width = window, window.shape[1]
    while rows.shape[0] < num_keys:
        rows = jnp.concatenate([pltpu.roll(rows, width - rows.shape[0], 1), rows], axis=0)
    return rows[rows.shape[0] - num_keys :, :num_queries]


def _sum_over_diagonals(block: jax.Array) -> jax.Array:
    """Applies the transpose of `_expand_bias` to a block: [num_keys, num_queries] -> [8, num_keys + num_queries]."""
    num_keys, num_queries = block.shape
    rows = jnp.pad(block, ((pl.next_power_of_2(num_keys) - num_keys, 0), (0, num_keys)))
    while rows.shape[0] > _SUBLANES:
        half = rows.shape[0] // 2
        rows = pltpu.roll(rows[:half], half, 1) + rows[half:]
    return rows


class _BlockSpecs:
    """Block specs for a grid over groups of heads, rows of the batch, and blocks of queries and keys in any order."""

    def __init__(self, plan: AttentionPlan, q_axis: int, k_axis: int):
        def find_query_block(*ids):
            # Programs skip blocks that the causal mask excludes; returning the block already in VMEM avoids a load.
            is_causal_over_queries = plan.causal and q_axis == 3
            first = jax.lax.div(ids[k_axis] * plan.block_k, plan.block_q) if is_causal_over_queries else 0
            return jnp.maximum(ids[q_axis], first)

        def find_key_block(*ids):
            last = plan.last_visible_key_block(ids[q_axis]) if plan.causal and k_axis == 3 else plan.blocks_k
            return jnp.minimum(ids[k_axis], last)

        rows_q = plan.blocks_q * plan.block_q
        self.query = pl.BlockSpec((1, plan.block_q, plan.width), lambda *ids: (ids[1], find_query_block(*ids), ids[0]))
        self.key = pl.BlockSpec((1, plan.block_k, plan.width), lambda *ids: (ids[1], find_key_block(*ids), ids[0]))
        self.all_queries = pl.BlockSpec((1, rows_q, plan.width), lambda *ids: (ids[1], 0, ids[0]))
        self.log_total = pl.BlockSpec(
            (1, 1, plan.heads_per_program, plan.block_q), lambda *ids: (ids[1], ids[0], 0, find_query_block(*ids))
        )
        self.query_segments = pl.BlockSpec((1, 1, plan.block_q), lambda *ids: (ids[1], 0, find_query_block(*ids)))
        self.key_segments = pl.BlockSpec((1, plan.block_k, 1), lambda *ids: (ids[1], find_key_block(*ids), 0))
        self.bias = pl.BlockSpec((1, plan.heads_per_program, _SUBLANES, plan.distances), lambda *ids: (ids[0], 0, 0, 0))

    def select_block_specs(self, operands: AttentionOperands) -> AttentionOperands:
        """Returns the block specs of the operands that are not None."""
        specs = self.query, self.key, self.key, self.query_segments, self.key_segments, self.bias
        return AttentionOperands(
            *(None if array is None else spec for array, spec in zip(operands, specs, strict=True))
        )


def _build_pallas_call_options(plan: AttentionPlan, operands: AttentionOperands, matmuls: int, reads: int) -> dict:
    batch = operands.query.shape[0]
    visible_keys = plan.keys / 2 if plan.causal else plan.keys  # mean number per query
    if plan.window is not None:
        visible_keys = min(visible_keys, plan.window if plan.causal else 2 * plan.window - 1)
    pairs = int(batch * plan.heads * plan.queries * visible_keys)
    sizes = [array.size * array.dtype.itemsize for array in operands[:3]]
    return {
        'cost_estimate': pl.CostEstimate(
            flops=2 * matmuls * pairs * plan.head_dim,
            transcendentals=pairs,
            bytes_accessed=reads * sum(sizes) + sizes[0],
        ),
        # Rows and blocks must run in order, because they share sums and the expanded bias.
        'compiler_params': pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary', 'arbitrary', 'arbitrary'),
            vmem_limit_bytes=max(plan.vmem_usage, _DEFAULT_VMEM_LIMIT),
        ),
        'interpret': is_interpreting_kernels(),
    }


def forward(plan: AttentionPlan, operands: AttentionOperands) -> tuple[jax.Array, jax.Array]:
    """Returns the attention output, [batch, queries, heads * kv], and the log-sum-exp of each query's logits.

    The log-sum-exp is [batch, groups, group, queries] float32.
    """
    batch, groups = operands.query.shape[0], plan.heads // plan.heads_per_program
    specs = _BlockSpecs(plan, q_axis=2, k_axis=3)
    statistic = pltpu.VMEM((plan.heads_per_program, 1, plan.block_q), _FLOAT32)
    return pl.pallas_call(
        functools.partial(_forward_kernel, plan),
        grid=(groups, batch, plan.blocks_q, plan.blocks_k),
        in_specs=[specs.select_block_specs(operands)],
        out_specs=(specs.query, specs.log_total),
        out_shape=(
            jax.ShapeDtypeStruct(operands.query.shape, operands.value.dtype),
            jax.ShapeDtypeStruct((batch, groups, plan.heads_per_program, plan.queries), _FLOAT32),
        ),
        scratch_shapes=[
            _build_logits_scratch_shape(plan) if operands.bias is not None else None,
            statistic,
            statistic,
            pltpu.VMEM((plan.width, plan.block_q), _FLOAT32),
        ],
        name='attention_forward',
        **_build_pallas_call_options(plan, operands, matmuls=2, reads=1),
    )(operands)


def backward(
    plan: AttentionPlan, operands: AttentionOperands, mixed: jax.Array, log_total: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Computes the gradients of query, key, value and bias from the results of `forward` and the output's gradient."""
    batch, groups = operands.query.shape[0], plan.heads // plan.heads_per_program
    specs = _BlockSpecs(plan, q_axis=3, k_axis=2)
    has_bias = operands.bias is not None
    differentiated = (*operands[:3], operands.bias)
    key_sum = pltpu.VMEM((plan.block_k, plan.width), _FLOAT32)
    return pl.pallas_call(
        functools.partial(_backward_kernel, plan),
        grid=(groups, batch, plan.blocks_k, plan.blocks_q),
        in_specs=[specs.select_block_specs(operands), specs.query, specs.log_total, specs.query],
        out_specs=(specs.all_queries, specs.key, specs.key, specs.bias if has_bias else None),
        out_shape=jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), differentiated),
        scratch_shapes=[
            _build_logits_scratch_shape(plan) if has_bias else None,
            _build_logits_scratch_shape(plan) if has_bias and plan.one_block else None,
            pltpu.VMEM((plan.width, plan.blocks_q * plan.block_q), _FLOAT32),
            key_sum,
            key_sum,
        ],
        name='attention_backward',
        **_build_pallas_call_options(plan, operands, matmuls=5, reads=2),
    )(operands, mixed, log_total, gradient)


def _build_logits_scratch_shape(plan: AttentionPlan):
    return pltpu.VMEM((plan.heads_per_program, plan.block_k, plan.block_q), _FLOAT32)


def _forward_kernel(plan, operands, mixed_ref, log_total_ref, bias_block, largest_ref, total_ref, mixed_sum):
    row, q_block, k_block = (pl.program_id(axis) for axis in (1, 2, 3))

    @pl.when(k_block == 0)
    def initialize_sums():
        largest_ref[...] = jnp.full_like(largest_ref, 4 * MASKED_LOGIT)
        total_ref[...] = jnp.zeros_like(total_ref)
        mixed_sum[...] = jnp.zeros_like(mixed_sum)

    @pl.when(_is_visible_block(plan, q_block, k_block))
    def add_key_block():
        _expand_bias_if_needed(plan, operands.bias, bias_block, row, q_block, k_block)
        query = operands.query[0]
        key = _load_rows(operands.key, k_block, plan.keys)
        value = _load_rows(operands.value, k_block, plan.keys).T
        visible = _build_visibility_mask(plan, operands, q_block, k_block)
        for head in range(plan.heads_per_program):
            rows = pl.ds(head * plan.head_dim, plan.head_dim)
            logits = _compute_logits(plan, query, key, bias_block, visible, k_block, head)
            largest = jnp.maximum(largest_ref[head], jnp.max(logits, axis=0, keepdims=True))
            weights = jnp.exp(logits - largest)
            decay = jnp.exp(largest_ref[head] - largest)
            largest_ref[head] = largest
            total_ref[head] = total_ref[head] * decay + jnp.sum(weights, axis=0, keepdims=True)
            head_value = value[head * plan.head_dim : (head + 1) * plan.head_dim]
            mixed_sum[rows] = mixed_sum[rows] * decay + _matmul(head_value, weights.astype(value.dtype))

    @pl.when(k_block == plan.blocks_k - 1)
    def write_outputs():
        for head in range(plan.heads_per_program):
            rows = pl.ds(head * plan.head_dim, plan.head_dim)
            mixed_sum[rows] = mixed_sum[rows] / total_ref[head]
            log_total_ref[0, 0, head : head + 1] = largest_ref[head] + jnp.log(total_ref[head])
        mixed_ref[0] = mixed_sum[...].T.astype(mixed_ref.dtype)


def _backward_kernel(
    plan: AttentionPlan,
    operands: AttentionOperands,
    mixed_ref,
    log_total_ref,
    gradient_ref,
    query_gradient_ref,
    key_gradient_ref,
    value_gradient_ref,
    bias_gradient_ref,
    bias_block,
    bias_sum,
    query_sum,
    key_sum,
    value_sum,
):
    row, k_block, q_block = (pl.program_id(axis) for axis in (1, 2, 3))
    has_bias, is_last_q_block = operands.bias is not None, q_block == plan.blocks_q - 1

    @pl.when(q_block == 0)
    def initialize_key_sums():
        key_sum[...] = jnp.zeros_like(key_sum)
        value_sum[...] = jnp.zeros_like(value_sum)

    @pl.when((q_block == 0) & (k_block == 0))
    def initialize_query_sum():
        query_sum[...] = jnp.zeros_like(query_sum)

    if has_bias:

        @pl.when((row == 0) & (q_block == 0) & (k_block == 0))
        def initialize_bias_sum():
            total = bias_sum if plan.one_block else bias_gradient_ref
            total[...] = jnp.zeros_like(total)

    @pl.when(_is_visible_block(plan, q_block, k_block))
    def add_block_gradients():
        _expand_bias_if_needed(plan, operands.bias, bias_block, row, q_block, k_block)
        query, mixed, gradient = (
            _load_rows(ref, q_block, plan.queries) for ref in (operands.query, mixed_ref, gradient_ref)
        )
        key, value = (_load_rows(ref, k_block, plan.keys) for ref in (operands.key, operands.value))
        key_rows = key.T
        visible = _build_visibility_mask(plan, operands, q_block, k_block)
        product = (mixed.astype(_FLOAT32) * gradient.astype(_FLOAT32)).T  # [width, queries]
        q_rows = pl.ds(pl.multiple_of(q_block * plan.block_q, _LANES), plan.block_q)
        for head in range(plan.heads_per_program):
            rows = slice(head * plan.head_dim, (head + 1) * plan.head_dim)
            logits = _compute_logits(plan, query, key, bias_block, visible, k_block, head)
            weights = jnp.exp(logits - log_total_ref[0, 0, head : head + 1])
            if plan.queries % plan.block_q:
                weights = jnp.where(_compute_token_positions(plan, q_block, 1) < plan.queries, weights, 0.0)
            weights_gradient = _matmul(_select_head(plan, value, head), gradient, 1)
            delta = jnp.sum(product[rows], axis=0, keepdims=True)
            logits_gradient = weights * (weights_gradient - delta)
            cast_gradient = logits_gradient.astype(query.dtype)
            value_sum[...] += _select_head(plan, _matmul(weights.astype(gradient.dtype), gradient), head)
            key_sum[...] += _select_head(plan, _matmul(cast_gradient, query), head)
            query_sum[rows, q_rows] += _matmul(key_rows[rows], cast_gradient)
            if has_bias and plan.one_block:
                bias_sum[head] += logits_gradient
            elif has_bias:
                bias_gradient_ref[0, head, :, _get_bias_slice(plan, q_block, k_block)] += _sum_over_diagonals(
                    logits_gradient
                )

    @pl.when(is_last_q_block)
    def write_key_gradients():
        key_gradient_ref[0] = key_sum[...].astype(key_gradient_ref.dtype)
        value_gradient_ref[0] = value_sum[...].astype(value_gradient_ref.dtype)

    @pl.when(is_last_q_block & (k_block == plan.blocks_k - 1))
    def write_query_gradient():
        query_gradient_ref[0] = query_sum[...].T.astype(query_gradient_ref.dtype)

    if has_bias and plan.one_block:

        @pl.when(row == pl.num_programs(1) - 1)
        def write_bias_gradient():
            for head in range(plan.heads_per_program):
                bias_gradient_ref[0, head] = _sum_over_diagonals(bias_sum[head])


def _expand_bias_if_needed(plan: AttentionPlan, bias_ref, block_ref, row, q_block, k_block) -> None:
    """Expands the bias of each head to the size of a block of logits, unless this was done for an earlier row."""
    if bias_ref is None:
        return

    @pl.when((row == 0) | (not plan.one_block))
    def expand_all_heads():
        for head in range(plan.heads_per_program):
            window = bias_ref[0, head, :, _get_bias_slice(plan, q_block, k_block)]
            block_ref[head] = _expand_bias(window, plan.block_k, plan.block_q)


def _get_bias_slice(plan: AttentionPlan, q_block, k_block):
    """Returns the slice of the bias for the distances between a block of queries and a block of keys."""
    start = q_block * plan.block_q + (plan.blocks_k - 1 - k_block) * plan.block_k
    return pl.ds(pl.multiple_of(start, _LANES), plan.block_q + plan.block_k)


def _is_visible_block(plan: AttentionPlan, q_block, k_block):
    is_visible = k_block <= plan.last_visible_key_block(q_block) if plan.causal else True
    if plan.window is None:
        return is_visible
    ahead = k_block * plan.block_k - q_block * plan.block_q  # from the first query to the first key
    return is_visible & (ahead - plan.block_q + 1 < plan.window) & (-ahead - plan.block_k + 1 < plan.window)


def _compute_logits(plan: AttentionPlan, query, key, bias_block, visible, k_block, head: int) -> jax.Array:
    """Computes the logits of one head, [keys, queries] float32."""
    logits = _matmul(_select_head(plan, key, head), query, 1)
    if bias_block is not None:
        logits += bias_block[head]
    logits = jnp.where(visible, logits, MASKED_LOGIT)
    if plan.keys % plan.block_k:
        # Queries without visible keys average all keys, but not those after the end of the row.
        logits = jnp.where(_compute_token_positions(plan, k_block, 0) < plan.keys, logits, 2 * MASKED_LOGIT)
    return logits


def _build_visibility_mask(plan: AttentionPlan, operands: AttentionOperands, q_block, k_block) -> jax.Array:
    """Returns the attention mask of a block of logits, bool, broadcastable to [keys, queries]."""
    keys = operands.key_segments[0]
    visible = keys > 0 if operands.query_segments is None else keys == operands.query_segments[0]
    if plan.causal:
        visible = visible & (_compute_token_positions(plan, k_block, 0) <= _compute_token_positions(plan, q_block, 1))
    if plan.window is not None:
        distance = jnp.abs(_compute_token_positions(plan, k_block, 0) - _compute_token_positions(plan, q_block, 1))
        visible = visible & (distance < plan.window)
    return visible


def _compute_token_positions(plan: AttentionPlan, block, axis: int) -> jax.Array:
    """Returns the position of each key (axis 0) or query (axis 1) of a block, [keys, queries] int32."""
    shape = plan.block_k, plan.block_q
    return block * shape[axis] + jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _load_rows(ref, block, length: int) -> jax.Array:
    """Loads a block of rows, and replaces undefined values after the end of the array with zeros."""
    rows = ref[0]
    if length % rows.shape[0] == 0:
        return rows
    index = block * rows.shape[0] + jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    return jnp.where(index < length, rows, jnp.zeros_like(rows))


def _select_head(plan: AttentionPlan, features: jax.Array, head: int) -> jax.Array:
    """Zeroes the features of other heads, because the matrix unit always multiplies all 128 lanes."""
    if plan.heads_per_program == 1:
        return features
    lane = jax.lax.broadcasted_iota(jnp.int32, features.shape, 1)
    in_head = (lane >= head * plan.head_dim) & (lane < (head + 1) * plan.head_dim)
    return jnp.where(in_head, features, jnp.zeros_like(features))


def _matmul(a: jax.Array, b: jax.Array, b_axis: int = 0) -> jax.Array:
    """Computes the matrix product a b, or a b^T if `b_axis` is 1."""
    return jax.lax.dot_general(a, b, (((1,), (b_axis,)), ((), ())), preferred_element_type=_FLOAT32)
