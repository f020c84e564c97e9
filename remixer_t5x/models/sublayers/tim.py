"""TIM (Transformers with Competitive Ensembles of Independent Mechanisms, section 2.2 and algorithm 1).

The D features of a token are split into n_s mechanisms, each with D / n_s features and separate parameters. GroupLinear
multiplies each mechanism by a separate matrix: GroupLinear(h, W)_j = h_j W_j.

    step 1  c = softmax over mechanisms of GroupLinear(h, W^c)                      one weight per mechanism and token
    step 2  h = norm(h + c * GroupLinear(Attention(Q, K, V), W^O))                  Q, K, V = GroupLinear(h, .)
    step 3  as step 2, but the n_s mechanisms of one token attend to each other, without c
    step 4  h = norm(h + GroupLinear(gelu(GroupLinear(h, W_1)), W_2))

`TimAttention` implements steps 1 and 2, `InterMechanismAttention` step 3, and `TimMLP` step 4. In a decoder,
`TimCrossAttention` is applied between steps 2 and 3. `norms.GroupedRMSNorm` normalizes each mechanism.

Differences from the paper, which follow T5: the feed-forward sublayer is gated as in T5.1.1,
`(gelu(h W_0) * h W_1) W_2`; attention has T5's position bias, no scale on the logits (folded into the query
initializer) and no biases; with pre-norm, c is computed from the normalized features. `num_heads` is the total number
of heads of all mechanisms, n_s times H in algorithm 1.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext, require_encoder_memory
from remixer_t5x.errors import UserError
from remixer_t5x.kernels.attention_formula import split_bias
from remixer_t5x.kernels.compile_target import get_target_platform
from remixer_t5x.models.layers import cache
from remixer_t5x.models.layers.cached_attention import attend_to_memory, attend_to_sequence
from remixer_t5x.models.layers.dense import (
    FeatureGroups,
    GroupDense,
    dropout,
    group_fan_in_normal,
    join_groups,
    split_groups,
    split_heads,
)

_IN_AXES = (axes.MECHANISMS, axes.EMBED, axes.JOINED_KV)
_OUT_AXES = (axes.MECHANISMS, axes.JOINED_KV, axes.EMBED)


def _check_num_mechanisms(num_mechanisms: int, size: int, setting: str) -> None:
    if num_mechanisms < 1 or size % num_mechanisms:
        raise UserError(f'num_mechanisms must divide {setting} = {size}, got {num_mechanisms}; use a divisor of {size}')


def _split_mechanisms(module: nn.Module, x: jax.Array, num_mechanisms: int, ctx: SequenceContext) -> FeatureGroups:
    """Splits [batch, length, embed] into mechanisms [mechanisms, batch, length, embed / mechanisms].

    On TPUs, each mechanism is a separate array, unless caches or intermediates are stored, which contain the heads of
    all mechanisms.
    """
    _check_num_mechanisms(num_mechanisms, x.shape[-1], 'EMBED_DIM')
    is_separate = (
        get_target_platform() == 'tpu' and not ctx.decode and not module.is_mutable_collection('intermediates')
    )
    return split_groups(x, num_mechanisms, num_mechanisms if is_separate else 1)


class Competition(nn.Module):
    """Computes the weights c of step 1, which scale the update of each mechanism of a token."""

    @nn.compact
    def __call__(self, mechanisms: FeatureGroups) -> FeatureGroups:
        """Returns weights [mechanisms, batch, length, 1] that sum to 1 over all mechanisms."""
        scores = GroupDense(1, (axes.MECHANISMS, axes.EMBED, axes.OUTPUTS), name='score')(mechanisms)
        weights = _softmax_over_arrays([score.astype(jnp.float32) for array in scores for score in array])
        if self.is_mutable_collection('intermediates'):
            self.sow('intermediates', 'competition', jnp.stack(weights))
        return _stack_mechanisms_like(scores, [weight.astype(scores[0].dtype) for weight in weights])


def _softmax_over_arrays(logits: Sequence[jax.Array]) -> list[jax.Array]:
    """Computes an elementwise softmax over a list of arrays."""
    largest = jax.lax.stop_gradient(functools.reduce(jnp.maximum, logits))
    exponentials = [jnp.exp(array - largest) for array in logits]
    total = sum(exponentials)
    return [array / total for array in exponentials]


def _stack_mechanisms_like(groups: FeatureGroups, mechanisms: Sequence[jax.Array]) -> FeatureGroups:
    """Stacks the arrays of mechanisms into groups of the same sizes as those in `groups`."""
    remaining = iter(mechanisms)
    return tuple(jnp.stack(list(itertools.islice(remaining, array.shape[0]))) for array in groups)


class _MechanismAttention(nn.Module):
    """Base class of `TimAttention` and `TimCrossAttention`, with their settings and grouped projections.

    Attributes:
        num_mechanisms: number of feature groups, n_s; must divide the model width and `num_heads`.
        num_heads: total number of heads of all mechanisms.
        dropout_rate: dropout on the attention weights, with one mask for all queries.
    """

    num_mechanisms: ranges.Count
    num_heads: ranges.Count
    head_dim: ranges.Count
    dropout_rate: ranges.Rate = 0.0

    def _project_to_heads(self, name: str, mechanisms: FeatureGroups) -> list[jax.Array]:
        """Projects each array [mechanisms, batch, length, width] to heads [batch, length, heads, kv].

        The heads are ordered by mechanism.
        """
        _check_num_mechanisms(self.num_mechanisms, self.num_heads, 'NUM_HEADS')
        init = group_fan_in_normal(1.0 / self.head_dim if name == 'query' else 1.0)
        width = self.num_heads * self.head_dim // self.num_mechanisms
        heads = GroupDense(width, _IN_AXES, kernel_init=init, name=name)(mechanisms)
        return [join_groups((array,)).reshape(*array.shape[1:-1], -1, self.head_dim) for array in heads]

    def _project_output(self, mixed: Sequence[jax.Array], width: int) -> FeatureGroups:
        """Projects heads [batch, length, heads, kv] to mechanisms [mechanisms, batch, length, width]."""
        count = self.num_mechanisms // len(mixed)
        mechanisms = [split_groups(array.reshape(*array.shape[:2], -1), count)[0] for array in mixed]
        return GroupDense(width, _OUT_AXES, name='out')(tuple(mechanisms))


class TimAttention(_MechanismAttention):
    """TIM's self-attention within each mechanism, with competition between mechanisms (steps 1 and 2).

    Attributes:
        competition: factory of a module that weights the updates of the mechanisms, or None (TIM-NoComp in the paper).
    """

    competition: Callable[..., Callable[[FeatureGroups], FeatureGroups]] | None = Competition

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        mechanisms = _split_mechanisms(self, x, self.num_mechanisms, ctx)
        queries, keys, values = (self._project_to_heads(name, mechanisms) for name in ('query', 'key', 'value'))
        heads = zip(queries, keys, values, split_bias(ctx.position_bias, len(mechanisms)), strict=True)
        mixed = [
            attend_to_sequence(self, query, key, value, ctx, bias, self.dropout_rate)
            for query, key, value, bias in heads
        ]
        update = self._project_output(mixed, mechanisms[0].shape[-1])
        if self.competition is not None:
            update = jax.tree.map(jnp.multiply, update, self.competition(name='competition')(mechanisms))
        return join_groups(update)


class TimCrossAttention(_MechanismAttention):
    """TIM's cross-attention: each mechanism attends to the same mechanism of the encoder's output in `ctx.memory`.

    While decoding, the first call computes and caches the keys and values of the memory, which all beams share.
    """

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        memory = require_encoder_memory(ctx, 'TimCrossAttention', 'TimAttention')
        shape = x.shape
        if ctx.decode:
            x = cache.reshape_beams_to_queries(x, memory.hidden.shape[0])
        queries = self._project_to_heads('query', _split_mechanisms(self, x, self.num_mechanisms, ctx))

        @functools.cache
        def project_memory(name: str) -> list[jax.Array]:
            return self._project_to_heads(name, _split_mechanisms(self, memory.hidden, self.num_mechanisms, ctx))

        def attend_within_mechanism(index: int, query: jax.Array) -> jax.Array:
            return attend_to_memory(
                self, query, lambda name: project_memory(name)[index], memory, ctx, self.dropout_rate
            )

        mixed = [attend_within_mechanism(index, query) for index, query in enumerate(queries)]
        return join_groups(self._project_output(mixed, shape[-1] // self.num_mechanisms)).reshape(shape)


class InterMechanismAttention(nn.Module):
    """Attention between the mechanisms of one token (step 3), which otherwise interact only through their competition.

    Attributes:
        num_mechanisms: number of feature groups, n_s; must divide the model width.
        num_heads: number of heads of each mechanism.
    """

    num_mechanisms: ranges.Count
    num_heads: ranges.Count = 2
    head_dim: ranges.Count = 32

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        mechanisms = _split_mechanisms(self, x, self.num_mechanisms, ctx)

        def project_mechanisms(name: str, scale: float = 1.0) -> list[jax.Array]:
            """Returns a list with one projection for each mechanism, [batch, length, heads, kv]."""
            width, init = self.num_heads * self.head_dim, group_fan_in_normal(scale)
            projected = GroupDense(width, _IN_AXES, kernel_init=init, name=name)(mechanisms)
            return [split_heads(mechanism, self.num_heads) for array in projected for mechanism in array]

        query, key, value = (
            project_mechanisms('query', 1.0 / self.head_dim),
            project_mechanisms('key'),
            project_mechanisms('value'),
        )
        mixed = [_attend_to_mechanisms(mechanism, key, value) for mechanism in query]
        joined = _stack_mechanisms_like(mechanisms, [heads.reshape(*heads.shape[:-2], -1) for heads in mixed])
        return join_groups(GroupDense(mechanisms[0].shape[-1], _OUT_AXES, name='out')(joined))


def _attend_to_mechanisms(query: jax.Array, key: Sequence[jax.Array], value: Sequence[jax.Array]) -> jax.Array:
    """Computes attention of one mechanism [..., heads, kv] to all mechanisms including itself.

    Elementwise products are faster than one small matmul per token, and broadcasting over the pairs of mechanisms
    crashes XLA:CPU in the backward pass (jaxlib 0.10.2).
    """
    query32 = query.astype(jnp.float32)
    weights = _softmax_over_arrays(
        [jnp.sum(query32 * other.astype(jnp.float32), axis=-1, keepdims=True) for other in key]
    )
    mixed = sum(weight * other.astype(jnp.float32) for weight, other in zip(weights, value, strict=True))
    return mixed.astype(value[0].dtype)


class TimMLP(nn.Module):
    """Gated feed-forward sublayer for each mechanism, `(gelu(h W_0) * h W_1) W_2` (step 4).

    Attributes:
        num_mechanisms: number of feature groups, n_s; must divide the model width and `hidden_dim`.
        hidden_dim: total number of hidden units of all mechanisms, F.
    """

    num_mechanisms: ranges.Count
    hidden_dim: ranges.Count
    dropout_rate: ranges.Rate = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        _check_num_mechanisms(self.num_mechanisms, self.hidden_dim, 'MLP_DIM')
        mechanisms = _split_mechanisms(self, x, self.num_mechanisms, ctx)
        width, in_axes = self.hidden_dim // self.num_mechanisms, (axes.MECHANISMS, axes.EMBED, axes.MLP)
        gates, values = (GroupDense(width, in_axes, name=name)(mechanisms) for name in ('wi_0', 'wi_1'))
        hidden = jax.tree.map(lambda gate, value: nn.gelu(gate, approximate=True) * value, gates, values)
        hidden = tuple(dropout(self.dropout_rate, array, deterministic=ctx.deterministic) for array in hidden)
        out_axes = (axes.MECHANISMS, axes.MLP, axes.EMBED)
        return join_groups(GroupDense(mechanisms[0].shape[-1], out_axes, name='wo')(hidden))
