"""Finds the checkpoints to evaluate: named ones, or each checkpoint of a run as it appears."""

import time
from collections.abc import Collection, Iterator

from etils import epath

from remixer_t5x.checkpoints import saved_params
from remixer_t5x.errors import UserError
from remixer_t5x.run_folder import model_dir

POLL_SECONDS = 10.0
SETTING = 'CHECKPOINT_PATH'


def find_all(paths: str) -> list[epath.Path]:
    """The folders of the checkpoints in `paths`, separated by commas; for a MODEL_DIR, its newest checkpoint.

    Raises UserError if a path is not a checkpoint, or if two have the same step, because their results would be mixed.
    """
    checkpoints = [saved_params.find_step(path.strip(), SETTING) for path in paths.split(',') if path.strip()]
    if not checkpoints:
        raise UserError(f'{SETTING} is empty; give a MODEL_DIR or a checkpoint, or several separated by commas')
    steps = [folder.name for folder in checkpoints]
    for step in steps:
        if steps.count(step) > 1:
            raise UserError(f'{SETTING} names two checkpoints of step {step}; evaluate them by two commands')
    return checkpoints


def follow(
    path: str, timeout: float, until: int | None = None, done: Collection[int] = (), poll: float = POLL_SECONDS
) -> Iterator[epath.Path]:
    """The checkpoints of a MODEL_DIR (or of its `checkpoints`), oldest first, and then each new one.

    Ends after step `until`, or if none appears for `timeout` seconds. Skips steps in `done`, and checkpoints that the
    training run removes before their turn. Raises UserError if none appears at all.
    """
    if ',' in path:
        raise UserError(f'{SETTING} is {path}; following takes one MODEL_DIR, without commas')
    run = model_dir.absolute(path)
    seen: set[int] = set()
    quiet_since = time.monotonic()
    while True:
        folder = run if saved_params.steps_in(run) else run / model_dir.CHECKPOINTS
        fresh = next((step for step in saved_params.steps_in(folder) if step not in seen), None)
        if fresh is not None:
            seen.add(fresh)
            if fresh not in done:
                yield folder / str(fresh)
            quiet_since = time.monotonic()
        if until is not None and seen and max(seen) >= until:
            return
        if fresh is None:
            if time.monotonic() - quiet_since >= timeout:
                break
            time.sleep(min(poll, timeout))
    if not seen:
        # This is the same error as for a named checkpoint, with the nearest checkpoint.
        saved_params.find_step(path, SETTING)
