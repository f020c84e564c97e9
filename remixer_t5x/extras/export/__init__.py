"""`remixer-t5x export`: exports a trained model to files that run without this package."""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
from typing import TYPE_CHECKING, Any

from remixer_t5x import base_vocabulary, lazy_imports
from remixer_t5x.cli import arguments
from remixer_t5x.cli.arguments import ON_CPU, Command
from remixer_t5x.cli.console import print_labeled_line
from remixer_t5x.errors import UserError

if TYPE_CHECKING:
    from remixer_t5x.evaluate.text_inference import TextInference

STABLEHLO, SAVED_MODEL = 'stablehlo', 'saved_model'
# Kinds of vocabularies. IDS means that the exported functions accept and return token ids instead of texts.
SENTENCEPIECE, BYTES, IDS = 'sentencepiece', 'bytes', 'ids'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin_flags(parser)
    arguments.add_macro_flag(parser, '--checkpoint', arguments.CHECKPOINT_MACRO, arguments.RUN_HELP)
    to = 'output folder, which must not exist'
    parser.add_argument('--to', type=arguments.parse_local_path, metavar='DIR', required=True, help=to)
    names = 'comma-separated: generate, score, encode, classify (default: all that the model supports)'
    parser.add_argument('--functions', type=arguments.split_names, metavar='NAMES', help=names)
    formats = 'comma-separated: stablehlo (default), saved_model'
    parser.add_argument('--formats', type=arguments.split_names, metavar='NAMES', default=[STABLEHLO], help=formats)
    parser.add_argument('--quantize', choices=('int8',), help='store matrices as 8-bit integers with scales')


def run(args: argparse.Namespace) -> None:
    """Exports the model to a new folder."""
    if not args.formats or not set(args.formats) <= {STABLEHLO, SAVED_MODEL}:
        raise UserError(f'--formats must be {STABLEHLO}, {SAVED_MODEL} or both, got {",".join(args.formats)}')
    if SAVED_MODEL in args.formats:
        lazy_imports.check_libraries_installed()
    folder = pathlib.Path(args.to).expanduser()
    if folder.exists():
        raise UserError(f'--to must be a new folder, got {folder}, which exists')
    from remixer_t5x.cli import infer

    # The input template is not applied, because exported functions accept complete input texts.
    args.gin_flags = [('INPUT_TEMPLATE', 'None'), *args.gin_flags]
    infer.load_config(args)
    settings, template = infer.load_settings(args)
    if template is not None:
        print_labeled_line('inputs', f'texts formatted with the template {template!r}')
    with lazy_imports.discard_stderr():
        _export_model(args, settings, folder)


def _export_model(args: argparse.Namespace, settings: TextInference, folder: pathlib.Path) -> None:
    from remixer_t5x.data import batch_formats, task_vocabulary
    from remixer_t5x.evaluate import predictions
    from remixer_t5x.extras.export import exported_functions, standalone
    from remixer_t5x.interop import safetensors_files
    from remixer_t5x.run_folder import model_dir

    model, vocabulary, decoder = settings.model, settings.vocabulary, settings.decoding.decoder
    task_vocabulary.check_vocabulary_size('VOCABULARY', vocabulary, model.vocab_size)
    step = settings.find_checkpoint_folder()
    settings = settings.adapt_to_checkpoint(step)
    lengths = batch_formats.get_max_inference_lengths(settings.decoding.feature_lengths)
    eos_id = None if vocabulary.eos_id is None else int(vocabulary.eos_id)
    names = args.functions or exported_functions.list_supported_functions(model)
    stop_strings = predictions.compile_stop_strings(settings.decoding.stop_strings, vocabulary)
    programs = exported_functions.build_functions(
        model, names, lengths, decoder, task_vocabulary.get_end_id(vocabulary), stop_strings
    )
    print_labeled_line('reading', step)
    weights = exported_functions.flatten_params(settings.restore_params(step))
    if args.quantize:
        weights = exported_functions.quantize_weights(model, weights)
    # Errors in settings are raised here, before the folder exists.
    exported = {function.name: function.to_stablehlo(weights) for function in programs}
    folder.mkdir(parents=True)
    kind = _write_vocabulary(vocabulary, folder)
    contents = {
        'format': 1,
        'functions': {f.name: {name: ['rows', *shape] for name, shape in f.inputs.items()} for f in programs},
        'lengths': dict(lengths),
        'vocabulary': {
            **{'kind': kind, 'ids': int(vocabulary.vocab_size), 'eos_id': eos_id},
            'ends_inputs': settings.ends_inputs,
            # Vocabularies of remixer_tasks convert sentinels in texts to ids; vocabularies of seqio do not.
            'sentinel_pattern': getattr(vocabulary, 'sentinel_pattern', None),
        },
        'decoder': settings.decoding.build_record()['decoder'],
        'labels': list(getattr(model, 'labels', None) or ()),
        'weights': args.quantize or 'float32',
        'checkpoint': step,
        'versions': model_dir.get_package_versions(),
    }
    (folder / 'contents.json').write_text(json.dumps(contents, indent=2) + '\n')
    if STABLEHLO in args.formats:
        safetensors_files.write_weights_file(folder / 'weights.safetensors', weights, {})
        _print_file(folder / 'weights.safetensors')
        shutil.copyfile(standalone.__file__, folder / 'run.py')
        for name, program in exported.items():
            (folder / f'{name}.stablehlo').write_bytes(program.serialize())
            _print_file(folder / f'{name}.stablehlo')
    if SAVED_MODEL in args.formats:
        from remixer_t5x.extras.export import saved_model

        path = folder / SAVED_MODEL
        signatures = saved_model.write_saved_model(path, programs, exported, weights, vocabulary, contents)
        _print_file(path, f'signatures {", ".join(signatures)}')


def _write_vocabulary(vocabulary: Any, folder: pathlib.Path) -> str:
    """Writes the SentencePiece model, if the vocabulary has one, and returns the kind of vocabulary."""
    if isinstance(getattr(vocabulary, 'sp_model', None), bytes):
        # The serialized SentencePiece model contains the sentinel tokens as pieces.
        (folder / 'vocabulary.model').write_bytes(vocabulary.sp_model)
        return SENTENCEPIECE
    if base_vocabulary.is_byte_vocabulary(vocabulary):
        return BYTES
    name = type(vocabulary).__name__
    print_labeled_line('vocabulary', f'none: {name} cannot be exported, so the functions accept and return token ids')
    return IDS


def _print_file(path: pathlib.Path, note: str = '') -> None:
    files = [path] if path.is_file() else [file for file in path.rglob('*') if file.is_file()]
    size = sum(file.stat().st_size for file in files) / 2**20
    print_labeled_line('wrote', f'{path}, {size:,.1f} MiB{"; " if note else ""}{note}')


COMMAND = Command(
    'export',
    'export a model as StableHLO or a SavedModel, for programs without this package',
    add_arguments,
    run,
    (
        'remixer-t5x export --checkpoint=runs/questions --to=served/questions',
        'remixer-t5x export --checkpoint=runs/questions --to=served/small '
        '--quantize=int8 --formats=saved_model --functions=generate',
    ),
    ON_CPU,
)
