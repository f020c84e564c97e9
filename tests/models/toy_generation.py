"""A language model that is a table: the logits of the next token are a random function of all tokens before it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from remixer_t5x.models.decoding import Generation

EOS = 1


def make_tables(seed: int, batch: int, vocab: int, length: int) -> np.ndarray:
    """[batch, histories, vocab] logits, for each sequence of the batch one row for each beginning."""
    tables = np.random.default_rng(seed).normal(0, 1.5, (batch, (vocab + 1) ** length, vocab))
    return tables.astype(np.float32)


def generation(tables, length: int, has_input=None, stop_strings=None) -> Generation:
    """The history of a row is in its cache and the table of a sequence in its memory.

    A decoder that mixes up rows, or the memories of sequences, thus reads the logits of another beginning.
    """
    batch, _, vocab = tables.shape

    def allocate(rows_per_sequence: int):
        return {
            'history': jnp.zeros((batch * rows_per_sequence, 1), jnp.int32),
            'memory': jnp.asarray(tables),
            'cache_index': jnp.zeros((), jnp.int32),
        }

    def step(tokens, cache):
        history = extended(cache['history'][:, 0], tokens, vocab)
        history = jnp.where(cache['cache_index'] == 0, 0, history)  # The token that starts a sequence does not count.
        logits = jnp.take_along_axis(cache['memory'], history.reshape(batch, -1, 1), axis=1)
        cache = {**cache, 'history': history[:, None], 'cache_index': cache['cache_index'] + 1}
        return logits.reshape(-1, vocab), cache

    has_input = jnp.ones(batch, bool) if has_input is None else jnp.asarray(has_input)
    return Generation(allocate, step, has_input, length, EOS, stop_strings=stop_strings)


def extended(history, token, vocab: int):
    """The number of a beginning with one token more; token 0 counts as a digit too."""
    return history * (vocab + 1) + token + 1


def log_probabilities(table: np.ndarray, length: int) -> dict[tuple[int, ...], float]:
    """Of every complete sequence."""
    vocab = table.shape[-1]
    log_table = np.asarray(jax.nn.log_softmax(table))
    found = {}
    for sequence in complete_sequences(vocab, length):
        history, total = 0, 0.0
        for token in sequence:
            total += log_table[history, token]
            history = extended(history, token, vocab)
        found[sequence] = total
    return found


def complete_sequences(vocab: int, length: int) -> list[tuple[int, ...]]:
    """Every sequence that ends with its only end token, or has `length` tokens and none."""
    others = [token for token in range(vocab) if token != EOS]
    ended = [(*start, EOS) for count in range(length) for start in itertools.product(others, repeat=count)]
    return ended + list(itertools.product(others, repeat=length))


def padded(sequence, length: int) -> list[int]:
    return list(sequence) + [0] * (length - len(sequence))
