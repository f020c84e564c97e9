"""Sizes and costs that the papers print, to compare with ours. Numbers only, each with its place in the paper."""

import dataclasses

# What a paper counted: the whole encoder-decoder, or an encoder with its input embedding (BERT-like and classifiers).
WHOLE, ENCODER = 'whole model', 'encoder and embedding'


@dataclasses.dataclass(frozen=True)
class Figure:
    """A printed number of parameters.

    Attributes:
        model: gin file in models/ that describes the model.
        size: gin file in sizes/.
        parameters: as printed.
        part: what was counted, `WHOLE` or `ENCODER`.
        flops: FLOPs of a forward pass for 512 tokens as printed, a multiply and an add counted as two; None if not
            printed.
        source: paper and table.
    """

    model: str
    size: str
    parameters: float
    part: str
    source: str
    flops: float | None = None


FIGURES = (
    Figure('t5_1_1', 'base', 248e6, WHOLE, 'REMIXERS, table 1'),
    # The table calls this row T5.1.1, whose large size has 783M; the first T5's large has 738M.
    Figure('t5_1_0', 'large', 738e6, WHOLE, 'REMIXERS, table 4 (there T5.1.1)'),
    Figure('remixer_scaled', 'scaled_base', 224e6, WHOLE, 'REMIXERS, table 1'),
    Figure('remixer', 'base', 324e6, WHOLE, 'REMIXERS, table 1 (302M in table 4)'),
    Figure('mixer_enc', 'base', 212e6, WHOLE, 'REMIXERS, table 4'),
    Figure('mixer_enc_dec', 'base', 212e6, WHOLE, 'REMIXERS, table 4'),
    Figure('t5_1_1', 'hyper_mixer_paper', 11e6, ENCODER, 'HyperMixer, appendix B.2'),
    Figure('hyper_mixer', 'hyper_mixer_paper', 11e6, ENCODER, 'HyperMixer, appendix B.2'),
    Figure('gmlp', 'gmlp_paper_base', 130e6, ENCODER, 'gMLP, table 5', 158.0e9),
    Figure('gmlp', 'gmlp_paper_large', 365e6, ENCODER, 'gMLP, table 5', 430.1e9),
    Figure('amlp', 'gmlp_paper_base', 109e6, ENCODER, 'gMLP, table 5', 128.9e9),
    Figure('amlp', 'gmlp_paper_large', 316e6, ENCODER, 'gMLP, table 5', 370.3e9),
)
