"""Converts lm_eval's `gen_kwargs` to a decoder and the end of an answer."""

from collections.abc import Mapping
from typing import Any

from remixer_t5x.errors import UserError
from remixer_t5x.models import beam_search
from remixer_t5x.models.beam_search import BeamSearch, PowerPenalty
from remixer_t5x.models.decoding import Decoder, Greedy
from remixer_t5x.models.sampling import Sampling

# lm_eval's names for the maximum length of an answer; the first is its preferred one.
_LENGTHS = ('max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_completion_tokens')
_OTHERS = ('do_sample', 'temperature', 'top_k', 'top_p', 'num_beams', 'early_stopping', 'length_penalty')
# transformers' `early_stopping`, whose default is False.
_STOPS = {False: beam_search.until_unlikely, True: beam_search.until_enough, 'never': beam_search.until_settled}


def parse_settings(kwargs: Mapping[str, Any], default_length: int) -> tuple[list[str], int, Decoder]:
    """The texts at which an answer ends, its maximum tokens, and the decoder.

    Beams have the defaults of transformers' `generate`, which lm_eval's `hf` uses. Raises UserError for a setting that
    no decoder has.
    """
    settings = {name: value for name, value in kwargs.items() if value is not None}
    unknown = settings.keys() - {'until', *_LENGTHS, *_OTHERS}
    if unknown:
        allowed = ', '.join(('until', _LENGTHS[0], *_OTHERS))
        raise UserError(f'generation_kwargs must be some of {allowed}, got {", ".join(sorted(unknown))}')
    until = settings.get('until', [])
    length = next((int(settings[name]) for name in _LENGTHS if name in settings), default_length)
    beams, temperature = int(settings.get('num_beams') or 1), float(settings.get('temperature') or 0.0)
    early_stopping = settings.get('early_stopping', False)
    if early_stopping not in _STOPS:
        raise UserError(f"early_stopping of generation_kwargs must be False, True or 'never', got {early_stopping!r}")
    decoder: Decoder = Greedy()
    if settings.get('do_sample') and temperature > 0:
        if beams > 1:
            raise UserError(
                f'generation_kwargs must have do_sample or num_beams, got do_sample and num_beams = {beams}'
            )
        decoder = Sampling(temperature, settings.get('top_k') or None, float(settings.get('top_p') or 1.0))
    elif beams > 1:
        penalty = PowerPenalty(float(settings.get('length_penalty', 1.0)))
        decoder = BeamSearch(beams, penalty, _STOPS[early_stopping])
    return [until] if isinstance(until, str) else list(until), length, decoder
