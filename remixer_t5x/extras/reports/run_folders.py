"""Reads the metrics, evaluations, predictions and settings of runs from their folders."""

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
    """Reads runs. Run names are the shortest distinct suffixes of the paths.

    Raises UserError for a folder that is not a run, a run without metrics, or an unreadable file.
    """
    paths = [model_dir.absolute_path(folder) for folder in folders]
    for path in paths:
        if paths.count(path) > 1:
            raise UserError(f'{path} is listed twice; list each run once')
    # Uses as few trailing path components as are needed for distinct names.
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ['/'.join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            break
    runs = []
    for path, name in zip(paths, names, strict=True):
        with object_store.wrap_read_errors(path):
            runs.append(_read(path, name))
    return runs


def _read(folder: epath.Path, name: str) -> Run:
    if not folder.is_dir():
        raise UserError(f'{folder} is not a folder; type the MODEL_DIR of a run')
    if not (folder / model_dir.MARKER).exists():
        raise UserError(f'{folder} is not a run (it has no {model_dir.MARKER}); type the MODEL_DIR of a run')
    metrics = folder / model_dir.METRICS
    logged = records.read(metrics) if metrics.exists() else []
    if not logged:
        raise UserError(f'{folder} has no metrics yet; wait for the first log (LOG_PERIOD steps), or type another run')
    config, evaluations = folder / model_dir.CONFIG, folder / EVAL / model_dir.METRICS
    return Run(
        name=name,
        folder=os.fspath(folder),
        records=logged,
        config=untrusted_files.read_text(config, 'restore it, or remove it') if config.exists() else '',
        evaluations=records.read(evaluations) if evaluations.exists() else (),
        predictions=dict(_predictions(folder / EVAL / results.PREDICTIONS)),
        spent=progress.read_times(folder),
    )


def _predictions(folder: epath.Path) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
    """Yields ('<task>-<split>', rows) from the newest prediction file of each task and split."""
    newest: dict[str, tuple[int, epath.Path]] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch(r'(.+)-(\d+)\.jsonl', path.name)
        if match and int(match[2]) >= newest.get(match[1], (-1, path))[0]:
            newest[match[1]] = int(match[2]), path
    for name, (_, path) in sorted(newest.items()):
        # Tasks without examples have empty files.
        rows = results.read_predictions(os.fspath(path))
        if rows:
            yield name, rows
