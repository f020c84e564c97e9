"""Stop strings, which end generation as soon as they occur in the output, as in Hugging Face's `StopStringCriteria`.

Stop strings are compiled into an automaton over tokens (Aho and Corasick 1975), so a stop string may begin and end
within a token. Each state represents the longest suffix of the text that is a proper prefix of a stop string.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from remixer_t5x.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class StopStrings:
    """Automaton that detects stop strings in a sequence of token ids.

    Attributes:
        next_state: [states, vocab] int32, the next state for each current state and token id. In state 0, the text does
            not end with the beginning of a stop string.
        completes: [states, vocab] bool, whether a token id completes a stop string in a state.
    """

    next_state: np.ndarray
    completes: np.ndarray

    @classmethod
    def compile(cls, stop_strings: Sequence[str], token_texts: Sequence[bytes]) -> StopStrings:
        """Builds the automaton for `stop_strings`; `token_texts` contains the UTF-8 text of each token id."""
        if not all(stop_strings):
            raise UserError(f'STOP_STRINGS must not contain an empty string, got {list(stop_strings)}')
        stops = tuple(text.encode() for text in stop_strings)
        states = sorted({stop[:length] for stop in stops for length in range(len(stop))})
        by_byte: np.ndarray = np.zeros((len(states), 256), np.int32)
        ends_at_byte: np.ndarray = np.zeros((len(states), 256), bool)
        for state, beginning in enumerate(states):
            for byte in range(256):
                text = beginning + bytes([byte])
                suffixes = (text[start:] for start in range(len(text) + 1))
                by_byte[state, byte] = states.index(next(suffix for suffix in suffixes if suffix in states))
                ends_at_byte[state, byte] = text.endswith(stops)
        next_state = np.repeat(np.arange(len(states), dtype=np.int32)[:, None], len(token_texts), axis=1)
        completes = np.zeros(next_state.shape, bool)
        for position in range(max(map(len, token_texts))):
            ids = [index for index, text in enumerate(token_texts) if len(text) > position]
            values = [token_texts[index][position] for index in ids]
            completes[:, ids] |= ends_at_byte[next_state[:, ids], values]
            next_state[:, ids] = by_byte[next_state[:, ids], values]
        return cls(next_state, completes)

    def next_states(self, states: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the state after each token, and whether the token completes a stop string.

        All arrays have the same shape. Token ids without text, such as padding, do not change the state.
        """
        is_known = (tokens >= 0) & (tokens < self.next_state.shape[1])
        next_states = jnp.where(is_known, jnp.asarray(self.next_state)[states, tokens], states)
        return next_states, is_known & jnp.asarray(self.completes)[states, tokens]

    def states_after(self, tokens: jax.Array) -> jax.Array:
        """Returns the state after all tokens of each row, [rows], for tokens [rows, length]."""
        states = jnp.zeros(tokens.shape[:1], jnp.int32)
        return jax.lax.scan(lambda states, column: (self.next_states(states, column)[0], None), states, tokens.T)[0]
