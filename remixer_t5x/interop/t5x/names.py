"""Maps parameters of T5.1.1 and the first T5 to and from the names of T5X's own network (t5x/examples/t5/network.py).

That network has separate layers, `encoder/layers_0`. Its scalable variant stacks them, `encoder/encoder`, by default
along the second axis. Shapes are the same as ours except for attention kernels, whose heads are separate in some
versions.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from remixer_t5x.errors import UserError
from remixer_t5x.models.architecture.layer import PreNorm
from remixer_t5x.models.seq2seq import Seq2Seq

Shapes = Mapping[str, tuple[int, ...]]

_OUTSIDE_LAYERS = {
    'token_embedder/embedding': 'token_embedder/embedding',
    'logits/kernel': 'decoder/logits_dense/kernel',
    'encoder/position_bias/embedding': 'encoder/relpos_bias/rel_embedding',
    'decoder/position_bias/embedding': 'decoder/relpos_bias/rel_embedding',
    'encoder/final_norm/scale': 'encoder/encoder_norm/scale',
    'decoder/final_norm/scale': 'decoder/decoder_norm/scale',
}
_FEED_FORWARD = {
    'gated_mlp': 'mlp',
    'gated_mlp_norm': 'pre_mlp_layer_norm',
    'relu_mlp': 'mlp',
    'relu_mlp_norm': 'pre_mlp_layer_norm',
}
_SUBLAYERS = {
    'encoder': {
        'self_attention': 'attention',
        'self_attention_norm': 'pre_attention_layer_norm',
        **_FEED_FORWARD,
    },
    'decoder': {
        'self_attention': 'self_attention',
        'self_attention_norm': 'pre_self_attention_layer_norm',
        'cross_attention': 'encoder_decoder_attention',
        'cross_attention_norm': 'pre_cross_attention_layer_norm',
        **_FEED_FORWARD,
    },
}
_IN_A_RUN = re.compile(r'(encoder|decoder)/run_0/layer/([^/]+)/(.+)')
_KEEP_NAMES = 'with --own_names the checkpoint keeps our names, for t5x/*.gin'


class Source(NamedTuple):
    """The arrays of a checkpoint that one of our parameters is made of.

    Attributes:
        names: one array, or one for each layer.
        apart: each of `names` is one layer.
        axis: the layers axis of a single array, None if it has none.
        shared: the layers of a single array must be equal, and the parameter is one of them.
    """

    names: Sequence[str]
    apart: bool = False
    axis: int | None = None
    shared: bool = False

    def gather(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        """The parameter, float32. Joins the heads of attention kernels if they then have `shape`.

        Raises ValueError if layers that must be equal differ.
        """
        parts = [np.asarray(arrays[name]).astype(np.float32) for name in self.names]
        value = np.stack(parts) if self.apart else parts[0]
        if self.axis is not None:
            value = np.moveaxis(value, self.axis, 0)
        if self.shared:
            if not (value == value[:1]).all():
                raise ValueError('each layer has its own position bias, and our stacks share one')
            value = value[0]
        joins = value.ndim == len(shape) + 1 and value.size == np.prod(shape)
        return np.ascontiguousarray(value.reshape(shape) if joins else value)


def own_sources(shapes: Shapes) -> dict[str, Source]:
    """The sources in a checkpoint of our own module, trained under T5X."""
    return {name: Source([name]) for name in shapes}


def network_sources(shapes: Shapes, saved: Shapes) -> dict[str, Source]:
    """The sources of our parameters in a checkpoint of T5X's network whose arrays are `saved`.

    Raises UserError for a parameter that T5X's network does not have.
    """
    scanned = any(name.startswith('encoder/encoder/') for name in saved)
    axis = _scan_axis(shapes, saved) if scanned else None

    def source(name: str) -> Source:
        whole = _OUTSIDE_LAYERS.get(name)
        if whole is None:
            stack, rest = _in_a_layer(name, 'it is read into models/t5_1_1.gin or models/t5_1_0.gin')
            if scanned:
                return Source([f'{stack}/{stack}/{rest}'], axis=axis)
            return Source([f'{stack}/layers_{index}/{rest}' for index in range(shapes[name][0])], apart=True)
        stack, _, rest = whole.partition('/')
        if whole not in saved and f'{stack}/{stack}/{rest}' in saved:
            return Source([f'{stack}/{stack}/{rest}'], axis=axis, shared=True)
        return Source([whole])

    return {name: source(name) for name in shapes}


def to_network(flat: Mapping[str, np.ndarray], model: Seq2Seq) -> dict[str, np.ndarray]:
    """Our parameters with the names of T5X's network, one array for each layer. Raises UserError if that network cannot
    express the model.
    """
    module: Any = model.module
    for stack in (module.encoder_stack(), module.decoder_stack()):
        if len(stack.runs) != 1 or not isinstance(stack.runs[0][0](), PreNorm):
            raise UserError(f"T5X's network has one run of PreNorm layers, and this model has others; {_KEEP_NAMES}")
    if module.tied != module.scaled_output:
        raise UserError(f"T5X's network scales the output if and only if it is tied; {_KEEP_NAMES}")
    arrays: dict[str, np.ndarray] = {}
    for name, value in flat.items():
        if name in _OUTSIDE_LAYERS:
            arrays[_OUTSIDE_LAYERS[name]] = value
            continue
        stack, rest = _in_a_layer(name, _KEEP_NAMES)
        arrays |= {f'{stack}/layers_{index}/{rest}': layer for index, layer in enumerate(value)}
    return arrays


def _in_a_layer(name: str, advice: str) -> tuple[str, str]:
    """The stack of our stacked parameter `name`, and T5X's name within a layer."""
    match = _IN_A_RUN.fullmatch(name)
    if match is None or match[2] not in _SUBLAYERS[match[1]]:
        raise UserError(f"T5X's network has nothing like {name}; {advice}")
    return match[1], f'{_SUBLAYERS[match[1]][match[2]]}/{match[3]}'


def _scan_axis(shapes: Shapes, saved: Shapes) -> int:
    """The layers axis of the scanned norms, whose other axis is the features: 1, unless only 0 fits."""
    layers = {name.split('/')[0]: shape[0] for name, shape in shapes.items() if _IN_A_RUN.fullmatch(name)}
    norms = [
        (name.split('/')[0], shape) for name, shape in saved.items() if len(shape) == 2 and name.endswith('/scale')
    ]
    return 1 if all(shape[1] == layers.get(stack) for stack, shape in norms) else 0
