"""How the attention kernel cuts its work into programs, and which block of each array a program reads."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from remixer_t5x.kernels.attention import tpu_bias

LANES = 128
# [512, 512] float32 logits are 1 MiB; a few of them fit next to the operands into the 16 MiB of a TPU v3 or v4.
_LONGEST_BLOCK = 512
_MEMORY_OF_BLOCKS = 8 * 2**20
# What a kernel may take unless it asks for more.
_USUAL_MEMORY = 16 * 2**20


class Operands(NamedTuple):
    """What both kernels read; `None` for what a call does not have.

    Attributes:
        query: [batch, queries, heads * kv].
        key, value: [batch, keys, heads * kv].
        query_segments: [batch, 1, queries] int32; None lets each query see every key of a segment above 0.
        key_segments: [batch, keys, 1] int32; a query sees the keys of its own segment.
        bias: [heads // group, group, 8, distances] float32 of `tpu_bias.shifted_copies`.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    query_segments: jax.Array | None
    key_segments: jax.Array
    bias: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the work is cut into programs.

    Attributes:
        queries, keys: lengths of the rows.
        heads: number of heads.
        head_dim: width of a head.
        causal: a query sees no key behind it.
        group: heads of one program.
        block_q, block_k: queries and keys of one program, multiples of 128.
    """

    queries: int
    keys: int
    heads: int
    head_dim: int
    causal: bool
    group: int
    block_q: int
    block_k: int

    @property
    def blocks_q(self) -> int:
        return pl.cdiv(self.queries, self.block_q)

    @property
    def blocks_k(self) -> int:
        return pl.cdiv(self.keys, self.block_k)

    @property
    def one_block(self) -> bool:
        """Whether one program holds all logits of a row, so that its bias serves the whole batch."""
        return self.blocks_q == self.blocks_k == 1

    @property
    def width(self) -> int:
        """Features of one program's heads."""
        return self.group * self.head_dim

    @property
    def memory(self) -> int:
        """Bytes of a core's own memory that the backward kernel takes, at most."""
        gradient = self.blocks_q * self.block_q * self.width * (4 + 2 * 2)
        bias = 4 * self.group * tpu_bias.SUBLANES * self.distances * 4
        return _MEMORY_OF_BLOCKS + gradient + bias

    @property
    def distances(self) -> int:
        """Number of distances between a query and a key, rounded up to whole blocks."""
        return self.blocks_q * self.block_q + self.blocks_k * self.block_k


def make_plan(queries: int, keys: int, heads: int, head_dim: int, causal: bool) -> Plan:
    """The fewest heads that fill whole registers, or all heads; blocks of at most 512 tokens, as equal as possible."""
    whole = (g for g in range(1, heads) if heads % g == 0 and g * head_dim % LANES == 0)
    return Plan(queries, keys, heads, head_dim, causal, next(whole, heads), _block(queries), _block(keys))


def _block(length: int) -> int:
    blocks = pl.cdiv(length, _LONGEST_BLOCK)
    return pl.cdiv(pl.cdiv(length, blocks), LANES) * LANES


def compiler_params(plan: Plan) -> pltpu.CompilerParams:
    # Head groups are independent. Rows and blocks follow one another, because they share sums and the bias.
    semantics = ('parallel', 'arbitrary', 'arbitrary', 'arbitrary')
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=max(plan.memory, _USUAL_MEMORY))


def block_scratch(plan: Plan):
    return pltpu.VMEM((plan.group, plan.block_k, plan.block_q), jnp.float32)


class Specs:
    """Which block of each array a program sees; the grid is (groups of heads, rows, ., .), `q_axis` and `k_axis`."""

    def __init__(self, plan: Plan, q_axis: int, k_axis: int):
        width, block_q, block_k = plan.width, plan.block_q, plan.block_k

        def q_block(*ids):
            # A block of keys that a block of queries does not see is skipped. The block next to it is there already,
            # so that naming that one saves the copy.
            return jnp.maximum(ids[q_axis], first_q(plan, ids[k_axis])) if plan.causal and q_axis == 3 else ids[q_axis]

        def k_block(*ids):
            return jnp.minimum(ids[k_axis], last_k(plan, ids[q_axis])) if plan.causal and k_axis == 3 else ids[k_axis]

        self.of_query = pl.BlockSpec((1, block_q, width), lambda *ids: (ids[1], q_block(*ids), ids[0]))
        self.of_key = pl.BlockSpec((1, block_k, width), lambda *ids: (ids[1], k_block(*ids), ids[0]))
        self.all_queries = pl.BlockSpec((1, plan.blocks_q * block_q, width), lambda *ids: (ids[1], 0, ids[0]))
        self.log_total = pl.BlockSpec((1, 1, plan.group, block_q), lambda *ids: (ids[1], ids[0], 0, q_block(*ids)))
        self.query_segments = pl.BlockSpec((1, 1, block_q), lambda *ids: (ids[1], 0, q_block(*ids)))
        self.key_segments = pl.BlockSpec((1, block_k, 1), lambda *ids: (ids[1], k_block(*ids), 0))
        self.bias = pl.BlockSpec((1, plan.group, tpu_bias.SUBLANES, plan.distances), lambda *ids: (ids[0], 0, 0, 0))

    def operands(self, operands: Operands) -> Operands:
        return Operands(
            self.of_query,
            self.of_key,
            self.of_key,
            None if operands.query_segments is None else self.query_segments,
            self.key_segments,
            None if operands.bias is None else self.bias,
        )


def first_q(plan: Plan, k_block):
    """The first block of queries that sees the block of keys."""
    return jax.lax.div(k_block * plan.block_k, plan.block_q)


def last_k(plan: Plan, q_block):
    """The last block of keys that the block of queries sees."""
    return jax.lax.div((q_block + 1) * plan.block_q - 1, plan.block_k)


def cost(plan: Plan, batch: int, operands: Operands, matmuls: int, reads: int) -> pl.CostEstimate:
    pairs = batch * plan.heads * plan.queries * plan.keys // (2 if plan.causal else 1)
    arrays = sum(array.size * array.dtype.itemsize for array in operands[:3])
    return pl.CostEstimate(
        flops=2 * matmuls * pairs * plan.head_dim,
        transcendentals=pairs,
        bytes_accessed=reads * arrays + operands.query.size * operands.query.dtype.itemsize,
    )
