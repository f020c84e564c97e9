"""Implements T5's span corruption (Raffel et al. 2020) and UL2's denoisers as tf.data transformations.

Span corruption (section 3.1.4; t5's `span_corruption`): documents are joined without a separator and split into
segments. In each segment, random spans are selected that are 3 tokens long on average and contain 15% of the
tokens in total; each span is replaced by a sentinel. The targets are the hidden spans, each preceded by its sentinel:

    text     Thank you for inviting me to your party last week
    inputs   Thank you <X> me to your party <Y> week </s>
    targets  <X> for inviting <Y> last </s>

Differences from T5:
- Documents are joined across the whole stream, so only the last example of the stream is shorter. T5 creates a shorter
  example at the end of every group of documents, and uses only a part of a document with more than 65,536 tokens.
- Targets that do not fit the feature length raise an error; T5 truncates such targets.

Defines the denoisers of UL2 (Tay et al. 2023, arXiv:2205.05131, section 3.1.2 and table 1) and of UL2R.

R (regular) is span corruption as in T5. X (extreme) hides long spans (64 tokens), many tokens (50%), or both. S
(sequential) is a prefix LM whose targets are 25% of a segment on average. A prompt before the inputs identifies the
denoiser: [R], [X], [S] in the paper, and [NLU], [NLG], [S2S] in UL2's checkpoints. UL2R (Tay et al. 2022,
arXiv:2210.11399, section 3) continues training from another checkpoint.

As in t5, the number of spans is computed from the mean length (the paper draws lengths around the mean). Segments are
as long as the feature lengths and the number of sentinels allow; the paper's code also uses ordinary pieces as
sentinels.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from remixer_t5x import base_vocabulary, ranges
from remixer_t5x.errors import UserError
from remixer_t5x.lazy_imports import seqio, tf
from remixer_tasks import language_modeling
from remixer_tasks.language_modeling import PrefixSettings

REGULAR, EXTREME, SEQUENTIAL = 'r', 'x', 's'
PROMPTS = {REGULAR: '[NLU]', EXTREME: '[NLG]', SEQUENTIAL: '[S2S]'}


@dataclasses.dataclass(frozen=True)
class NoiseSettings:
    """Settings of span corruption.

    Attributes:
        density: fraction of the tokens in a segment that are hidden, between 0 and 1.
        mean_span: mean length of a hidden span in tokens; values below 1 act as 1.
    """

    density: ranges.OpenFraction = 0.15
    mean_span: ranges.Positive = 3.0

    def __post_init__(self):
        ranges.check_fields(self, density='noise_density', mean_span='mean_noise_span_length')

    def count_hidden_tokens_and_spans(self, length: int) -> tuple[int, int]:
        """Returns how many tokens and how many spans are hidden in a segment; (0, 0) if `length` is below 2 tokens."""
        if length < 2:
            return 0, 0
        hidden = min(max(round(length * self.density), 1), length - 1)
        spans = max(round(hidden / self.mean_span), 1)
        return hidden, min(spans, hidden, length - hidden)

    def compute_feature_lengths(self, length: int) -> tuple[int, int]:
        """Returns the lengths of the inputs and of the targets, with EOS, for a segment of `length` tokens."""
        hidden, spans = self.count_hidden_tokens_and_spans(length)
        return length - hidden + spans + 1, hidden + spans + 1


def find_longest_segment(inputs_length: int, targets_length: float, noise: NoiseSettings, sentinels: float) -> int:
    """Returns the maximum number of tokens in a segment, limited by the lengths of features and the sentinels.

    T5's inputs of 512 tokens allow segments of 568 tokens, whose targets have 114 tokens. Raises UserError if the
    result is less than 2.
    """
    if sentinels < 1:
        raise UserError(
            'span corruption needs sentinels, but the vocabulary has none; use a SentencePiece or byte vocabulary with '
            'extra_ids = 100'
        )

    def segment_fits(length: int) -> bool:
        inputs, targets = noise.compute_feature_lengths(length)
        return (
            inputs <= inputs_length
            and targets <= targets_length
            and noise.count_hidden_tokens_and_spans(length)[1] <= sentinels
        )

    # Longer segments never have shorter inputs or targets.
    length = 1 + bisect.bisect_left(range(2, 2**40), True, key=lambda length: not segment_fits(length))
    if length < 2:
        raise UserError(
            f'TASK_FEATURE_LENGTHS is too short for spans of {noise.mean_span:g} tokens, got {inputs_length} and '
            f"{targets_length}: set {{'inputs': 512, 'targets': 512}}"
        )
    return length


def _divide_randomly(items: tf.Tensor, parts: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
    """Randomly divides `items` items into `parts` non-empty parts; returns their lengths as a [parts] int32 vector.

    `scores` contains [items - 1] independent uniform numbers, one for each possible split point.
    """
    cuts = tf.sort(tf.argsort(scores)[: parts - 1]) + 1
    bounds = tf.concat([[0], cuts, [items]], 0)
    return bounds[1:] - bounds[:-1]


def draw_noise_mask(length: tf.Tensor, hidden: tf.Tensor, spans: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Samples a [length] bool mask with `spans` spans, which contain `hidden` tokens in total.

    The first token is never hidden. Requires 1 <= spans <= min(hidden, length - hidden). `seed` has [2] integers.
    """
    visible = length - hidden
    scores = tf.random.stateless_uniform([length - 2], seed)
    visible_lengths = _divide_randomly(visible, spans, scores[: visible - 1])
    hidden_lengths = _divide_randomly(hidden, spans, scores[visible - 1 :])
    lengths = tf.reshape(tf.stack([visible_lengths, hidden_lengths], 1), [-1])
    return tf.repeat(tf.range(2 * spans) % 2 == 1, lengths)


def corrupt_spans(tokens: tf.Tensor, mask: tf.Tensor, vocabulary: seqio.Vocabulary) -> dict[str, tf.Tensor]:
    """Builds inputs and targets, int32 ids with EOS, from a segment [n] and its noise mask [n].

    mask[0] is False, so every span follows a visible token. In the targets, the span's sentinel replaces this token.
    """
    first, _ = base_vocabulary.find_sentinel_range(vocabulary)
    # True for the first token of each span, and for the token directly before each span.
    starts = mask & ~tf.concat([[False], mask[:-1]], 0)
    before = ~mask & tf.concat([mask[1:], [False]], 0)
    corrupted = {}
    for name, replaced, is_kept in (('inputs', starts, starts | ~mask), ('targets', before, before | mask)):
        marked = tf.where(replaced, first + 1 - tf.cumsum(tf.cast(replaced, tf.int32)), tokens)
        corrupted[name] = tf.concat([tf.boolean_mask(marked, is_kept), [vocabulary.eos_id]], 0)
    return corrupted


def span_corruption(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int],
    output_features: Mapping[str, seqio.Feature],
    noise: NoiseSettings = NoiseSettings(),  # noqa: B008 (frozen)
    prompt: str | None = None,
) -> tf.data.Dataset:
    """seqio preprocessor that converts documents {'targets': [n] int32 ids} to {'inputs', 'targets'} with EOS.

    All examples have the lengths `noise.compute_feature_lengths(find_longest_segment(...))`, except the last one of a
    finite dataset. The inputs are full: if the targets or the sentinels do not suffice for full inputs, UserError is
    raised. If a `prompt` is prepended to the inputs, as in UL2, segments are shorter instead, because denoisers with
    different noise share the feature lengths. The hidden spans depend only on seqio's map seed and the position of the
    example in the stream.
    """
    vocabulary = output_features['targets'].vocabulary
    front = vocabulary.encode(prompt) if prompt else []
    inputs_length, targets_length = sequence_length['inputs'] - len(front), sequence_length['targets']
    count = base_vocabulary.find_sentinel_range(vocabulary)[1]
    length = find_longest_segment(inputs_length, targets_length, noise, count)
    full_length = find_longest_segment(inputs_length, math.inf, noise, math.inf)
    if prompt is None and length < full_length:
        needed = noise.compute_feature_lengths(full_length)[1]
        spans = noise.count_hidden_tokens_and_spans(full_length)[1]
        raise UserError(
            f'span corruption of {inputs_length} input tokens needs {needed} target tokens and {spans} sentinels, got '
            f"{targets_length} and {count}; use {{'inputs': {inputs_length}, 'targets': {needed}}} as "
            f'TASK_FEATURE_LENGTHS, set the extra_ids of the vocabulary to {spans}, or use a lower NOISE_DENSITY or a '
            'longer MEAN_NOISE_SPAN_LENGTH'
        )
    counts = [noise.count_hidden_tokens_and_spans(size) for size in range(length + 1)]

    @seqio.map_over_dataset(num_seeds=1)
    def corrupt_segment(tokens, seed):
        size = tf.size(tokens)
        hidden, spans = tf.unstack(tf.constant(counts)[size])
        mask = tf.cond(spans > 0, lambda: draw_noise_mask(size, hidden, spans, seed), lambda: tf.zeros([size], tf.bool))
        example = corrupt_spans(tokens, mask, vocabulary)
        return {**example, 'inputs': tf.concat([front, example['inputs']], 0)} if front else example

    return corrupt_segment(
        language_modeling.join_and_split_documents(language_modeling.extract_tokens(dataset), length)
    )


@dataclasses.dataclass(frozen=True)
class Denoiser:
    """A denoiser of the UL2 mixture.

    Attributes:
        kind: 'r', 'x' or 's'.
        settings: the settings of span corruption, or of the prefix LM for 's'.
        rate: sampling rate relative to the other denoisers.
    """

    kind: str
    settings: NoiseSettings | PrefixSettings
    rate: float = 1.0

    @property
    def name(self) -> str:
        """The denoiser's name in tasks, metrics and files, such as r_span3_rate15."""
        density = f'rate{100 * self.settings.density:g}'.replace('.', '_')
        span = (
            '' if isinstance(self.settings, PrefixSettings) else f'span{self.settings.mean_span:g}_'.replace('.', '_')
        )
        return f'{self.kind}_{span}{density}'


UL2_DENOISERS = (
    Denoiser(REGULAR, NoiseSettings(0.15, 3)),
    Denoiser(REGULAR, NoiseSettings(0.15, 8)),
    Denoiser(SEQUENTIAL, PrefixSettings(0.25, join_documents=True)),
    Denoiser(EXTREME, NoiseSettings(0.5, 3)),
    Denoiser(EXTREME, NoiseSettings(0.5, 8)),
    Denoiser(EXTREME, NoiseSettings(0.15, 64)),
    Denoiser(EXTREME, NoiseSettings(0.5, 64)),
)
UL2R = (
    Denoiser(SEQUENTIAL, PrefixSettings(0.25, join_documents=True), 0.5),
    Denoiser(REGULAR, NoiseSettings(0.15, 3), 0.25),
    Denoiser(EXTREME, NoiseSettings(0.15, 32), 0.125),
    Denoiser(EXTREME, NoiseSettings(0.5, 3), 0.125),
)


def build_denoisers(rows: Any = None) -> tuple[Denoiser, ...]:
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
        raise UserError(f'DENOISERS must contain one or more distinct denoisers, got {rows!r}; {hint}')
    return chosen


def _parse_denoiser(kind: str, span: float | None, share: float, rate: float) -> Denoiser:
    if kind not in PROMPTS or (kind == SEQUENTIAL) != (span is None) or not rate > 0:
        raise ValueError(kind)
    settings = PrefixSettings(share, join_documents=True) if span is None else NoiseSettings(share, span)
    return Denoiser(kind, settings, float(rate))
