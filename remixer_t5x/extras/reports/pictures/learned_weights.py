"""Extracts the learned parameters and intermediate arrays of each layer for the papers' figures.

Matrices such as Remixer's H and gMLP's spatial weights are parameters. Arrays that depend on a text, such as attention
weights and TIM's competition weights, are sown by sublayers into the collection `intermediates`.

Also computes pseudo-attention: how strongly each output token depends on each input token, for any mixer. Entry (i, j)
is the norm of the Jacobian of output token i with respect to input token j, as in figures 5 and 6 of the HyperMixer
paper (following Simonyan et al. 2014). The result can be compared to an attention matrix.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from scipy import special

from remixer_t5x.context import EncoderMemory, make_sequence_context
from remixer_t5x.models.sublayers import remixer

ENCODER, DECODER = 'encoder', 'decoder'

# With more features per token than this, Jacobian norms are estimated with random sign vectors.
MAX_EXACT_FEATURES = 64
PROBES = 32
# Number of rows per backward pass.
BATCH_ROWS = 32


@dataclasses.dataclass(frozen=True)
class LayerArray:
    """An array of a layer. `layer` is the 1-based index in the stack; `sublayer` is the sublayer's name in `params`."""

    stack: str
    layer: int
    sublayer: str
    array: np.ndarray

    @property
    def title(self) -> str:
        return f'{self.stack} {self.layer}'


def read_intermediates(model: Any, params: Any, inputs: np.ndarray, targets: np.ndarray) -> Mapping[str, Any]:
    """Runs the model on a text without dropout, and returns the collection `intermediates`.

    Args:
        model: a `Seq2Seq`.
        params: unboxed parameters.
        inputs: token ids of the text, [length] int32 without padding.
        targets: token ids of the answer, [length] int32 without padding.
    """
    decoder_inputs = np.concatenate([[0], targets[:-1]]).astype(np.int32)

    @jax.jit
    def run_model(params):
        rows = (jnp.asarray(row, jnp.int32)[None] for row in (inputs, decoder_inputs))
        return model.module.apply({'params': params}, *rows, enable_dropout=False, mutable=['intermediates'])[1]

    return jax.device_get(run_model(params)).get('intermediates', {})


def collect_layer_arrays(tree: Mapping[str, Any], params: Mapping[str, Any], *names: str) -> list[LayerArray]:
    """Returns the arrays whose path in `tree` ends with `names`: encoder arrays, then decoder arrays.

    `tree` has the structure of the parameters or of `intermediates`, whose leaves are tuples of one array. The first
    axis of every array is the layer in a scanned run; `params` determines the number of layers of each run.
    """
    arrays = []
    for stack in (ENCODER, DECODER):
        first = 1
        runs = [name for name in params.get(stack, {}) if name.startswith('run_')]
        for run in sorted(runs, key=lambda name: int(name.removeprefix('run_'))):
            count = jax.tree.leaves(params[stack][run])[0].shape[0]
            for path, leaf in traverse_util.flatten_dict(tree.get(stack, {}).get(run, {})).items():
                if path[-len(names) :] != names:
                    continue
                # The first name after 'layer' (or 'layer_N' in a `Block`) is the sublayer name.
                sublayer = next(name for name in path[1:] if not name.startswith('layer_'))
                stacked = leaf[0] if isinstance(leaf, tuple) else leaf
                arrays += [
                    LayerArray(stack, first + index, sublayer, np.asarray(stacked[index], np.float32))
                    for index in range(count)
                ]
            first += count
    return sorted(arrays, key=lambda layer: (layer.stack != ENCODER, layer.layer))


def collect_remixer_logits(params: Mapping[str, Any]) -> list[LayerArray]:
    """Returns the mixing logits H of every Remixer layer, each [max_length, max_length]."""
    layers = collect_layer_arrays(params, params, 'mixing', 'logits')
    return [
        dataclasses.replace(layer, array=np.asarray(remixer.bound_logits(jnp.asarray(layer.array)))) for layer in layers
    ]


def compute_softmax_rows(logits: np.ndarray, length: int, causal: bool) -> np.ndarray:
    """Computes softmax(H) for a text of `length` tokens, [length, length] float32; rows sum to 1."""
    matrix = np.asarray(logits, np.float64)[:length, :length]
    if causal:
        matrix = np.where(np.tri(length, dtype=bool), matrix, -np.inf)
    return special.softmax(matrix, axis=-1).astype(np.float32)


def collect_spatial_weights(params: Mapping[str, Any], lengths: Mapping[str, int]) -> list[LayerArray]:
    """Returns the spatial weights W of every gMLP layer, [length, length], where `length` is the training length.

    In a decoder, weights above the diagonal are 0.
    """
    layers = []
    for layer in collect_layer_arrays(params, params, 'mixing', 'weights', 'kernel'):
        length, causal = lengths[layer.stack], layer.stack == DECODER
        matrix = (
            layer.array[:length, :length]
            if layer.array.ndim == 2
            else _build_toeplitz_matrix(layer.array, length, causal)
        )
        layers.append(dataclasses.replace(layer, array=np.tril(matrix) if causal else matrix))
    return layers


def _build_toeplitz_matrix(values: np.ndarray, length: int, causal: bool) -> np.ndarray:
    """Expands per-distance weights w into the matrix W[i, j] = w[j - i].

    `values` starts at the most negative distance; in a decoder, it ends at distance 0.
    """
    zero = len(values) - 1 if causal else (len(values) - 1) // 2
    distance = np.arange(length)[None, :] - np.arange(length)[:, None]
    return values[np.clip(zero + distance, 0, len(values) - 1)]


def collect_attention_maps(intermediates: Mapping[str, Any], params: Mapping[str, Any]) -> list[LayerArray]:
    """Returns the attention weights [heads, queries, keys] of every layer; `sublayer` names the attention sublayer."""
    layers = collect_layer_arrays(intermediates, params, 'attention_weights')
    return [dataclasses.replace(layer, array=layer.array[0]) for layer in layers]


def collect_competition_weights(intermediates: Mapping[str, Any], params: Mapping[str, Any]) -> list[LayerArray]:
    """Returns TIM's competition weights [mechanisms, tokens] of every TIM layer; they sum to 1 over mechanisms."""
    layers = collect_layer_arrays(intermediates, params, 'competition', 'competition')
    return [dataclasses.replace(layer, array=layer.array[:, 0, :, 0]) for layer in layers]


def compute_jacobian_norms(function: Callable[..., jax.Array], x: jax.Array, *others: Any) -> np.ndarray:
    """Computes the Frobenius norms of d function(x, *others)[i] / d x[j], [outputs, inputs] float32.

    Rows of a batch are independent, so one backward pass over N identical rows computes N rows of the Jacobian.
    `jax.jacrev` is not used, because it uses vmap, and jaxlib 0.10.2 crashes on some such programs on a CPU. For more
    than MAX_EXACT_FEATURES features, the squared norm of the Jacobian J is estimated as the mean squared norm of v^T J
    over random sign vectors v.

    Args:
        function: ([rows, inputs, embed], *others) -> [rows, outputs, features]; compiled once per set of shapes.
        x: the input tokens, [inputs, embed].
    """
    _, outputs, features = jax.eval_shape(function, x[None], *others).shape
    vectors: np.ndarray = np.eye(features)
    if features > MAX_EXACT_FEATURES:
        vectors = np.random.default_rng(0).choice((-1.0, 1.0), size=(PROBES, features)) / np.sqrt(PROBES)
    squares, total = np.zeros((outputs, x.shape[0])), outputs * len(vectors)
    for first in range(0, total, BATCH_ROWS):
        number = np.arange(first, first + BATCH_ROWS)
        positions = np.minimum(number // len(vectors), outputs - 1)
        # Zero vectors pad the last batch without changing the sums.
        batch = vectors[number % len(vectors)] * (number < total)[:, None]
        cotangents = ((positions[:, None] == np.arange(outputs))[:, :, None] * batch[:, None]).astype(np.float32)
        np.add.at(squares, positions, np.asarray(_compute_squared_norms(function, x, others, cotangents), np.float64))
    return np.sqrt(squares).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def _compute_squared_norms(
    function: Callable[..., jax.Array], x: jax.Array, others: tuple[Any, ...], cotangents: jax.Array
) -> jax.Array:
    """Returns squared gradient norms [rows, inputs] at each input, for cotangents [rows, outputs, features]."""
    repeated = jnp.broadcast_to(x, (cotangents.shape[0], *x.shape))
    outputs, backward = jax.vjp(lambda rows: function(rows, *others), repeated)
    return jnp.sum(jnp.square(backward(cotangents.astype(outputs.dtype))[0].astype(jnp.float32)), axis=-1)


def compute_encoder_layer_maps(model: Any, params: Mapping[str, Any], inputs: np.ndarray) -> list[np.ndarray]:
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

        @jax.jit
        def apply_layer(x: jax.Array, layer_params: Any, single: Any = single) -> jax.Array:
            return _apply_stack(single, {**shared, 'run_0': layer_params}, x, inputs)

        def compute_update(x: jax.Array, layer_params: Any, apply_layer: Any = apply_layer) -> jax.Array:
            return apply_layer(x, layer_params) - x

        for number in range(count):
            layer_params = jax.tree.map(lambda leaf, n=number: leaf[n : n + 1], stack_params[f'run_{index}'])
            maps.append(compute_jacobian_norms(compute_update, hidden, layer_params))
            hidden = apply_layer(hidden[None], layer_params)[0]
    return maps


def compute_encoder_map(model: Any, params: Mapping[str, Any], inputs: np.ndarray) -> np.ndarray:
    """Computes the pseudo-attention of the encoder outputs to the input embeddings."""
    stack = model.module.encoder_stack()

    def encode_from_embeddings(x: jax.Array, params: Any) -> jax.Array:
        return _apply_stack(stack, params, x, inputs)

    return compute_jacobian_norms(encode_from_embeddings, _embed_tokens(model, params, inputs), params['encoder'])


def compute_decoder_to_input_map(
    model: Any, params: Mapping[str, Any], inputs: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """Computes the pseudo-attention of the decoder outputs to the encoder's input embeddings, through all layers."""
    encoder_stack, decoder_stack = model.module.encoder_stack(), model.module.decoder_stack()
    decoder_inputs = _embed_tokens(model, params, np.concatenate([[0], targets[:-1]]).astype(np.int32))

    def decode_from_embeddings(x: jax.Array, params: Any, decoder_inputs: jax.Array) -> jax.Array:
        rows = x.shape[0]
        memory = EncoderMemory(
            _apply_stack(encoder_stack, params[0], x, inputs), make_sequence_context(_repeat_rows(inputs, rows))
        )
        ctx = make_sequence_context(_repeat_rows(targets, rows), causal=True, memory=memory)
        rows_of_inputs = jnp.broadcast_to(decoder_inputs, (rows, *decoder_inputs.shape))
        return decoder_stack.apply({'params': params[1]}, rows_of_inputs, ctx)

    stack_params = params['encoder'], params['decoder']
    embedded = _embed_tokens(model, params, inputs)
    return compute_jacobian_norms(decode_from_embeddings, embedded, stack_params, decoder_inputs)


def _apply_stack(stack: Any, params: Mapping[str, Any], x: jax.Array, tokens: np.ndarray) -> jax.Array:
    """Applies the stack to x, [rows, length, embed]; all rows share the masks and positions of `tokens`."""
    return stack.apply({'params': params}, x, make_sequence_context(_repeat_rows(tokens, x.shape[0])))


def _repeat_rows(tokens: np.ndarray, count: int) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), (count, len(tokens)))


def _embed_tokens(model: Any, params: Any, tokens: np.ndarray) -> jax.Array:
    """Returns the embeddings of the tokens, [length, embed]."""
    rows = jnp.asarray(tokens, jnp.int32)[None]
    return model.module.apply({'params': params}, rows, method=lambda module, ids: module.token_embedder(ids))[0]
