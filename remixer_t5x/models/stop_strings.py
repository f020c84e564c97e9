"""Stop strings: generation ends with the token that completes one, as with Hugging Face's `StopStringCriteria`.

The strings are compiled into an automaton (Aho and Corasick 1975) that reads tokens. Its state is the longest end of
the text so far that begins a stop string, so that a string is found wherever its tokens begin and end.
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
    """The automaton.

    Attributes:
        next_state: [states, ids] int32, the state after a token. State 0 has seen no beginning of a stop string.
        completes: [states, ids] bool, whether the token completes a stop string.
    """

    next_state: np.ndarray
    completes: np.ndarray

    @classmethod
    def compile(cls, stop_strings: Sequence[str], token_texts: Sequence[bytes]) -> StopStrings:
        """Builds the automaton for strings, from the text of each id."""
        if not all(stop_strings):
            raise UserError(f'STOP_STRINGS must not contain an empty text, got {list(stop_strings)}')
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

    def read(self, states: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the state after a token and whether the token completes a stop string; all arrays have one shape.

        Ids without text, such as padding, keep the state.
        """
        is_known = (tokens >= 0) & (tokens < self.next_state.shape[1])
        next_states = jnp.where(is_known, jnp.asarray(self.next_state)[states, tokens], states)
        return next_states, is_known & jnp.asarray(self.completes)[states, tokens]

    def read_all(self, tokens: jax.Array) -> jax.Array:
        """Returns the states after [rows, length] tokens, [rows]."""
        states = jnp.zeros(tokens.shape[:1], jnp.int32)
        return jax.lax.scan(lambda states, column: (self.read(states, column)[0], None), states, tokens.T)[0]
