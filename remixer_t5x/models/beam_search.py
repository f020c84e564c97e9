"""Beam search, which extends the most likely partial sequences (live beams) at each step.

Each step extends the live beams by every token and selects the best 2 * beams candidates. A candidate with an end token
joins the finished sequences if it is among the best `beams` candidates; the best `beams` other candidates become the
next live beams. At the last position, every candidate is finished. The results equal those of Hugging Face's
`generate`. In T5X, any of the 2 * beams candidates can finish, and the penalty is `BrevityPenalty`.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from remixer_t5x import ranges
from remixer_t5x.kernels.compile_target import targets_single_cpu
from remixer_t5x.models.decoding import Cache, DecodingResult, GenerationInputs, select_top_values
from remixer_t5x.models.logits_processors import LogitsOptions

# Maps the length of a sequence, including its end token, to the positive divisor of its score.
LengthPenalty = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class PowerPenalty:
    """Hugging Face's length penalty, `length ** alpha`; 1 compares mean log-probabilities, and 0 compares sums."""

    alpha: float = 1.0

    def __call__(self, length: jax.Array) -> jax.Array:
        return jnp.asarray(length, jnp.float32) ** self.alpha


@dataclasses.dataclass(frozen=True)
class BrevityPenalty:
    """T5X's length penalty, `((5 + length) / 6) ** alpha` (Wu et al. 2016)."""

    alpha: float = 0.6

    def __call__(self, length: jax.Array) -> jax.Array:
        return ((5.0 + jnp.asarray(length, jnp.float32)) / 6.0) ** self.alpha


def continue_until_settled(
    live: jax.Array, finished: jax.Array, length: jax.Array, max_length: int, penalty: LengthPenalty
) -> jax.Array:
    """Continues the search until no live beam can beat the worst finished sequence at any length, as in T5X.

    Equivalent to Hugging Face's `early_stopping='never'`; the penalty must be monotone in length. `live` [batch] is the
    sum of log-probabilities of the best live beam, and `finished` [batch] the worst score of the finished sequences, or
    -inf if fewer than `beams` sequences are finished. Returns [batch] bool, whether to continue.
    """
    return jnp.maximum(live / penalty(max_length), live / penalty(length)) > finished


def continue_until_unlikely(
    live: jax.Array, finished: jax.Array, length: jax.Array, max_length: int, penalty: LengthPenalty
) -> jax.Array:
    """Continues the search until no live beam scores better at its current length than the worst finished sequence.

    This is Hugging Face's default. Unlike with `continue_until_settled`, the search can miss beams whose score would
    still increase.
    """
    return live / penalty(length) > finished


def continue_until_enough_finished(
    live: jax.Array, finished: jax.Array, length: jax.Array, max_length: int, penalty: LengthPenalty
) -> jax.Array:
    """Continues the search until `beams` sequences are finished, as with Hugging Face's `early_stopping=True`."""
    return jnp.isneginf(finished)


class _Beams(NamedTuple):
    """Token sequences [batch, n, length] and their scores [batch, n]; unused slots have the score -inf."""

    tokens: jax.Array
    scores: jax.Array


class _SearchState(NamedTuple):
    index: jax.Array  # int32 scalar, index of the token to generate
    live: _Beams  # live beams, unsorted; scores are sums of log-probabilities
    finished: _Beams  # finished sequences, best first; scores are divided by the length penalty
    is_open: jax.Array  # [batch], whether the search continues
    cache: Cache
    stop_states: jax.Array | None  # [batch, beams], states of the stop-string automaton


@dataclasses.dataclass(frozen=True, repr=False)
class BeamSearch(LogitsOptions):
    """Decoder that returns the best `beams` sequences, best first.

    If the search finds fewer sequences, the remaining slots contain no tokens and have the score -inf.

    Attributes:
        beams: number of live beams and of returned sequences.
        length_penalty: maps the length of a finished sequence to the divisor of its score: `PowerPenalty(alpha)` or
            `BrevityPenalty(alpha)`.
        stop: the stopping rule: `continue_until_settled`, `continue_until_unlikely` or
            `continue_until_enough_finished`.
    """

    beams: ranges.Count = 4
    length_penalty: LengthPenalty = PowerPenalty()
    stop: Callable[..., jax.Array] = continue_until_settled
    is_deterministic: ClassVar[bool] = True

    def __call__(self, generation: GenerationInputs, rng: jax.Array | None = None) -> DecodingResult:
        cache = generation.allocate(self.beams)
        # A leaf of the cache has rows for each beam if its shape depends on the number of beams.
        larger = jax.eval_shape(lambda: generation.allocate(2 * self.beams))
        pairs = zip(jax.tree.leaves(cache), jax.tree.leaves(larger), strict=True)
        beam_leaves = [leaf.shape != other.shape for leaf, other in pairs]

        def should_continue(state: _SearchState) -> jax.Array:
            return (state.index < generation.max_length) & jnp.any(state.is_open)

        def run_search_step(state: _SearchState) -> _SearchState:
            return self._extend_beams(generation, beam_leaves, state)

        state = jax.lax.while_loop(should_continue, run_search_step, self._create_initial_state(generation, cache))
        tokens, scores = state.finished
        return DecodingResult(jnp.where(jnp.isneginf(scores)[..., None], 0, tokens), scores)

    def _create_initial_state(self, generation: GenerationInputs, cache: Cache) -> _SearchState:
        batch = generation.batch
        tokens = jnp.zeros((batch, self.beams, generation.max_length), jnp.int32)
        no_scores = jnp.full((batch, self.beams), -jnp.inf, jnp.float32)
        # All beams are identical at first, so only the first beam has a finite score and is extended.
        live = _Beams(tokens, no_scores.at[:, 0].set(0.0))
        states = generation.compute_first_stop_states(self.beams)
        states = None if states is None else states.reshape(batch, self.beams)
        is_open = jnp.ones((batch,), bool)
        return _SearchState(jnp.zeros((), jnp.int32), live, _Beams(tokens, no_scores), is_open, cache, states)

    def _extend_beams(self, generation: GenerationInputs, beam_leaves: list[bool], state: _SearchState) -> _SearchState:
        index, live, finished, is_open, cache, stop_states = state
        # At the first step, index - 1 is -1 and selects a meaningless token, which is replaced by `first` below.
        previous = live.tokens[:, :, index - 1].reshape(-1)
        first = 0 if generation.last is None else generation.make_first_tokens(self.beams)
        logits, cache = generation.step(jnp.where(index == 0, first, previous), cache)
        processors = self.build_processors(generation.eos_id)
        if processors:
            generated = live.tokens.reshape(-1, generation.max_length)
            logits = generation.process_logits(processors, jax.nn.log_softmax(logits), generated, index)
        scores, parents, last = _select_best_extensions(live.scores, logits, 2 * self.beams, normalize=not processors)
        tokens = _gather_beams(live.tokens, parents)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, last[..., None], index, axis=2)
        length = index + 1
        ends = (last == generation.eos_id) | (length == generation.max_length)
        if generation.stop_strings is not None:
            parent_states = _gather_beams(stop_states, parents)
            candidate_states, is_complete = generation.stop_strings.advance_states(parent_states, last)
            ends |= is_complete

        may_end = ends & (jnp.arange(ends.shape[1]) < self.beams) & is_open[:, None]
        ended = _Beams(tokens, jnp.where(may_end, scores / self.length_penalty(length), -jnp.inf))
        # If scores are equal, sequences that finished earlier come first.
        finished = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), finished, ended)
        finished_scores, order = select_top_values(finished.scores, self.beams)
        finished = _Beams(_gather_beams(finished.tokens, order), finished_scores)

        live_scores = jnp.where(ends, -jnp.inf, scores)
        _, chosen = select_top_values(live_scores, self.beams)
        chosen, parents = _assign_parent_slots(chosen, _gather_beams(parents, chosen))
        live = _Beams(_gather_beams(tokens, chosen), _gather_beams(live_scores, chosen))
        stop_states = None if stop_states is None else _gather_beams(candidate_states, chosen)
        cache = _reorder_cache(cache, beam_leaves, parents)
        best_live, worst_finished = jnp.max(live.scores, axis=1), finished.scores[:, -1]
        can_improve = self.stop(best_live, worst_finished, length, generation.max_length, self.length_penalty)
        return _SearchState(
            length, live, finished, is_open & can_improve & ~jnp.isneginf(best_live), cache, stop_states
        )


def _gather_beams(array: jax.Array, index: jax.Array) -> jax.Array:
    """Gathers entries `index` [batch, m] along the second axis of an array [batch, n, ...]; returns [batch, m, ...]."""
    return jax.vmap(lambda row, index: row.at[index].get(mode='promise_in_bounds'))(array, index)


def _select_best_extensions(
    scores: jax.Array, logits: jax.Array, count: int, normalize: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the `count` best extensions of all beams, given beam scores [batch, beams] and logits [rows, vocab].

    Selects the best extensions of each beam first. Set `normalize` to False if `logits` are log-probabilities. Returns
    the scores, the index of the extended beam and the added token of each extension, [batch, count], best first.
    """
    batch, beams = scores.shape
    largest, tokens = (x.reshape(batch, beams, -1) for x in select_top_values(logits, min(count, logits.shape[-1])))
    log_total = jax.nn.logsumexp(logits, axis=-1).reshape(batch, beams, 1) if normalize else 0.0
    extended = scores[..., None] + (largest - log_total)
    best, index = select_top_values(extended.reshape(batch, -1), count)
    return best, index // extended.shape[-1], jnp.take_along_axis(tokens.reshape(batch, -1), index, axis=1)


def _assign_parent_slots(chosen: jax.Array, parents: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Assigns new beams to the slots of their parents if possible, to reduce the number of cache rows to copy.

    The first child of each parent is assigned to the parent's slot; other children are assigned to the slots of beams
    without children. Returns the candidates `chosen` [batch, beams] and the slots of their `parents`, sorted by slot.
    """
    beams = parents.shape[1]
    is_parent = jnp.any(parents[:, :, None] == jnp.arange(beams), axis=1)
    has_earlier_sibling = jnp.any(jnp.tril(parents[:, :, None] == parents[:, None, :], -1), axis=2)
    free = jnp.argsort(is_parent, axis=1, stable=True)
    slots = jnp.where(has_earlier_sibling, _gather_beams(free, jnp.cumsum(has_earlier_sibling, axis=1) - 1), parents)
    order = jnp.argsort(slots, axis=1)
    return _gather_beams(chosen, order), _gather_beams(parents, order)


def _reorder_cache(cache: Cache, beam_leaves: list[bool], parents: jax.Array) -> Cache:
    """Copies the cache rows of beam `parents[:, i]` to beam i of each sequence."""
    leaves, tree = jax.tree.flatten(cache)
    old = [leaf for leaf, has_beams in zip(leaves, beam_leaves, strict=True) if has_beams]
    # A loop of small copies is faster than one gather only on a single CPU device.
    if targets_single_cpu():
        new = iter(_copy_rows(old, parents))
    else:
        by_beam = (leaf.reshape(*parents.shape, *leaf.shape[1:]) for leaf in old)
        new = (_gather_beams(rows, parents).reshape(-1, *rows.shape[2:]) for rows in by_beam)
    return tree.unflatten(
        [next(new) if has_beams else leaf for leaf, has_beams in zip(leaves, beam_leaves, strict=True)]
    )


def _copy_rows(leaves: list[jax.Array], parents: jax.Array) -> list[jax.Array]:
    """Replaces each row of the [batch * beams, ...] leaves with the row of its parent, in place.

    Copies only rows whose parent is in a different slot. This is safe, because every parent has a child in its slot, so
    the parent's row is never overwritten.
    """
    batch, beams = parents.shape
    source = (parents + beams * jnp.arange(batch)[:, None]).reshape(-1)
    is_moved = source != jnp.arange(batch * beams)
    rows = jnp.argsort(~is_moved, stable=True)

    def copy_row(index: jax.Array, leaves: list[jax.Array]) -> list[jax.Array]:
        row = rows[index]
        parent = source[row]
        return [
            jax.lax.dynamic_update_slice_in_dim(leaf, jax.lax.dynamic_slice_in_dim(leaf, parent, 1), row, axis=0)
            for leaf in leaves
        ]

    return jax.lax.fori_loop(0, jnp.sum(is_moved), copy_row, leaves)
