"""A layer: a list of sublayers in one of five layouts (HyperMixer, appendix F, names them).

    pre         y = x + f(N(x));   z = y + g(N(y))
    post        y = N(x + f(x));   z = N(y + g(y))
    rezero      y = x + a f(x);    z = y + b g(y)       a, b learned, 0 at the start, no norms
    parallel    z = x + f(N(x)) + g(N(x))
    serialized  y = x + f(N(x));   z = x + g(N(y))

A layout is a class, so that gin can swap it.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x.context import SequenceContext
from remixer_t5x.layers.dropout import dropout
from remixer_t5x.layers.norms import RMSNorm

SublayerFactory = Callable[..., nn.Module]


def _parameter_names(factories: Sequence[SublayerFactory]) -> list[str]:
    """A snake_case name for the class of each factory; a repeated class gets a number from its second use on."""
    names: list[str] = []
    for factory in factories:
        while isinstance(factory, functools.partial):
            factory = factory.func
        words = re.findall(r'[A-Z]+(?![a-z])\d*|[A-Z][a-z0-9]*|[a-z0-9]+', factory.__name__)
        name = '_'.join(words).lower()
        repeats = sum(known == name or known.startswith(f'{name}_') for known in names)
        names.append(f'{name}_{repeats + 1}' if repeats else name)
    return names


class Layer(nn.Module):
    """The base of all layouts: sublayers made from factories, with dropout on their outputs.

    Attributes:
        sublayers: factories of modules `(x, ctx) -> y`; factories and not instances, so that no two layers share
            weights.
        dropout_rate: dropout on each sublayer's output, before it joins the residual stream.
    """

    sublayers: Sequence[SublayerFactory]
    dropout_rate: float = 0.0

    def _named(self) -> Iterator[tuple[str, nn.Module]]:
        for name, factory in zip(_parameter_names(self.sublayers), self.sublayers, strict=True):
            yield name, factory(name=name)

    def _update(self, sublayer: nn.Module, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        return dropout(self.dropout_rate, sublayer(x, ctx), deterministic=ctx.deterministic)


class NormedLayer(Layer):
    """A layer with norms; `norm` is a factory of a module `x -> y`."""

    norm: Callable[..., nn.Module] = RMSNorm


class PreNorm(NormedLayer):
    """Each sublayer reads the normalised residual stream; T5's layout."""

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        for name, sublayer in self._named():
            x = x + self._update(sublayer, self.norm(name=f'{name}_norm')(x), ctx)
        return x


class PostNorm(NormedLayer):
    """The sum of input and update is normalised, as in the first Transformer."""

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        for name, sublayer in self._named():
            x = self.norm(name=f'{name}_norm')(x + self._update(sublayer, x, ctx))
        return x


class ReZero(Layer):
    """Each update is scaled by a learned number that starts at 0; there are no norms (Bachlechner et al. 2020)."""

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        for name, sublayer in self._named():
            init = nn.with_logical_partitioning(nn.initializers.zeros, ())
            scale = self.param(f'{name}_scale', init, (), jnp.float32)
            x = x + scale.astype(x.dtype) * self._update(sublayer, x, ctx)
        return x


class Parallel(NormedLayer):
    """All sublayers read the same normalised input, and their updates are added."""

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        normed = self.norm(name='norm')(x)
        updates = [self._update(sublayer, normed, ctx) for _, sublayer in self._named()]
        return x + sum(updates)


class Serialized(NormedLayer):
    """Like `PreNorm`, but the last update is added to the layer's input and not to the running sum."""

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        stream = x
        for name, sublayer in self._named():
            update = self._update(sublayer, self.norm(name=f'{name}_norm')(stream), ctx)
            stream = x + update
        return stream


def make_layer(
    sublayers: Sequence[SublayerFactory],
    layout: Callable[..., Layer] = PreNorm,
    dropout_rate: float = 0.0,
    norm: Callable[..., nn.Module] | None = None,
    name: str | None = None,
) -> Layer:
    """Builds a layer. The layout is a factory, so gin can bind it in one line.

    `norm` replaces the layout's norm; a layout without norms refuses it.
    """
    options = {} if norm is None else {'norm': norm}
    return layout(sublayers=sublayers, dropout_rate=dropout_rate, name=name, **options)
