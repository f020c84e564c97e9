"""A toy language model: a table with random logits of the next token for each history of tokens."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from remixer_t5x.models.decoding import GenerationInputs

EOS = 1


def make_tables(seed: int, batch: int, vocab: int, length: int) -> np.ndarray:
    """Returns logits [batch, histories, vocab]."""
    tables = np.random.default_rng(seed).normal(0, 1.5, (batch, (vocab + 1) ** length, vocab))
    return tables.astype(np.float32)


def generation(tables, length: int, stop_strings=None) -> GenerationInputs:
    """Returns a `GenerationInputs` whose cache contains the history of each row and the table of each sequence.

    A decoder that confuses rows or sequences therefore reads the logits of another history.
    """
    batch, _, vocab = tables.shape

    def allocate(rows_per_sequence: int):
        return {
            'history': jnp.zeros((batch * rows_per_sequence, 1), jnp.int32),
            'memory': jnp.asarray(tables),
            'cache_index': jnp.zeros((), jnp.int32),
        }

    def step(tokens, cache):
        history = append_to_history(cache['history'][:, 0], tokens, vocab)
        history = jnp.where(cache['cache_index'] == 0, 0, history)  # Ignores the start token.
        logits = jnp.take_along_axis(cache['memory'], history.reshape(batch, -1, 1), axis=1)
        cache = {**cache, 'history': history[:, None], 'cache_index': cache['cache_index'] + 1}
        return logits.reshape(-1, vocab), cache

    return GenerationInputs(batch, allocate, step, length, EOS, stop_strings=stop_strings)


def append_to_history(history, token, vocab: int):
    """Returns the index of a history with one more token, in which token 0 is a digit as well."""
    return history * (vocab + 1) + token + 1


def log_probabilities(table: np.ndarray, length: int) -> dict[tuple[int, ...], float]:
    """Returns the log-probability of every complete sequence."""
    vocab = table.shape[-1]
    log_table = np.asarray(jax.nn.log_softmax(table))
    scores = {}
    for sequence in complete_sequences(vocab, length):
        history, total = 0, 0.0
        for token in sequence:
            total += log_table[history, token]
            history = append_to_history(history, token, vocab)
        scores[sequence] = total
    return scores


def complete_sequences(vocab: int, length: int) -> list[tuple[int, ...]]:
    """Returns every sequence that ends with its only end token, or has `length` tokens and no end token."""
    others = [token for token in range(vocab) if token != EOS]
    ended = [(*start, EOS) for count in range(length) for start in itertools.product(others, repeat=count)]
    return ended + list(itertools.product(others, repeat=length))


def pad(sequence, length: int) -> list[int]:
    return list(sequence) + [0] * (length - len(sequence))
