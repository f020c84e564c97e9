"""`remixer-t5x convert --checkpoint=PATH --to_adapters=MODEL_DIR`: what a run has changed, apart from its base."""

import argparse

import numpy as np
from flax import traverse_util

from remixer_t5x.checkpoints import config_changes, saved_params
from remixer_t5x.cli.convert.checks import check_equal, say, size
from remixer_t5x.errors import UserError
from remixer_t5x.interop import converted
from remixer_t5x.run_folder import model_dir


def write(args: argparse.Namespace) -> None:
    """Writes the arrays that differ from the base, and where the base is; reads both back as a command would."""
    params, record, step = converted.read(args.checkpoint, '--checkpoint', merge=False)
    place = args.base or _initial(str(record.get('config') or ''))
    base = saved_params.find_step(place, '--base')
    whole = traverse_util.flatten_dict(converted.read(str(base), '--base')[0], sep='/')
    flat = traverse_util.flatten_dict(params, sep='/')
    own = {name: array for name, array in flat.items() if not _is_in(whole, name, array)}
    if not own:
        raise UserError(f'{args.checkpoint} has the parameters of {base}, so there is nothing to write; give another')
    folder = converted.claim(args.to_adapters)
    say('read', f'{size(params)}, {size(own)} of them differ from {base}')
    model_dir.write_config(folder, str(record.get('config') or ''))
    converted.copy_vocabulary(args.checkpoint, folder)
    (folder / saved_params.BASE_FILE).write_text(f'{base}\n')
    record = {**record, saved_params.BASE: saved_params.fingerprint(base)}
    written = converted.write(folder, traverse_util.unflatten_dict(own, sep='/'), step, record)
    say('checkpoint', str(written))
    say('base', f'{base}, in {folder / saved_params.BASE_FILE}; write its new path there if you move it')
    check_equal(converted.read(args.checkpoint)[0], converted.read(str(folder))[0], str(folder))


def _initial(config: str) -> str:
    """INITIAL_CHECKPOINT_PATH in the gin text of the run."""
    found = config_changes.bindings(config).get('INITIAL_CHECKPOINT_PATH', 'None').strip('\'"')
    if found == 'None':
        raise UserError('the run began with no checkpoint; give the checkpoint to compare with: --base=PATH')
    return found


def _is_in(base: dict[str, np.ndarray], name: str, array: np.ndarray) -> bool:
    return name in base and base[name].shape == array.shape and np.array_equal(base[name], array, equal_nan=True)
