"""Extracts the learned parameters and intermediate arrays of each layer for the papers' figures.

Matrices such as Remixer's H and gMLP's spatial weights are parameters. Arrays that depend on a text, such as attention
weights and TIM's competition weights, are sown by sublayers into the collection `intermediates`.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from remixer_t5x.models.sublayers import remixer

ENCODER, DECODER = 'encoder', 'decoder'

# If the root mean square of H, after subtracting the mean of each row, is below this value, softmax(H) is nearly
# uniform: weights typically differ from their row mean by at most a tenth. H is initialised with a standard deviation
# of 0.02.
NEAR_ZERO = 0.1


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
    def run(params):
        rows = (jnp.asarray(row, jnp.int32)[None] for row in (inputs, decoder_inputs))
        return model.module.apply({'params': params}, *rows, enable_dropout=False, mutable=['intermediates'])[1]

    return jax.device_get(run(params)).get('intermediates', {})


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
            for sublayer, stacked in _find_named_arrays(tree.get(stack, {}).get(run, {}), names):
                arrays += [
                    LayerArray(stack, first + index, sublayer, np.asarray(stacked[index], np.float32))
                    for index in range(count)
                ]
            first += count
    return sorted(arrays, key=lambda layer: (layer.stack != ENCODER, layer.layer))


def _find_named_arrays(tree: Any, names: tuple[str, ...], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields (sublayer name, array) for each array in a stack's layers if the array's path ends with `names`."""
    if isinstance(tree, Mapping):
        for name, child in tree.items():
            yield from _find_named_arrays(child, names, (*path, name))
    elif path[-len(names) :] == names:
        # The first name after 'layer' (or 'layer_N' in a `Block`) is the sublayer name.
        yield (
            next(name for name in path[1:] if not name.startswith('layer_')),
            tree[0] if isinstance(tree, tuple) else tree,
        )


def remixer_logits(params: Mapping[str, Any]) -> list[LayerArray]:
    """Returns the mixing logits H of every Remixer layer, each [max_length, max_length]."""
    layers = collect_layer_arrays(params, params, 'mixing', 'logits')
    return [
        dataclasses.replace(layer, array=np.asarray(remixer.bound_logits(jnp.asarray(layer.array)))) for layer in layers
    ]


def softmax_rows(logits: np.ndarray, length: int, causal: bool) -> np.ndarray:
    """Computes softmax(H) for a text of `length` tokens, [length, length] float32; rows sum to 1."""
    matrix = np.asarray(logits, np.float64)[:length, :length]
    if causal:
        matrix = np.where(np.tri(length, dtype=bool), matrix, -np.inf)
    return special.softmax(matrix, axis=-1).astype(np.float32)


def row_spread(logits: np.ndarray, length: int, causal: bool) -> float:
    """Computes the root mean square deviation of H from its row means, over the columns that each row can attend to.
    softmax(H) depends only on these deviations, and is uniform if all are 0. See NEAR_ZERO.
    """
    matrix = np.asarray(logits, np.float64)[:length, :length]
    visible = np.tri(length, dtype=bool) if causal else np.ones_like(matrix, bool)
    mean = np.where(visible, matrix, 0).sum(axis=-1, keepdims=True) / visible.sum(axis=-1, keepdims=True)
    return float(np.sqrt(np.mean((matrix - mean)[visible] ** 2)))


def spatial_weights(params: Mapping[str, Any], lengths: Mapping[str, int]) -> list[LayerArray]:
    """Returns the spatial weights W of every gMLP layer, [length, length], where `length` is the training length.

    In a decoder, weights above the diagonal are 0.
    """
    layers = []
    for layer in collect_layer_arrays(params, params, 'mixing', 'weights', 'kernel'):
        length, causal = lengths[layer.stack], layer.stack == DECODER
        matrix = layer.array[:length, :length] if layer.array.ndim == 2 else _toeplitz(layer.array, length, causal)
        layers.append(dataclasses.replace(layer, array=np.tril(matrix) if causal else matrix))
    return layers


def _toeplitz(values: np.ndarray, length: int, causal: bool) -> np.ndarray:
    """Expands weights w by distance to a matrix W[i, j] = w[j - i].

    `values` starts at the most negative distance; in a decoder, it ends at distance 0.
    """
    zero = len(values) - 1 if causal else (len(values) - 1) // 2
    distance = np.arange(length)[None, :] - np.arange(length)[:, None]
    return values[np.clip(zero + distance, 0, len(values) - 1)]


def attention_maps(intermediates: Mapping[str, Any], params: Mapping[str, Any]) -> list[LayerArray]:
    """Returns the attention weights [heads, queries, keys] of every layer; `sublayer` names the attention sublayer."""
    layers = collect_layer_arrays(intermediates, params, 'attention_weights')
    return [dataclasses.replace(layer, array=layer.array[0]) for layer in layers]


def competition_weights(intermediates: Mapping[str, Any], params: Mapping[str, Any]) -> list[LayerArray]:
    """Returns TIM's competition weights [mechanisms, tokens] of every TIM layer; they sum to 1 over mechanisms."""
    layers = collect_layer_arrays(intermediates, params, 'competition', 'competition')
    return [dataclasses.replace(layer, array=layer.array[:, 0, :, 0]) for layer in layers]


def entropy(weights: np.ndarray) -> np.ndarray:
    """Computes the entropy in bits along the first axis."""
    return special.entr(weights).sum(axis=0) / np.log(2)
