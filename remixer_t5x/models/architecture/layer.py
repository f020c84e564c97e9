"""A layer: a list of sublayers in one of six layouts (HyperMixer, appendix F, names five of them).

    pre         y = x + f(N(x));   z = y + g(N(y))
    post        y = N(x + f(x));   z = N(y + g(y))
    sandwich    y = x + N(f(N(x)));   z = y + N(g(N(y)))       Gemma 2 and T5Gemma
    rezero      y = x + a f(x);    z = y + b g(y)       a, b learned, 0 at the start, no norms
    parallel    z = x + f(N(x)) + g(N(x))
    serialized  y = x + f(N(x));   z = x + g(N(y))

A layout is a class, so that gin can swap it.
"""

import functools
import inspect
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
    """A snake_case name for the class of each factory; a repeated class gets a number from its second use on."""
    names: list[str] = []
    for factory in factories:
        if isinstance(factory, nn.Module):
            name = type(factory).__name__
            raise UserError(f'the sublayer {name}() is a module and not a class; give @{name} without ()')
        words = re.findall(r'[A-Z]+(?![a-z])\d*|[A-Z][a-z0-9]*|[a-z0-9]+', _called(factory))
        name = '_'.join(words).lower()
        repeats = sum(known == name or known.startswith(f'{name}_') for known in names)
        names.append(f'{name}_{repeats + 1}' if repeats else name)
    return names


def _made(factory: SublayerFactory, name: str) -> nn.Module:
    """The sublayer of a factory. Raises UserError if the factory needs more than a name, or takes none."""
    if problem := _problem_of_call(factory, name=name):
        raise UserError(f'the sublayer {_called(factory)} cannot be made: {problem}; bind its settings in a gin file')
    return factory(name=name)


def _output(sublayer: nn.Module, x: jax.Array, ctx: SequenceContext) -> jax.Array:
    """What a sublayer returns. Raises UserError if it is not an array that can be added to `x`."""
    name, rule = type(sublayer).__name__, 'a sublayer is a module (x, ctx) -> y, with y of the shape and dtype of x'
    problem = _problem_of_call(sublayer.__call__, x, ctx) if callable(sublayer) else 'it has no __call__'
    if problem:
        raise UserError(f'the sublayer {name} cannot be called: {problem}; {rule}')
    y = sublayer(x, ctx)
    if not isinstance(y, jax.Array):
        raise UserError(f'the sublayer {name} returns a {type(y).__name__}; {rule}')
    if y.shape != x.shape or jnp.result_type(x, y) != x.dtype:
        raise UserError(f'the sublayer {name} returns {y.dtype}{[*y.shape]} for {x.dtype}{[*x.shape]}; {rule}')
    return y


def _problem_of_call(function: Callable[..., object], *args: object, **options: object) -> str:
    """Why a function does not take these arguments; empty if it does."""
    # Flax wraps a module's methods; gin's factories wrap classes whose arguments they give themselves.
    is_method = inspect.ismethod(function)
    try:
        inspect.signature(function, follow_wrapped=is_method).bind(*args, **options)
    except TypeError as error:
        return str(error)
    except ValueError as error:
        # A partial with wrong arguments; others are functions without a signature.
        return str(error.__cause__ or '')
    return ''


def _called(factory: SublayerFactory) -> str:
    while isinstance(factory, functools.partial):
        factory = factory.func
    return factory.__name__


class Layer(nn.Module):
    """The base of all layouts: sublayers made from factories, with dropout on their outputs.

    Attributes:
        sublayers: factories of modules `(x, ctx) -> y`; factories and not instances, so that no two layers share
            weights.
        dropout_rate: dropout on each sublayer's output, before it joins the residual stream.
    """

    sublayers: Sequence[SublayerFactory]
    dropout_rate: ranges.Rate = 0.0

    def _named(self) -> Iterator[tuple[str, nn.Module]]:
        for name, factory in zip(_parameter_names(self.sublayers), self.sublayers, strict=True):
            yield name, _made(factory, name)

    def _update(self, sublayer: nn.Module, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        return dropout(self.dropout_rate, _output(sublayer, x, ctx), deterministic=ctx.deterministic)


class NormedLayer(Layer):
    """A layer with norms; `norm` is a factory of a module `x -> y`."""

    norm: Callable[..., nn.Module] = RMSNorm


class PreNorm(NormedLayer):
    """Each sublayer reads the normalised residual stream; T5's layout.

    Attributes:
        first_norm: whether the first sublayer has a norm; False suits normalised embeddings, as in ModernBERT.
    """

    first_norm: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        for index, (name, sublayer) in enumerate(self._named()):
            normed = self.norm(name=f'{name}_norm')(x) if index or self.first_norm else x
            x = x + self._update(sublayer, normed, ctx)
        return x


class PostNorm(NormedLayer):
    """The sum of input and update is normalised, as in the first Transformer."""

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        for name, sublayer in self._named():
            x = self.norm(name=f'{name}_norm')(x + self._update(sublayer, x, ctx))
        return x


class SandwichNorm(NormedLayer):
    """Input and output of each sublayer are normalised (Ding et al. 2021), as in Gemma 2 and T5Gemma."""

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        for name, sublayer in self._named():
            update = _output(sublayer, self.norm(name=f'{name}_norm')(x), ctx)
            update = self.norm(name=f'{name}_post_norm')(update)
            x = x + dropout(self.dropout_rate, update, deterministic=ctx.deterministic)
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
    sublayers: Sequence[SublayerFactory | None],
    layout: Callable[..., Layer] = PreNorm,
    dropout_rate: ranges.Rate = 0.0,
    norm: Callable[..., nn.Module] | None = None,
    name: str | None = None,
) -> Layer:
    """Builds a layer. The layout is a factory, so gin can bind it in one line.

    `norm` replaces the layout's norm; a layout without norms refuses it. A sublayer that is None is left out.
    """
    sublayers = tuple(sublayer for sublayer in sublayers if sublayer is not None)
    options = {} if norm is None else {'norm': norm}
    return layout(sublayers=sublayers, dropout_rate=dropout_rate, name=name, **options)


class Block(nn.Module):
    """Different layers, one after another, that a run repeats as a whole.

    Attributes:
        layers: factories of layers.
    """

    layers: Sequence[Callable[..., Layer]]

    @property
    def sublayers(self) -> tuple[SublayerFactory, ...]:
        """The factories of the sublayers of all layers."""
        return tuple(sublayer for layer in self.layers for sublayer in layer().sublayers)

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        for index, layer in enumerate(self.layers):
            x = layer(name=f'layer_{index}')(x, ctx)
        return x


def alternate(
    layers: Sequence[Callable[..., Layer]], num_layers: ranges.Count
) -> tuple[tuple[Callable[..., nn.Module], int], ...]:
    """The runs of a stack whose layers alternate, such as layers with a sliding window and layers that see all tokens.

    Args:
        layers: factories of the layers to repeat, in order.
        num_layers: number of layers of the stack; the last repetition may be incomplete.

    Returns:
        `Stack.runs`: one run of blocks, then the rest of the layers.
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
    """The runs of a ModernBERT: one `first` layer, then `period` - 1 `local` layers and one `last` layer, repeated."""
    return ((first, 1), *alternate([*[local] * (period - 1), last], num_layers - 1))
