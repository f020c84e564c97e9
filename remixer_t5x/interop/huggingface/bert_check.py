"""Checks that a converted BERT computes the same as the original: logits of both on a random batch."""

import pathlib
from typing import Any

import jax
import numpy as np

from remixer_t5x.interop.huggingface import check
from remixer_t5x.models.masked_lm import MaskedLM

ROWS, LENGTH = 2, 64


def random_batch(vocab_size: int, module: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """Tokens of two types, [ROWS, LENGTH] int32 or as long as the model's positions; the last row is padded."""
    rng = np.random.default_rng(seed)
    length = min(LENGTH, module.input_layer().max_length)
    tokens = rng.integers(1, vocab_size, (ROWS, length), dtype=np.int32)
    tokens[-1, length // 2 :] = 0
    types = np.zeros_like(tokens)
    if module.input_layer().token_types > 1:
        types[:, length // 3 :] = 1
    return {'encoder_input_tokens': tokens, 'encoder_token_types': types}


def our_logits(model: MaskedLM, params: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Our logits at the batch's tokens, float32 [tokens, vocab]."""
    return np.asarray(jax.jit(model.logits)(params, batch))[batch['encoder_input_tokens'] > 0]


def their_logits(folder: pathlib.Path, batch: dict[str, np.ndarray]) -> np.ndarray:
    """The logits of Hugging Face's own BERT in `folder`, float32 [tokens, vocab], computed in float32."""
    read = {'input_ids': batch['encoder_input_tokens'], 'token_type_ids': batch['encoder_token_types']}
    return check.logits_of_transformers('AutoModelForMaskedLM', folder, read)[batch['encoder_input_tokens'] > 0]
