"""`remixer-t5x export`: exports a trained model to files that run without this package."""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from remixer_t5x import lazy_imports
from remixer_t5x.cli import arguments
from remixer_t5x.cli.arguments import ON_CPU, Command
from remixer_t5x.cli.console import print_labeled_line
from remixer_t5x.errors import UserError

if TYPE_CHECKING:
    from remixer_t5x.evaluate.text_inference import TextInference
    from remixer_t5x.extras.export.exported_functions import ExportedFunction

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
    """Exports the model to a new folder, and compares the outputs of the exported programs with those of the model."""
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
    from remixer_t5x.extras.export import exported_functions
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
    exact = exported_functions.flatten_params(settings.restore_params(step))
    weights = exported_functions.quantize_weights(model, exact) if args.quantize else exact
    with _create_folder(folder):
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
            _write_stablehlo(folder, programs, weights, exact, model.vocab_size)
        if SAVED_MODEL in args.formats:
            from remixer_t5x.extras.export import saved_model

            signatures = saved_model.write_saved_model(folder / SAVED_MODEL, programs, weights, vocabulary, contents)
            _print_file(folder / SAVED_MODEL, f'signatures {", ".join(signatures)}')


@contextlib.contextmanager
def _create_folder(folder: pathlib.Path) -> Iterator[None]:
    """Creates the output folder, and removes it after an error, because the next run would refuse it."""
    folder.mkdir(parents=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_vocabulary(vocabulary: Any, folder: pathlib.Path) -> str:
    """Writes the SentencePiece model, if the vocabulary has one, and returns the kind of vocabulary."""
    if isinstance(getattr(vocabulary, 'sp_model', None), bytes):
        # The serialized SentencePiece model contains the sentinel tokens as pieces.
        (folder / 'vocabulary.model').write_bytes(vocabulary.sp_model)
        return SENTENCEPIECE
    name = type(vocabulary).__name__
    if name == 'ByteVocabulary':
        return BYTES
    print_labeled_line('vocabulary', f'none: {name} cannot be exported, so the functions accept and return token ids')
    return IDS


def _write_stablehlo(
    folder: pathlib.Path,
    programs: Sequence[ExportedFunction],
    weights: Mapping[str, Any],
    exact: Mapping[str, Any],
    vocab_size: int,
) -> None:
    from remixer_t5x.extras.export import standalone
    from remixer_t5x.interop import safetensors_files

    safetensors_files.write_weights_file(folder / 'weights.safetensors', weights, {})
    _print_file(folder / 'weights.safetensors')
    shutil.copyfile(standalone.__file__, folder / 'run.py')
    for function in programs:
        file, program = folder / f'{function.name}.stablehlo', function.to_stablehlo(weights).serialize()
        file.write_bytes(program)
        _print_file(file, describe_difference(program, function, weights, exact, vocab_size))


def describe_difference(
    program: bytearray,
    function: ExportedFunction,
    weights: Mapping[str, Any],
    exact: Mapping[str, Any],
    vocab_size: int,
) -> str:
    """Describes the largest difference between the outputs of the program and the model on two rows of random ids."""
    import jax
    import numpy as np
    from jax import export

    rng = np.random.default_rng(0)
    inputs = [rng.integers(3, min(100, vocab_size), (2, *shape)).astype(np.int32) for shape in function.inputs.values()]
    exported = export.deserialize(program).call(weights, *inputs)
    original = jax.jit(function.call)(exact, *inputs)
    name = 'hidden' if 'hidden' in original else 'scores'
    difference = float(np.abs(np.asarray(exported[name]) - np.asarray(original[name])).max())
    largest = float(np.abs(np.asarray(original[name])).max())
    return f'for random ids, {name} differ from the model by up to {difference:.2g} (largest value: {largest:.3g})'


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
