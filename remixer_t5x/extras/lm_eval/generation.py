"""lm_eval's `gen_kwargs` as a decoder of ours, and the end of an answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from remixer_t5x.errors import UserError
from remixer_t5x.models.beam_search import BeamSearch
from remixer_t5x.models.decoding import Decoder, Greedy
from remixer_t5x.models.sampling import Sampling

# What lm_eval gives for the length of an answer; the first is its own name.
_LENGTHS = ('max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_completion_tokens')
_SAMPLING = ('temperature', 'top_k', 'top_p')


def settings(given: Mapping[str, Any], default_length: int) -> tuple[list[str], int, Decoder]:
    """The texts at which an answer ends, its most tokens, and the decoder, by lm_eval's `gen_kwargs`.

    Raises UserError for a setting that no decoder of ours has.
    """
    rest = dict(given)
    until = rest.pop('until', None) or []
    lengths = [int(rest.pop(name)) for name in _LENGTHS if rest.get(name) is not None]
    beams, samples = int(rest.pop('num_beams', 1) or 1), rest.pop('do_sample', None)
    drawn = {name: rest.pop(name) for name in _SAMPLING if name in rest}
    unknown = [name for name, value in rest.items() if value is not None]
    if unknown:
        allowed = ', '.join(('until', _LENGTHS[0], 'do_sample', *_SAMPLING, 'num_beams'))
        raise UserError(f'generation_kwargs has {unknown[0]}; allowed are {allowed}')
    temperature = float(drawn.get('temperature') or 0.0)
    decoder: Decoder = Greedy()
    if samples and temperature > 0:
        decoder = Sampling(temperature, drawn.get('top_k') or None, float(drawn.get('top_p') or 1.0))
    elif beams > 1:
        decoder = BeamSearch(beams=beams)
    return [until] if isinstance(until, str) else list(until), (lengths or [default_length])[0], decoder


def before(until: Sequence[str], text: str) -> str:
    """The text before the first of `until`."""
    for end in until:
        text = text.split(end)[0] if end else text
    return text
