"""Checks that several sublayers share, with the same error messages."""

from remixer_t5x.context import Memory, SequenceContext
from remixer_t5x.errors import UserError


def check_length(owner: str, max_length: int, length: int) -> None:
    """Raises UserError if a row of `length` tokens exceeds `max_length` of the class named `owner`."""
    if length > max_length:
        raise UserError(
            f'{owner}.max_length is {max_length}, got a sequence of {length} tokens: '
            f'give {owner}.max_length = {length} or shorten TASK_FEATURE_LENGTHS'
        )


def refuse_prefix(ctx: SequenceContext, owner: str) -> None:
    """Raises UserError if there are tokens that are to be read in both directions, which the class `owner` cannot."""
    if ctx.prefix is not None:
        raise UserError(
            f'{owner} cannot read a prefix in both directions: give PREFIX_LM = False, which reads it from left to '
            'right, or @attention.SelfAttention, @hyper_mixer.HyperMixer or @linear_attention.LinearAttention'
        )


def needed_memory(ctx: SequenceContext, owner: str, instead: str) -> Memory:
    """`ctx.memory`. Raises UserError if there is none, with what to use instead of the class `owner`."""
    if ctx.memory is None:
        raise UserError(f'{owner} needs the output of an encoder: use it in DECODER_SUBLAYERS, or {instead} here')
    return ctx.memory
