"""Encoder-decoders of configs/models at the sizes of a study; at one size they have about equally many parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

from remixer_t5x.config import loading

# Of sizes/tiny.gin and sizes/mini.gin: each dimension over the width.
PROPORTIONS = {
    'MLP_DIM': 2,
    'WIDER_MLP_DIM': 2.65625,
    'REMIXER_DIM': 1,
    'HYPER_MIXER_DIM': 2,
    'HYPER_MIXER_MLP_DIM': 2.75,
    'MIXER_DIM': 1,
    'GMLP_DIM': 6.75,
}
HEADS = 4


def given(
    name: str,
    width: int,
    layers: int,
    lengths: Mapping[str, int],
    vocabulary: int,
    flags: Sequence[tuple[str, str]] = (),
    files: Sequence[str] = (),
) -> loading.Given:
    """What the model is read from.

    Args:
        name: a file of configs/models.
        layers: of the encoder, and of the decoder.
        lengths: the most tokens of 'inputs' and 'targets'.
        vocabulary: ids.
        flags, files: read after the model's own.
    """
    sizes: dict[str, Any] = {
        'EMBED_DIM': width,
        **{name: round(width * times) for name, times in PROPORTIONS.items()},
        'NUM_HEADS': HEADS,
        'HEAD_DIM': width // HEADS,
        'NUM_ENCODER_LAYERS': layers,
        'NUM_DECODER_LAYERS': layers,
        'MAX_INPUT_LENGTH': lengths['inputs'],
        'MAX_TARGET_LENGTH': lengths['targets'],
        'VOCAB_SIZE': vocabulary,
        'REMAT_POLICY': 'None',
    }
    own = [(macro, str(value)) for macro, value in sizes.items()]
    return loading.Given([f'models/{name}.gin', 'sizes/tiny.gin', *files], [*own, *flags])
