"""A stack of layers, divided into runs of consecutive identical layers, which are executed with `nn.scan`.

The parameters of these layers are stacked along a leading `layers` axis. If `unroll` is 1, the compile time does not
depend on their number.
"""

import contextlib
import contextvars
import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext
from remixer_t5x.errors import UserError
from remixer_t5x.kernels.attention_formula import ATTENTION_OUTPUT
from remixer_t5x.models.architecture.layer import Block, apply_same_shape
from remixer_t5x.models.layers.dense import dropout
from remixer_t5x.models.layers.norms import NormFactory, RMSNorm
from remixer_t5x.models.layers.positions import BiasFactory, EmbeddingFactory

LayerFactory = Callable[..., nn.Module]
Params = Any

_DOTS_AND_ATTENTION = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(ATTENTION_OUTPUT),
)
# Name of JAX's cuDNN attention primitive, whose internal results cannot be tagged with `checkpoint_name`.
_CUDNN_ATTENTION_PRIMITIVE = 'dot_product_attention_fwd_wrapper'


def full_remat(prim, *args, **params) -> bool:
    """Remat policy that saves only the input of each layer, which minimizes memory but requires a third more FLOPs."""
    return jax.checkpoint_policies.nothing_saveable(prim, *args, **params)


def dots_remat(prim, *args, **params) -> bool:
    """Remat policy that saves the outputs of attention and of matmuls with parameters."""
    return _DOTS_AND_ATTENTION(prim, *args, **params) or prim.name == _CUDNN_ATTENTION_PRIMITIVE


_TRACE_LAYERS_ONCE = contextvars.ContextVar('trace_layers_once', default=False)


@contextlib.contextmanager
def trace_layers_once() -> Iterator[None]:
    """Traces the layers of each run only once instead of twice in this context, to reduce the tracing time.

    Use this context only if the values of parameters do not matter, for example to compute shapes, because a seed
    generates different initial parameters inside and outside of this context.
    """
    token = _TRACE_LAYERS_ONCE.set(True)
    try:
        yield
    finally:
        _TRACE_LAYERS_ONCE.reset(token)


class _ScanBody(nn.Module):
    """Body of the scan over the layers of a run, with the carry x and no outputs."""

    layer: LayerFactory

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> tuple[jax.Array, None]:
        x = self.layer(name='layer')(x, ctx)
        return nn.with_logical_constraint(x, (axes.BATCH, axes.LENGTH, axes.ACTIVATION_EMBED)), None


def unstack_layers(params: Params) -> Params:
    """Unstacks each run in the parameters of a stack, from `{'layer': stacked}` to `{'layer_0': ..., 'layer_1': ...}`.

    Decoding requires unstacked layers. Unstacking once before decoding avoids slicing parameters at every step.
    """

    def unstack_run(run: Params) -> Params:
        count = jax.tree.leaves(run)[0].shape[0]
        return {f'layer_{index}': jax.tree.map(operator.itemgetter(index), run['layer']) for index in range(count)}

    return {name: unstack_run(child) if name.startswith('run_') else child for name, child in params.items()}


def _find_initial_cache_index(ctx: SequenceContext) -> jax.Array:
    """Returns the position of the first decoding step: 0, or the position of the last token of each prompt."""
    if ctx.cache_slots is None:
        return jnp.zeros((), jnp.int32)
    return jnp.sum(ctx.is_token, axis=1, dtype=jnp.int32) - 1


class Stack(nn.Module):
    """A stack of layers with an optional final norm; input and output are [batch, length, embed].

    Attributes:
        runs: pairs (layer factory, number of layers), one for each run, in order.
        position_bias: factory of a module (length, ctx) -> bias, or None. All attention sublayers without a separate
            bias use it. `SequenceContext` describes its shape; all rows of a batch share the bias in training.
        position_embedding: factory of a module (embed, ctx) -> [batch, length, embed], which is added to the stack's
            input, or None. Required if no sublayer depends on the order of tokens.
        remat_policy: which activations to save for the backward pass: `dots_remat`, `full_remat` or None (all).
        unroll: number of layers in one iteration of the scan, or None for all layers. Larger values increase the
            compile time, but XLA:GPU copies fewer activations into stacked arrays.
    """

    runs: Sequence[tuple[LayerFactory, int]]
    position_bias: BiasFactory | None = None
    position_embedding: EmbeddingFactory | None = None
    final_norm: NormFactory | None = RMSNorm
    dropout_rate: ranges.Rate = 0.0
    remat_policy: Callable[..., bool] | None = None
    attention: str = 'auto'
    unroll: ranges.Count | None = 1

    def __post_init__(self) -> None:
        for _, count in self.runs:
            ranges.check_setting('the number of layers (NUM_ENCODER_LAYERS, NUM_DECODER_LAYERS)', count, ranges.Count)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext, max_decode_length: int | None = None) -> jax.Array:
        """Applies all layers; decoding steps require `max_decode_length`, the number of cached positions."""
        length = x.shape[1]
        ctx = dataclasses.replace(ctx, attention=self.attention)
        if ctx.decode:
            ctx = self._set_decoding_step(x, ctx)
            if ctx.step is not None:
                length = max_decode_length
        ctx = dataclasses.replace(ctx, num_keys=length)
        if self.position_bias is not None:
            bias = self.position_bias(name='position_bias')(length, ctx)
            ctx = dataclasses.replace(ctx, position_bias=bias)
        if self.position_embedding is not None:
            embedding = self.position_embedding(name='position_embedding')(x.shape[-1], ctx)
            if not isinstance(embedding, jax.Array) or embedding.shape[1:] != x.shape[1:]:
                raise UserError(
                    f'a position embedding must be an array [1 or batch, length, embed], got '
                    f'{jax.tree.map(jnp.shape, embedding)}; use @positions.SinusoidalPositions'
                )
            x = x + embedding.astype(x.dtype)
        x = dropout(self.dropout_rate, x, deterministic=ctx.deterministic)
        for index, (layer, count) in enumerate(self.runs):
            x = self._apply_layer_run(f'run_{index}', layer, count, x, ctx)
        if self.final_norm is not None:
            x = apply_same_shape(self.final_norm(name='final_norm'), x)
        return dropout(self.dropout_rate, x, deterministic=ctx.deterministic)

    def _set_decoding_step(self, x: jax.Array, ctx: SequenceContext) -> SequenceContext:
        """Adds the decoding step and the token positions to `ctx`, except in the call that allocates the caches."""
        is_allocated = self.has_variable('cache', 'cache_index')
        index = self.variable('cache', 'cache_index', _find_initial_cache_index, ctx)
        if not is_allocated:
            return ctx
        step = index.value
        index.value = step + 1
        positions = step[:, None] if step.ndim else jnp.broadcast_to(step, x.shape[:2])
        return dataclasses.replace(ctx, step=step, positions=positions)

    def _apply_layer_run(
        self, name: str, layer: LayerFactory, count: int, x: jax.Array, ctx: SequenceContext
    ) -> jax.Array:
        if ctx.decode:
            # At every decoding step, a scan would copy slices of all stacked parameters and caches.
            return Block((layer,) * count, name=name)(x, ctx)
        body: type[nn.Module] = _ScanBody
        unroll = count if self.unroll is None else min(self.unroll, count)
        if self.remat_policy is not None:
            # Without unrolling, XLA cannot undo rematerialization by common subexpression elimination (CSE).
            body = nn.remat(body, policy=self.remat_policy, prevent_cse=unroll > 1)
        split = {'params': True, 'dropout': True}
        # Flax's check of loop invariants traces the layer twice, and both traces draw random numbers. Disabling the
        # check changes the random numbers drawn from a seed, so it is disabled only if none are drawn.
        draws_random_numbers = any(self.has_rng(name) for name in split) and not _TRACE_LAYERS_ONCE.get()
        run = nn.scan(
            body,
            variable_axes={'params': 0, 'intermediates': 0},
            split_rngs=split,
            check_constancy_invariants=draws_random_numbers,
            in_axes=nn.broadcast,
            length=count,
            unroll=unroll,
            metadata_params={nn.PARTITION_NAME: axes.LAYERS},
        )
        x, _ = run(layer, name=name)(x, ctx)
        return x
