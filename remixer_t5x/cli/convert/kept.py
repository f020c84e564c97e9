"""A Hugging Face folder as a MODEL_DIR in the cache, converted when it is first asked for."""

import argparse
import pathlib

from remixer_t5x.checkpoints import saved_params
from remixer_t5x.cli.convert import described
from remixer_t5x.run_folder import model_dir
from remixer_tasks.files import cache


def of_hugging_face(path: str) -> pathlib.Path:
    """The MODEL_DIR with the parameters and the gin file of the T5 in the folder `path`.

    Raises UserError if the folder has no T5.
    """
    source = pathlib.Path(path).expanduser().resolve()
    files = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in source.glob('*.*'))
    folder = cache.root() / 'huggingface' / cache.key(str(source), files)
    if not saved_params.steps_in(model_dir.absolute(str(folder)) / model_dir.CHECKPOINTS):
        arguments = argparse.Namespace(from_hf=path, to=str(folder), vocabulary=None, trust_gin=None)
        described.CONVERSIONS['from_hf', 'to'](arguments)
    return folder
