"""Layers: a list of sublayers in one of five layouts, named as in appendix F of HyperMixer (Mai et al. 2023).

    pre         y = x + f(N(x));   z = y + g(N(y))
    post        y = N(x + f(x));   z = N(y + g(y))
    rezero      y = x + a f(x);    z = y + b g(y)       a, b learned and initialised with 0; no norms
    parallel    z = x + f(N(x)) + g(N(x))
    serialized  y = x + f(N(x));   z = x + g(N(y))

Each layout is a class, so that gin can swap it.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import ranges
from remixer_t5x.context import SequenceContext
from remixer_t5x.errors import UserError
from remixer_t5x.models.layers.dropout import dropout
from remixer_t5x.models.layers.norms import RMSNorm

SublayerFactory = Callable[..., nn.Module]


def _parameter_names(factories: Sequence[SublayerFactory]) -> list[str]:
    """Returns the class name of each sublayer in snake case; repeated classes are numbered from the second one on."""
    names: list[str] = []
    for factory in factories:
        while isinstance(factory, functools.partial):
            factory = factory.func
        if isinstance(factory, nn.Module):
            name = type(factory).__name__
            raise UserError(f'a sublayer must be a class, got an instance of {name}; use @{name} without ()')
        words = re.findall(r'[A-Z]+(?![a-z])\d*|[A-Z][a-z0-9]*|[a-z0-9]+', factory.__name__)
        name = '_'.join(words).lower()
        repeats = sum(other == name or other.startswith(f'{name}_') for other in names)
        names.append(f'{name}_{repeats + 1}' if repeats else name)
    return names


class Layer(nn.Module):
    """Base class of the layouts: builds the sublayers and applies dropout to their outputs.

    Attributes:
        sublayers: factories of modules `(x, ctx) -> y`; instances would share their weights between layers.
        dropout_rate: dropout on each sublayer's output, before the residual connection.
    """

    sublayers: Sequence[SublayerFactory]
    dropout_rate: ranges.Rate = 0.0

    def _named_sublayers(self) -> Iterator[tuple[str, nn.Module]]:
        for name, factory in zip(_parameter_names(self.sublayers), self.sublayers, strict=True):
            yield name, factory(name=name)

    def _update(self, sublayer: nn.Module, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        """Calls a sublayer and applies dropout. Raises UserError if shape or dtype of the output differ from x's."""
        y = sublayer(x, ctx)
        if not isinstance(y, jax.Array) or y.shape != x.shape or jnp.result_type(x, y) != x.dtype:
            output = f'{y.dtype}{[*y.shape]}' if isinstance(y, jax.Array) else type(y).__name__
            raise UserError(
                f'the output of {type(sublayer).__name__} must be {x.dtype}{[*x.shape]} like its input, got {output}'
            )
        return dropout(self.dropout_rate, y, deterministic=ctx.deterministic)


class NormedLayer(Layer):
    """Base class of layouts with norms; `norm` is a factory of a module `x -> y`."""

    norm: Callable[..., nn.Module] = RMSNorm


class PreNorm(NormedLayer):
    """Normalises the input of each sublayer, as T5 does."""

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        for name, sublayer in self._named_sublayers():
            x = x + self._update(sublayer, self.norm(name=f'{name}_norm')(x), ctx)
        return x


class PostNorm(NormedLayer):
    """Normalises the sum of input and update, as the original Transformer does."""

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        for name, sublayer in self._named_sublayers():
            x = self.norm(name=f'{name}_norm')(x + self._update(sublayer, x, ctx))
        return x


class ReZero(Layer):
    """Scales each update by a learned number, initialised with 0, without norms (Bachlechner et al. 2020)."""

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        for name, sublayer in self._named_sublayers():
            init = nn.with_logical_partitioning(nn.initializers.zeros, ())
            scale = self.param(f'{name}_scale', init, (), jnp.float32)
            x = x + scale.astype(x.dtype) * self._update(sublayer, x, ctx)
        return x


class Parallel(NormedLayer):
    """Applies all sublayers to the same normalised input and adds their updates."""

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        normed = self.norm(name='norm')(x)
        updates = [self._update(sublayer, normed, ctx) for _, sublayer in self._named_sublayers()]
        return x + sum(updates)


class Serialized(NormedLayer):
    """Like `PreNorm`, but adds the last update to the layer's input rather than to the running sum."""

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        stream = x
        for name, sublayer in self._named_sublayers():
            update = self._update(sublayer, self.norm(name=f'{name}_norm')(stream), ctx)
            stream = x + update
        return stream


def make_layer(
    sublayers: Sequence[SublayerFactory | None],
    layout: Callable[..., Layer] = PreNorm,
    dropout_rate: ranges.Rate = 0.0,
    norm: Callable[..., nn.Module] | None = None,
    name: str | None = None,
) -> Layer:
    """Builds a layer of the given layout. `norm` replaces the layout's default; sublayers that are None are skipped."""
    sublayers = tuple(sublayer for sublayer in sublayers if sublayer is not None)
    options = {} if norm is None else {'norm': norm}
    return layout(sublayers=sublayers, dropout_rate=dropout_rate, name=name, **options)
