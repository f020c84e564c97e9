"""Extracts what a trained model has learned and computes, layer by layer: the data of the papers' figures.

Matrices (Remixer's H, gMLP's spatial weights) are read from the parameters. Arrays that depend on a text (attention
weights, TIM's competition) are sown by sublayers into `intermediates`, a collection that only `observe` collects.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remixer_t5x.models.sublayers import remixer

ENCODER, DECODER = 'encoder', 'decoder'

# Row-centred root mean square of H below which softmax(H) is nearly uniform: weights are then typically within a tenth
# of the mean of their row. H is initialised at 0.02.
NEAR_ZERO = 0.1


@dataclasses.dataclass(frozen=True)
class LayerArray:
    """An array of one layer. `layer` counts from 1 in its stack; `sublayer` is the name of its parameters."""

    stack: str
    layer: int
    sublayer: str
    array: np.ndarray

    @property
    def title(self) -> str:
        return f'{self.stack} {self.layer}'


def observe(model: Any, params: Any, inputs: np.ndarray, targets: np.ndarray) -> Mapping[str, Any]:
    """Runs the model on one text without dropout, and returns the arrays that sublayers sow.

    Args:
        model: a `Seq2Seq`.
        params: unboxed parameters.
        inputs: ids of the text, [length] int32 without padding.
        targets: ids of the answer, [length] int32 without padding.
    """
    decoder_inputs = np.concatenate([[0], targets[:-1]]).astype(np.int32)

    @jax.jit
    def run(params):
        rows = (jnp.asarray(row, jnp.int32)[None] for row in (inputs, decoder_inputs))
        return model.module.apply({'params': params}, *rows, enable_dropout=False, mutable=['intermediates'])[1]

    return jax.device_get(run(params)).get('intermediates', {})


def by_layer(tree: Mapping[str, Any], params: Mapping[str, Any], *names: str) -> list[LayerArray]:
    """The arrays of `tree` whose path ends with `names`, from the encoder's first layer to the decoder's last.

    `tree` has the structure of the parameters, or of `intermediates`, whose leaves are tuples of one array; every array
    has the layers of its run as its first axis. The number of layers of each run comes from `params`.
    """
    arrays = []
    for stack in (ENCODER, DECODER):
        first = 1
        runs = [name for name in params.get(stack, {}) if name.startswith('run_')]
        for run in sorted(runs, key=lambda name: int(name.removeprefix('run_'))):
            count = jax.tree.leaves(params[stack][run])[0].shape[0]
            for sublayer, stacked in _leaves_named(tree.get(stack, {}).get(run, {}), names):
                arrays += [
                    LayerArray(stack, first + index, sublayer, np.asarray(stacked[index], np.float32))
                    for index in range(count)
                ]
            first += count
    return sorted(arrays, key=lambda layer: (layer.stack != ENCODER, layer.layer))


def _leaves_named(tree: Any, names: tuple[str, ...], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields (name of the sublayer, array) for each array in a stack's layers whose path ends with `names`."""
    if isinstance(tree, Mapping):
        for name, child in tree.items():
            yield from _leaves_named(child, names, (*path, name))
    elif path[-len(names) :] == names:
        # The first name below 'layer' (or 'layer_N' in a `Block`) is the name of the sublayer.
        yield (
            next(name for name in path[1:] if not name.startswith('layer_')),
            tree[0] if isinstance(tree, tuple) else tree,
        )


def remixer_logits(params: Mapping[str, Any]) -> list[LayerArray]:
    """Returns the mixing logits H of every Remixer layer, each [max_length, max_length]."""
    layers = by_layer(params, params, 'mixing', 'logits')
    return [
        dataclasses.replace(layer, array=np.asarray(remixer.bound_logits(jnp.asarray(layer.array)))) for layer in layers
    ]


def softmax_rows(logits: np.ndarray, length: int, causal: bool) -> np.ndarray:
    """softmax(H) for a text of `length` tokens, [length, length] float32; rows sum to 1."""
    matrix = np.asarray(logits, np.float64)[:length, :length]
    if causal:
        matrix = np.where(np.tri(length, dtype=bool), matrix, -np.inf)
    weights = np.exp(matrix - matrix.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)


def row_spread(logits: np.ndarray, length: int, causal: bool) -> float:
    """Root mean square of H about the mean of each row, over the columns that are visible to the row.

    softmax(H) depends only on these differences, and is uniform if they are 0. See NEAR_ZERO.
    """
    matrix = np.asarray(logits, np.float64)[:length, :length]
    visible = np.tri(length, dtype=bool) if causal else np.ones_like(matrix, bool)
    mean = np.where(visible, matrix, 0).sum(axis=-1, keepdims=True) / visible.sum(axis=-1, keepdims=True)
    return float(np.sqrt(np.mean((matrix - mean)[visible] ** 2)))


def near_zero(layers: list[LayerArray], lengths: Mapping[str, int]) -> list[LayerArray]:
    """Layers that hardly mix by position: `row_spread` is below NEAR_ZERO over the trained length of their stack."""
    return [
        layer for layer in layers if row_spread(layer.array, lengths[layer.stack], layer.stack == DECODER) < NEAR_ZERO
    ]


def spatial_weights(params: Mapping[str, Any], lengths: Mapping[str, int]) -> list[LayerArray]:
    """W of every gMLP layer, [length, length] with the trained length of its stack; zero above a decoder's diagonal."""
    layers = []
    for layer in by_layer(params, params, 'mixing', 'weights', 'kernel'):
        length, causal = lengths[layer.stack], layer.stack == DECODER
        matrix = layer.array[:length, :length] if layer.array.ndim == 2 else _toeplitz(layer.array, length, causal)
        layers.append(dataclasses.replace(layer, array=np.tril(matrix) if causal else matrix))
    return layers


def _toeplitz(values: np.ndarray, length: int, causal: bool) -> np.ndarray:
    """W[i, j] = w[j - i]; `values` starts with the most negative distance, and ends with distance 0 in a decoder."""
    zero = len(values) - 1 if causal else (len(values) - 1) // 2
    distance = np.arange(length)[None, :] - np.arange(length)[:, None]
    return values[np.clip(zero + distance, 0, len(values) - 1)]


def attention_maps(intermediates: Mapping[str, Any], params: Mapping[str, Any]) -> list[LayerArray]:
    """Attention weights of every layer, [heads, queries, keys] each; the sublayer's name is the kind of attention."""
    layers = by_layer(intermediates, params, 'attention_weights')
    return [dataclasses.replace(layer, array=layer.array[0]) for layer in layers]


def competition_weights(intermediates: Mapping[str, Any], params: Mapping[str, Any]) -> list[LayerArray]:
    """TIM's competition in every TIM layer, [mechanisms, tokens] each; sums to 1 over mechanisms."""
    layers = by_layer(intermediates, params, 'competition', 'competition')
    return [dataclasses.replace(layer, array=layer.array[:, 0, :, 0]) for layer in layers]


def entropy(weights: np.ndarray) -> np.ndarray:
    """Entropy in bits along the first axis; 0 log 0 is 0."""
    logs = np.log2(weights, where=weights > 0, out=np.zeros_like(weights))
    return -np.sum(weights * logs, axis=0)
