"""Layer layouts, which define how sublayers, norms and residual connections are combined.

The equations show layers with two sublayers, f and g, and the norm N (HyperMixer, Mai et al. 2023, appendix F).

    pre         y = x + f(N(x));   z = y + g(N(y))
    post        y = N(x + f(x));   z = N(y + g(y))
    sandwich    y = x + N(f(N(x)));   z = y + N(g(N(y)))       Gemma 2 and T5Gemma
    rezero      y = x + a f(x);    z = y + b g(y)       a and b are learned scalars, initialized to 0
    parallel    z = x + f(N(x)) + g(N(x))
    serialized  y = x + f(N(x));   z = x + g(N(y))
"""

import collections
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import linen as nn

from remixer_t5x import ranges
from remixer_t5x.context import SequenceContext
from remixer_t5x.errors import UserError
from remixer_t5x.models.layers.dense import create_param, dropout
from remixer_t5x.models.layers.norms import NormFactory, RMSNorm

SublayerFactory = Callable[..., Callable[[jax.Array, SequenceContext], jax.Array]]


def unwrap_partial(factory: Any) -> Any:
    """Returns the function or class of nested `functools.partial` objects; returns other objects unchanged."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    return factory


def _make_sublayer_names(factories: Sequence[SublayerFactory]) -> list[str]:
    """Returns unique parameter names of sublayers: class names in snake case, with a number if a class is repeated."""
    names: list[str] = []
    counts: collections.Counter[str] = collections.Counter()
    for factory in map(unwrap_partial, factories):
        if isinstance(factory, nn.Module):
            name = type(factory).__name__
            raise UserError(f'a sublayer must be a class or factory, got an instance of {name}; use @{name} without ()')
        if not callable(factory):
            raise UserError(f'a sublayer must be a class or factory, got {factory!r}; use @attention.SelfAttention')
        words = re.findall(r'[A-Z]+(?![a-z])\d*|[A-Z][a-z0-9]*|[a-z0-9]+', factory.__name__)
        name = '_'.join(words).lower()
        counts[name] += 1
        names.append(f'{name}_{counts[name]}' if counts[name] > 1 else name)
    return names


class Layer(nn.Module):
    """Base class of layer layouts, which creates the sublayers and applies dropout to their outputs.

    Attributes:
        sublayers: factories of modules `(x, ctx) -> y`. Do not pass instances, which would share weights across layers.
        dropout_rate: dropout rate of each sublayer's output, before the residual connection.
        norm: factory of the norms; not used by `ReZero`, so that any model can be combined with this layout.
    """

    sublayers: Sequence[SublayerFactory]
    dropout_rate: ranges.Rate = 0.0
    norm: NormFactory = RMSNorm

    def _named_sublayers(self) -> Iterator[tuple[str, nn.Module]]:
        for name, factory in zip(_make_sublayer_names(self.sublayers), self.sublayers, strict=True):
            yield name, factory(name=name)

    def _normalize(self, name: str, x: jax.Array) -> jax.Array:
        return apply_same_shape(self.norm(name=name), x)

    def _compute_update(self, sublayer: nn.Module, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        return dropout(self.dropout_rate, apply_same_shape(sublayer, x, ctx), deterministic=ctx.deterministic)


def apply_same_shape(module: nn.Module, x: jax.Array, *args: Any) -> jax.Array:
    """Applies a sublayer or norm to `x`. Raises UserError if its output is not like `x`."""
    y = module(x, *args)
    if not isinstance(y, jax.Array) or y.shape != x.shape or y.dtype != x.dtype:
        output = f'{y.dtype}{[*y.shape]}' if isinstance(y, jax.Array) else type(y).__name__
        raise UserError(
            f'the output of {type(module).__name__} must be {x.dtype}{[*x.shape]} like its input, got {output}'
        )
    return y


class PreNorm(Layer):
    """Layout that normalizes the input of each sublayer, as in T5.

    Attributes:
        first_norm: whether to normalize the input of the first sublayer; set it to False if the embeddings are already
            normalized, as in ModernBERT.
    """

    first_norm: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        for index, (name, sublayer) in enumerate(self._named_sublayers()):
            normed = self._normalize(f'{name}_norm', x) if index or self.first_norm else x
            x = x + self._compute_update(sublayer, normed, ctx)
        return x


class PostNorm(Layer):
    """Layout that normalizes the sum after each residual connection, as in the original Transformer."""

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        for name, sublayer in self._named_sublayers():
            x = self._normalize(f'{name}_norm', x + self._compute_update(sublayer, x, ctx))
        return x


class SandwichNorm(Layer):
    """Layout that normalizes the input and output of each sublayer (Ding et al. 2021), as in Gemma 2 and T5Gemma."""

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        for name, sublayer in self._named_sublayers():
            update = apply_same_shape(sublayer, self._normalize(f'{name}_norm', x), ctx)
            update = self._normalize(f'{name}_post_norm', update)
            x = x + dropout(self.dropout_rate, update, deterministic=ctx.deterministic)
        return x


class ReZero(Layer):
    """Layout without norms that scales each update by a learned scalar, initialized to 0 (Bachlechner et al. 2020)."""

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        for name, sublayer in self._named_sublayers():
            scale = create_param(self, f'{name}_scale', nn.initializers.zeros, (), ())
            x = x + scale.astype(x.dtype) * self._compute_update(sublayer, x, ctx)
        return x


class Parallel(Layer):
    """Layout that applies all sublayers to the same normalized input and sums their updates."""

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        normed = self._normalize('norm', x)
        updates = [self._compute_update(sublayer, normed, ctx) for _, sublayer in self._named_sublayers()]
        return x + sum(updates)


class Serialized(Layer):
    """Variant of `PreNorm` that adds every update to the layer's input instead of the previous sum."""

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        stream = x
        for name, sublayer in self._named_sublayers():
            update = self._compute_update(sublayer, self._normalize(f'{name}_norm', stream), ctx)
            stream = x + update
        return stream


def make_layer(
    sublayers: Sequence[SublayerFactory | None],
    layout: Callable[..., Layer] = PreNorm,
    dropout_rate: ranges.Rate = 0.0,
    norm: NormFactory | None = None,
    name: str | None = None,
) -> Layer:
    """Builds a layer from the sublayers that are not None; if `norm` is None, uses the layout's default norm."""
    sublayers = tuple(sublayer for sublayer in sublayers if sublayer is not None)
    options = {} if norm is None else {'norm': norm}
    return layout(sublayers=sublayers, dropout_rate=dropout_rate, name=name, **options)


class Block(nn.Module):
    """A sequence of different layers that a stack repeats, such as a local and a global attention layer."""

    layers: Sequence[Callable[..., Layer]]

    @property
    def sublayers(self) -> tuple[SublayerFactory, ...]:
        """Returns the sublayer factories of all layers."""
        return tuple(sublayer for layer in self.layers for sublayer in layer().sublayers)

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        for index, layer in enumerate(self.layers):
            x = layer(name=f'layer_{index}')(x, ctx)
        return x


def alternate(
    layers: Sequence[Callable[..., Layer]], num_layers: ranges.Count
) -> tuple[tuple[Callable[..., nn.Module], int], ...]:
    """Returns `Stack.runs` for layers that repeat in order, such as layers with local and with global attention.

    Args:
        num_layers: total number of layers of the stack; the last repetition may be incomplete.
    """
    repeats, rest = divmod(num_layers, len(layers))
    runs = ((functools.partial(Block, tuple(layers)), repeats), (functools.partial(Block, tuple(layers[:rest])), 1))
    return tuple(run for run, is_used in zip(runs, (repeats, rest), strict=True) if is_used)


def alternate_after_first(
    first: Callable[..., Layer],
    local: Callable[..., Layer],
    last: Callable[..., Layer],
    period: ranges.Count,
    num_layers: ranges.Count,
) -> tuple[tuple[Callable[..., nn.Module], int], ...]:
    """Returns `Stack.runs` for ModernBERT: `first`, then repeatedly `period` - 1 `local` layers and a `last` layer."""
    return ((first, 1), *alternate([*[local] * (period - 1), last], num_layers - 1))
