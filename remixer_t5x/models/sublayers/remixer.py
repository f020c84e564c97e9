"""Remixer block (REMIXERS: A Mixer-Transformer Architecture with Compositional Operators, section 2.1).

The block is a gated feed-forward sublayer that also mixes tokens with a learned matrix H, which does not depend on the
input, and combines ("composes") the mixed and the unmixed hidden units:

    X' = gelu(X W_1) * (X W_2)                       X: [length, D]; W_1, W_2: [D, F]
    S  = softmax(H) X'                               H: [length, length]
    C  = alpha (S * X') + (1 - alpha) (X' - S)
    Y  = C W_3 + R(X')                               W_3: [F, D]

Choices that the paper leaves open:

- The hidden width F may differ from D (the paper's footnote 2); the residual is then added to the hidden units,
  `Y = (C + X') W_3`.
- The softmax masks padding, and in a decoder also later tokens.
- H is indexed by position in the example, so packing does not change the output.
- Logits outside [-20, 20] are bounded smoothly before the softmax (`bound_logits`).
- Dropout is applied to softmax(H), as in attention; section 3.1.2 of the paper drops "values from H".
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext, check_length
from remixer_t5x.errors import UserError
from remixer_t5x.kernels.compile_target import get_target_platform
from remixer_t5x.kernels.gelu import multiply_by_gelu
from remixer_t5x.kernels.reshaping import gather_by_positions
from remixer_t5x.models.layers import cache
from remixer_t5x.models.layers.cached_attention import build_sequence_visibility
from remixer_t5x.models.layers.dense import Dense, create_param, dropout

Projection = Callable[[jax.Array], jax.Array]
# Factory of modules that compute gates from X'.
GateFactory = Callable[..., Callable[[jax.Array], jax.Array]]
# Factory of modules that compute C from S and X'.
CompositionFactory = Callable[..., Callable[[jax.Array, jax.Array], jax.Array]]

# The initial mixing is nearly uniform, but the columns of H receive different gradients.
MIXING_INIT = nn.initializers.normal(stddev=0.02)
# `bound_logits` does not change absolute values up to EXACT_LOGIT, and bounds others by EXACT_LOGIT + LOGIT_MARGIN.
EXACT_LOGIT, LOGIT_MARGIN = 20.0, 10.0


def compose_with_alpha(alpha: jax.Array | float, mixed: jax.Array, unmixed: jax.Array) -> jax.Array:
    """Computes the composition `alpha (S * X') + (1 - alpha) (X' - S)` of section 2.1.2."""
    return alpha * (mixed * unmixed) + (1 - alpha) * (unmixed - mixed)


class FixedAlpha(nn.Module):
    """Composition with a fixed alpha, a hyperparameter in [0, 1]."""

    value: ranges.Fraction = 0.5

    @nn.compact
    def __call__(self, mixed: jax.Array, unmixed: jax.Array) -> jax.Array:
        return compose_with_alpha(self.value, mixed, unmixed)


class ScalarAlpha(nn.Module):
    """Composition with one learned alpha, parameterized as a sigmoid and initialized to 0.5."""

    @nn.compact
    def __call__(self, mixed: jax.Array, unmixed: jax.Array) -> jax.Array:
        logit = create_param(self, 'alpha', nn.initializers.zeros, (), ())
        return compose_with_alpha(nn.sigmoid(logit).astype(unmixed.dtype), mixed, unmixed)


class VectorAlpha(nn.Module):
    """Composition with a learned alpha for each hidden unit."""

    @nn.compact
    def __call__(self, mixed: jax.Array, unmixed: jax.Array) -> jax.Array:
        logits = create_param(self, 'alpha', nn.initializers.zeros, (None,), unmixed.shape[-1:])
        return compose_with_alpha(nn.sigmoid(logits).astype(unmixed.dtype), mixed, unmixed)


class DenseGate(nn.Module):
    """Computes the gate `sigmoid(X' G)`, a vector for each token, with a learned matrix G [F, F]."""

    @nn.compact
    def __call__(self, unmixed: jax.Array) -> jax.Array:
        # Both axes index hidden units, but a mesh axis can shard only one of them, so the first has the name `embed`.
        return nn.sigmoid(Dense(unmixed.shape[-1], (axes.EMBED, axes.MLP), name='gate')(unmixed))


class ElementwiseGate(nn.Module):
    """Computes the gate `sigmoid(X' * g)`, a vector for each token, with a learned vector g [F]."""

    @nn.compact
    def __call__(self, unmixed: jax.Array) -> jax.Array:
        weights = create_param(self, 'gate', nn.initializers.zeros, (None,), unmixed.shape[-1:])
        return nn.sigmoid(unmixed * weights.astype(unmixed.dtype))


class GatedAlpha(nn.Module):
    """Composition with an alpha vector for each token, which a gate computes from X'.

    This is one of two interpretations of row (2) in table 5 of the paper; section 4.1 describes a "gating vector
    sigma(G(x)) to parameterize alpha".

    Attributes:
        gate: factory of a module that maps X' to gates in (0, 1), [batch, length, F].
    """

    gate: GateFactory = DenseGate

    @nn.compact
    def __call__(self, mixed: jax.Array, unmixed: jax.Array) -> jax.Array:
        return compose_with_alpha(self.gate(name='gating')(unmixed), mixed, unmixed)


class GatedComposition(nn.Module):
    """Gated composition, `C = g X_C + (1 - g) S`, which interpolates between composed and mixed hidden units.

    This is the second interpretation of row (2) in table 5 of the paper, "gating between X_c and X_s".

    Attributes:
        gate: factory of a module that maps X' to gates g in (0, 1), [batch, length, F].
        composition: factory of a module (S, X') -> X_C.
    """

    gate: GateFactory = DenseGate
    composition: CompositionFactory = ScalarAlpha

    @nn.compact
    def __call__(self, mixed: jax.Array, unmixed: jax.Array) -> jax.Array:
        composed = self.composition(name='composition')(mixed, unmixed)
        gate = self.gate(name='gating')(unmixed)
        return gate * composed + (1 - gate) * mixed


class NoComposition(nn.Module):
    """Mixing without composition, `C = S` (an ablation in the paper)."""

    @nn.compact
    def __call__(self, mixed: jax.Array, unmixed: jax.Array) -> jax.Array:
        return mixed


def hidden_residual(project: Projection, composed: jax.Array, hidden: jax.Array, features: int) -> jax.Array:
    """Computes the output `Y = (C + X') W_3`."""
    return project(composed + hidden)


def identity_residual(project: Projection, composed: jax.Array, hidden: jax.Array, features: int) -> jax.Array:
    """Computes the output `Y = C W_3 + X'`; the hidden width F must equal the model width D."""
    if hidden.shape[-1] != features:
        raise UserError(
            f'Remixer.hidden_dim must equal the model width {features} for remixer.identity_residual, '
            f'got {hidden.shape[-1]}; use remixer.hidden_residual'
        )
    return project(composed) + hidden


def no_residual(project: Projection, composed: jax.Array, hidden: jax.Array, features: int) -> jax.Array:
    """Computes the output `Y = C W_3`."""
    return project(composed)


def bound_logits(logits: jax.Array) -> jax.Array:
    """Bounds logits smoothly: absolute values up to 20 do not change; larger ones approach 30 with a nonzero gradient.

    All rows of a batch share one softmax of H, although their padding differs. Without the bound, a large logit at a
    padding position could make the weights of all tokens underflow.
    """
    excess = jnp.maximum(jnp.abs(logits) - EXACT_LOGIT, 0.0)
    within = jnp.clip(logits, -EXACT_LOGIT, EXACT_LOGIT)
    return within + jnp.sign(logits) * LOGIT_MARGIN * excess / (excess + LOGIT_MARGIN)


class LearnedMixing(nn.Module):
    """Token mixing with learned weights, `S = softmax(H) X'`, over the tokens visible to each token.

    Dropout of softmax(H) uses one mask for the batch, or one per row if rows are packed or have a prefix.
    """

    max_length: ranges.Count
    dropout_rate: ranges.Rate = 0.0

    @nn.compact
    def __call__(self, hidden: jax.Array, ctx: SequenceContext) -> jax.Array:
        if ctx.decode:
            hidden = cache.update_cache(self, 'cached_hidden', hidden, ctx)
        length = hidden.shape[1]
        check_length('Remixer', self.max_length, length)
        names, shape = (axes.POSITIONS_OUT, axes.POSITIONS_IN), (self.max_length, self.max_length)
        logits = create_param(self, 'logits', MIXING_INIT, names, shape)
        if ctx.step is not None:
            return self._mix_decoding_step(logits[:, :length], hidden, ctx)
        logits = bound_logits(logits[:length, :length])
        if ctx.causal and ctx.prefix is None:
            logits = jnp.where(jnp.tri(length, dtype=bool), logits, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1)
        if ctx.packed or ctx.prefix is not None:
            return self._mix_with_row_weights(weights, hidden, ctx)
        return self._mix_rows(weights, hidden, ctx)

    def _mix_rows(self, weights: jax.Array, hidden: jax.Array, ctx: SequenceContext) -> jax.Array:
        """Mixes rows with one example each by `W (m * X') / (W m)`, where W = softmax(H) and m is the token mask.

        This equals a softmax without padding, but needs no [batch, length, length] array.
        """
        is_token = ctx.is_token.astype(jnp.float32)
        scale = _safe_inverse(jnp.einsum('qk,bk->bq', weights, is_token))
        weights = nn.Dropout(self.dropout_rate)(weights, deterministic=ctx.deterministic)
        if get_target_platform() == 'gpu':
            # With one matmul for the whole batch, XLA:GPU would transpose X' and S, which are larger than W.
            row_weights = weights * (is_token[:, None, :] * scale[:, :, None])
            return jnp.einsum('bqk,bkf->bqf', row_weights.astype(hidden.dtype), hidden)
        tokens = hidden * is_token[..., None].astype(hidden.dtype)
        return jnp.einsum('qk,bkf->bqf', weights.astype(hidden.dtype), tokens) * scale.astype(hidden.dtype)[..., None]

    def _mix_with_row_weights(self, weights: jax.Array, hidden: jax.Array, ctx: SequenceContext) -> jax.Array:
        """Mixes rows that are packed or have a prefix, with separate [length, length] weights for each row."""
        weights = weights.astype(hidden.dtype)
        weights = gather_by_positions(weights, ctx.positions) if ctx.packed else weights
        weights = jnp.where(build_sequence_visibility(ctx).build_mask()[:, 0], weights, 0).astype(jnp.float32)
        weights = weights * _safe_inverse(jnp.sum(weights, axis=-1, keepdims=True))
        weights = nn.Dropout(self.dropout_rate)(weights, deterministic=ctx.deterministic)
        return jnp.einsum('bqk,bkf->bqf', weights.astype(hidden.dtype), hidden)

    def _mix_decoding_step(self, logits: jax.Array, hidden: jax.Array, ctx: SequenceContext) -> jax.Array:
        """Computes S for the token at `ctx.step` from the cached X' of all tokens up to it."""
        step = cache.get_decoding_step(ctx)
        rows = bound_logits(jnp.take(logits, step, axis=0))
        rows = jnp.where(cache.visible_positions(logits.shape[1], ctx), rows, -jnp.inf)
        equation = 'bk,bkf->bf' if step.ndim else 'k,bkf->bf'
        return jnp.einsum(equation, jax.nn.softmax(rows).astype(hidden.dtype), hidden)[:, None]


def _safe_inverse(total: jax.Array) -> jax.Array:
    """Returns 1 / total, or 0 where total is 0, so that rows without tokens yield no NaN in gradients."""
    has_tokens = total > 0
    return jnp.where(has_tokens, 1.0 / jnp.where(has_tokens, total, 1.0), 0.0)


class Remixer(nn.Module):
    """Remixer block: a gated feed-forward sublayer that also mixes tokens with a learned matrix H.

    Attributes:
        hidden_dim: number of hidden units, F.
        max_length: maximum sequence length, the size of H; longer rows raise UserError.
        composition: factory of a module (S, X') -> C.
        residual: how X' is added to the output: `hidden_residual`, `identity_residual` or `no_residual`.
        dropout_rate: dropout on the hidden units that are multiplied by W_3.
        mixing_dropout_rate: dropout on the mixing weights softmax(H), 0.0 to 0.2 in the paper.
    """

    hidden_dim: ranges.Count
    max_length: ranges.Count
    composition: CompositionFactory = ScalarAlpha
    residual: Callable[..., jax.Array] = hidden_residual
    dropout_rate: ranges.Rate = 0.0
    mixing_dropout_rate: ranges.Rate = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        gate, units = (Dense(self.hidden_dim, (axes.EMBED, axes.MLP), name=name)(x) for name in ('wi_0', 'wi_1'))
        hidden = multiply_by_gelu(gate, units)
        mixed = LearnedMixing(self.max_length, self.mixing_dropout_rate, name='mixing')(hidden, ctx)
        composed = self.composition(name='composition')(mixed, hidden)
        project = Dense(x.shape[-1], (axes.MLP, axes.EMBED), name='wo')

        def drop_and_project(units: jax.Array) -> jax.Array:
            return project(dropout(self.dropout_rate, units, deterministic=ctx.deterministic))

        return self.residual(drop_and_project, composed, hidden, x.shape[-1])
