"""`remixer-t5x export`: a trained model as files that programs without this package can run."""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from remixer_t5x.cli import arguments
from remixer_t5x.cli.command import ON_CPU, Command
from remixer_t5x.errors import UserError

if TYPE_CHECKING:
    from remixer_t5x.evaluate.text_inference import TextInference
    from remixer_t5x.extras.export.functions import Function

STABLEHLO, SAVED_MODEL = 'stablehlo', 'saved_model'
# Rows of the comparison; the model pads to its lengths, so that these are enough.
COMPARED = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin(parser)
    arguments.add_macro(parser, '--checkpoint', arguments.CHECKPOINT, arguments.RUN_HELP)
    parser.add_argument('--to', metavar='DIR', required=True, help='a new folder')
    names = 'generate, score, encode, classify, by comma (default: all that the model has)'
    parser.add_argument('--functions', type=arguments.names, metavar='NAMES', help=names)
    formats = 'stablehlo (default) or saved_model, or both by comma'
    parser.add_argument('--formats', type=arguments.names, metavar='NAMES', default=[STABLEHLO], help=formats)
    parser.add_argument('--quantize', choices=('int8',), help='store matrices as 8-bit integers with scales')


def run(args: argparse.Namespace) -> None:
    """Writes the folder, and compares what is in it with the model."""
    unknown = sorted(set(args.formats) - {STABLEHLO, SAVED_MODEL})
    if unknown or not args.formats:
        raise UserError(f'--formats names {", ".join(unknown) or "nothing"}; it takes {STABLEHLO} and {SAVED_MODEL}')
    folder = pathlib.Path(args.to).expanduser()
    if folder.exists():
        raise UserError(f'{folder} exists already; give a new folder with --to')
    from remixer_t5x.cli import infer

    # A function takes one text: what a template of rows has been filled into.
    args.gin_flags = [('INPUT_TEMPLATE', 'None'), *args.gin_flags]
    infer.load(args)
    settings, template = infer.settings_of(args)
    if template is not None:
        _say('inputs', f'texts as the template {template!r} makes them')
    with arguments.libraries(args):
        _export(args, settings, folder)


def _export(args: argparse.Namespace, settings: TextInference, folder: pathlib.Path) -> None:
    from remixer_t5x.data import frames, task_vocabulary
    from remixer_t5x.extras.export import functions, int8

    model, vocabulary = settings.model, settings.vocabulary
    task_vocabulary.check_ids('VOCABULARY', vocabulary, model.vocab_size)
    lengths = frames.text_lengths(settings.decoding.feature_lengths)
    names = args.functions or functions.possible(model)
    eos_id = 1 if vocabulary.eos_id is None else int(vocabulary.eos_id)
    made = functions.make(model, names, lengths, settings.decoding.decoder, eos_id)
    step = settings.step_folder()
    _say('reading', step)
    exact = int8.flat(settings.restore(step))
    weights = int8.quantized(model, exact) if args.quantize else exact
    folder.mkdir(parents=True)
    contents = _contents(args, settings, made, lengths, folder, step)
    if STABLEHLO in args.formats:
        _write_stablehlo(folder, made, weights, exact, contents)
    if SAVED_MODEL in args.formats:
        from remixer_t5x.extras.export import saved_model

        labels = contents['labels']
        ends = contents['vocabulary']['ends_inputs']
        written = saved_model.write(folder / SAVED_MODEL, made, weights, vocabulary, lengths, ends, labels)
        _say(
            'wrote', f'{folder / SAVED_MODEL}, with the signatures {", ".join(written)}; {_size(folder / SAVED_MODEL)}'
        )


def _contents(
    args: argparse.Namespace,
    settings: TextInference,
    made: list[Function],
    lengths: Mapping[str, int],
    folder: pathlib.Path,
    step: str,
) -> dict[str, Any]:
    """Writes the vocabulary and the list of contents, and returns the list."""
    from remixer_t5x.evaluate import text_inference
    from remixer_t5x.extras.export import texts
    from remixer_t5x.run_folder import model_dir

    vocabulary = texts.write(settings.vocabulary, folder, settings.codec().ends)
    if vocabulary['kind'] == texts.IDS:
        name = type(settings.vocabulary).__name__
        _say('vocabulary', f'none: {name} cannot be written, so the functions take and give ids')
    contents = {
        'format': 1,
        'functions': {f.name: {name: ['rows', *shape] for name, shape in f.inputs.items()} for f in made},
        'lengths': dict(lengths),
        'vocabulary': vocabulary,
        'decoder': text_inference.decoder_name(settings.decoding.decoder),
        'labels': list(getattr(settings.model, 'labels', None) or ()),
        'weights': args.quantize or 'float32',
        'checkpoint': step,
        'versions': model_dir.package_versions(),
    }
    (folder / 'contents.json').write_text(json.dumps(contents, indent=2) + '\n')
    return contents


def _write_stablehlo(
    folder: pathlib.Path, made: list[Function], weights: Mapping[str, Any], exact: Mapping[str, Any], contents: Any
) -> None:
    from safetensors.numpy import save_file

    from remixer_t5x.extras.export import run as standalone
    from remixer_t5x.extras.export import stablehlo

    save_file(dict(weights), folder / 'weights.safetensors')
    _say('wrote', f'{folder / "weights.safetensors"}, {contents["weights"]}, {_size(folder / "weights.safetensors")}')
    shutil.copyfile(standalone.__file__, folder / 'run.py')
    for function in made:
        file = folder / f'{function.name}.stablehlo'
        program = stablehlo.exported(function, weights).serialize()
        file.write_bytes(program)
        _say('wrote', f'{file}, {_size(file)}; {_compared(program, function, weights, exact)}')


def _compared(program: bytearray, function: Function, weights: Mapping[str, Any], exact: Mapping[str, Any]) -> str:
    """How far the program's outputs are from the model's with its own weights, on random ids."""
    import jax
    import numpy as np
    from jax import export

    rng = np.random.default_rng(0)
    inputs = [rng.integers(3, 100, (COMPARED, *shape)).astype(np.int32) for shape in function.inputs.values()]
    theirs = export.deserialize(program).call(weights, *inputs)
    ours = jax.jit(function.call)(exact, *inputs)
    name = 'hidden' if 'hidden' in ours else 'scores'
    difference = float(np.abs(np.asarray(theirs[name]) - np.asarray(ours[name])).max())
    largest = float(np.abs(np.asarray(ours[name])).max())
    return f'on random ids its {name} differ by at most {difference:.2g} from the model, of values up to {largest:.3g}'


def _size(path: pathlib.Path) -> str:
    files = [path] if path.is_file() else [file for file in path.rglob('*') if file.is_file()]
    return f'{sum(file.stat().st_size for file in files) / 2**20:,.1f} MiB'


def _say(what: str, text: str) -> None:
    print(f'{what:<12} {text}', flush=True)


COMMAND = Command(
    'export',
    'a model as StableHLO or a SavedModel, for programs without this package',
    add_arguments,
    run,
    (
        'remixer-t5x export --checkpoint=runs/questions --to=served/questions',
        'remixer-t5x export --checkpoint=runs/questions --to=served/small '
        '--quantize=int8 --formats=saved_model --functions=generate',
    ),
    ON_CPU,
)
