"""Remixer block (REMIXERS: A Mixer-Transformer Architecture with Compositional Operators, section 2.1).

A gated feed-forward sublayer that also mixes tokens with a learned matrix H, the same for all inputs, and composes the
mixed with the unmixed hidden units:

    X' = gelu(X W_1) * (X W_2)                       X: [length, D]; W_1, W_2: [D, F]
    S  = softmax(H) X'                               H: [length, length]
    C  = alpha (S * X') + (1 - alpha) (X' - S)
    Y  = C W_3 + R(X')                               W_3: [F, D]

Choices that the paper leaves open: the hidden width F may differ from D (the paper's footnote 2), and then
the residual R is added to the hidden units, `Y = (C + X') W_3`; padding is masked in the softmax; rows of H are
indexed by position in the example, so packing does not change the output; in a decoder H is masked causally; the
softmax reads `bounded(H)`, which is H between -20 and 20; dropout is applied to softmax(H), as in attention, where
section 3.1.2 drops "values from H"; alpha is one learned number by default.
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
from remixer_t5x.models.layers.attend import visible_in_sequence
from remixer_t5x.models.layers.checks import check_length
from remixer_t5x.models.layers.dense import Dense
from remixer_t5x.models.layers.dropout import dropout

Projection = Callable[[jax.Array], jax.Array]

# Small noise around zero, so that mixing starts nearly uniform but all columns receive different gradients.
MIXING_INIT = nn.initializers.normal(stddev=0.02)
# `bounded` does not change logits up to EXACT_LOGIT, and limits all logits to EXACT_LOGIT + LOGIT_MARGIN.
EXACT_LOGIT, LOGIT_MARGIN = 20.0, 10.0


def compose(alpha: jax.Array | float, mixed: jax.Array, unmixed: jax.Array) -> jax.Array:
    """`alpha (S * X') + (1 - alpha) (X' - S)`, section 2.1.2; alpha broadcasts to [batch, length, F]."""
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
    """Computes the gate `sigmoid(X' G)`, G: [F, F]: a vector for each token."""

    @nn.compact
    def __call__(self, unmixed: jax.Array) -> jax.Array:
        return nn.sigmoid(Dense(unmixed.shape[-1], (None, axes.MLP), name='gate')(unmixed))


class ElementwiseGate(nn.Module):
    """Computes the gate `sigmoid(X' * g)`, g: [F]: a vector for each token, with only F parameters."""

    @nn.compact
    def __call__(self, unmixed: jax.Array) -> jax.Array:
        init = nn.with_logical_partitioning(nn.initializers.zeros, (None,))
        weights = self.param('gate', init, unmixed.shape[-1:], jnp.float32)
        return nn.sigmoid(unmixed * weights.astype(unmixed.dtype))


class GatedAlpha(nn.Module):
    """Composition with a vector alpha for each token, `alpha = g(X')`.

    One of two interpretations of row (2) in table 5: section 4.1 describes a "gating vector sigma(G(x)) to
    parameterize alpha".

    Attributes:
        gate: factory of a module X' -> numbers in (0, 1), [batch, length, F].
    """

    gate: Callable[..., nn.Module] = DenseGate

    @nn.compact
    def __call__(self, mixed: jax.Array, unmixed: jax.Array) -> jax.Array:
        return compose(self.gate(name='gating')(unmixed), mixed, unmixed)


class GatedComposition(nn.Module):
    """`C = g X_C + (1 - g) S`: the gate decides whether to compose at all.

    The other interpretation of row (2) in table 5, "gating between X_c and X_s".

    Attributes:
        gate: factory of g, a module X' -> numbers in (0, 1), [batch, length, F].
        composition: factory of a module (S, X') -> X_C.
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
    """`Y = C W_3 + X'`, if F = D."""
    if hidden.shape[-1] != features:
        raise UserError(
            f'Remixer.hidden_dim must be {features}, the width of the model, for remixer.identity_residual, '
            f'got {hidden.shape[-1]}; use remixer.hidden_residual'
        )
    return project(composed) + hidden


def no_residual(project: Projection, composed: jax.Array, hidden: jax.Array, features: int) -> jax.Array:
    """`Y = C W_3`."""
    return project(composed)


def bounded(logits: jax.Array) -> jax.Array:
    """Bounds logits smoothly: unchanged from -20 to 20, then approaching -30 and 30 with a nonzero gradient.

    One softmax of H serves all rows of a batch, although they have different padding. Without the bound, the column of
    a padding token could exceed the columns of all tokens so far that their weights underflow. Between -30 and 30 no
    weight is below exp(-60), which float32 and bfloat16 represent.
    """
    excess = jnp.maximum(jnp.abs(logits) - EXACT_LOGIT, 0.0)
    within = jnp.clip(logits, -EXACT_LOGIT, EXACT_LOGIT)
    return within + jnp.sign(logits) * LOGIT_MARGIN * excess / (excess + LOGIT_MARGIN)


class LearnedMixing(nn.Module):
    """`S = softmax(H) X'`, [batch, length, F], over the tokens that each token may see.

    Attributes:
        max_length: size of H; longer rows raise UserError.
        dropout_rate: dropout on softmax(H), with one mask for the whole batch (for each row if rows are packed).
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
        logits = logits[:length, :length]
        if ctx.causal and ctx.prefix is None:
            logits = jnp.where(jnp.tri(length, dtype=bool), logits, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1)
        if ctx.packed or ctx.prefix is not None:
            return self._mix_packed(weights, hidden, ctx)
        return self._mix_rows(weights, hidden, ctx)

    def _mix_rows(self, weights: jax.Array, hidden: jax.Array, ctx: SequenceContext) -> jax.Array:
        """One example per row: `W (m * X') / (W m)` with W = softmax(H), the same for all rows, and m the token mask.

        This equals the softmax over the tokens alone, without an array [batch, length, length].
        """
        is_token = ctx.is_token.astype(jnp.float32)
        scale = _inverse(jnp.einsum('qk,bk->bq', weights, is_token))
        weights = self._drop_weights(weights, ctx)
        if target_platform() == 'gpu':
            # A single matmul for the batch would transpose X' and S on a GPU; the weights of each row are smaller.
            row_weights = weights * (is_token[:, None, :] * scale[:, :, None])
            return jnp.einsum('bqk,bkf->bqf', row_weights.astype(hidden.dtype), hidden)
        tokens = hidden * is_token[..., None].astype(hidden.dtype)
        return jnp.einsum('qk,bkf->bqf', weights.astype(hidden.dtype), tokens) * scale.astype(hidden.dtype)[..., None]

    def _mix_packed(self, weights: jax.Array, hidden: jax.Array, ctx: SequenceContext) -> jax.Array:
        """Several examples per row, or a prefix: weights by position in the example, [batch, length, length]."""
        weights = weights.astype(hidden.dtype)
        placed = place_examples(weights, ctx.positions) if ctx.packed else weights
        if ctx.prefix is not None:
            is_visible = visible_in_sequence(ctx).mask()[:, 0]
        else:
            is_visible = ctx.segment_ids[:, :, None] == ctx.segment_ids[:, None, :]
        weights = jnp.where(is_visible, placed, 0).astype(jnp.float32)
        weights = weights * _inverse(jnp.sum(weights, axis=-1, keepdims=True))
        weights = self._drop_weights(weights, ctx).astype(hidden.dtype)
        return jnp.einsum('bqk,bkf->bqf', weights, hidden)

    def _mix_step(self, logits: jax.Array, hidden: jax.Array, ctx: SequenceContext) -> jax.Array:
        """Mixes the cached X' up to and including the token at `ctx.step`."""
        step = cache.decoding_step(ctx)
        rows = jnp.where(cache.visible(logits.shape[1], ctx), jnp.take(logits, step, axis=0), -jnp.inf)
        equation = 'bk,bkf->bf' if step.ndim else 'k,bkf->bf'
        return jnp.einsum(equation, jax.nn.softmax(rows).astype(hidden.dtype), hidden)[:, None]

    def _drop_weights(self, weights: jax.Array, ctx: SequenceContext) -> jax.Array:
        if self.dropout_rate == 0.0 or ctx.deterministic:
            return weights
        return nn.Dropout(self.dropout_rate, deterministic=False)(weights)


def _inverse(total: jax.Array) -> jax.Array:
    """Returns 1 / total, or 0 where total is 0, so that rows of padding have no NaN in their gradient."""
    has_tokens = total > 0
    return jnp.where(has_tokens, 1.0 / jnp.where(has_tokens, total, 1.0), 0.0)


class Remixer(nn.Module):
    """The Remixer block, [batch, length, D] -> [batch, length, D]; the module's docstring has the equations.

    Attributes:
        hidden_dim: number of hidden units, F.
        max_length: size of H; longer rows raise UserError.
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
