"""Remixer block (REMIXERS: A Mixer-Transformer Architecture with Compositional Operators, section 2.1).

A feed-forward sublayer that also mixes tokens by a learned matrix H shared by all inputs, and composes the mixed with
the unmixed representations:

    X' = gelu(X W_1) * (X W_2)
    S  = softmax(H) X'
    C  = alpha (S * X') + (1 - alpha) (X' - S)
    Y  = C W_3 + R(X')

Departures, where the paper leaves a choice: the hidden width F may differ from D (the paper's footnote 2), and then
the residual R is added in the hidden space, `Y = (C + X') W_3`; padding takes no part in the softmax; rows of H are
indexed by position in the example, so packing changes nothing; in a decoder a row sees no column after it; the softmax
reads `bounded(H)`, which is H from -20 to 20; dropout falls on softmax(H), like attention's, where section 3.1.2 drops
"values from H"; alpha is one learned number by default.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext
from remixer_t5x.errors import UserError
from remixer_t5x.kernels.compile_target import target_platform
from remixer_t5x.kernels.diagonals import place_examples
from remixer_t5x.kernels.gelu import gelu_times
from remixer_t5x.models.layers import cache
from remixer_t5x.models.layers.attend import in_sequence
from remixer_t5x.models.layers.checks import check_length
from remixer_t5x.models.layers.dense import Dense
from remixer_t5x.models.layers.dropout import dropout

Projection = Callable[[jax.Array], jax.Array]

# Small noise around zero: mixing starts uniform, but no two columns get the same gradient.
MIXING_INIT = nn.initializers.normal(stddev=0.02)
# Logits of H up to this size are what they are; no logit gets further than the second number beyond it.
EXACT_LOGIT, LOGIT_ROOM = 20.0, 10.0


def bounded(logits: jax.Array) -> jax.Array:
    """The logits themselves from -20 to 20, and beyond it a smooth approach to -30 and 30, with a gradient everywhere.

    One softmax of H serves all rows of a batch, whatever is padding in each. A column that is padding may therefore
    exceed the columns of tokens by as much as it likes, and their weights would underflow. With logits from -30 to 30
    no weight is below exp(-60), which float32 and bfloat16 represent.
    """
    beyond = jnp.maximum(jnp.abs(logits) - EXACT_LOGIT, 0.0)
    within = jnp.clip(logits, -EXACT_LOGIT, EXACT_LOGIT)
    return within + jnp.sign(logits) * LOGIT_ROOM * beyond / (beyond + LOGIT_ROOM)


def compose(alpha: jax.Array | float, mixed: jax.Array, unmixed: jax.Array) -> jax.Array:
    """`alpha (S * X') + (1 - alpha) (X' - S)`, section 2.1.2; alpha broadcasts over [batch, length, F]."""
    return alpha * (mixed * unmixed) + (1 - alpha) * (unmixed - mixed)


class FixedAlpha(nn.Module):
    """Composition with alpha as a hyperparameter in [0, 1]."""

    value: ranges.Positive = 0.5

    @nn.compact
    def __call__(self, mixed: jax.Array, unmixed: jax.Array) -> jax.Array:
        return compose(self.value, mixed, unmixed)


class ScalarAlpha(nn.Module):
    """Composition with one learned alpha, the sigmoid of a parameter that starts at 0."""

    @nn.compact
    def __call__(self, mixed: jax.Array, unmixed: jax.Array) -> jax.Array:
        logit = self.param('alpha', nn.with_logical_partitioning(nn.initializers.zeros, ()), (), jnp.float32)
        return compose(nn.sigmoid(logit).astype(unmixed.dtype), mixed, unmixed)


class VectorAlpha(nn.Module):
    """Composition with a learned alpha for each hidden unit."""

    @nn.compact
    def __call__(self, mixed: jax.Array, unmixed: jax.Array) -> jax.Array:
        init = nn.with_logical_partitioning(nn.initializers.zeros, (None,))
        logits = self.param('alpha', init, unmixed.shape[-1:], jnp.float32)
        return compose(nn.sigmoid(logits).astype(unmixed.dtype), mixed, unmixed)


class DenseGate(nn.Module):
    """`sigmoid(X' G)`, G: [F, F]: a vector for each token."""

    @nn.compact
    def __call__(self, unmixed: jax.Array) -> jax.Array:
        return nn.sigmoid(Dense(unmixed.shape[-1], (None, axes.MLP), name='gate')(unmixed))


class ElementwiseGate(nn.Module):
    """`sigmoid(X' * g)`, g: [F]: a vector for each token, by F parameters."""

    @nn.compact
    def __call__(self, unmixed: jax.Array) -> jax.Array:
        init = nn.with_logical_partitioning(nn.initializers.zeros, (None,))
        weights = self.param('gate', init, unmixed.shape[-1:], jnp.float32)
        return nn.sigmoid(unmixed * weights.astype(unmixed.dtype))


class GatedAlpha(nn.Module):
    """Composition with a vector alpha for each token: section 4.1's "gating vector sigma(G(x)) to parameterize alpha".

    The first of two readings of table 5's row (2); `GatedComposition` is the second. `gate` is a factory of a module
    X' -> numbers in (0, 1), [batch, length, F].
    """

    gate: Callable[..., nn.Module] = DenseGate

    @nn.compact
    def __call__(self, mixed: jax.Array, unmixed: jax.Array) -> jax.Array:
        return compose(self.gate(name='gating')(unmixed), mixed, unmixed)


class GatedComposition(nn.Module):
    """`C = g * X_C + (1 - g) * S`: table 5's "gating between X_c and X_s", which decides whether to compose at all.

    The second of two readings of that row; `GatedAlpha` is the first. `gate` is a factory as there, and `composition`
    is a factory of the module that makes X_C.
    """

    gate: Callable[..., nn.Module] = DenseGate
    composition: Callable[..., nn.Module] = ScalarAlpha

    @nn.compact
    def __call__(self, mixed: jax.Array, unmixed: jax.Array) -> jax.Array:
        composed = self.composition(name='composition')(mixed, unmixed)
        gate = self.gate(name='gating')(unmixed)
        return gate * composed + (1 - gate) * mixed


class NoComposition(nn.Module):
    """`C = S`: mixing without composition (the paper's ablation)."""

    @nn.compact
    def __call__(self, mixed: jax.Array, unmixed: jax.Array) -> jax.Array:
        return mixed


def hidden_residual(project: Projection, composed: jax.Array, hidden: jax.Array, features: int) -> jax.Array:
    """`Y = (C + X') W_3`."""
    return project(composed + hidden)


def identity_residual(project: Projection, composed: jax.Array, hidden: jax.Array, features: int) -> jax.Array:
    """`Y = C W_3 + X'`, for F = D only."""
    if hidden.shape[-1] != features:
        raise UserError(
            f'remixer.identity_residual needs Remixer.hidden_dim equal to the model width {features}, '
            f'got {hidden.shape[-1]}: use remixer.hidden_residual'
        )
    return project(composed) + hidden


def no_residual(project: Projection, composed: jax.Array, hidden: jax.Array, features: int) -> jax.Array:
    """`Y = C W_3`."""
    return project(composed)


class LearnedMixing(nn.Module):
    """`S = softmax(H) X'`, [batch, length, F], over the tokens that each token may see.

    Attributes:
        max_length: size of H; rows longer than this are refused.
        dropout_rate: dropout on softmax(H), one mask for the whole batch (for each row, where rows are packed).
    """

    max_length: ranges.Count
    dropout_rate: ranges.Rate = 0.0

    @nn.compact
    def __call__(self, hidden: jax.Array, ctx: SequenceContext) -> jax.Array:
        if ctx.decode:
            hidden = cache.extend(self, 'cached_hidden', hidden, ctx)
        length = hidden.shape[1]
        check_length('Remixer', self.max_length, length)
        init = nn.with_logical_partitioning(MIXING_INIT, (axes.POSITIONS_OUT, axes.POSITIONS_IN))
        logits = bounded(self.param('logits', init, (self.max_length, self.max_length), jnp.float32))
        if ctx.step is not None:
            return self._mix_step(logits[:, :length], hidden, ctx)
        if ctx.packed or ctx.prefix is not None:
            return self._mix_packed(logits, hidden, ctx)
        return self._mix_rows(logits[:length, :length], hidden, ctx)

    def _mix_rows(self, logits: jax.Array, hidden: jax.Array, ctx: SequenceContext) -> jax.Array:
        """One example per row: `E (m * X') / (E m)` with E = exp(H) up to a row's scale, [length, length] for all."""
        if ctx.causal:
            logits = jnp.where(jnp.tri(logits.shape[0], dtype=bool), logits, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1)
        is_token = ctx.is_token.astype(jnp.float32)
        total = jnp.einsum('qk,bk->bq', weights, is_token)
        scale = _inverse(total)
        weights = self._drop_weights(weights, ctx)
        if target_platform() == 'gpu':
            # A GPU would transpose X' and S to make one matmul of the batch. Weights for each row are smaller than X'.
            of_rows = weights * (is_token[:, None, :] * scale[:, :, None])
            return jnp.einsum('bqk,bkf->bqf', of_rows.astype(hidden.dtype), hidden)
        tokens = hidden * is_token[..., None].astype(hidden.dtype)
        return jnp.einsum('qk,bkf->bqf', weights.astype(hidden.dtype), tokens) * scale.astype(hidden.dtype)[..., None]

    def _mix_packed(self, logits: jax.Array, hidden: jax.Array, ctx: SequenceContext) -> jax.Array:
        """Several examples per row, or a prefix, as in `_mix_rows`: exp(H) by position in the example, [batch, length,
        length].

        The softmax of H itself is [length, length] for the whole batch; only its placed copy, in hidden's dtype, is
        larger.
        """
        length = hidden.shape[1]
        logits = logits[:length, :length]
        if ctx.causal and ctx.prefix is None:
            logits = jnp.where(jnp.tri(length, dtype=bool), logits, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1).astype(hidden.dtype)
        placed = place_examples(weights, ctx.positions) if ctx.packed else weights
        allowed = in_sequence(ctx).mask()[:, 0] if ctx.prefix is not None else _same_example(ctx)
        weights = jnp.where(allowed, placed, 0).astype(jnp.float32)
        weights = weights * _inverse(jnp.sum(weights, axis=-1, keepdims=True))
        weights = self._drop_weights(weights, ctx).astype(hidden.dtype)
        return jnp.einsum('bqk,bkf->bqf', weights, hidden)

    def _mix_step(self, logits: jax.Array, hidden: jax.Array, ctx: SequenceContext) -> jax.Array:
        """The token at `ctx.step` mixes the cached X' up to and including its own."""
        step = cache.decoding_step(ctx)
        if step.ndim:
            rows = jnp.where(cache.visible(logits.shape[1], ctx), jnp.take(logits, step, axis=0), -jnp.inf)
            return jnp.einsum('bk,bkf->bf', jax.nn.softmax(rows).astype(hidden.dtype), hidden)[:, None]
        row = jax.lax.dynamic_index_in_dim(logits, step, axis=0, keepdims=False)
        weights = jax.nn.softmax(jnp.where(cache.visible(row.shape[0], ctx), row, -jnp.inf)).astype(hidden.dtype)
        return jnp.einsum('k,bkf->bf', weights, hidden)[:, None]

    def _drop_weights(self, weights: jax.Array, ctx: SequenceContext) -> jax.Array:
        if self.dropout_rate == 0.0 or ctx.deterministic:
            return weights
        return nn.Dropout(self.dropout_rate, deterministic=False)(weights)


def _same_example(ctx: SequenceContext) -> jax.Array:
    """[batch, length, length] bool."""
    return ctx.segment_ids[:, :, None] == ctx.segment_ids[:, None, :]


def _inverse(total: jax.Array) -> jax.Array:
    """1 / total, but 0 for 0: a row of only padding gets zeros, and its gradient has no NaN."""
    has_tokens = total > 0
    return jnp.where(has_tokens, 1.0 / jnp.where(has_tokens, total, 1.0), 0.0)


class Remixer(nn.Module):
    """Gated feed-forward sublayer with a learned, input-independent token mixing inside.

    Attributes:
        hidden_dim: number of hidden units, F.
        max_length: size of H; rows longer than this are refused.
        composition: factory of a module (S, X') -> C.
        residual: how X' is added to the output: `hidden_residual`, `identity_residual` or `no_residual`.
        dropout_rate: dropout on the hidden units that W_3 reads.
        mixing_dropout_rate: dropout on the mixing weights softmax(H), 0.0 to 0.2 in the paper.
    """

    hidden_dim: ranges.Count
    max_length: ranges.Count
    composition: Callable[..., nn.Module] = ScalarAlpha
    residual: Callable[..., jax.Array] = hidden_residual
    dropout_rate: ranges.Rate = 0.0
    mixing_dropout_rate: ranges.Rate = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        gate, units = (Dense(self.hidden_dim, (axes.EMBED, axes.MLP), name=name)(x) for name in ('wi_0', 'wi_1'))
        hidden = gelu_times(gate, units)
        mixed = LearnedMixing(self.max_length, self.mixing_dropout_rate, name='mixing')(hidden, ctx)
        composed = self.composition(name='composition')(mixed, hidden)
        project = Dense(x.shape[-1], (axes.MLP, axes.EMBED), name='wo')

        def drop_and_project(units: jax.Array) -> jax.Array:
            return project(dropout(self.dropout_rate, units, deterministic=ctx.deterministic))

        return self.residual(drop_and_project, composed, hidden, x.shape[-1])
