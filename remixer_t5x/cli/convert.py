"""`remixer-t5x convert`: converts, merges and averages weights.

Converts between checkpoints of remixer_t5x and models in the formats of Hugging Face, T5X and safetensors. Also
extracts and merges adapters, and averages checkpoints. Each conversion reads its output back and compares it with
the input.
"""

import argparse
from typing import Any

from remixer_t5x import lazy_imports
from remixer_t5x.cli import arguments
from remixer_t5x.cli.arguments import ON_CPU, Command
from remixer_t5x.errors import UserError

# Maps each pair of a source flag and a target flag to the name of the conversion function in `cli.conversions`, or in
# `extras.hub.shared_model` for `to_shared` and `push_to_hub`. The source or the target is a checkpoint or MODEL_DIR of
# remixer_t5x.
CONVERSIONS = {
    ('from_hf', 'to'): 'convert_to_model_dir',
    ('from_safetensors', 'to'): 'convert_from_safetensors',
    ('from_t5x', 'to'): 'convert_from_t5x',
    ('average', 'to'): 'average_checkpoints',
    ('checkpoint', 'to'): 'merge_adapters',
    ('checkpoint', 'to_adapters'): 'extract_adapters',
    ('checkpoint', 'to_hf'): 'export_any_model',
    ('checkpoint', 'to_safetensors'): 'convert_to_safetensors',
    ('checkpoint', 'to_t5x'): 'convert_to_t5x',
    ('checkpoint', 'to_shared'): 'write_shared_model',
    ('checkpoint', 'push_to_hub'): 'push_shared_model',
}
# Maps each additional flag to the source and target flags that it can be combined with.
READERS = {
    'dtype': ('to_hf', 'to_safetensors'),
    'vocabulary': ('from_hf',),
    'trust_gin': ('from_hf',),
    'own_names': ('to_t5x',),
    'private': ('push_to_hub',),
    'base': ('to_adapters',),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin_flags(parser)
    sources = parser.add_mutually_exclusive_group(required=True)
    sources.add_argument('--from_hf', metavar='NAME', help='a model on the Hugging Face Hub, or a local folder')
    sources.add_argument('--from_safetensors', metavar='FILE', help='a file that --to_safetensors wrote')
    sources.add_argument('--from_t5x', metavar='DIR', help='a T5X checkpoint')
    sources.add_argument('--checkpoint', metavar='PATH', help=f'source to convert: {arguments.CHECKPOINT_HELP}')
    average = 'checkpoints of one model, separated by commas; their mean is written'
    sources.add_argument('--average', metavar='PATHS', help=average)
    targets = parser.add_mutually_exclusive_group(required=True)
    targets.add_argument('--to', metavar='MODEL_DIR', help='a new MODEL_DIR')
    adapters = 'a new MODEL_DIR with only the parameters that differ from --base; the others are loaded from --base'
    targets.add_argument('--to_adapters', metavar='MODEL_DIR', help=adapters)
    to_hf = 'a new folder that transformers can load, with PyTorch code if transformers lacks the model'
    targets.add_argument('--to_hf', type=arguments.parse_local_path, metavar='DIR', help=to_hf)
    to_safetensors = 'a new file with the parameters of any model'
    targets.add_argument('--to_safetensors', type=arguments.parse_local_path, metavar='FILE', help=to_safetensors)
    targets.add_argument('--to_t5x', metavar='DIR', help='a folder for a T5X checkpoint')
    shared = 'a new folder to share: weights, vocabulary, and a model card generated from the run'
    targets.add_argument('--to_shared', type=arguments.parse_local_path, metavar='DIR', help=shared)
    targets.add_argument('--push_to_hub', metavar='NAME', help='a model on the Hub; uploads what --to_shared writes')
    base = 'with --to_adapters: the checkpoint that the run started from (default: its INITIAL_CHECKPOINT_PATH)'
    parser.add_argument('--base', metavar='PATH', help=base)
    private = 'with --push_to_hub: create a private model'
    parser.add_argument('--private', action='store_true', default=None, help=private)
    dtype = 'with --to_hf or --to_safetensors: dtype of the arrays (default float32)'
    parser.add_argument('--dtype', choices=('float32', 'bfloat16'), help=dtype)
    vocabulary = 'with --from_hf: the SentencePiece model, if the folder has none'
    parser.add_argument('--vocabulary', metavar='FILE', help=vocabulary)
    trust = "with --from_hf: accept a model.gin that imports modules other than this package's models and can run code"
    parser.add_argument('--trust_gin', action='store_true', default=None, help=trust)
    own_names = (
        "with --to_t5x: keep this package's parameter names (for any model; read with t5x/*.gin) instead of T5X's names"
    )
    parser.add_argument('--own_names', action='store_true', default=None, help=own_names)


def run(args: argparse.Namespace) -> None:
    """Runs the conversion, compares the output with the input, and prints the paths of both."""
    source, target = select_conversion(args)
    model_and_vocabulary: list[Any] = []
    # These conversions require gin files, because the source files do not contain the model's configuration.
    if {'from_t5x', 'to_hf', 'to_t5x'} & {source, target}:
        model_and_vocabulary = arguments.load_macro_values(args, 'MODEL', 'VOCABULARY')
    elif args.gin_file or args.gin_flags or args.model:
        raise UserError(
            f'gin files and --model must be omitted with --{source} and --{target}, because the input defines the model'
        )
    from remixer_t5x.cli import conversions
    from remixer_t5x.interop import converted_checkpoint
    from remixer_t5x.run_folder import object_store

    # Checks the output before reading the input, which can take minutes.
    if target not in ('to_t5x', 'push_to_hub'):
        converted_checkpoint.check_folder_is_empty(getattr(args, target))
    is_shared = target in ('to_shared', 'push_to_hub')
    module = lazy_imports.import_extra('hub.shared_model') if is_shared else conversions
    with object_store.wrap_write_errors(getattr(args, target)):
        getattr(module, CONVERSIONS[source, target])(args, *model_and_vocabulary)


def select_conversion(args: argparse.Namespace) -> tuple[str, str]:
    """Returns the source and target flags. Raises UserError if flags cannot be combined."""
    sources, targets = ({pair[index] for pair in CONVERSIONS} for index in (0, 1))
    # argparse requires one flag of each kind.
    (source,) = [name for name in sources if getattr(args, name) is not None]
    (target,) = [name for name in targets if getattr(args, name) is not None]
    if (source, target) not in CONVERSIONS:
        raise UserError(f'--{source} must be combined with --to, got --{target}')
    for flag, readers in READERS.items():
        if getattr(args, flag) is not None and not {source, target} & {*readers}:
            names = ' or '.join(f'--{name}' for name in readers)
            raise UserError(f'--{flag} can only be used with {names}; omit it')
    return source, target


COMMAND = Command(
    'convert',
    'convert weights between checkpoints, Hugging Face and its Hub, T5X and safetensors; merge or average checkpoints',
    add_arguments,
    run,
    (
        'remixer-t5x convert --from_hf=google/flan-t5-small --to=runs/flan',
        'remixer-t5x convert --checkpoint=runs/remixer --push_to_hub=me/remixer',
        'remixer-t5x convert --gin_file=runs/t5_small/model.gin --checkpoint=runs/finetuned --to_hf=exported',
        'remixer-t5x convert --checkpoint=runs/remixer --to_safetensors=remixer.safetensors',
        'remixer-t5x convert --average=runs/a/checkpoints/8000,runs/a/checkpoints/9000 --to=runs/averaged',
        'remixer-t5x convert --checkpoint=runs/adapted --to_adapters=adapters/questions',
    ),
    ON_CPU,
)
