"""What the laws look at: two layers of given sublayers in an encoder or a decoder, with few compiled programs.

A program is compiled once and serves every law that can be read from it. `trace` gives outputs and gradients at once,
for one shape: its rows hold all examples of a law, and its cotangents pick what the law asks for.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from remixer_t5x.context import Memory, SequenceContext
from remixer_t5x.models.architecture import layer, stack

Segments = Sequence[Sequence[int]]
ENCODER, DECODER = 'encoder', 'decoder'
# Tokens of a row, and of a row of the encoder's output that a decoder reads.
LENGTH, MEMORY = 12, 6
# A row for each position, so that one backward pass gives the gradient of every position's output.
ROWS = LENGTH
LAYERS = 2
DROPOUT = 0.5


def fast_key(seed: int) -> jax.Array:
    """A key for `init` and dropout whose numbers XLA draws in one operation, which compiles faster than the default."""
    return jax.random.key(seed, impl='unsafe_rbg')


class Traced(NamedTuple):
    """Outputs [rows, length, embed], and the gradients of their product with the cotangents."""

    outputs: Any
    params: Any
    x: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """Two layers of `sublayers` on one side, with random parameters.

    Attributes:
        sublayers: factories of modules `(x, ctx) -> y`.
        side: 'encoder' or 'decoder'.
        layout: of a layer.
        norm: factory of its norm; None is the layout's own.
        position_bias: factory of the stack's position bias, for attention; None for other mixers.
        reach: how many tokens, itself included, an output of the decoder must depend on; None asks nothing.
        embed: width of the residual stream.
    """

    sublayers: tuple[Callable[..., nn.Module], ...]
    side: str
    layout: Callable[..., layer.Layer] = layer.PreNorm
    norm: Callable[..., nn.Module] | None = None
    position_bias: Callable[..., nn.Module] | None = None
    reach: int | None = None
    embed: int = 16

    @property
    def is_decoder(self) -> bool:
        return self.side == DECODER

    def stack(self, dropout: float = DROPOUT, **options: Any) -> stack.Stack:
        """The layers in a stack; `options` are the stack's."""
        make_layer = functools.partial(layer.make_layer, self.sublayers, self.layout, dropout, self.norm)
        runs = ((make_layer, LAYERS),)
        return stack.Stack(runs=runs, position_bias=self.position_bias, dropout_rate=dropout, **options)

    # Arrays are NumPy's outside of compiled functions: JAX would compile a program for each slice and shape.
    def features(self, seed: int, length: int = LENGTH, rows: int = ROWS) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal((rows, length, self.embed), np.float32)

    def context(
        self, segments: Segments, memory: Any = None, memory_segments: Segments | None = None, **flags: Any
    ) -> SequenceContext:
        """Context of rows given as lists of example lengths, e.g. [[3, 4], [5]]; several examples mean packing."""
        packed = any(len(row) > 1 for row in segments)
        ids, positions = layout_rows(segments, flags.pop('length', LENGTH))
        ctx = SequenceContext(ids, positions, causal=self.is_decoder, packed=packed, **flags)
        if not self.is_decoder:
            return ctx
        memory = self.features(9, MEMORY, len(segments)) if memory is None else memory
        memory_ids, memory_positions = layout_rows(memory_segments or [[MEMORY]] * len(memory), memory.shape[1])
        about_memory = SequenceContext(memory_ids, memory_positions, packed=packed)
        return dataclasses.replace(ctx, memory=Memory(memory, about_memory))

    @functools.cached_property
    def boxed_params(self) -> Any:
        """Initial parameters in boxes with their logical axes."""
        init = jax.jit(self.stack().init)
        # Numbers and not tracers, even if a law asks for them first within `jax.jit`: they are kept for the other laws.
        with jax.ensure_compile_time_eval(), stack.traced_once():
            return init(fast_key(0), self.features(0), self.context([[LENGTH]] * ROWS)).get('params', {})

    @functools.cached_property
    def params(self) -> Any:
        """Random parameters away from their initial values, so that nothing is zero or one by default."""
        rng = np.random.default_rng(1)
        initial = jax.device_get(nn.unbox(self.boxed_params))
        return jax.tree.map(lambda x: x + 0.3 * rng.standard_normal(x.shape, np.float32), initial)

    @functools.cached_property
    def forward(self) -> Callable[..., jax.Array]:
        """`(params, x, ctx) -> outputs`, compiled for each shape, dtype and set of flags."""
        model = self.stack()
        return jax.jit(lambda params, x, ctx: model.apply({'params': params}, x, ctx))

    def trace(self, x: np.ndarray, ctx: SequenceContext, cotangents: np.ndarray | None = None) -> Traced:
        """Outputs at [ROWS, LENGTH], and gradients where `cotangents`, of the outputs' shape, are given."""
        cotangents = np.zeros_like(x) if cotangents is None else cotangents
        return jax.device_get(self._traced()(self.params, x, ctx, cotangents))

    def outputs(self, params: Any, x: np.ndarray, ctx: SequenceContext) -> np.ndarray:
        """Outputs with other parameters, by the program of `trace`."""
        return np.asarray(self._traced()(params, x, ctx, np.zeros_like(x)).outputs)

    def gradients(self, **options: Any) -> Any:
        """Gradients of the parameters for random cotangents at tokens, rows of two lengths."""
        ctx = self.context([[LENGTH], [8]] * (ROWS // 2), self.features(11, MEMORY))
        cotangents = self.features(12) * (np.asarray(ctx.segment_ids) > 0)[..., None]
        return jax.device_get(self._traced(**options)(self.params, self.features(10), ctx, cotangents).params)

    def influence(self, segments: Sequence[int], **flags: Any) -> np.ndarray:
        """[output, input]: the largest gradient of a position's output, in a random direction, with respect to an
        input position's features, for a row that holds examples of these lengths; `flags` are fields of its context.
        """
        cotangents: np.ndarray = np.zeros((ROWS, LENGTH, self.embed), np.float32)
        cotangents[np.arange(ROWS), np.arange(LENGTH)] = np.random.default_rng(5).standard_normal(self.embed)
        rows = [list(segments)] * ROWS
        ctx = self.context(rows, self.features(3, MEMORY), [[3] * len(segments)] * ROWS, **flags)
        return np.max(np.abs(self.trace(self.features(2), ctx, cotangents).x), axis=-1)

    @functools.cache  # noqa: B019 (a subject lives as long as the checks of it)
    def _traced(self, **options: Any) -> Callable[..., Traced]:
        model = self.stack(**options)

        def traced(params, x, ctx, cotangents):
            outputs, pull = jax.vjp(lambda params, x: model.apply({'params': params}, x, ctx), params, x)
            return Traced(outputs, *pull(cotangents.astype(outputs.dtype)))

        return jax.jit(traced)


def layout_rows(segments: Segments, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids and positions, [rows, length] int32 each, of rows given as lists of example lengths."""
    ids: np.ndarray = np.zeros((len(segments), length), np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (len(segments), 1))
    for row, lengths in enumerate(segments):
        start = 0
        for index, count in enumerate(lengths):
            ids[row, start : start + count] = index + 1
            positions[row, start : start + count] = np.arange(count)
            start += count
    return ids, positions


def uses_dropout(sublayers: Sequence[Callable[..., nn.Module]]) -> bool:
    """Whether a sublayer has a dropout rate above 0."""
    made = [factory() for factory in sublayers]
    return any(value for module in made for name, value in vars(module).items() if name.endswith('dropout_rate'))
