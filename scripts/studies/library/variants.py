"""What the studies of a small task compare: T5.1.1 with another mixer, feed-forward or layout in its encoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from remixer_t5x.config import loading

SINUSOIDAL = ('ENCODER_POSITION_EMBEDDING', '@positions.SinusoidalPositions')
NO_BIAS = ('ENCODER_POSITION_BIAS', 'None')


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is other than in T5.1.1: gin files after the model's, and gin flags after them.

    `model` is a file of configs/models, and `proportions` are dimensions over the width.
    """

    files: tuple[str, ...] = ()
    flags: tuple[tuple[str, str], ...] = ()
    model: str = 't5_1_1'
    proportions: tuple[tuple[str, float], ...] = ()

    def __add__(self, other: Variant) -> Variant:
        files, flags = self.files + other.files, self.flags + other.flags
        return Variant(files, flags, self.model, self.proportions + other.proportions)


def flagged(**flags: str) -> Variant:
    return Variant(flags=tuple(flags.items()))


def mixer(file: str, name: str, *flags: tuple[str, str]) -> Variant:
    return Variant((f'{file}.gin',), (('ENCODER_MIXER', name), NO_BIAS, *flags))


# For the files of models that swap the decoder's mixer too.
ATTENTION_IN_DECODER = (
    ('DECODER_MIXER', '@attention.SelfAttention'),
    ('DECODER_POSITION_BIAS', '@positions.RelativePositionBias'),
    ('DECODER_POSITION_EMBEDDING', 'None'),
)


ATTENTION = Variant()
HYPER_MIXER = mixer('sublayers/hyper_mixer', '@encoder/hyper_mixer.HyperMixer')
REMIXER = Variant(('sublayers/remixer.gin',), (('ENCODER_FEED_FORWARD', '@encoder/remixer.Remixer'),))
VARIANTS: dict[str, Variant] = {
    'attention': ATTENTION,
    'hyper_mixer': HYPER_MIXER,
    'mlp_mixer': mixer('sublayers/mlp_mixer', '@mlp_mixer.MLPMixer'),
    'linear_attention': mixer(
        'models/linear_transformer', '@linear_attention.LinearAttention', SINUSOIDAL, *ATTENTION_IN_DECODER
    ),
    # In the layout of HyperMixer's FNet (appendix F), and in the layout of FNet's authors and of models/fnet.gin.
    'fnet': mixer('sublayers/fnet', '@fnet.FNet', SINUSOIDAL, ('ENCODER_LAYOUT', '@layer.Serialized')),
    'fnet, post-norm': mixer('sublayers/fnet', '@fnet.FNet', SINUSOIDAL, ('ENCODER_LAYOUT', '@layer.PostNorm')),
    'gmlp': mixer('models/gmlp_mixer', '@encoder/gmlp.GMLP', *ATTENTION_IN_DECODER),
    # Attention with Remixer in place of the feed-forward, as in REMIXERS, and its table 5.
    'remixer': REMIXER,
    'remixer, no composition': REMIXER + flagged(COMPOSITION='@remixer.NoComposition'),
    # Two readings of row (2): a gate that is alpha, and a gate between the composed and the mixed representations.
    'remixer, gated alpha': REMIXER + flagged(COMPOSITION='@remixer.GatedAlpha'),
    'remixer, gated composition': REMIXER + flagged(COMPOSITION='@remixer.GatedComposition'),
    # HyperMixer, table 5.
    'feature mixing only': mixer('sublayers/hyper_mixer', '@hyper_mixer.Identity'),
    'token mixing only': HYPER_MIXER + flagged(ENCODER_SUBLAYERS='(%ENCODER_MIXER,)'),
    'shared weight vector': HYPER_MIXER
    + flagged(GENERATED_WEIGHTS='@hyper_mixer.SharedWeightVector', TOKEN_INFORMATION='None', TIED='False'),
    'hyper_mixer, untied': HYPER_MIXER + flagged(TIED='False'),
}
# HyperMixer, table 6: five layouts of attention, and of HyperMixing without and with norms.
LAYOUTS = {
    'serialized': '@layer.Serialized',
    'post-norm': '@layer.PostNorm',
    'pre-norm': '@layer.PreNorm',
    'ReZero': '@layer.ReZero',
    'parallel': '@layer.Parallel',
}
NORMED = {
    'attention': ATTENTION,
    'HyperMixing, no norm': HYPER_MIXER + flagged(HYPER_MIXER_NORM='None'),
    'HyperMixing, length': HYPER_MIXER + flagged(HYPER_MIXER_NORM='None', LENGTH_SCALE='True'),
    'HyperMixing, layer norm': HYPER_MIXER,
}
VARIANTS |= {
    f'{norm}, {layout}': variant + flagged(ENCODER_LAYOUT=name)
    for norm, variant in NORMED.items()
    for layout, name in LAYOUTS.items()
}


def model_of(variant: Variant, width: int, layers: int, *, type_files: Sequence[str] = (), **macros: Any) -> Any:
    """The variant's model with 4 heads; every hidden size is twice the width, of GLU-like ones too.

    Args:
        layers: of the encoder; the decoder of an encoder-decoder has one.
        type_files: gin files that make another model type than an encoder-decoder.
        macros: the lengths, VOCAB_SIZE and others.
    """
    hidden = ('MLP_DIM', 'HYPER_MIXER_DIM', 'MIXER_DIM', 'REMIXER_DIM', 'GMLP_DIM')
    sizes = {
        'EMBED_DIM': width,
        **dict.fromkeys(hidden, 2 * width),
        'NUM_HEADS': 4,
        'HEAD_DIM': width // 4,
        'NUM_ENCODER_LAYERS': layers,
        'NUM_DECODER_LAYERS': 1,
        'REMAT_POLICY': 'None',
        **{name: round(width * times) for name, times in variant.proportions},
        **macros,
    }
    files = [f'models/{variant.model}.gin', 'sizes/tiny.gin', *variant.files, *type_files]
    flags = [*((name, str(value)) for name, value in sizes.items()), *variant.flags]
    (model,) = loading.values(loading.Given(files, flags), 'MODEL')
    return model
