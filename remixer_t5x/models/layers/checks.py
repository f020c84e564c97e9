"""Checks that several sublayers share, with the same messages."""

from remixer_t5x.context import Memory, SequenceContext
from remixer_t5x.errors import UserError


def check_length(owner: str, max_length: int, length: int) -> None:
    """Raises UserError if a row of `length` tokens is longer than `max_length` of the class named `owner`."""
    if length > max_length:
        raise UserError(
            f'{owner}.max_length must be at least the length of a row, {length} tokens, got {max_length}; '
            f'type {owner}.max_length = {length} or shorten TASK_FEATURE_LENGTHS'
        )


def refuse_prefix(ctx: SequenceContext, owner: str) -> None:
    """Raises UserError if tokens have a prefix, which the class named `owner` cannot read in both directions."""
    if ctx.prefix is not None:
        raise UserError(
            f'{owner} does not support bidirectional attention to a prefix; type PREFIX_LM = False, to read '
            'the prefix from left to right, or use @attention.SelfAttention, @hyper_mixer.HyperMixer or '
            '@linear_attention.LinearAttention'
        )


def require_memory(ctx: SequenceContext, owner: str, alternative: str) -> Memory:
    """Returns `ctx.memory`. Raises UserError if there is no encoder; `alternative` is the class to use then."""
    if ctx.memory is None:
        raise UserError(
            f'{owner} needs the output of an encoder; use it in DECODER_SUBLAYERS of an encoder-decoder, or '
            f'{alternative} here'
        )
    return ctx.memory
