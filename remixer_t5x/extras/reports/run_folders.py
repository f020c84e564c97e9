"""Reads the folder of a run for a report: metrics, evaluations, predictions and settings."""

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
    """The runs, named by the last part of their path, or by more parts if names would be equal.

    Raises UserError for a folder that is not a run, a run without metrics, and a file that cannot be read.
    """
    paths = [model_dir.absolute(folder) for folder in folders]
    for path in paths:
        if paths.count(path) > 1:
            raise UserError(f'{path} is named twice; name each run once')
    runs = []
    for path, name in zip(paths, short_names(paths), strict=True):
        with object_store.reading(path):
            runs.append(_read(path, name))
    return runs


def short_names(paths: Sequence[epath.Path]) -> list[str]:
    """The fewest last parts of each path that make all names different."""
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ['/'.join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _read(folder: epath.Path, name: str) -> Run:
    if not folder.is_dir():
        raise UserError(f'{folder} is not a folder; type the MODEL_DIR of a run')
    if not (folder / model_dir.MARKER).exists():
        raise UserError(f'{folder} is not a run (it has no {model_dir.MARKER}); type the MODEL_DIR of a run')
    metrics = folder / model_dir.METRICS
    logged = records.read(metrics) if metrics.exists() else []
    if not logged:
        raise UserError(f'{folder} has no metrics yet; wait for the first log (LOG_PERIOD steps), or type another run')
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
    """Yields ('<task>-<split>', rows) of the newest step of each."""
    newest: dict[str, tuple[int, epath.Path]] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch(r'(.+)-(\d+)\.jsonl', path.name)
        if match and int(match[2]) >= newest.get(match[1], (-1, path))[0]:
            newest[match[1]] = int(match[2]), path
    for name, (_, path) in sorted(newest.items()):
        # A task without examples leaves an empty file.
        rows = results.read_predictions(os.fspath(path))
        if rows:
            yield name, rows
