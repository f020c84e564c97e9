"""Logits processors: constraints on the next token, with the names and semantics of Hugging Face's `generate`.

Logits of forbidden tokens are set to -inf. In beam search, processors modify log-probabilities, as in transformers.
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remixer_t5x import ranges
from remixer_t5x.errors import UserError

# Function (logits, tokens, step) -> modified logits [rows, vocab] float32; a row is a sample or a beam. `tokens` [rows,
# length] are the start token (id 0), the prompt of a decoder-only model and the generated tokens, left-padded with -1.
# `step` is the number of generated tokens.
LogitsProcessor = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def penalize_repetition(logits: jax.Array, tokens: jax.Array, step: jax.Array, *, penalty: float) -> jax.Array:
    """Divides positive logits of preceding tokens by `penalty`, and multiplies negative ones (Keskar et al. 2019)."""
    penalized = jnp.where(logits < 0, logits * penalty, logits / penalty)
    return jnp.where(_find_occurring_ids(tokens, tokens >= 0, logits.shape[-1]), penalized, logits)


def forbid_repeated_ngrams(logits: jax.Array, tokens: jax.Array, step: jax.Array, *, size: int) -> jax.Array:
    """Forbids tokens that would repeat an earlier n-gram of `size` tokens (Paulus et al. 2017)."""
    windows = tokens.shape[1] - size + 1
    if windows < 1:
        return logits
    repeats = tokens[:, :windows] >= 0
    for offset in range(size - 1):
        repeats &= tokens[:, offset : offset + windows] == tokens[:, windows + offset, None]
    return jnp.where(_find_occurring_ids(tokens[:, size - 1 :], repeats, logits.shape[-1]), -jnp.inf, logits)


def forbid_words(logits: jax.Array, tokens: jax.Array, step: jax.Array, *, words: Sequence[Sequence[int]]) -> jax.Array:
    """Forbids each token sequence in `words`: its last token is forbidden after its other tokens."""
    words = [word for word in words if len(word) <= tokens.shape[1] + 1]
    if not words:
        return logits
    _check_token_ids('BAD_WORDS_IDS', (token for word in words for token in word), logits.shape[-1])
    longest = max(len(word) - 1 for word in words)
    # Shorter words are padded with -1, which matches every token.
    starts: np.ndarray = np.asarray([[-1] * (longest + 1 - len(word)) + list(word[:-1]) for word in words], np.int32)
    recent = tokens[:, None, tokens.shape[1] - longest :]
    matches = jnp.all((recent == starts) | (starts < 0), axis=-1)
    last = jnp.broadcast_to(np.asarray([word[-1] for word in words], np.int32), matches.shape)
    return jnp.where(_find_occurring_ids(last, matches, logits.shape[-1]), -jnp.inf, logits)


def forbid_early_end(
    logits: jax.Array, tokens: jax.Array, step: jax.Array, *, min_new_tokens: int, eos_id: int
) -> jax.Array:
    """Forbids the end token until `min_new_tokens` tokens have been generated."""
    is_end = jnp.arange(logits.shape[-1]) == eos_id
    return jnp.where(is_end & (step < min_new_tokens), -jnp.inf, logits)


def force_prefix(logits: jax.Array, tokens: jax.Array, step: jax.Array, *, prefix: Sequence[int]) -> jax.Array:
    """Forces the first generated tokens to be `prefix`, even if their logits are -inf."""
    _check_token_ids('FORCED_PREFIX', prefix, logits.shape[-1])
    is_forced = jnp.arange(logits.shape[-1]) == jnp.asarray(prefix, jnp.int32)[jnp.minimum(step, len(prefix) - 1)]
    forced = jnp.where(is_forced, jnp.where(jnp.isneginf(logits), 0.0, logits), -jnp.inf)
    return jnp.where(step < len(prefix), forced, logits)


def _check_token_ids(setting: str, ids: Iterable[int], vocab: int) -> None:
    for token in ids:
        if not 0 <= token < vocab:
            raise UserError(f'{setting} must contain ids from 0 to {vocab - 1}, got {token}')


def _find_occurring_ids(tokens: jax.Array, is_counted: jax.Array, vocab: int) -> jax.Array:
    """Returns which token ids occur in each row of `tokens` where `is_counted` is True, [rows, vocab] bool."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    return jnp.zeros((tokens.shape[0], vocab), bool).at[rows, tokens].max(is_counted, mode='drop')


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LogitsOptions:
    """Options of all decoders, named as in Hugging Face's `GenerationConfig`.

    Attributes:
        no_repeat_ngram_size: size of n-grams that must not repeat, including those in prompts; 0 allows repetition.
        repetition_penalty: factor that reduces the logits of preceding tokens if above 1 and increases them if below 1.
        bad_words_ids: sequences of token ids that must not be generated.
        min_new_tokens: minimum number of tokens before the end token.
        forced_prefix: token ids with which every generated sequence begins.
        logits_processor: custom processors (`LogitsProcessor`), called after those of the other options.
    """

    no_repeat_ngram_size: ranges.NonNegativeInt = 0
    repetition_penalty: ranges.Positive = 1.0
    bad_words_ids: Sequence[Sequence[int]] = ()
    min_new_tokens: ranges.NonNegativeInt = 0
    forced_prefix: Sequence[int] = ()
    logits_processor: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        ranges.check_fields(self)
        for name in ('bad_words_ids', 'forced_prefix', 'logits_processor'):
            # Decoders must be hashable, because they are part of the cache keys of compiled functions.
            object.__setattr__(self, name, _to_nested_tuple(getattr(self, name)))
        if not all(word and _is_tuple_of_ids(word) for word in self.bad_words_ids):
            raise UserError(f'BAD_WORDS_IDS must be lists of ids, such as [[5, 6], [7]], got {self.bad_words_ids}')
        if not _is_tuple_of_ids(self.forced_prefix):
            raise UserError(f'FORCED_PREFIX must be a list of ids, such as [5, 6], got {self.forced_prefix}')
        if not isinstance(self.logits_processor, tuple) or not all(map(callable, self.logits_processor)):
            raise UserError(
                f'LOGITS_PROCESSOR must be a list of functions, got {self.logits_processor}; put functions in '
                'brackets, as in logits_processor=[function]'
            )

    def __repr__(self) -> str:
        shared = {field.name: field.default for field in dataclasses.fields(LogitsOptions)}
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        shown = [f'{name}={value!r}' for name, value in values.items() if name not in shared or value != shared[name]]
        return f'{type(self).__name__}({", ".join(shown)})'

    def build_processors(self, eos_id: int) -> list[LogitsProcessor]:
        """Returns the processors of all options that are set, in the order used by transformers."""
        processors: list[LogitsProcessor] = []
        if self.repetition_penalty != 1:
            processors.append(functools.partial(penalize_repetition, penalty=self.repetition_penalty))
        if self.no_repeat_ngram_size:
            processors.append(functools.partial(forbid_repeated_ngrams, size=self.no_repeat_ngram_size))
        if words := [word for word in self.bad_words_ids if tuple(word) != (eos_id,)]:
            processors.append(functools.partial(forbid_words, words=words))
        if self.min_new_tokens:
            processors.append(functools.partial(forbid_early_end, min_new_tokens=self.min_new_tokens, eos_id=eos_id))
        if self.forced_prefix:
            processors.append(functools.partial(force_prefix, prefix=self.forced_prefix))
        return [*processors, *self.logits_processor]


def _is_tuple_of_ids(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(token, numbers.Integral) for token in value)


def _to_nested_tuple(value: Any) -> Any:
    return tuple(map(_to_nested_tuple, value)) if isinstance(value, list | tuple) else value
