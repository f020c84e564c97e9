"""Builds a two-layer encoder or decoder with the sublayers to check, and the compiled programs shared by the checks.

`run_with_gradients` computes outputs and gradients with one program of a fixed shape; the cotangents select the
gradients.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from remixer_t5x.context import EncoderMemory, SequenceContext
from remixer_t5x.models.architecture import layer, stack

Segments = Sequence[Sequence[int]]
ENCODER, DECODER = 'encoder', 'decoder'
# Number of tokens in a row of the stack's inputs, and in a row of the encoder output for cross-attention.
LENGTH, MEMORY = 12, 6
# Use one row per position, so that one backward pass computes the gradients of all positions.
ROWS = LENGTH
LAYERS = 2
DROPOUT = 0.5


def make_fast_prng_key(seed: int) -> jax.Array:
    """Returns a key for a PRNG that is a single XLA operation and compiles faster than JAX's default PRNG."""
    return jax.random.key(seed, impl='unsafe_rbg')


class OutputsWithGradients(NamedTuple):
    """The outputs, [rows, length, embed], and the gradients of their dot product with the cotangents.

    For packed rows and prefixes, `params` is None, because no check reads it and its program takes longer to compile.
    """

    outputs: Any
    x: Any
    params: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class SublayerFixture:
    """An encoder or decoder of two layers with the given sublayers and random parameters.

    Attributes:
        side: 'encoder' or 'decoder'.
        norm: factory of the norm in each layer; None uses the default of `layout`.
        position_bias: factory of the stack's position bias for attention; None for other mixers.
        reach: number of tokens, including the current one, on which a decoder output must depend; None disables this
            check.
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

    def build_stack(self, dropout: float = DROPOUT, **options: Any) -> stack.Stack:
        """Returns a stack of the layers; `options` are passed to `Stack`."""
        make_layer = functools.partial(layer.make_layer, self.sublayers, self.layout, dropout, self.norm)
        runs = ((make_layer, LAYERS),)
        return stack.Stack(runs=runs, position_bias=self.position_bias, dropout_rate=dropout, **options)

    # Use NumPy, because JAX would compile a program for each slice and shape.
    def make_random_features(self, seed: int, length: int = LENGTH, rows: int = ROWS) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal((rows, length, self.embed), np.float32)

    def make_context(
        self, segments: Segments, memory: Any = None, memory_segments: Segments | None = None, **flags: Any
    ) -> SequenceContext:
        """Returns the context of rows; `segments` lists the example lengths of each row, as in [[3, 4], [5]]."""
        packed = flags.pop('packed', any(len(row) > 1 for row in segments))
        ids, positions = make_segment_arrays(segments, flags.pop('length', LENGTH))
        ctx = SequenceContext(ids, positions, causal=self.is_decoder, packed=packed, num_keys=ids.shape[1], **flags)
        if not self.is_decoder:
            return ctx
        memory = self.make_random_features(9, MEMORY, len(segments)) if memory is None else memory
        memory_ids, memory_positions = make_segment_arrays(memory_segments or [[MEMORY]] * len(memory), memory.shape[1])
        memory_ctx = SequenceContext(memory_ids, memory_positions, packed=packed)
        return dataclasses.replace(ctx, memory=EncoderMemory(memory, memory_ctx))

    @functools.cached_property
    def boxed_params(self) -> Any:
        """Initial parameters, boxed with their logical axes."""
        init = jax.jit(self.build_stack().init)
        # Cache arrays rather than tracers, even if the first call is inside `jax.jit`.
        with jax.ensure_compile_time_eval(), stack.trace_layers_once():
            return init(make_fast_prng_key(0), self.make_random_features(0), self.make_context([[LENGTH]] * ROWS)).get(
                'params', {}
            )

    @functools.cached_property
    def params(self) -> Any:
        """Initial parameters plus noise, so that no parameter is exactly zero or one."""
        rng = np.random.default_rng(1)
        initial = jax.device_get(nn.unbox(self.boxed_params))
        return jax.tree.map(lambda x: x + 0.3 * rng.standard_normal(x.shape, np.float32), initial)

    @functools.cached_property
    def unstacked_params(self) -> Any:
        """The same parameters in the form that decoding requires."""
        return stack.unstack_layers(self.params)

    @functools.cached_property
    def forward(self) -> Callable[..., jax.Array]:
        """The compiled function `(params, x, ctx) -> outputs`."""
        model = self.build_stack()
        return jax.jit(lambda params, x, ctx: model.apply({'params': params}, x, ctx))

    @functools.cached_property
    def allocate(self) -> Callable[..., Any]:
        """The compiled function `(x, ctx) -> caches`, which allocates the caches and fills them with prompts."""
        decode = self._decode_uncompiled
        # XLA removes the computation of the outputs.
        return functools.partial(jax.jit(lambda params, x, ctx: decode(params, x, ctx, {})[1]), self.unstacked_params)

    @functools.cached_property
    def decode(self) -> Callable[..., tuple[jax.Array, Any]]:
        """The compiled function `(x, ctx, caches) -> (outputs, caches)`, which computes one step."""
        return functools.partial(jax.jit(self._decode_uncompiled), self.unstacked_params)

    def _decode_uncompiled(self, params: Any, x: Any, ctx: SequenceContext, caches: Any) -> tuple[jax.Array, Any]:
        return self.build_stack().apply({'params': params, **caches}, x, ctx, LENGTH, mutable=['cache'])

    def run_with_gradients(
        self, x: np.ndarray, ctx: SequenceContext, cotangents: np.ndarray | None = None, params: Any = None
    ) -> OutputsWithGradients:
        """Returns the outputs for x [ROWS, LENGTH, embed] and the gradients of their dot product with `cotangents`."""
        cotangents = np.zeros_like(x) if cotangents is None else cotangents
        return jax.device_get(
            self._compile_with_gradients()(self.params if params is None else params, x, ctx, cotangents)
        )

    def compute_param_gradients(self, **options: Any) -> Any:
        """Returns the parameter gradients for random cotangents at all tokens of rows of two different lengths."""
        ctx = self.make_context([[LENGTH], [8]] * (ROWS // 2), self.make_random_features(11, MEMORY))
        cotangents = self.make_random_features(12) * (np.asarray(ctx.segment_ids) > 0)[..., None]
        return jax.device_get(
            self._compile_with_gradients(**options)(self.params, self.make_random_features(10), ctx, cotangents).params
        )

    def compute_position_influence(self, segments: Sequence[int], **flags: Any) -> np.ndarray:
        """Returns how much each output position depends on each input position, [output, input]; 0 if it does not.

        The influence is the largest absolute gradient plus, for dependencies without a gradient, the largest change of
        the output after a change of the input. Changes that rounding can explain are not counted.

        Each row contains examples of lengths `segments`; `flags` are fields of the `SequenceContext`.
        """
        cotangents: np.ndarray = np.zeros((ROWS, LENGTH, self.embed), np.float32)
        cotangents[np.arange(ROWS), np.arange(LENGTH)] = np.random.default_rng(5).standard_normal(self.embed)
        rows = [list(segments)] * ROWS
        ctx = self.make_context(rows, self.make_random_features(3, MEMORY), [[3] * len(segments)] * ROWS, **flags)
        x = self.make_random_features(2)
        changed = x.copy()
        changed[np.arange(ROWS), np.arange(LENGTH)] = self.make_random_features(5, 1)[:, 0]
        results = self.run_with_gradients(x, ctx, cotangents)
        changes = np.abs(self.run_with_gradients(changed, ctx, cotangents).outputs - results.outputs).max(axis=-1).T
        changes[changes <= 1e-4 * np.abs(results.outputs).max()] = 0
        return np.abs(results.x).max(axis=-1) + changes

    @functools.cache  # noqa: B019 (the cache should live as long as the fixture)
    def _compile_with_gradients(self, **options: Any) -> Callable[..., OutputsWithGradients]:
        model = self.build_stack(**options)

        def outputs_and_gradients(params, x, ctx, cotangents):
            def apply(x, params):
                return model.apply({'params': params}, x, ctx)

            if ctx.packed or ctx.prefix is not None:
                outputs, pull = jax.vjp(lambda x: apply(x, params), x)
            else:
                outputs, pull = jax.vjp(apply, x, params)
            return OutputsWithGradients(outputs, *pull(cotangents.astype(outputs.dtype)))

        return jax.jit(outputs_and_gradients)


def make_segment_arrays(segments: Segments, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns segment ids and positions, [rows, length] int32, for rows specified as lists of example lengths.

    At padding, positions continue in rows of one example, and are 0 in packed rows, as in batches.
    """
    ids: np.ndarray = np.zeros((len(segments), length), np.int32)
    positions = np.zeros_like(ids)
    for row, lengths in enumerate(segments):
        if len(lengths) == 1:
            positions[row] = np.arange(length)
        start = 0
        for index, count in enumerate(lengths):
            ids[row, start : start + count] = index + 1
            positions[row, start : start + count] = np.arange(count)
            start += count
    return ids, positions
