"""Plots all pictures of a trained model for one text."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from remixer_t5x.extras.reports.pictures import drawing, learned_weights
from remixer_t5x.extras.reports.pictures.drawing import MatrixPanel, Picture
from remixer_t5x.extras.reports.pictures.learned_weights import DECODER, ENCODER, LayerArray

# Maximum number of layers to draw side by side.
MAX_DRAWN_LAYERS = 4


@dataclasses.dataclass(frozen=True)
class ModelWithText:
    """A trained model, with a text and the model's answer.

    Attributes:
        model: a `Seq2Seq`.
        inputs: token ids and the text of each token.
        targets: token ids of the decoder and the text of each token.
        lengths: maximum sequence lengths in training, for `encoder` and `decoder`.
    """

    model: Any
    params: Any
    inputs: tuple[np.ndarray, Sequence[str]]
    targets: tuple[np.ndarray, Sequence[str]]
    lengths: Mapping[str, int]

    @property
    def stack_tokens(self) -> list[tuple[str, np.ndarray, Sequence[str]]]:
        """The stacks as (stack name, token ids, text of each token)."""
        return [(ENCODER, *self.inputs), (DECODER, *self.targets)]


def draw_all_pictures(text: ModelWithText) -> list[Picture]:
    """Draws all pictures in page order."""
    intermediates = learned_weights.read_intermediates(text.model, text.params, text.inputs[0], text.targets[0])
    kinds = (
        _draw_remixer_weights(text, intermediates),
        _draw_tim_competition(text, intermediates),
        _draw_gmlp_weights(text),
        _draw_attention_maps(text, intermediates),
        _draw_pseudo_attention(text),
    )
    return [picture for kind in kinds for picture in kind]


def _select_stack_layers(layers: Iterable[LayerArray], stack: str, sublayer: str = '') -> list[LayerArray]:
    return [layer for layer in layers if layer.stack == stack and sublayer in layer.sublayer]


def _draw_remixer_weights(text: ModelWithText, intermediates: Mapping[str, Any]) -> Iterator[Picture]:
    """Plots softmax(H) of Remixer layers, and the mean self-attention if all shown layers have it."""
    logits = learned_weights.collect_remixer_logits(text.params)
    attention = [
        layer
        for layer in learned_weights.collect_attention_maps(intermediates, text.params)
        if 'self_attention' in layer.sublayer
    ]
    for stack, ids, pieces in text.stack_tokens:
        shown = drawing.select_evenly_spaced(_select_stack_layers(logits, stack), MAX_DRAWN_LAYERS)
        if not shown:
            continue
        means = {layer.layer: layer.array.mean(axis=0) for layer in _select_stack_layers(attention, stack)}
        matrices: dict[str, list[np.ndarray]] = {}
        if all(layer.layer in means for layer in shown):
            matrices['self-attention, mean'] = [means[layer.layer] for layer in shown]
        matrices['softmax(H)'] = [
            learned_weights.compute_softmax_rows(layer.array, len(ids), stack == DECODER) for layer in shown
        ]
        panels = [
            [MatrixPanel(layer.title, array, pieces, pieces) for layer, array in zip(shown, row, strict=True)]
            for row in matrices.values()
        ]
        note = 'Rows are output tokens, columns are input tokens. H is initialized near 0, where softmax(H) is uniform.'
        figure = drawing.draw_matrices(panels, list(matrices))
        yield Picture(f'remixer-{stack}', f'What H learned, {stack}', note, figure)


def _draw_tim_competition(text: ModelWithText, intermediates: Mapping[str, Any]) -> Iterator[Picture]:
    competition = learned_weights.collect_competition_weights(intermediates, text.params)
    for stack, _, pieces in text.stack_tokens:
        layers = _select_stack_layers(competition, stack)
        if not layers:
            continue
        bits = ', '.join(f'{each.title}: {stats.entropy(each.array, base=2).mean():.2f}' for each in layers)
        note = (
            'The colour shows the weight of each mechanism for each token; weights sum to 1 over mechanisms. Mean '
            f'entropy in bits, {bits}; {np.log2(len(layers[0].array)):.2f} means no preference.'
        )
        figure = draw_competition_weights(layers, pieces)
        yield Picture(f'tim-competition-{stack}', f'Competition of mechanisms, {stack}', note, figure)


def draw_competition_weights(layers: Sequence[LayerArray], pieces: Sequence[str]) -> Any:
    """Plots a panel for each TIM mechanism (figure 1 of TIM): layers from top to bottom, tokens from left to right."""
    count = layers[0].array.shape[0]
    figure = drawing.create_figure(max(5.0, 0.24 * len(pieces) + 1.6), count * (0.28 * len(layers) + 1.25))
    for index, axes in enumerate(figure.subplots(count, 1, squeeze=False)[:, 0]):
        drawing.draw_heat_map(axes, np.stack([layer.array[index] for layer in layers]), 1.0)
        drawing.style_axes(axes, f'mechanism {index + 1} · 0 to 1')
        drawing.label_token_ticks(axes, list(pieces), [layer.title for layer in layers])
    return figure


def _draw_gmlp_weights(text: ModelWithText) -> Iterator[Picture]:
    weights = learned_weights.collect_spatial_weights(text.params, text.lengths)
    for stack in (ENCODER, DECODER):
        if layers := _select_stack_layers(weights, stack):
            panels = [
                MatrixPanel(layer.title, layer.array)
                for layer in drawing.select_evenly_spaced(layers, MAX_DRAWN_LAYERS)
            ]
            note = 'Magnitude of W at the trained length: rows are output tokens, columns are input tokens.'
            yield Picture(f'gmlp-weights-{stack}', f'Spatial weights, {stack}', note, drawing.draw_matrices([panels]))


def _draw_attention_maps(text: ModelWithText, intermediates: Mapping[str, Any]) -> Iterator[Picture]:
    maps = learned_weights.collect_attention_maps(intermediates, text.params)
    cross = [layer for layer in maps if 'cross' in layer.sublayer]
    inner = [layer for layer in maps if 'cross' not in layer.sublayer]
    read, written = text.inputs[1], text.targets[1]
    decoder = _select_stack_layers(inner, DECODER, 'attention')
    for name, title, layers, rows, columns in (
        ('attention-encoder', 'Self-attention, encoder', _select_stack_layers(inner, ENCODER), read, read),
        ('attention-decoder', 'Self-attention, decoder', decoder, written, written),
        ('attention-cross', 'Cross-attention', _select_stack_layers(cross, DECODER), written, read),
    ):
        if layers:
            panels = [
                MatrixPanel(layer.title, layer.array.mean(axis=0), rows, columns)
                for layer in drawing.select_evenly_spaced(layers, MAX_DRAWN_LAYERS)
            ]
            note = 'Mean over heads; rows are queries, columns are keys.'
            yield Picture(name, title, note, drawing.draw_matrices([panels]))


def _draw_pseudo_attention(text: ModelWithText) -> Iterator[Picture]:
    (ids, pieces), (target_ids, target_pieces) = text.inputs, text.targets
    arrays = learned_weights.compute_encoder_layer_maps(text.model, text.params, ids)
    layers = [(f'{ENCODER} {number}', array) for number, array in enumerate(arrays, 1)]
    whole = learned_weights.compute_encoder_map(text.model, text.params, ids)
    maps = [*drawing.select_evenly_spaced(layers, MAX_DRAWN_LAYERS), ('whole encoder', whole)]
    panels = [MatrixPanel(title, array, pieces, pieces, off_diagonal=True) for title, array in maps]
    cross = learned_weights.compute_decoder_to_input_map(text.model, text.params, ids, target_ids)
    note = 'Norm of the gradient of each output token (rows) with respect to each input token (columns)'
    yield Picture(
        'pseudo-attention-encoder',
        'Pseudo-attention, encoder',
        f'{note}; single layers exclude the residual connection. The scale ends at the largest off-diagonal value.',
        drawing.draw_matrices([panels]),
    )
    figure = drawing.draw_matrices([[MatrixPanel('', cross, target_pieces, pieces)]])
    yield Picture('pseudo-attention-decoder', 'Pseudo-attention, decoder to text', f'{note}.', figure)
