"""`remixer-t5x convert`: weights of Hugging Face and its Hub, T5X and plain safetensors to checkpoints, and back;
adapters apart from their base, and merged.

Each conversion reads back what it has written and compares it with what it read.
"""

import argparse

from remixer_t5x.cli import arguments
from remixer_t5x.cli.command import ON_CPU, Command
from remixer_t5x.errors import UserError

# Which target goes with which source; one of the two is a checkpoint or MODEL_DIR of ours.
TARGETS = {
    'from_hf': ('to',),
    'from_safetensors': ('to',),
    'from_t5x': ('to',),
    'checkpoint': ('to', 'to_adapters', 'to_hf', 'to_safetensors', 'to_t5x', 'to_shared', 'push_to_hub'),
}
# Where the files do not say which model they hold, the user's gin files do.
_OF_A_MODEL = {'from_t5x', 'to_hf', 'to_t5x'}
# Flags that some conversions read.
_READ_BY = {
    'dtype': ('to_hf', 'to_safetensors'),
    'vocabulary': ('from_hf',),
    'trust_gin': ('from_hf',),
    'own_names': ('to_t5x',),
    'private': ('push_to_hub',),
    'base': ('to_adapters',),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin(parser)
    parser.add_argument('--from_hf', metavar='NAME', help='a model on the Hugging Face Hub, or a folder of one')
    parser.add_argument('--from_safetensors', metavar='FILE', help='a file that --to_safetensors wrote')
    parser.add_argument('--from_t5x', metavar='DIR', help="a checkpoint of T5X's")
    parser.add_argument('--to', metavar='MODEL_DIR', help='a new MODEL_DIR for what is read')
    adapters = 'a new MODEL_DIR with only the parameters that differ from --base; it is read on top of it'
    parser.add_argument('--to_adapters', metavar='MODEL_DIR', help=adapters)
    base = 'with --to_adapters: the checkpoint that the run began with (default: its INITIAL_CHECKPOINT_PATH)'
    parser.add_argument('--base', metavar='PATH', help=base)
    parser.add_argument('--checkpoint', metavar='PATH', help=f'{arguments.CHECKPOINT_HELP}, to be written elsewhere')
    parser.add_argument('--to_hf', metavar='DIR', help='a new folder, as transformers loads it')
    parser.add_argument('--to_safetensors', metavar='FILE', help='a new file with the parameters of any model')
    parser.add_argument('--to_t5x', metavar='DIR', help="a folder for a checkpoint of T5X's")
    shared = 'a new folder for others to load: weights, vocabulary, and a model card made from the run'
    parser.add_argument('--to_shared', metavar='DIR', help=shared)
    parser.add_argument('--push_to_hub', metavar='NAME', help='a model on the Hub to upload the same to')
    parser.add_argument('--private', action='store_true', default=None, help='with --push_to_hub: only you can see it')
    dtype = 'of the arrays in --to_hf or --to_safetensors (default float32)'
    parser.add_argument('--dtype', choices=('float32', 'bfloat16'), help=dtype)
    vocabulary = 'with --from_hf: the SentencePiece model, where the folder has none'
    parser.add_argument('--vocabulary', metavar='FILE', help=vocabulary)
    trust = "with --from_hf: accept a model.gin that names modules outside of this package's models; gin runs code"
    parser.add_argument('--trust_gin', action='store_true', default=None, help=trust)
    own_names = "with --to_t5x: keep our names of parameters, for t5x/*.gin and any model, instead of T5X's network's"
    parser.add_argument('--own_names', action='store_true', default=None, help=own_names)


def run(args: argparse.Namespace) -> None:
    """Converts, compares what was written with what was read, and says both."""
    source, target = direction(args)
    if _OF_A_MODEL & {source, target}:
        model, vocabulary = arguments.values(args, 'MODEL', 'VOCABULARY')
        from remixer_t5x.cli.convert import with_model

        with_model.CONVERSIONS[source, target](args, model, vocabulary)
        return
    if args.gin_file or args.gin_flags or args.model:
        raise UserError(f'--{source} with --{target} reads no gin files: the files say which model they hold')
    with arguments.libraries(args):
        from remixer_t5x.cli.convert import described
    described.CONVERSIONS[source, target](args)


def direction(args: argparse.Namespace) -> tuple[str, str]:
    """The flags of source and target. Raises UserError where the flags do not make one conversion."""
    sources = _given(args, TARGETS)
    if len(sources) != 1:
        raise UserError(
            f'convert takes one source, and was given {_flags(sources) or "none"}; give --from_hf=NAME, '
            '--from_safetensors=FILE or --from_t5x=DIR with --to=MODEL_DIR, or --checkpoint=PATH with --to=MODEL_DIR, '
            '--to_adapters=MODEL_DIR, --to_hf=DIR, --to_safetensors=FILE, --to_t5x=DIR, --to_shared=DIR or '
            '--push_to_hub=NAME'
        )
    targets = _given(args, dict.fromkeys(name for names in TARGETS.values() for name in names))
    allowed = TARGETS[sources[0]]
    if len(targets) != 1 or targets[0] not in allowed:
        raise UserError(f'--{sources[0]} goes with {_flags(allowed, " or ")}, and {_flags(targets) or "none"} is given')
    for flag, readers in _READ_BY.items():
        if getattr(args, flag) is not None and not {sources[0], targets[0]} & set(readers):
            raise UserError(f'--{flag} is read with {_flags(readers, " or ")} only; leave it out')
    return sources[0], targets[0]


def _given(args: argparse.Namespace, names) -> list[str]:
    return [name for name in names if getattr(args, name) is not None]


def _flags(names, joined: str = ', ') -> str:
    return joined.join(f'--{name}' for name in names)


COMMAND = Command(
    'convert',
    'weights of Hugging Face and its Hub, T5X and plain safetensors to checkpoints, and back; compares both sides',
    add_arguments,
    run,
    (
        'remixer-t5x convert --from_hf=google/flan-t5-small --to=runs/flan',
        'remixer-t5x convert --checkpoint=runs/remixer --push_to_hub=me/remixer',
        'remixer-t5x convert --gin_file=runs/t5_small/model.gin --checkpoint=runs/finetuned --to_hf=exported',
        'remixer-t5x convert --checkpoint=runs/remixer --to_safetensors=remixer.safetensors',
        'remixer-t5x convert --checkpoint=runs/adapted --to_adapters=adapters/questions',
    ),
    ON_CPU,
)
