"""Computes pseudo-attention: how strongly each output token depends on each input token, for any mixer.

Entry (i, j) is the norm of the Jacobian of output token i with respect to input token j, as in figures 5 and 6 of the
HyperMixer paper (following Simonyan et al. 2014). The result can be compared to an attention matrix.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remixer_t5x.context import Memory, make_sequence_context

# With more features per token than this, Jacobian norms are estimated with random sign vectors.
MOST_EXACT = 64
PROBES = 32
# Number of rows per backward pass.
BATCH_ROWS = 32


class JacobianNorms:
    """Computes the Frobenius norms of d function(x, *others)[i] / d x[j], compiled once per set of shapes.

    Rows of a batch are independent, so one backward pass over N identical rows computes N rows of the Jacobian.
    `jax.jacrev` is not used, because it uses vmap, and jaxlib 0.10.2 crashes on some such programs on a CPU.

    Attributes:
        function: ([rows, inputs, embed], *others) -> [rows, outputs, features]; rows are independent.
        seed: seed of the random sign vectors v. For more than MOST_EXACT features, the squared norm of J is estimated
            as the mean square of `v . J`.
    """

    def __init__(self, function: Callable[..., jax.Array], seed: int = 0):
        self._function, self._seed = function, seed
        self._compiled_squares = jax.jit(self._squared_norms)

    def __call__(self, x: jax.Array, *others: Any) -> np.ndarray:
        """Returns the norm of each output token's Jacobian for each input token, [outputs, inputs] float32.

        `x` contains the input tokens, [inputs, embed].
        """
        _, outputs, features = jax.eval_shape(self._function, x[None], *others).shape
        squares = np.zeros((outputs, x.shape[0]), np.float64)
        for positions, vectors in _batches(outputs, _projection_vectors(features, self._seed)):
            cotangents = (positions[:, None] == np.arange(outputs))[:, :, None] * vectors[:, None]
            np.add.at(squares, positions, np.asarray(self._compiled_squares(x, others, cotangents), np.float64))
        return np.sqrt(squares).astype(np.float32)

    def _squared_norms(self, x: jax.Array, others: tuple[Any, ...], cotangents: jax.Array) -> jax.Array:
        """Returns squared gradient norms [rows, inputs] at each input, for cotangents [rows, outputs, features]."""
        repeated = jnp.broadcast_to(x, (cotangents.shape[0], *x.shape))
        outputs, backward = jax.vjp(lambda rows: self._function(rows, *others), repeated)
        return jnp.sum(jnp.square(backward(cotangents.astype(outputs.dtype))[0].astype(jnp.float32)), axis=-1)


def _projection_vectors(features: int, seed: int) -> np.ndarray:
    """Returns vectors v for which the sum of `(v . J)^2` is the squared norm of J, exactly or in expectation."""
    if features <= MOST_EXACT:
        return np.eye(features, dtype=np.float32)
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), size=(PROBES, features))
    return (signs / np.sqrt(PROBES)).astype(np.float32)


def _batches(outputs: int, directions: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields all pairs of output position and direction in batches.

    Each batch is (positions [BATCH_ROWS], vectors [BATCH_ROWS, features]).
    """
    total = outputs * len(directions)
    for first in range(0, total, BATCH_ROWS):
        number = np.arange(first, first + BATCH_ROWS)
        # Zero vectors pad the last batch without changing the sums.
        vectors = directions[number % len(directions)] * (number < total)[:, None]
        yield np.minimum(number // len(directions), outputs - 1), vectors


def encoder_layer_maps(model: Any, params: Mapping[str, Any], inputs: np.ndarray) -> list[np.ndarray]:
    """Computes the pseudo-attention [length, length] of each encoder layer without its residual connection."""
    stack, stack_params = model.module.encoder_stack(), params['encoder']
    shared = {name: child for name, child in stack_params.items() if not name.startswith(('run_', 'final_norm'))}
    hidden = _apply_stack(
        stack.clone(runs=(), final_norm=None), shared, _embed_tokens(model, params, inputs)[None], inputs
    )[0]
    maps = []
    for index, (factory, count) in enumerate(stack.runs):
        # A one-layer stack prepares the layer's inputs in the same way as the full model.
        single = stack.clone(runs=((factory, 1),), final_norm=None, position_embedding=None, remat_policy=None)

        def layer(x: jax.Array, layer_params: Any, single: Any = single) -> jax.Array:
            return _apply_stack(single, {**shared, 'run_0': layer_params}, x, inputs)

        norms = JacobianNorms(lambda x, layer_params, layer=layer: layer(x, layer_params) - x)
        for number in range(count):
            layer_params = jax.tree.map(lambda leaf, n=number: leaf[n : n + 1], stack_params[f'run_{index}'])
            maps.append(norms(hidden, layer_params))
            hidden = jax.jit(layer)(hidden[None], layer_params)[0]
    return maps


def encoder_map(model: Any, params: Mapping[str, Any], inputs: np.ndarray) -> np.ndarray:
    """Computes the pseudo-attention of the encoder outputs to the input embeddings."""
    stack = model.module.encoder_stack()
    norms = JacobianNorms(lambda x, stack_params: _apply_stack(stack, stack_params, x, inputs))
    return norms(_embed_tokens(model, params, inputs), params['encoder'])


def decoder_to_input_map(model: Any, params: Mapping[str, Any], inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Computes the pseudo-attention of the decoder outputs to the encoder's input embeddings, through all layers."""
    encoder_stack, decoder_stack = model.module.encoder_stack(), model.module.decoder_stack()
    decoder_inputs = _embed_tokens(model, params, np.concatenate([[0], targets[:-1]]).astype(np.int32))

    def function(x: jax.Array, params: Any, decoder_inputs: jax.Array) -> jax.Array:
        rows = x.shape[0]
        memory = Memory(
            _apply_stack(encoder_stack, params[0], x, inputs), make_sequence_context(_repeat_rows(inputs, rows))
        )
        ctx = make_sequence_context(_repeat_rows(targets, rows), causal=True, memory=memory)
        rows_of_inputs = jnp.broadcast_to(decoder_inputs, (rows, *decoder_inputs.shape))
        return decoder_stack.apply({'params': params[1]}, rows_of_inputs, ctx)

    stack_params = params['encoder'], params['decoder']
    return JacobianNorms(function)(_embed_tokens(model, params, inputs), stack_params, decoder_inputs)


def _apply_stack(stack: Any, params: Mapping[str, Any], x: jax.Array, tokens: np.ndarray) -> jax.Array:
    """Applies the stack to x, [rows, length, embed]; all rows share the masks and positions of `tokens`."""
    return stack.apply({'params': params}, x, make_sequence_context(_repeat_rows(tokens, x.shape[0])))


def _repeat_rows(tokens: np.ndarray, count: int) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), (count, len(tokens)))


def _embed_tokens(model: Any, params: Any, tokens: np.ndarray) -> jax.Array:
    """Returns the embeddings of the tokens, [length, embed]."""
    rows = jnp.asarray(tokens, jnp.int32)[None]
    return model.module.apply({'params': params}, rows, method=lambda module, ids: module.token_embedder(ids))[0]
