"""Implements `convert --from_hf` for folders written by `convert --to_shared`."""

import argparse
import pathlib
import shutil

from remixer_t5x.api import saved_models
from remixer_t5x.cli.convert.checks import check_equal, say, size
from remixer_t5x.data import task_vocabulary
from remixer_t5x.errors import UserError
from remixer_t5x.interop import converted, shared_folder
from remixer_t5x.run_folder import model_dir


def read(args: argparse.Namespace, folder: pathlib.Path) -> None:
    """Converts the shared model in `folder` to a MODEL_DIR.

    Its gin text is not run here, but later commands load it from MODEL_DIR, so it must be harmless or trusted.
    """
    if args.vocabulary is not None:
        raise UserError(f'--vocabulary is for a T5; {folder} has its own: leave it out')
    shared = shared_folder.read(folder)
    if not args.trust_gin:
        saved_models.check_gin(shared, f'remixer-t5x convert --from_hf={args.from_hf} --to={args.to} --trust_gin')
    target = converted.claim(args.to)
    say('reading', str(folder))
    params, step, record = shared.params()
    shutil.copytree(folder / task_vocabulary.FOLDER, target / task_vocabulary.FOLDER)
    if args.trust_gin and (folder / shared_folder.CODE).is_dir():
        shutil.copytree(folder / shared_folder.CODE, target / shared_folder.CODE)
        say('code', f'{target / shared_folder.CODE}, which commands find with PYTHONPATH={target / shared_folder.CODE}')
    text = f'{shared.gin_text()}\n{task_vocabulary.gin_text(target)}'
    (target / model_dir.CONVERTED).write_text(text)
    written = converted.write(target, params, step, {**record, 'config': text, 'converted_from': str(folder)})
    say('read', size(params))
    say('checkpoint', str(written))
    say('model', f'{target / model_dir.CONVERTED}')
    check_equal(params, converted.read(str(target))[0], str(target))
