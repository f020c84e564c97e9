"""Defines the denoisers of UL2 (Tay et al. 2023, arXiv:2205.05131, section 3.1.2 and table 1) and of UL2R.

R (regular) is span corruption as in T5. X (extreme) hides long spans (64 tokens), many tokens (50%), or both. S
(sequential) is a prefix LM whose targets are 25% of a segment on average. A prompt before the inputs identifies the
denoiser: [R], [X], [S] in the paper, and [NLU], [NLG], [S2S] in UL2's checkpoints. UL2R (Tay et al. 2022,
arXiv:2210.11399, section 3) continues training from another checkpoint.

As in t5, the number of spans is computed from the mean length (the paper draws lengths around the mean). Segments are
as long as the feature lengths and the number of sentinels allow; the paper's code also uses ordinary pieces as
sentinels.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from remixer_t5x.errors import UserError
from remixer_tasks.objectives.language_modeling import Prefix
from remixer_tasks.objectives.span_corruption import Noise

REGULAR, EXTREME, SEQUENTIAL = 'r', 'x', 's'
PROMPTS = {REGULAR: '[NLU]', EXTREME: '[NLG]', SEQUENTIAL: '[S2S]'}


@dataclasses.dataclass(frozen=True)
class Denoiser:
    """A denoiser of the UL2 mixture.

    Attributes:
        kind: 'r', 'x' or 's'.
        settings: the settings of span corruption, or of the prefix LM for 's'.
        rate: sampling rate relative to the other denoisers.
    """

    kind: str
    settings: Noise | Prefix
    rate: float = 1.0

    @property
    def name(self) -> str:
        """The denoiser's name in tasks, metrics and files, such as r_span3_rate15."""
        density = f'rate{100 * self.settings.density:g}'.replace('.', '_')
        span = '' if isinstance(self.settings, Prefix) else f'span{self.settings.mean_span:g}_'.replace('.', '_')
        return f'{self.kind}_{span}{density}'


UL2_DENOISERS = (
    Denoiser(REGULAR, Noise(0.15, 3)),
    Denoiser(REGULAR, Noise(0.15, 8)),
    Denoiser(SEQUENTIAL, Prefix(0.25, join_documents=True)),
    Denoiser(EXTREME, Noise(0.5, 3)),
    Denoiser(EXTREME, Noise(0.5, 8)),
    Denoiser(EXTREME, Noise(0.15, 64)),
    Denoiser(EXTREME, Noise(0.5, 64)),
)
UL2R = (
    Denoiser(SEQUENTIAL, Prefix(0.25, join_documents=True), 0.5),
    Denoiser(REGULAR, Noise(0.15, 3), 0.25),
    Denoiser(EXTREME, Noise(0.15, 32), 0.125),
    Denoiser(EXTREME, Noise(0.5, 3), 0.125),
)


def denoisers(rows: Any = None) -> tuple[Denoiser, ...]:
    """Returns UL2's denoisers for None or 'ul2', UL2R's for 'ul2r', or one for each (kind, mean span, density, rate).

    For kind 's', the mean span is None, as in [('r', 3, 0.15, 1), ('s', None, 0.25, 1)]. Invalid rows raise UserError.
    """
    if rows is None or rows == 'ul2':
        return UL2_DENOISERS
    if rows == 'ul2r':
        return UL2R
    hint = "use 'ul2', 'ul2r', or rows such as ('r', 3, 0.15, 1.0) and ('s', None, 0.25, 1.0)"
    try:
        chosen = tuple(_parse_denoiser(*row) for row in rows)
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f'DENOISERS must be a sequence of rows, one per denoiser, got {rows!r}; {hint}') from error
    if not chosen or len({denoiser.name for denoiser in chosen}) < len(chosen):
        raise UserError(f'DENOISERS must have one or more different denoisers, got {rows!r}; {hint}')
    return chosen


def _parse_denoiser(kind: str, span: float | None, share: float, rate: float) -> Denoiser:
    if kind not in PROMPTS or (kind == SEQUENTIAL) != (span is None) or not rate > 0:
        raise ValueError(kind)
    settings = Prefix(share, join_documents=True) if span is None else Noise(share, span)
    return Denoiser(kind, settings, float(rate))
