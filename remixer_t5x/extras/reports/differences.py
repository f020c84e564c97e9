"""Compares models over seeds with confidence intervals, and describes significant differences."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import special

# Joint confidence level of all intervals for a measure, assuming normally distributed differences between seeds.
CONFIDENCE = 0.9

# Value of a metric for each seed.
ValueBySeed = Mapping[int, float]


@dataclasses.dataclass(frozen=True)
class ComparedMeasure:
    """A measure for comparing models, and its value for each model and seed."""

    name: str
    models: Mapping[str, ValueBySeed]
    higher_is_better: bool


@dataclasses.dataclass(frozen=True)
class ModelDifference:
    """The difference between the means of `model` and `other` over their common seeds.

    Attributes:
        model: name of the model with the better mean.
        other: name of the other model.
        gain: mean improvement over seeds, at least 0.
        low: lower end of the confidence interval of `gain`; -infinity if there is none (see `t_interval`).
        high: upper end of the confidence interval; infinity if there is none.
        seeds: number of common seeds.
    """

    model: str
    other: str
    gain: float
    low: float
    high: float
    seeds: int

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0

    def __str__(self) -> str:
        claim = f'{self.model} is better than {self.other} by {self.gain:.4g}'
        if not self.is_significant:
            claim = f'no difference shown between {self.model} and {self.other}'
        if self.seeds < 2:
            return f'{claim} (one seed: no interval)'
        if self.high == math.inf:
            return f'{claim} (the same difference, {self.gain:.4g}, for all {self.seeds} seeds: no interval)'
        return f'{claim} ({CONFIDENCE:.0%} interval {self.low:.4g} to {self.high:.4g}, {self.seeds} seeds)'


def bonferroni_confidence(models: int) -> float:
    """Returns the confidence level of each interval, with Bonferroni's correction for all pairs of models."""
    return 1 - (1 - CONFIDENCE) / max(1, models * (models - 1) // 2)


def t_interval(gains: np.ndarray | Sequence[float], confidence: float = CONFIDENCE) -> tuple[np.ndarray, np.ndarray]:
    """Computes Student's t confidence interval of the mean: [..., seeds] -> (mean [...], half-width [...]).

    The half-width is infinite for one seed, and if all gains are equal up to rounding. Equal gains occur by chance if a
    metric has few possible values, such as an accuracy on few examples; they do not show how much the gain varies.
    """
    gains = np.asarray(gains, np.float64)
    seeds = gains.shape[-1]
    if seeds < 2:
        return gains.mean(-1), np.full(gains.shape[:-1], np.inf)
    quantile = special.stdtrit(seeds - 1, (1 + confidence) / 2)
    half_width = quantile * gains.std(-1, ddof=1) / seeds**0.5
    are_equal = np.ptp(gains, -1) <= 1e-9 * np.abs(gains).max(-1)
    return gains.mean(-1), np.where(are_equal, np.inf, half_width)


def expected_maximum(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Computes the expected maximum of k draws with replacement, for k = 1, ..., n (Dodge et al. 2019, equation 2)."""
    ordered, n = np.sort(values), len(values)
    k, rank = np.arange(1, n + 1)[:, None], np.arange(1, n + 1)
    return np.sum(ordered * ((rank / n) ** k - ((rank - 1) / n) ** k), axis=1)


def compare_models(models: Mapping[str, ValueBySeed], higher_is_better: bool) -> list[ModelDifference]:
    """Compares all pairs of models with paired t intervals over seeds; skips pairs of models without a common seed.

    Runs with the same seed share the data order and held-out rows, whose effects cancel in the difference.
    """
    confidence, differences = bonferroni_confidence(len(models)), []
    for first, second in itertools.combinations(models, 2):
        common = [seed for seed in models[first] if seed in models[second]]
        if not common:
            continue
        gains = [models[first][seed] - models[second][seed] for seed in common]
        mean, margin = map(float, t_interval(gains, confidence))
        if (mean < 0) == higher_is_better:
            first, second = second, first
        differences.append(
            ModelDifference(first, second, abs(mean), abs(mean) - margin, abs(mean) + margin, len(common))
        )
    return differences


def describe_differences(measure: ComparedMeasure) -> str:
    """Describes the differences between the best model and all other models; empty if no models share a seed.

    If some models have several seeds, the best model is chosen among them: a model with a single seed, for example
    because its other runs failed, has no interval for any difference.
    """
    means = {name: statistics.fmean(by_seed.values()) for name, by_seed in measure.models.items()}
    candidates = [name for name, by_seed in measure.models.items() if len(by_seed) > 1] or means
    best = (max if measure.higher_is_better else min)(candidates, key=means.__getitem__)
    pairs = [
        pair for pair in compare_models(measure.models, measure.higher_is_better) if best in (pair.model, pair.other)
    ]
    if not pairs:
        return ''
    if max(pair.seeds for pair in pairs) < 2:
        values = ', '.join(f'{name} {mean:.4g}' for name, mean in means.items())
        return f'{measure.name}: {values} (one seed: no interval, and no difference shown).'
    return f'{measure.name}: {"; ".join(map(str, pairs))}.'
