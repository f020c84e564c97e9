"""Checkpoints through Orbax, written in the background: train state, data position, and a record of the run.

`MODEL_DIR/checkpoints/<step>` holds three items: `state` (arrays, sharded; they restore on any mesh), `data`
(the position of each stream of batches, JSON) and `run` (operative gin, vocabulary fingerprint, versions, JSON).
Orbax writes under a temporary name, which `durable` syncs and renames at the end, so a listed step is complete. The
next start removes what an interrupted write left behind.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from remixer_t5x.checkpoints import durable, saved_params
from remixer_t5x.data.prefetch import Position
from remixer_t5x.errors import UserError
from remixer_t5x.run_folder import model_dir, object_store

State = Any


class SaveFailed(UserError):
    """A checkpoint could not be written."""


class Checkpoints:
    """The checkpoints under one MODEL_DIR; keeps the newest `keep` (None keeps all)."""

    def __init__(self, folder: epath.Path, keep: int | None = 3):
        self.folder = folder / model_dir.CHECKPOINTS
        self._options = durable.manager_options(self.folder, keep, background=True)
        self._open()

    def _open(self) -> None:
        with saved_params.wrap_errors(self.folder, 'opened'):
            self._manager = ocp.CheckpointManager(
                self.folder, options=self._options, item_names=('state', 'data', 'run')
            )

    def steps(self) -> list[int]:
        """Waits for a pending write, and returns the steps of complete checkpoints, oldest first."""
        with contextlib.suppress(Exception):
            self._manager.wait_until_finished()
        # The manager forgets the previous checkpoint as soon as a write starts, even if that write then fails.
        return sorted(ocp.utils.checkpoint_steps(self.folder))

    def latest_step(self) -> int | None:
        """Returns the step of the newest complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def move_away(self, step: int) -> epath.Path:
        """Moves an unusable checkpoint to MODEL_DIR/damaged, and returns its new folder.

        One process calls this, and then all processes call `reopen`.
        """
        target = self.folder.parent / 'damaged' / str(step)
        with saved_params.wrap_errors(self.folder / str(step), 'moved away'):
            target.parent.mkdir(exist_ok=True)
            if target.exists():
                target.rmtree()
            (self.folder / str(step)).rename(target)
        return target

    def reopen(self) -> None:
        """Opens the folder again after a failed write or a change of the folder; removes unfinished writes."""
        with contextlib.suppress(Exception):
            self._manager.close()
        self._open()

    def save(self, step: int, state: State, position: Position, run: dict[str, Any]) -> None:
        """Starts writing and returns once the arrays are copied to the host.

        Raises SaveFailed if this or the previous write failed; complete checkpoints stay as they are.
        """
        try:
            check_space(self.folder, state, 'a checkpoint takes')
        except UserError as error:
            # The pending write may still fit, and a run could then resume from it.
            self.steps()
            raise SaveFailed(f'{error} ({self._newest_message()})') from None
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            data=ocp.args.JsonSave({'positions': _gather_streams(position)}),
            run=ocp.args.JsonSave(run),
        )
        with self._save_errors(f'the checkpoint of step {step} (or the previous checkpoint)'):
            self._manager.save(step, args=items, force=True)

    def restore(self, step: int, abstract_state: State) -> tuple[State, Position]:
        """Restores the state in the shapes and shardings of `abstract_state`, and the data position of all streams.

        Raises UserError if the checkpoint does not fit or cannot be read, and durable.DamagedCheckpoint if an array
        contains NaN or infinity.
        """
        folder = self.folder / str(step)
        shapes = saved_params.saved_shapes(folder / 'state')
        saved_params.check_fit(folder, shapes, saved_params.array_shapes(abstract_state))
        with saved_params.wrap_errors(folder, 'read'):
            items = self._manager.restore(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state), data=ocp.args.JsonRestore()),
            )
            position = Position.from_json(items['data']['positions'])
        saved_params.check_finite(folder, items['state'])
        return items['state'], position

    def check_for_errors(self) -> None:
        """Raises SaveFailed if a write in the background has failed; does not wait."""
        with self._save_errors():
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Waits until the last checkpoint is complete. Raises SaveFailed if it could not be written."""
        with self._save_errors():
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def close(self) -> None:
        """Waits for the last write and ends the threads. Raises SaveFailed if it could not be written."""
        with self._save_errors():
            self._manager.close()

    def _newest_message(self) -> str:
        with contextlib.suppress(Exception):
            # In a bucket, the folder of the write that failed has its name already.
            if steps := ocp.utils.checkpoint_steps(self.folder):
                return f'the checkpoint of step {max(steps)} is kept'
        return 'there is no checkpoint yet'

    @contextlib.contextmanager
    def _save_errors(self, what: str = 'a checkpoint') -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise SaveFailed(
                f'{what} could not be written to {self.folder}: {saved_params.root_cause(error)}; check the space and '
                f'rights there and run the same command again ({self._newest_message()})'
            ) from error


def check_space(folder: epath.Path, arrays: Any, what: str) -> None:
    """Raises UserError, with `what` takes the space, if the disk has no room for this process's part of `arrays`.

    A write that fills the disk would also break the log, and other programs that write there.
    """
    if object_store.is_remote(folder):
        return
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays)) // jax.process_count()
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f'the disk of {folder} has {free / 2**20:.1f} MiB left and {what} {needed / 2**20:.1f} MiB; free some '
            'space and run the same command again'
        )


def write_params(
    folder: epath.Path, step: int, params: Any, run: Mapping[str, Any], replaced: Sequence[int] = ()
) -> None:
    """Writes a checkpoint of parameters and the record `run` alone, and then removes the steps `replaced`.

    Returns once it is on disk. Raises UserError if it cannot be written.
    """
    items = ocp.args.Composite(state=ocp.args.StandardSave({'params': params}), run=ocp.args.JsonSave(dict(run)))
    options = durable.manager_options(folder)
    with (
        saved_params.wrap_errors(folder / str(step), 'written'),
        ocp.CheckpointManager(folder, options=options, item_names=('state', 'run')) as writer,
    ):
        if step in writer.all_steps():
            writer.delete(step)
        writer.save(step, args=items, force=True)
        # Removed only now, so that there is always one checkpoint.
        for other in replaced:
            writer.delete(other)


def _gather_streams(position: Position) -> list[dict[str, Any]]:
    """Returns every stream's record, in order, on every host, because Orbax lets only the first host write JSON."""
    mine = json.dumps(position.to_json()).encode()
    records = json.loads(mine)
    if jax.process_count() > 1:
        sizes = multihost_utils.process_allgather(np.asarray([len(mine)], np.int32)).reshape(-1)
        padded: np.ndarray = np.zeros(int(sizes.max()), np.uint8)
        padded[: len(mine)] = np.frombuffer(mine, np.uint8)
        rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
        for row, size in zip(rows, sizes, strict=True):
            records |= json.loads(row[:size].tobytes())
    return [records[str(index)] for index in range(len(records))]
