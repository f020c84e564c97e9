"""Reads the folder of a run for a report: what was logged, evaluated and predicted, and with which settings."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import results
from remixer_t5x.evaluate.checkpoint_evaluation import EVAL
from remixer_t5x.extras.reports import records
from remixer_t5x.extras.reports.records import Run
from remixer_t5x.run_folder import model_dir, object_store
from remixer_t5x.train import progress


def read_all(folders: Sequence[str]) -> list[Run]:
    """The runs, each with a name of its own: the last part of its path, or more of it where two would be the same.

    Raises UserError for a folder that is not a run, a run without metrics, and a file that cannot be read.
    """
    if isinstance(folders, str) or not folders:
        raise UserError(f'MODEL_DIRS is {folders!r}; type the folders of one run or several')
    paths = [model_dir.absolute(folder) for folder in folders]
    for path in paths:
        if paths.count(path) > 1:
            raise UserError(f'{path} is given twice; give each run once')
    found = []
    for path, name in zip(paths, names(paths), strict=True):
        with object_store.reading(path):
            found.append(_read(path, name))
    return found


def names(paths: Sequence[epath.Path]) -> list[str]:
    """The fewest last parts of each path that tell all of them apart."""
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        found = ['/'.join(path.parts[-count:]) for path in paths]
        if len(set(found)) == len(found):
            break
    return found


def _read(folder: epath.Path, name: str) -> Run:
    if not folder.is_dir():
        raise UserError(f'{folder} is not a folder; give the MODEL_DIR of a run')
    if not (folder / model_dir.MARKER).exists():
        raise UserError(f'{folder} is not a run (it has no {model_dir.MARKER}); give the MODEL_DIR of a run')
    metrics = folder / model_dir.METRICS
    logged = records.read(metrics) if metrics.exists() else []
    if not logged:
        raise UserError(f'{folder} has no metrics yet; wait for the first log (LOG_PERIOD steps), or give another run')
    evaluated = folder / EVAL / model_dir.METRICS
    return Run(
        name,
        os.fspath(folder),
        logged,
        _config(folder),
        records.read(evaluated) if evaluated.exists() else (),
        dict(_predictions(folder / EVAL / results.PREDICTIONS)),
        progress.read_times(folder),
    )


def _config(folder: epath.Path) -> str:
    path = folder / model_dir.CONFIG
    return untrusted_files.read_text(path, 'restore it, or remove it to do without') if path.exists() else ''


def _predictions(folder: epath.Path) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
    """('<task>-<split>', rows) of the newest step of each."""
    newest: dict[str, tuple[int, epath.Path]] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        found = re.fullmatch(r'(.+)-(\d+)\.jsonl', path.name)
        if found and int(found[2]) >= newest.get(found[1], (-1, path))[0]:
            newest[found[1]] = int(found[2]), path
    for name, (_, path) in sorted(newest.items()):
        # A task without examples leaves an empty file.
        rows = results.read_predictions(os.fspath(path))
        if rows:
            yield name, rows
