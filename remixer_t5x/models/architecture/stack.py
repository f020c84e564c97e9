"""A stack: runs of identical layers, executed by `nn.scan`, and a final norm.

The parameters of a run are stacked on a leading `layers` axis. With `unroll=1`, compile time is independent of depth.
"""

import contextlib
import contextvars
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext
from remixer_t5x.kernels.attention.formula import ATTENTION_OUTPUT
from remixer_t5x.models.layers.dropout import dropout
from remixer_t5x.models.layers.norms import RMSNorm

LayerFactory = Callable[..., nn.Module]
Params = Any

_DOTS_AND_ATTENTION = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(ATTENTION_OUTPUT),
)
# cuDNN's attention is a primitive, so its results cannot be named with `checkpoint_name`.
_CUDNN_ATTENTION = 'dot_product_attention_fwd_wrapper'


def full_remat(prim, *args, **params) -> bool:
    """Remat policy that saves only the input of each layer: about a third more FLOPs, but the least memory."""
    return jax.checkpoint_policies.nothing_saveable(prim, *args, **params)


def dots_remat(prim, *args, **params) -> bool:
    """Remat policy that saves the results of attention and of matmuls with parameters, and recomputes the rest."""
    return _DOTS_AND_ATTENTION(prim, *args, **params) or prim.name == _CUDNN_ATTENTION


_TRACE_ONCE = contextvars.ContextVar('trace_layers_once', default=False)


@contextlib.contextmanager
def trace_layers_once() -> Iterator[None]:
    """Traces the layer of a run once instead of twice, which halves the tracing time.

    The same seed draws different random numbers inside this context, so use it for shapes or arbitrary parameters only.
    """
    token = _TRACE_ONCE.set(True)
    try:
        yield
    finally:
        _TRACE_ONCE.reset(token)


class _Repeated(nn.Module):
    """Body of the scan over a run: carries x and returns no per-layer output."""

    layer: LayerFactory

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> tuple[jax.Array, None]:
        x = self.layer(name='layer')(x, ctx)
        return nn.with_logical_constraint(x, (axes.BATCH, axes.LENGTH, axes.ACTIVATION_EMBED)), None


class _UnrolledRun(nn.Module):
    """A run while decoding: each layer has separate parameters and caches.

    With stacked parameters and caches, each step would slice all parameters and write back all caches, which takes
    longer than the computation.
    """

    layer: LayerFactory
    count: int

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        for index in range(self.count):
            x = self.layer(name=f'layer_{index}')(x, ctx)
        return x


def unstack_layers(params: Params) -> Params:
    """Unstacks the parameters of runs, `{'layer': stacked}`, into layers, `{'layer_0': ..., 'layer_1': ...}`.

    Decoding accepts both forms; unstacking before many steps avoids slicing in each step. All other parameters and
    layers that are already separate are returned unchanged.
    """
    if not isinstance(params, Mapping):
        return params
    if set(params) != {'layer'}:
        return {name: unstack_layers(child) for name, child in params.items()}
    stacked = params['layer']
    count = jax.tree.leaves(stacked)[0].shape[0]
    return {f'layer_{index}': jax.tree.map(operator.itemgetter(index), stacked) for index in range(count)}


def _first_step(ctx: SequenceContext) -> jax.Array:
    """Returns the index of the token that the first decoding step reads: 0, or the last token of each prompt."""
    if ctx.cache_slots is None:
        return jnp.zeros((), jnp.int32)
    return jnp.sum(ctx.is_token, axis=1, dtype=jnp.int32) - 1


class Stack(nn.Module):
    """[batch, length, embed] -> the same shape.

    Attributes:
        runs: ((layer factory, number of layers), ...) from first to last.
        position_bias: factory of a module (length, ctx) -> [1, heads, q, k] or `DistanceBias`, or None; shared by all
            layers, except attention with a separate `position_bias`.
        position_embedding: factory of a module (embed, ctx) -> [batch, length, embed] added to the input, or None; for
            mixers that do not read the bias or the order of tokens.
        final_norm: factory of a norm after the last layer, or None (for layouts that end with one or need none).
        dropout_rate: dropout on the stack's input and output.
        remat_policy: which activations are saved for the backward pass: None (all), `dots_remat` or `full_remat`.
        attention: implementation of attention, one of `kernels.attention.api.IMPLEMENTATIONS`.
        unroll: maximum number of layers in one iteration of the scan, or None for all layers. Larger values compile
            more slowly, but XLA:GPU then does not copy the activations that the backward pass reads into an array over
            layers.
    """

    runs: Sequence[tuple[LayerFactory, int]]
    position_bias: Callable[..., nn.Module] | None = None
    position_embedding: Callable[..., nn.Module] | None = None
    final_norm: Callable[..., nn.Module] | None = RMSNorm
    dropout_rate: ranges.Rate = 0.0
    remat_policy: Callable[..., bool] | None = None
    attention: str = 'auto'
    unroll: ranges.Count | None = 1

    def __post_init__(self) -> None:
        for _, count in self.runs:
            ranges.check('the number of layers (NUM_ENCODER_LAYERS, NUM_DECODER_LAYERS)', count, ranges.Count)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext, max_decode_length: int | None = None) -> jax.Array:
        """Runs the layers; decoding steps require `max_decode_length`, the number of cache slots."""
        length = x.shape[1]
        ctx = dataclasses.replace(ctx, attention=self.attention)
        if ctx.decode:
            ctx = self._at_decoding_step(x, ctx)
            if ctx.step is not None:
                length = max_decode_length
        ctx = dataclasses.replace(ctx, num_keys=length)
        if self.position_bias is not None:
            bias = self.position_bias(name='position_bias')(length, ctx)
            ctx = dataclasses.replace(ctx, position_bias=bias)
        if self.position_embedding is not None:
            x = x + self.position_embedding(name='position_embedding')(x.shape[-1], ctx).astype(x.dtype)
        x = dropout(self.dropout_rate, x, deterministic=ctx.deterministic)
        for index, (layer, count) in enumerate(self.runs):
            x = self._run(f'run_{index}', layer, count, x, ctx)
        if self.final_norm is not None:
            x = self.final_norm(name='final_norm')(x)
        return dropout(self.dropout_rate, x, deterministic=ctx.deterministic)

    def _at_decoding_step(self, x: jax.Array, ctx: SequenceContext) -> SequenceContext:
        """Sets the step and position of the token being decoded, except in the call that allocates the cache."""
        is_allocated = self.has_variable('cache', 'cache_index')
        index = self.variable('cache', 'cache_index', _first_step, ctx)
        if not is_allocated:
            return ctx
        step = index.value
        index.value = step + 1
        positions = step[:, None] if step.ndim else jnp.broadcast_to(step, x.shape[:2])
        return dataclasses.replace(ctx, step=step, positions=positions)

    def _run(self, name: str, layer: LayerFactory, count: int, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        if ctx.decode:
            apart = nn.map_variables(_UnrolledRun, 'params', trans_in_fn=unstack_layers)
            return apart(layer, count, name=name)(x, ctx)
        body: type[nn.Module] = _Repeated
        unroll = count if self.unroll is None else min(self.unroll, count)
        if self.remat_policy is not None:
            # In a scan of single layers, XLA cannot replace a recomputed value by the one from the forward pass.
            body = nn.remat(body, policy=self.remat_policy, prevent_cse=unroll > 1)
        split = {'params': True, 'dropout': True}
        # Flax's check traces the layer twice, and the second trace draws other random numbers than the first. It stays
        # enabled if random numbers are drawn, because they must not change for a seed.
        draws = any(self.has_rng(name) for name in split) and not _TRACE_ONCE.get()
        run = nn.scan(
            body,
            variable_axes={'params': 0, 'intermediates': 0},
            split_rngs=split,
            check_constancy_invariants=draws,
            in_axes=nn.broadcast,
            length=count,
            unroll=unroll,
            metadata_params={nn.PARTITION_NAME: axes.LAYERS},
        )
        x, _ = run(layer, name=name)(x, ctx)
        return x
