"""All pictures of one trained model and one text."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from remixer_t5x.extras.reports.pictures import filters, heat_maps, learned, mechanisms, pseudo_attention
from remixer_t5x.extras.reports.pictures.drawing import Picture
from remixer_t5x.extras.reports.pictures.heat_maps import Panel
from remixer_t5x.extras.reports.pictures.learned import DECODER, ENCODER, LayerArray

# Number of layers side by side: the first, the last, and evenly spaced ones between.
MOST_LAYERS = 4


@dataclasses.dataclass(frozen=True)
class Subject:
    """The model and the text of the pictures.

    `inputs` and `targets` are ids with their pieces of text; `lengths` are the trained lengths of `encoder` and
    `decoder`; `before` are the parameters that training started with, or None; `name` is the prefix of picture names.
    """

    model: Any
    params: Any
    inputs: tuple[np.ndarray, Sequence[str]]
    targets: tuple[np.ndarray, Sequence[str]]
    lengths: Mapping[str, int]
    before: Any = None
    name: str = ''


def chosen(layers: Sequence[LayerArray], most: int = MOST_LAYERS) -> list[LayerArray]:
    """At most `most` of the layers, with the first and the last."""
    if len(layers) <= most:
        return list(layers)
    indices = np.linspace(0, len(layers) - 1, most).round()
    return [layers[int(index)] for index in indices]


def draw_all(subject: Subject) -> list[Picture]:
    """The pictures, in the order in which to show them."""
    seen = learned.observe(subject.model, subject.params, subject.inputs[0], subject.targets[0])
    pictures = [*_remixer(subject, seen), *_tim(subject, seen), *_gmlp(subject), *_attention(subject, seen)]
    pictures += _pseudo(subject)
    return [dataclasses.replace(picture, name=f'{subject.name}{picture.name}') for picture in pictures]


def _select(layers: Sequence[LayerArray], stack: str, sublayer: str = '') -> list[LayerArray]:
    return [one for one in layers if one.stack == stack and sublayer in one.sublayer]


def _remixer(subject: Subject, seen: Mapping[str, Any]) -> list[Picture]:
    """softmax(H) under the mean self-attention, and above softmax(H) before finetuning."""
    logits = learned.remixer_logits(subject.params)
    before = {} if subject.before is None else _by_place(learned.remixer_logits(subject.before))
    attention = learned.attention_maps(seen, subject.params)
    pictures = []
    for stack, (ids, pieces) in ((ENCODER, subject.inputs), (DECODER, subject.targets)):
        own, causal = _select(logits, stack), stack == DECODER
        if not own:
            continue
        shown = chosen(own)

        def mixing(one: LayerArray, ids=ids, pieces=pieces, causal=causal) -> Panel:
            return Panel(one.title, learned.softmax_rows(one.array, len(ids), causal), pieces, pieces)

        means = _by_place(
            dataclasses.replace(a, array=a.array.mean(axis=0)) for a in _select(attention, stack, 'self_attention')
        )
        # A row is drawn only if every chosen layer has it.
        rows = {
            'self-attention, mean': [
                Panel(one.title, means[one.stack, one.layer].array, pieces, pieces) for one in shown
            ]
            if all((one.stack, one.layer) in means for one in shown)
            else [],
            'softmax(H) before': [mixing(before[one.stack, one.layer]) for one in shown] if before else [],
            'softmax(H)': [mixing(one) for one in shown],
        }
        rows = {name: panels for name, panels in rows.items() if panels}
        note = _near_zero_note(own, subject.lengths)
        if before:
            note += f' Before this training {_near_zero_note(_select(list(before.values()), stack), subject.lengths)}'
        figure = heat_maps.draw(list(rows.values()), list(rows))
        pictures.append(Picture(f'remixer-{stack}', f'What H learned, {stack}', note, figure))
    return pictures


def _by_place(layers) -> dict[tuple[str, int], LayerArray]:
    return {(one.stack, one.layer): one for one in layers}


def _near_zero_note(layers: Sequence[LayerArray], lengths: Mapping[str, int]) -> str:
    spreads = ', '.join(
        f'{one.title}: {learned.spread(one.array, lengths[one.stack], one.stack == DECODER):.3f}' for one in layers
    )
    quiet = [one.title for one in learned.near_zero(list(layers), lengths)]
    count = f'H is near zero in {len(quiet)} of {len(layers)} layers' + (f' ({", ".join(quiet)})' if quiet else '')
    return f'{count}: root mean square about the mean of each row below {learned.NEAR_ZERO} ({spreads}).'


def _tim(subject: Subject, seen: Mapping[str, Any]) -> list[Picture]:
    layers = learned.competition_weights(seen, subject.params)
    pictures = []
    for stack, (_, pieces) in ((ENCODER, subject.inputs), (DECODER, subject.targets)):
        own = _select(layers, stack)
        if not own:
            continue
        bits = ', '.join(f'{one.title}: {learned.entropy(one.array).mean():.2f}' for one in own)
        pictures += [
            Picture(
                f'tim-competition-{stack}',
                f'Competition of mechanisms, {stack}',
                'The colour shows the weight of each mechanism for each token; weights sum to 1 over mechanisms.',
                mechanisms.draw_patterns(own, pieces),
            ),
            Picture(
                f'tim-certainty-{stack}',
                f'How certain the competition is, {stack}',
                f'Mean entropy in bits, {bits}; {np.log2(len(own[0].array)):.2f} means no preference.',
                mechanisms.draw_certainty(own),
            ),
            Picture(
                f'tim-tokens-{stack}',
                f'Weights of single tokens, {stack}',
                'Least, mean and most over layers and occurrences; a wide bar depends on context or layer.',
                mechanisms.draw_ranges(mechanisms.token_ranges(own, pieces)),
            ),
        ]
    return pictures


def _gmlp(subject: Subject) -> list[Picture]:
    layers = learned.spatial_weights(subject.params, subject.lengths)
    pictures = []
    for stack in (ENCODER, DECODER):
        own = _select(layers, stack)
        if not own:
            continue
        leans = ', '.join(f'{one.title}: {filters.asymmetry(filters.middle_row(one)):+.2f}' for one in own)
        direction = '' if stack == DECODER else f' Share ahead minus share behind: {leans}.'
        note = f'W of the token in the middle, over the distance to it.{direction}'
        pictures.append(Picture(f'gmlp-filters-{stack}', f'Spatial filters, {stack}', note, filters.draw(own)))
        panels = [Panel(one.title, one.array) for one in chosen(own)]
        note = 'Magnitude of W at the trained length: rows are tokens written, columns tokens read.'
        pictures.append(Picture(f'gmlp-weights-{stack}', f'Spatial weights, {stack}', note, heat_maps.draw([panels])))
    return pictures


def _attention(subject: Subject, seen: Mapping[str, Any]) -> list[Picture]:
    layers = learned.attention_maps(seen, subject.params)
    text, written = subject.inputs[1], subject.targets[1]
    kinds = (
        ('attention-encoder', 'Self-attention, encoder', ENCODER, '', text, text),
        ('attention-decoder', 'Self-attention, decoder', DECODER, 'attention', written, written),
        ('attention-cross', 'Cross-attention', DECODER, 'cross', written, text),
    )
    pictures = []
    for name, title, stack, word, rows, columns in kinds:
        own = [one for one in _select(layers, stack, word) if ('cross' in one.sublayer) == (word == 'cross')]
        if own:
            panels = [Panel(one.title, one.array.mean(axis=0), rows, columns) for one in chosen(own)]
            note = 'Mean over heads; rows are tokens that read, columns tokens that are read.'
            pictures.append(Picture(name, title, note, heat_maps.draw([panels])))
    return pictures


def _pseudo(subject: Subject) -> list[Picture]:
    model, params = subject.model, subject.params
    (ids, text), (target_ids, written) = subject.inputs, subject.targets
    found = pseudo_attention.encoder_layers(model, params, ids)
    layers = chosen([LayerArray(ENCODER, number, '', array) for number, array in enumerate(found, 1)])
    panels = [Panel(one.title, one.array, text, text, beside_diagonal=True) for one in layers]
    whole = pseudo_attention.encoder(model, params, ids)
    panels.append(Panel('whole encoder', whole, text, text, beside_diagonal=True))
    cross = Panel('', pseudo_attention.decoder_to_text(model, params, ids, target_ids), written, text)
    note = 'Norm of the gradient of each output token (rows) with respect to each input token (columns)'
    return [
        Picture(
            'pseudo-attention-encoder',
            'Pseudo-attention, encoder',
            f'{note}; for a layer, of what it adds to its input. The scale is the largest value of different tokens.',
            heat_maps.draw([panels]),
        ),
        Picture('pseudo-attention-decoder', 'Pseudo-attention, decoder to text', f'{note}.', heat_maps.draw([[cross]])),
    ]
