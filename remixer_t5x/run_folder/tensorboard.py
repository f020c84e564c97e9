"""Writes TensorBoard event files with tensorboardX. Import this module lazily: the import takes 0.5 seconds."""

import math
import time
import types
from collections.abc import Mapping
from typing import Any

from etils import epath
from tensorboardX import record_writer, summary
from tensorboardX.proto import event_pb2

from remixer_t5x.run_folder import object_store

# Seconds between two uploads of an event file to a bucket.
UPLOAD_SECONDS = 30
_FILE_PREFIX = 'events.out.tfevents.'
# Write event files in buckets like other files; tensorboardX would use google-cloud-storage.
record_writer.register_writer_factory(
    'gs',
    types.SimpleNamespace(
        open=lambda path: object_store.GrowingObject(epath.Path(path)), directory_check=lambda path: None
    ),
)


class TensorBoardWriter:
    """Writes a TensorBoard event file to `folder`. The tag of a metric is `kind/name`.

    Events are written in the caller's thread, because tensorboardX's writer thread would end when the disk is full, and
    its full queue would then block the caller forever. If `restored_step` is not None, TensorBoard hides metrics in
    earlier files for steps after `restored_step`, which is -1 for a new run.
    """

    def __init__(self, folder: epath.Path, restored_step: int | None):
        self._is_remote, self._last_flush_time = object_store.is_remote(folder), time.monotonic()
        record_writer.directory_check(str(folder))
        # TensorBoard reads the files whose names contain `tfevents` in alphabetical order. Use a larger number than
        # in all earlier files, even if this machine's clock is behind the one that named them.
        names = (path.name.removeprefix(_FILE_PREFIX) for path in folder.glob(f'{_FILE_PREFIX}*'))
        number = max([time.time_ns(), *(int(name) + 1 for name in names if name.isdecimal())])
        self._file = record_writer.RecordWriter(f'{folder}/{_FILE_PREFIX}{number}')
        self._add_event(file_version='brain.Event:2')
        if restored_step is not None:
            self.rewind(restored_step)

    def rewind(self, step: int) -> None:
        """Makes TensorBoard hide the metrics of steps after `step`, because the run repeats these steps."""
        session_log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add_event(step=step + 1, session_log=session_log)

    def write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        for name, value in {**numbers, **timing}.items():
            # TensorBoard cannot plot NaN and infinity.
            if math.isfinite(value):
                self._add_event(step=step, summary=summary.scalar(f'{kind}/{name}', value))
        # Flush local files immediately, because a resumed run does not log the steps before its checkpoint again.
        if not self._is_remote or time.monotonic() - self._last_flush_time > UPLOAD_SECONDS:
            self._last_flush_time = time.monotonic()
            self._file.flush()

    def _add_event(self, **event: Any) -> None:
        self._file.write(event_pb2.Event(wall_time=time.time(), **event).SerializeToString())

    def close(self) -> None:
        self._file.close()
