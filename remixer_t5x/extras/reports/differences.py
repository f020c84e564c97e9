"""Compares models over seeds: differences with confidence intervals, and sentences that state only what they show."""

import dataclasses
import itertools
import statistics
from collections.abc import Mapping

# Joint confidence of all intervals of one measure, if differences between seeds are normally distributed.
CONFIDENCE = 0.9

# The value of one measure for each seed.
BySeed = Mapping[int, float]


@dataclasses.dataclass(frozen=True)
class Difference:
    """How much better the mean of `model` is than that of `other`, over their common seeds.

    Attributes:
        model: name of the model with the better mean.
        other: name of the other model.
        gain: mean over seeds of the improvement, at least 0.
        low: lower end of the confidence interval of the gain; -infinity for one seed.
        high: upper end; infinity for one seed.
        seeds: number of common seeds.
    """

    model: str
    other: str
    gain: float
    low: float
    high: float
    seeds: int

    @property
    def is_shown(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0

    def __str__(self) -> str:
        claim = f'{self.model} is better than {self.other} by {self.gain:.4g}'
        if not self.is_shown:
            claim = f'no difference shown between {self.model} and {self.other}'
        if self.seeds < 2:
            return f'{claim} (one common seed)'
        return f'{claim} ({CONFIDENCE:.0%} interval {self.low:.4g} to {self.high:.4g}, {self.seeds} seeds)'


def compare_models(models: Mapping[str, BySeed], higher_is_better: bool) -> list[Difference]:
    """Compares all pairs of models, seed by seed, with Student's intervals; skips pairs without a common seed.

    Runs with the same seed share the data order and held-out rows, whose effects cancel in the difference. With more
    than two models, Bonferroni's correction widens the intervals, so that they hold jointly.
    """
    pairs = list(itertools.combinations(models, 2))
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(pairs))
    differences = []
    for first, second in pairs:
        common = [seed for seed in models[first] if seed in models[second]]
        gains = [models[first][seed] - models[second][seed] for seed in common]
        if not gains:
            continue
        mean, margin = statistics.fmean(gains), float('inf')
        if len(gains) > 1:
            import scipy.stats

            quantile = float(scipy.stats.t.ppf((1 + confidence) / 2, len(gains) - 1))
            margin = quantile * statistics.stdev(gains) / len(gains) ** 0.5
        if (mean < 0) == higher_is_better:
            first, second = second, first
        gain = abs(mean)
        differences.append(Difference(first, second, gain, gain - margin, gain + margin, len(gains)))
    return differences


def conclusion(measure: str, models: Mapping[str, BySeed], higher_is_better: bool) -> str:
    """Compares the model with the best mean with each other model, in one line; empty without a common seed."""
    best = (max if higher_is_better else min)(models, key=lambda name: statistics.fmean(models[name].values()))
    pairs = [pair for pair in compare_models(models, higher_is_better) if best in (pair.model, pair.other)]
    if not pairs:
        return ''
    if max(pair.seeds for pair in pairs) < 2:
        values = ', '.join(f'{name} {next(iter(by_seed.values())):.4g}' for name, by_seed in models.items())
        return f'{measure}: {values}; one seed does not show a difference.'
    return f'{measure}: {"; ".join(map(str, pairs))}.'
