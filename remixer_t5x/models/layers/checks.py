"""Checks for the inputs and settings of sublayers."""

from remixer_t5x.context import Memory, SequenceContext
from remixer_t5x.errors import UserError


def check_length(owner: str, max_length: int, length: int) -> None:
    """Raises UserError if `length` exceeds `max_length`, which is a setting of the class named `owner`."""
    if length > max_length:
        raise UserError(
            f'{owner}.max_length must be at least the sequence length of {length} tokens, got {max_length}; '
            f'set {owner}.max_length = {length} or reduce TASK_FEATURE_LENGTHS'
        )


def check_no_prefix(ctx: SequenceContext, owner: str) -> None:
    """Raises UserError if `ctx` has a prefix, because the class named `owner` supports only causal mixing."""
    if ctx.prefix is not None:
        raise UserError(
            f'{owner} does not support bidirectional attention to a prefix; set PREFIX_LM = False to process '
            'the prefix from left to right, or use @attention.SelfAttention, @hyper_mixer.HyperMixer or '
            '@linear_attention.LinearAttention'
        )


def require_memory(ctx: SequenceContext, owner: str, alternative: str) -> Memory:
    """Returns the encoder output, `ctx.memory`.

    Raises UserError if there is no encoder; the message suggests the class named `alternative` instead of `owner`.
    """
    if ctx.memory is None:
        raise UserError(
            f'{owner} requires an encoder; use it in DECODER_SUBLAYERS of an encoder-decoder, or use '
            f'{alternative} instead'
        )
    return ctx.memory
