"""Compares models over seeds and examples: intervals, and sentences that state only what the intervals show."""

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import special

# Joint confidence of all intervals of one measure, if differences between seeds are normally distributed.
CONFIDENCE = 0.9
BOOTSTRAP_SAMPLES = 2000

# The value of one measure for each seed.
BySeed = Mapping[int, float]


@dataclasses.dataclass(frozen=True)
class Measure:
    """A measure by which models are compared, with its value by model and seed."""

    name: str
    models: Mapping[str, BySeed]
    higher_is_better: bool


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
            return f'{claim} (one seed: no interval)'
        return f'{claim} ({CONFIDENCE:.0%} interval {self.low:.4g} to {self.high:.4g}, {self.seeds} seeds)'


def joint_confidence(models: int) -> float:
    """Confidence of each interval by Bonferroni's correction, so that those of all pairs hold jointly."""
    return 1 - (1 - CONFIDENCE) / max(1, models * (models - 1) // 2)


def student_interval(
    gains: np.ndarray | Sequence[float], confidence: float = CONFIDENCE
) -> tuple[np.ndarray, np.ndarray]:
    """Computes Student's confidence interval of the mean: [..., seeds] -> (mean [...], half-width [...]).

    The half-width is infinite for one seed.
    """
    gains = np.asarray(gains, np.float64)
    seeds = gains.shape[-1]
    if seeds < 2:
        return gains.mean(-1), np.full(gains.shape[:-1], np.inf)
    quantile = special.stdtrit(seeds - 1, (1 + confidence) / 2)
    return gains.mean(-1), quantile * gains.std(-1, ddof=1) / seeds**0.5


def bootstrap_interval(
    gains: np.ndarray, confidence: float = CONFIDENCE, samples: int = BOOTSTRAP_SAMPLES
) -> tuple[float, float]:
    """Computes a percentile bootstrap interval of the mean of `gains`, [seeds, examples].

    Each sample draws seeds and examples independently with replacement, because the same examples are predicted with
    every seed (the pigeonhole bootstrap of Owen 2007).
    """
    rng = np.random.default_rng(0)
    seeds, examples = gains.shape
    means: list[np.ndarray] = []
    # Blocks limit memory to about 2 million numbers.
    for block in np.array_split(np.arange(samples), 1 + samples * examples // 2_000_000):
        weights = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=len(block)) / seeds
        drawn = rng.integers(examples, size=(len(block), examples))
        means.append(np.take_along_axis(weights @ gains, drawn, axis=1).mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def expected_best(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Expected maximum of k = 1, ..., n draws with replacement from n results, [n] (Dodge et al. 2019, equation 2).

    For sorted results v_1 <= ... <= v_n, it is sum_i v_i ((i/n)^k - ((i-1)/n)^k).
    """
    ordered, n = np.sort(values), len(values)
    k, rank = np.arange(1, n + 1)[:, None], np.arange(1, n + 1)
    return np.sum(ordered * ((rank / n) ** k - ((rank - 1) / n) ** k), axis=1)


def compare_models(models: Mapping[str, BySeed], higher_is_better: bool) -> list[Difference]:
    """Compares all pairs of models, seed by seed, with Student's intervals; skips pairs without a common seed.

    Runs with the same seed share the data order and held-out rows, whose effects cancel in the difference.
    """
    confidence, differences = joint_confidence(len(models)), []
    for first, second in itertools.combinations(models, 2):
        common = [seed for seed in models[first] if seed in models[second]]
        if not common:
            continue
        gains = [models[first][seed] - models[second][seed] for seed in common]
        mean, margin = map(float, student_interval(gains, confidence))
        if (mean < 0) == higher_is_better:
            first, second = second, first
        differences.append(Difference(first, second, abs(mean), abs(mean) - margin, abs(mean) + margin, len(common)))
    return differences


def conclusion(measure: Measure) -> str:
    """Compares the model with the best mean with each other model, in one line; empty without a common seed."""
    means = {name: statistics.fmean(by_seed.values()) for name, by_seed in measure.models.items()}
    best = (max if measure.higher_is_better else min)(means, key=means.__getitem__)
    pairs = [
        pair for pair in compare_models(measure.models, measure.higher_is_better) if best in (pair.model, pair.other)
    ]
    if not pairs:
        return ''
    if max(pair.seeds for pair in pairs) < 2:
        values = ', '.join(f'{name} {next(iter(by_seed.values())):.4g}' for name, by_seed in measure.models.items())
        return f'{measure.name}: {values} (one seed: no interval, and no difference shown).'
    return f'{measure.name}: {"; ".join(map(str, pairs))}.'
