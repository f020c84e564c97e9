"""Defines the class `Command`, and command-line arguments that commands share.

The shared arguments are flags for gin files, macros and decoders, and argument types.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from remixer_t5x import ranges
from remixer_t5x.errors import UserError

ON_CPU = {'JAX_PLATFORMS': 'cpu'}
GIN_HELP = """\
gin flags:
  --gin_file=FILE        a gin file; repeatable: later files override earlier ones; looked up in the current folder,
                         then in --gin_search_paths, then among the configs shipped with the package
  --gin.NAME=VALUE       sets a macro (--gin.TRAIN_STEPS=1000) or a setting (--gin.adafactor.decay_rate=0.8) after all
                         files; a VALUE that is not a gin value is read as text: --gin.MODEL_DIR=/tmp/x needs no quotes
"""
MESH_HELP = 'sizes of the mesh axes, such as data=2,fsdp=4; overrides the hardware file'
CHECKPOINT_MACRO = 'CHECKPOINT_PATH'
CHECKPOINT_HELP = 'a checkpoint, or a MODEL_DIR (uses its newest checkpoint)'
RUN_HELP = f'{CHECKPOINT_HELP}; without --gin_file, the config.gin of that run is read'
_MODEL_HELP = (
    'use models/NAME.gin instead of the model file that a gin file includes; append +SETTING=VALUE to change a setting'
)


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of `remixer-t5x`.

    The module of a command imports libraries lazily, so that `--help` and flag errors appear at once.

    Attributes:
        name: one word, or two words for a subcommand such as `data list`.
        run: runs the command and returns the exit code (None means 0).
        prints_result: whether the command prints its result to standard output, so that a write error must stop it.
            Commands without a result print only progress, and ignore write errors.
        env: environment variables to set before any library is imported.
        keeps_buffers: whether to call `main.keep_freed_buffers` before the command runs.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]
    examples: tuple[str, ...]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prints_result: bool = False
    keeps_buffers: bool = False


def add_gin_flags(parser: argparse.ArgumentParser, model: bool = True) -> None:
    """Adds the flags for gin files to a parser, including `--model` if `model` is true."""
    parser.epilog = f'{GIN_HELP}\n{parser.epilog}'
    parser.add_argument('--gin_file', action='append', default=[], metavar='FILE', help='a gin file (repeatable)')
    if model:
        parser.add_argument('--model', metavar='NAME', help=_MODEL_HELP)
    parser.add_argument(
        '--tfds_data_dir', metavar='DIR', help='folder with prepared TFDS datasets; overrides TFDS_DATA_DIR'
    )
    parser.add_argument(
        '--gin_search_paths',
        action='append',
        default=[],
        metavar='DIRS',
        help='comma-separated folders in which to look up gin files',
    )


def add_macro_flag(
    parser: Any, flag: str, macro: str, help: str, alone: str | None = None, metavar: str | None = None
) -> None:
    """Adds a flag as a short form of `--gin.MACRO`. A flag that is passed without a value sets the macro to `alone`."""
    optional: dict[str, Any] = {} if alone is None else {'nargs': '?', 'const': (macro, alone)}
    parser.add_argument(
        flag, dest='macros', action='append', type=lambda text: (macro, text), default=[], help=help,
        metavar=metavar or flag.removeprefix('--').upper(), **optional,
    )  # fmt: skip


# These flags accept gin values. All flags except `forced_prefix` are named as in transformers' GenerationConfig.
_GENERATION_OPTIONS = {
    'no_repeat_ngram_size': ('N', 'n-grams of this size occur at most once'),
    'repetition_penalty': ('X', 'values above 1 make earlier tokens less likely (default 1.0)'),
    'min_new_tokens': ('N', 'minimum number of tokens before the end token'),
    'min_p': ('P', 'with --sampling: sample only tokens at least P times as likely as the most likely one'),
    'bad_words_ids': ('IDS', "token ids that are never generated, as in '[[5, 6], [7]]'"),
    'forced_prefix': ('IDS', "token ids that answers begin with, as in '[5, 6]'"),
    'stop_strings': ('TEXTS', "an answer ends after this text, or the first of several, as in \"['.', 'END']\""),
}
# Options that most decoders lack; a flag for an option that the decoder does not read is an error.
_DECODER_MACROS = ('SAMPLES', 'BEAMS', 'TEMPERATURE', 'TOP_K', 'TOP_P', *map(str.upper, _GENERATION_OPTIONS))


def add_decoder_flags(parser: argparse.ArgumentParser, batch_size: str) -> Any:
    """Adds the decoder flags, and the flag `--batch_size`, which sets the macro with the name in `batch_size`.

    Returns the mutually exclusive group that contains `--beams` and `--sampling`.
    """
    add_macro_flag(parser, '--batch_size', batch_size, 'texts per batch, over all devices', metavar='N')
    group = parser.add_mutually_exclusive_group()
    group.add_argument('--beams', metavar='N', type=make_whole_number_type(2), help='beam search with N beams')
    sampling = 'sample answers at this temperature (default 1.0)'
    group.add_argument('--sampling', metavar='TEMPERATURE', nargs='?', const='1.0', help=sampling)
    for name, (metavar, help) in _GENERATION_OPTIONS.items():
        add_macro_flag(parser, f'--{name}', name.upper(), help, metavar=metavar)
    return group


def apply_decoder_flags(args: argparse.Namespace) -> None:
    """Converts the flags `--beams` and `--sampling` to gin flags in `args.gin_flags`."""
    if args.beams is not None:
        args.gin_flags = [*args.gin_flags, ('DECODER', '@beam_search.BeamSearch()'), ('BEAMS', str(args.beams))]
    if args.sampling is not None:
        args.gin_flags = [*args.gin_flags, ('DECODER', '@sampling.Sampling()'), ('TEMPERATURE', args.sampling)]


def split_gin_flags(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Separates the (name, value) pairs of `--gin.NAME=value` and `--gin.NAME value` from the other arguments."""
    rest: list[str] = []
    pairs: list[tuple[str, str]] = []
    arguments = iter(argv)
    for argument in arguments:
        if not argument.startswith('--gin.'):
            rest.append(argument)
            continue
        name, equals, value = argument.removeprefix('--gin.').partition('=')
        if not equals:
            value = next(arguments, '--')
            if value.startswith('--'):
                raise UserError(f'{argument} has no value; pass {argument}=VALUE')
        if not name:
            raise UserError(f'{argument} does not name a macro or setting; pass --gin.NAME=VALUE')
        pairs.append((name.strip(), value))
    return rest, pairs


def load_config(args: argparse.Namespace, root: str, partial: bool = True, **sources: Any) -> None:
    """Loads the gin files and flags of the command line, and checks the settings that the class `root` requires.

    With `partial`, the command reads only some settings of the configuration, and unread macros are allowed, except for
    options of decoders.
    `sources` sets the optional fields `base`, `defaults` and `objects` of `config.loading.ConfigSources`.
    """
    from remixer_t5x.config import loading

    config_sources = _build_config_sources(args, **sources)
    loading.load_gin_config(config_sources, root, partial=partial, must_be_read=_DECODER_MACROS)


def load_macro_values(
    args: argparse.Namespace, *macros: str, must_be_read: Collection[str] = (), **sources: Any
) -> list[Any]:
    """Loads the gin files and flags of the command line, and returns the values of macros.

    `must_be_read` is described in `config.loading.load_gin_config`; `sources` sets the optional fields `base`,
    `defaults` and `objects` of `config.loading.ConfigSources`.
    """
    from remixer_t5x.config import loading

    return loading.load_macro_values(_build_config_sources(args, **sources), *macros, must_be_read=must_be_read)


def _build_config_sources(args: argparse.Namespace, **sources: Any) -> Any:
    from remixer_t5x.config import gin_files, loading

    if args.tfds_data_dir:
        # All libraries that read TFDS datasets use this environment variable.
        os.environ['TFDS_DATA_DIR'] = args.tfds_data_dir
    search_paths = split_names(','.join(args.gin_search_paths))
    model = gin_files.parse_model_flag(args.model) if args.model is not None else ()
    if not hasattr(args, 'run_sources'):
        args.run_sources = _find_checkpoint_config(args)
    run_files, run_flags = args.run_sources
    if sources.get('base') and not (run_files or args.gin_file):
        raise UserError(
            'a gin file must configure the model; pass --checkpoint=MODEL_DIR of a local run, or --gin_file=FILE'
        )
    return loading.ConfigSources(
        [*run_files, *args.gin_file], [*run_flags, *args.gin_flags], search_paths, model, **sources
    )


def _find_checkpoint_config(args: argparse.Namespace) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns the gin file and the vocabulary flags of the run that wrote the checkpoint on the command line.

    Returns no gin file if --gin_file is set. gin files are not read from buckets, so a run in a bucket requires the
    flag --gin_file.
    """
    from remixer_t5x.data import task_vocabulary
    from remixer_t5x.run_folder import model_dir

    # The last flag overrides earlier ones; `eval` accepts multiple checkpoints, separated by commas.
    macros = (value for name, value in reversed(args.gin_flags) if name == CHECKPOINT_MACRO)
    text = getattr(args, 'checkpoint', None) or next(macros, '')
    first = text.strip('\'"').partition(',')[0].strip()
    if not first or first[0] in '%@([':
        return [], []
    folder = model_dir.find_model_dir(first)
    flags = task_vocabulary.get_saved_vocabulary_flags(folder)
    if args.gin_file or '://' in first:
        return [], flags
    file = None if folder is None else model_dir.find_gin_file(folder)
    if file is None:
        from remixer_t5x.checkpoints import checkpoint_paths

        # Raises a UserError that suggests the most similar path if there is no checkpoint.
        checkpoint_paths.find_checkpoint(first, '--checkpoint')
        return [], flags
    if not getattr(args, 'process_index', None):
        print(f'no --gin_file is given: reading {file}', file=sys.stderr)
    return [str(file)], flags


def make_whole_number_type(minimum: int) -> Callable[[str], int]:
    """Returns an argparse type for integers that are at least `minimum`."""

    def parse_integer(text: str) -> int:
        number = ranges.parse_whole_number(text, minimum)
        if number is None:
            raise argparse.ArgumentTypeError(f'must be an integer of at least {minimum}, got {text!r}')
        return number

    return parse_integer


def parse_local_path(text: str) -> str:
    """Returns a local path unchanged, and rejects URLs. The function is used as an argparse type."""
    if '://' in text:
        raise argparse.ArgumentTypeError(f'must be a local path, got {text!r}; copy the result after the command')
    return text


def split_names(text: str) -> list[str]:
    """Splits a comma-separated string into a list of names. The function is also used as an argparse type."""
    return [item.strip() for item in text.split(',') if item.strip()]
