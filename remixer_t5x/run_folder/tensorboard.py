"""Writes TensorBoard event files with tensorboardX. Import this module lazily: the import takes 0.5 seconds."""

import contextlib
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath
from tensorboardX import record_writer, summary
from tensorboardX.proto import event_pb2

from remixer_t5x.run_folder import object_store

# Seconds between two flushes of an event file.
FLUSH_SECONDS = 30
# Size in bytes at which an event file in a bucket is continued in a new object.
PART_BYTES = 1 << 20


class TensorBoardWriter:
    """Writes TensorBoard event files to `folder`. The tag of a metric is `kind/name`.

    Events are written in the caller's thread, because tensorboardX's writer thread would end when the disk is full, and
    its full queue would then block the caller forever. After a failed write, which may leave a partial event, a new
    file is started. If `restored_step` is not None, TensorBoard hides metrics in earlier files for steps after
    `restored_step`.
    """

    def __init__(self, folder: epath.Path, restored_step: int | None):
        # Replace tensorboardX's writer for gs://, because it would upload the whole file at each flush.
        record_writer.register_writer_factory('gs', _BucketEventFileFactory())
        self._folder, self._file_count = folder, 0
        self._open_event_file()
        if restored_step is not None:
            self.rewind(restored_step)

    def _open_event_file(self) -> None:
        self._last_flush_time, self._broken = time.monotonic(), True
        with object_store.wrap_write_errors(self._folder):
            record_writer.directory_check(str(self._folder))
            # TensorBoard reads only files whose names contain `tfevents`, in alphabetical order. The number at the end
            # of the name distinguishes files created in the same second.
            name = f'events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{self._file_count}'
            self._file = record_writer.RecordWriter(os.path.join(str(self._folder), name))
        self._file_count += 1
        self._broken = False
        self._add_event(file_version='brain.Event:2')

    def rewind(self, step: int) -> None:
        """Makes TensorBoard hide the metrics of steps after `step`, because the run repeats these steps."""
        session_log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add_event(step=step + 1, session_log=session_log)

    def write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        for name, value in {**numbers, **timing}.items():
            # TensorBoard cannot plot NaN and infinity.
            if math.isfinite(value):
                self._add_event(step=step, summary=summary.scalar(f'{kind}/{name}', value))
        if time.monotonic() - self._last_flush_time > FLUSH_SECONDS:
            with self._wrap_write_errors():
                self._file.flush()
            self._last_flush_time = time.monotonic()

    def _add_event(self, **event: Any) -> None:
        if self._broken:
            with contextlib.suppress(Exception):
                self._file.close()
            self._open_event_file()
        with self._wrap_write_errors():
            self._file.write(event_pb2.Event(wall_time=time.time(), **event).SerializeToString())

    @contextlib.contextmanager
    def _wrap_write_errors(self) -> Iterator[None]:
        self._broken = True
        with object_store.wrap_write_errors(self._folder):
            yield
        self._broken = False

    def add_files(self, name: str, kind: str, path: epath.Path) -> None:
        """Does nothing, because TensorBoard displays only metrics."""

    def close(self) -> None:
        with self._wrap_write_errors():
            self._file.close()


class _BucketEventFile:
    """Stores a tensorboardX event file in a bucket as a sequence of objects: `path`, `path.1`, `path.2`, ...

    A failed upload does not end the run, because metrics.jsonl contains the same metrics. The next flush retries the
    upload.
    """

    def __init__(self, path: str):
        self._path, self._part_number = path, 0
        self._object = object_store.GrowingObject(epath.Path(path))

    def write(self, data: bytes) -> None:
        self._object.append(data)

    def flush(self) -> None:
        """Uploads new events. Called only between events, so that no event is split between two objects."""
        if self._object.try_flush() and len(self._object) >= PART_BYTES:
            self._part_number += 1
            self._object = object_store.GrowingObject(epath.Path(f'{self._path}.{self._part_number}'))

    def close(self) -> None:
        self._object.flush()


class _BucketEventFileFactory:
    """Opens event files in gs:// folders for tensorboardX."""

    def open(self, path: str) -> _BucketEventFile:
        return _BucketEventFile(path)

    def directory_check(self, path: str) -> None:
        """Does nothing, because buckets have no folders."""
