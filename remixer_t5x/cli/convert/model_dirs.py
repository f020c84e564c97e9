"""Conversions between MODEL_DIRs and safetensors, and of adapters: merged, or without their base."""

import argparse
import pathlib

import numpy as np
from flax import traverse_util

from remixer_t5x.checkpoints import changes, saved_params
from remixer_t5x.cli.convert import conversion
from remixer_t5x.cli.convert.conversion import say
from remixer_t5x.errors import UserError
from remixer_t5x.interop import converted
from remixer_t5x.interop.safetensors import export


def from_safetensors(args: argparse.Namespace) -> None:
    """`--from_safetensors=FILE --to=MODEL_DIR`."""
    params, step, record = export.read(args.from_safetensors)
    folder = converted.claim(args.to)
    origin = str(pathlib.Path(args.from_safetensors).expanduser().resolve())
    conversion.write_model_dir(folder, params, step, {**record, 'converted_from': origin}, record['config'])
    conversion.check_equal(params, converted.read(str(folder))[0], folder)


def to_safetensors(args: argparse.Namespace) -> None:
    """`--checkpoint=PATH --to_safetensors=FILE`."""
    params, record, step = converted.read(args.checkpoint, '--checkpoint')
    dtype = args.dtype or 'float32'
    file = export.write(args.to_safetensors, params, step, record, dtype)
    say('read', f'{conversion.describe_size(params)}, step {step}')
    say('wrote', f'{file}, {dtype}, {file.stat().st_size / 2**20:,.1f} MiB')
    conversion.check_equal(export.rounded(params, dtype), export.read(str(file))[0], file)


def merge_adapters(args: argparse.Namespace) -> None:
    """`--checkpoint=PATH --to=MODEL_DIR`."""
    params, record, step = converted.read(args.checkpoint, '--checkpoint')
    folder = converted.claim(args.to)
    source = str(saved_params.find_step(args.checkpoint, '--checkpoint'))
    record = {name: value for name, value in record.items() if name != saved_params.BASE} | {'converted_from': source}
    converted.copy_vocabulary(source, folder)
    conversion.write_model_dir(folder, params, step, record, str(record.get('config') or ''))
    conversion.check_equal(params, converted.read(str(folder))[0], folder)


def to_adapters(args: argparse.Namespace) -> None:
    """`--checkpoint=PATH --to_adapters=MODEL_DIR`: writes the arrays that differ from the base, and the base's path."""
    params, record, step = converted.read(args.checkpoint, '--checkpoint', merge=False)
    config = str(record.get('config') or '')
    base = saved_params.find_step(args.base or _initial_checkpoint(config), '--base')
    of_base = traverse_util.flatten_dict(converted.read(str(base), '--base')[0], sep='/')
    changed = {
        name: array
        for name, array in traverse_util.flatten_dict(params, sep='/').items()
        if name not in of_base or not np.array_equal(of_base[name], array, equal_nan=True)
    }
    if not changed:
        raise UserError(f'{args.checkpoint} has the parameters of {base}, so there is nothing to write; give another')
    folder = converted.claim(args.to_adapters)
    say('differing', f'{conversion.describe_size(changed)}, of {conversion.describe_size(params)}')
    converted.copy_vocabulary(args.checkpoint, folder)
    (folder / saved_params.BASE_FILE).write_text(f'{base}\n')
    record = {**record, saved_params.BASE: saved_params.fingerprint(base)}
    conversion.write_model_dir(folder, traverse_util.unflatten_dict(changed, sep='/'), step, record, config)
    say('base', f'{base}, in {folder / saved_params.BASE_FILE}; write its new path there if you move it')
    conversion.check_equal(converted.read(args.checkpoint)[0], converted.read(str(folder))[0], folder)


def _initial_checkpoint(config: str) -> str:
    """INITIAL_CHECKPOINT_PATH in the gin text of the run. Raises UserError if it is None."""
    path = changes.bindings(config).get('INITIAL_CHECKPOINT_PATH', 'None').strip('\'"')
    if path == 'None':
        raise UserError('the run began with no checkpoint; give the checkpoint to compare with: --base=PATH')
    return path
