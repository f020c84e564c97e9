"""lm_eval's `gen_kwargs` as a decoder of ours, and the end of an answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from remixer_t5x.errors import UserError
from remixer_t5x.models import beam_search
from remixer_t5x.models.beam_search import BeamSearch, PowerPenalty
from remixer_t5x.models.decoding import Decoder, Greedy
from remixer_t5x.models.sampling import Sampling

# What lm_eval gives for the length of an answer; the first is its own name.
_LENGTHS = ('max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_completion_tokens')
_SAMPLING = ('temperature', 'top_k', 'top_p')
# transformers' `early_stopping`, whose default is False.
_STOPS = {
    False: beam_search.until_unlikely,
    True: beam_search.until_enough,
    'never': beam_search.until_settled,
}


def settings(given: Mapping[str, Any], default_length: int) -> tuple[list[str], int, Decoder]:
    """The texts at which an answer ends, its most tokens, and the decoder, by lm_eval's `gen_kwargs`.

    Beams have the defaults of transformers' `generate`, which lm_eval's `hf` uses. Raises UserError for a setting that
    no decoder of ours has.
    """
    rest = dict(given)
    until = rest.pop('until', None) or []
    lengths = [int(rest.pop(name)) for name in _LENGTHS if rest.get(name) is not None]
    beams, samples = int(rest.pop('num_beams', 1) or 1), rest.pop('do_sample', None)
    early, power = rest.pop('early_stopping', None) or False, rest.pop('length_penalty', None)
    drawn = {name: rest.pop(name) for name in _SAMPLING if name in rest}
    unknown = [name for name, value in rest.items() if value is not None]
    if unknown:
        allowed = ', '.join(
            ('until', _LENGTHS[0], 'do_sample', *_SAMPLING, 'num_beams', 'early_stopping', 'length_penalty')
        )
        raise UserError(f'generation_kwargs has {unknown[0]}; allowed are {allowed}')
    temperature = float(drawn.get('temperature') or 0.0)
    decoder: Decoder = Greedy()
    if early not in _STOPS:
        raise UserError(f"generation_kwargs has early_stopping = {early!r}; allowed are False, True and 'never'")
    if samples and temperature > 0 and beams > 1:
        raise UserError(f'generation_kwargs has do_sample with num_beams = {beams}; allowed is one of the two')
    if samples and temperature > 0:
        decoder = Sampling(temperature, drawn.get('top_k') or None, float(drawn.get('top_p') or 1.0))
    elif beams > 1:
        decoder = BeamSearch(beams, PowerPenalty(1.0 if power is None else float(power)), _STOPS[early])
    return [until] if isinstance(until, str) else list(until), (lengths or [default_length])[0], decoder


def before(until: Sequence[str], text: str) -> str:
    """The text before the first of `until`."""
    for end in until:
        text = text.split(end)[0] if end else text
    return text
