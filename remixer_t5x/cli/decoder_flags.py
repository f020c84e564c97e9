"""Flags of `infer` and `eval` that choose a decoder and its main setting (configs/runs/_decoders.gin)."""

import argparse

from remixer_t5x.cli import arguments
from remixer_t5x.errors import UserError


def add(parser: argparse.ArgumentParser, batch_size: str) -> None:
    """Adds the flags; `batch_size` is the macro that --batch_size sets."""
    group = parser.add_argument_group('decoding')
    beams = 'beam search with N beams'
    group.add_argument('--beams', metavar='N', type=arguments.whole_number(2), help=beams)
    sampling = 'draw answers at random, at this temperature (default 1.0)'
    group.add_argument('--sampling', metavar='TEMPERATURE', nargs='?', const='1.0', type=_number, help=sampling)
    arguments.add_macro(group, '--batch_size', batch_size, 'texts of one batch over all devices', metavar='N')


def _number(text: str) -> str:
    try:
        if float(text) > 0:
            return text
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f'{text!r} is not a number above 0')


def apply(args: argparse.Namespace) -> None:
    """Adds the macros of the flags. Raises UserError for two decoders."""
    if args.beams is not None and args.sampling is not None:
        raise UserError('--beams and --sampling are two decoders; give one of them')
    if args.beams is not None:
        args.gin_flags = [*args.gin_flags, ('DECODER', '@beam_search.BeamSearch()'), ('BEAMS', str(args.beams))]
    if args.sampling is not None:
        args.gin_flags = [*args.gin_flags, ('DECODER', '@sampling.Sampling()'), ('TEMPERATURE', args.sampling)]
