"""Finds checkpoints by path, follows those that a run writes, and detects those that a run removes."""

import contextlib
import time
from collections.abc import Collection, Iterator

import orbax.checkpoint as ocp
from etils import epath

from remixer_t5x import lazy_imports
from remixer_t5x.checkpoints import durable_folders
from remixer_t5x.errors import UserError, suggest_similar_name
from remixer_t5x.run_folder import model_dir, object_store


def find_checkpoint(path: str, setting: str = 'INITIAL_CHECKPOINT_PATH') -> epath.Path:
    """Returns `path` if it is a checkpoint folder, or the newest checkpoint in a MODEL_DIR or its `checkpoints` folder.

    Raises UserError if there is no checkpoint. `setting` is the text before the path in the error message.
    """
    start = model_dir.to_absolute_path(path)
    with object_store.wrap_read_errors(start):
        for folder in (start, start / model_dir.CHECKPOINTS):
            if is_complete_checkpoint(folder):
                return folder
            if steps := list_steps(folder):
                return folder / str(steps[-1])
    siblings = [child.name for child in (start.parent.iterdir() if start.parent.is_dir() else ()) if child.is_dir()]
    raise UserError(
        f'{setting} {start} does not contain a checkpoint{suggest_similar_name(start.name, siblings)}; use the '
        'MODEL_DIR of a run that has saved a checkpoint, or one of the folders in its `checkpoints` folder'
    )


def list_steps(folder: epath.Path) -> list[int]:
    """Returns the steps of the complete checkpoints in `folder`, in ascending order."""
    with object_store.wrap_read_errors(folder):
        if not folder.is_dir():
            return []
        names = [
            child.name
            for child in folder.iterdir()
            if durable_folders.is_step_name(child.name) and is_complete_checkpoint(child)
        ]
    return sorted(map(int, names))


def is_complete_checkpoint(step: epath.Path) -> bool:
    """Returns whether the folder `step` is a complete checkpoint."""
    # In a bucket, the folder of an incomplete checkpoint already has its final name.
    return (step / 'state').exists() and ocp.utils.is_checkpoint_finalized(step)


def find_checkpoints(paths: str) -> list[epath.Path]:
    """Returns the checkpoint folder of each path in the comma-separated list `paths`.

    Raises UserError if two checkpoints have the same step, because their evaluation results would be indistinguishable.
    """
    checkpoints = [find_checkpoint(path.strip(), 'CHECKPOINT_PATH') for path in paths.split(',') if path.strip()]
    steps = [folder.name for folder in checkpoints]
    if not steps or len({*steps}) < len(steps):
        raise UserError(
            f'CHECKPOINT_PATH must list one or more checkpoints, each of a different step, got {paths!r}; evaluate '
            'checkpoints of the same step with separate commands'
        )
    return checkpoints


def follow_checkpoints(
    path: str, timeout: float, until: int | None = None, skipped: Collection[int] = (), poll: float = 10.0
) -> Iterator[epath.Path]:
    """Yields the checkpoints of a MODEL_DIR in ascending order, and waits for new checkpoints.

    Stops after step `until`, or if no checkpoint appears for `timeout` seconds. Skips the steps in `skipped` and all
    checkpoints that are deleted before they can be yielded. Raises UserError if no checkpoint appears at all.
    """
    run = model_dir.to_absolute_path(path)
    seen: set[int] = set()
    quiet_since = time.monotonic()
    while True:
        folder = run if list_steps(run) else run / model_dir.CHECKPOINTS
        new_step = next((step for step in list_steps(folder) if step not in seen), None)
        if new_step is not None:
            seen.add(new_step)
            if new_step not in skipped:
                yield folder / str(new_step)
            quiet_since = time.monotonic()
        if until is not None and seen and max(seen) >= until:
            return
        if new_step is None:
            if time.monotonic() - quiet_since >= timeout:
                break
            time.sleep(min(poll, timeout))
    if not seen:
        # Raises a UserError that suggests the most similar name.
        find_checkpoint(path, 'CHECKPOINT_PATH')


class CheckpointRemovedError(UserError):
    """Raised if another process removed a checkpoint while it was being read."""


@contextlib.contextmanager
def report_removal(step: epath.Path) -> Iterator[None]:
    """Replaces a UserError of the block by CheckpointRemovedError if another process removes the checkpoint `step`."""
    try:
        yield
    except UserError as error:
        if not _wait_until_removed(step):
            raise
        raise CheckpointRemovedError(
            f'the checkpoint at {step} was removed while it was being read, probably because its run keeps only the '
            'newest checkpoints (KEEP_CHECKPOINTS); use a newer checkpoint, or one in best/'
        ) from error


def _wait_until_removed(step: epath.Path, timeout: float = 10.0) -> bool:
    """Waits until the folder `step` is no longer a complete checkpoint. Returns False after `timeout` seconds.

    A run deletes an old checkpoint file by file, so reading the checkpoint may fail while it still seems complete. The
    newest checkpoint is not removed, so the function does not wait for it.
    """
    deadline = time.monotonic() + timeout
    # If the folder cannot be read, the error of the caller states the reason.
    with contextlib.suppress(UserError, *lazy_imports.get_file_error_types()):
        is_newest = durable_folders.get_step(step) >= max(list_steps(step.parent), default=0)
        while is_complete_checkpoint(step):
            if is_newest or time.monotonic() >= deadline:
                return False
            time.sleep(1.0)
        return True
    return False
