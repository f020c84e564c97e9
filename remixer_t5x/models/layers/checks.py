"""Checks that several sublayers share, so that their messages agree."""

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
    """Raises UserError if there is a prefix, which the class `owner` cannot read in both directions."""
    if ctx.prefix is not None:
        raise UserError(
            f'{owner} cannot read a prefix in both directions: give PREFIX_LM = False, which reads it from left to '
            'right, or @attention.SelfAttention, @hyper_mixer.HyperMixer or @linear_attention.LinearAttention'
        )


def needed_memory(ctx: SequenceContext, owner: str, instead: str) -> Memory:
    """Returns `ctx.memory`. Raises UserError without an encoder, naming what to use instead of the class `owner`."""
    if ctx.memory is None:
        raise UserError(f'{owner} needs the output of an encoder: use it in DECODER_SUBLAYERS, or {instead} here')
    return ctx.memory
