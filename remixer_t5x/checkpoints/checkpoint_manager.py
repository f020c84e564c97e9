"""Writes checkpoints with Orbax in the background, and restores them.

`MODEL_DIR/checkpoints/<step>` contains three items. `state` contains sharded arrays, which can be restored on any mesh;
`data` is JSON with the position of each data stream; `run` is JSON with the operative gin config, the vocabulary record
and package versions. Orbax writes to a temporary folder, which `durable_folders` syncs and renames, so a folder named
after a step number is always complete. When a run starts, it removes the temporary folders of interrupted writes.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from remixer_t5x.checkpoints import checkpoint_paths, compatibility, durable_folders, saved_params
from remixer_t5x.data.prefetch import DataPosition
from remixer_t5x.devices import collectives
from remixer_t5x.errors import UserError
from remixer_t5x.run_folder import model_dir

State = Any


class CheckpointSaveError(UserError):
    """Raised if a checkpoint cannot be written."""


class RunCheckpoints:
    """Manages the checkpoints of a MODEL_DIR and retains the newest `keep` checkpoints (None retains all)."""

    def __init__(self, folder: epath.Path, keep: int | None = 3):
        self.folder = folder / model_dir.CHECKPOINTS
        self._options = durable_folders.build_manager_options(self.folder, keep, background=True)
        self._open_manager()

    def _open_manager(self) -> None:
        # Orbax communicates on the devices. On CPUs, Gloo waits at most 30 s for a process that is still busy.
        collectives.barrier()
        with saved_params.wrap_checkpoint_errors(self.folder, 'opened'):
            self._manager = ocp.CheckpointManager(
                self.folder, options=self._options, item_names=('state', 'data', 'run')
            )

    def list_complete_steps(self) -> list[int]:
        """Waits for a pending write, and returns the steps of the complete checkpoints in ascending order."""
        with contextlib.suppress(Exception):
            self._manager.wait_until_finished()
        # List the folder instead of querying Orbax's manager, because the manager forgets the previous checkpoint when
        # a write starts, even if the write fails.
        return checkpoint_paths.list_steps(self.folder)

    def latest_step(self) -> int | None:
        """Returns the step of the newest complete checkpoint, or None if there is none."""
        return max(self.list_complete_steps(), default=None)

    def move_damaged_checkpoint(self, step: int) -> epath.Path:
        """Moves a damaged checkpoint to MODEL_DIR/damaged, and returns its new path.

        Call this method in one process, and then `reopen` in all processes.
        """
        target = self.folder.parent / 'damaged' / str(step)
        with saved_params.wrap_checkpoint_errors(self.folder / str(step), 'moved away'):
            target.parent.mkdir(exist_ok=True)
            if target.exists():
                target.rmtree()
            (self.folder / str(step)).rename(target)
        return target

    def reopen(self) -> None:
        """Reopens the checkpoint folder after a failed write or a change to its files. Removes unfinished writes."""
        with contextlib.suppress(Exception):
            self._manager.close()
        self._open_manager()

    def save(self, step: int, state: State, position: DataPosition, record: dict[str, Any]) -> None:
        """Starts writing a checkpoint, and returns once the arrays are copied to the host.

        Raises CheckpointSaveError if this or the previous write failed. A failed write does not affect complete
        checkpoints.
        """
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            data=ocp.args.JsonSave({'positions': _gather_stream_positions(position)}),
            run=ocp.args.JsonSave(record),
        )
        with self._wrap_save_errors(f'the checkpoint of step {step} (or the previous checkpoint)'):
            self._manager.save(step, args=items, force=True)

    def restore(self, step: int, abstract_state: State, changed: str = '') -> tuple[State, DataPosition]:
        """Restores the state, with the shapes and shardings of `abstract_state`, and the data position.

        `changed` lists the settings that have changed since the checkpoint, for error messages. Raises UserError if the
        checkpoint does not fit the model or cannot be read, and durable_folders.DamagedCheckpointError if an array
        contains NaN or infinity.
        """
        folder = self.folder / str(step)
        shapes = saved_params.read_saved_shapes(folder / 'state'), saved_params.get_array_shapes(abstract_state)
        changed = f' (changed: {changed})' if changed else ''
        params = [{name: shape for name, shape in side.items() if name.startswith('params/')} for side in shapes]
        new_folder = compatibility.RESET_ADVICE if params[0] == params[1] else 'pass another --gin.MODEL_DIR'
        saved_params.check_shapes_fit_model(folder, *shapes, f'restore the old settings{changed}, or {new_folder}')
        with saved_params.wrap_checkpoint_errors(folder, 'read'):
            items = self._manager.restore(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state), data=ocp.args.JsonRestore()),
            )
            position = DataPosition.from_json(items['data']['positions'])
        saved_params.check_arrays_finite(folder, items['state'])
        return items['state'], position

    def check_for_errors(self) -> None:
        """Raises CheckpointSaveError if a background write has failed. Does not wait for pending writes."""
        with self._wrap_save_errors():
            self._manager.check_for_errors()

    def wait_until_finished(self) -> None:
        """Waits until the last checkpoint is complete. Raises CheckpointSaveError if it cannot be written."""
        with self._wrap_save_errors():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the last write and stops Orbax's threads. Raises CheckpointSaveError if the write failed."""
        with self._wrap_save_errors():
            self._manager.close()

    def _describe_newest_checkpoint(self) -> str:
        with contextlib.suppress(Exception):
            # List only complete checkpoints, because a failed write to a bucket may leave a folder with a step number.
            if steps := checkpoint_paths.list_steps(self.folder):
                return f'the checkpoint of step {steps[-1]} is kept'
        return 'there is no checkpoint yet'

    @contextlib.contextmanager
    def _wrap_save_errors(self, item: str = 'a checkpoint') -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if collectives.is_connection_error(error):
                raise
            raise CheckpointSaveError(
                f'{item} could not be written to {self.folder}: {saved_params.describe_root_cause(error)}; free disk '
                f'space or correct the permissions, and run the same command again '
                f'({self._describe_newest_checkpoint()})'
            ) from error


def write_params(
    folder: epath.Path, step: int, params: Any, record: Mapping[str, Any], replaced: Sequence[int] = ()
) -> None:
    """Writes parameters and the run record as a checkpoint, and then deletes the checkpoints of the steps `replaced`.

    Waits until the checkpoint is on disk. Raises UserError if the checkpoint cannot be written.
    """
    items = ocp.args.Composite(state=ocp.args.StandardSave({'params': params}), run=ocp.args.JsonSave(dict(record)))
    options = durable_folders.build_manager_options(folder)
    with (
        saved_params.wrap_checkpoint_errors(folder / str(step), 'written'),
        ocp.CheckpointManager(folder, options=options, item_names=('state', 'run')) as writer,
    ):
        if step in writer.all_steps():
            writer.delete(step)
        writer.save(step, args=items, force=True)
        # Remove the replaced checkpoints last, so that there is always a complete checkpoint.
        for other in replaced:
            writer.delete(other)


def _gather_stream_positions(position: DataPosition) -> list[dict[str, Any]]:
    """Gathers the positions of all data streams from all hosts, because Orbax writes JSON only on the first host."""
    local_json = json.dumps(position.to_json()).encode()
    records = json.loads(local_json)
    if jax.process_count() > 1:
        sizes = multihost_utils.process_allgather(np.asarray([len(local_json)], np.int32)).reshape(-1)
        padded: np.ndarray = np.zeros(int(sizes.max()), np.uint8)
        padded[: len(local_json)] = np.frombuffer(local_json, np.uint8)
        rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
        for row, size in zip(rows, sizes, strict=True):
            records |= json.loads(row[:size].tobytes())
    return [records[str(index)] for index in range(len(records))]
