"""TensorBoard's event files, written through tensorboardX."""

import contextlib
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from remixer_t5x.run_folder import metrics
from remixer_t5x.run_folder.growing_object import register

# Seconds between two times that the file is brought up to date.
FLUSH_SECONDS = 30


class TensorBoardWriter:
    """TensorBoard event files in `folder`; tags are `kind/name`.

    Writes in the caller's thread: tensorboardX's own thread ends when the disk is full, and the queue to it then blocks
    the caller for ever. After a write that failed, which may have left half an event, a new file begins.
    """

    def __init__(self, folder: epath.Path, restored_step: int):
        register()
        self._folder, self._files = folder, 0
        self._open()
        self.rewind(restored_step)

    def _open(self) -> None:
        # Imported here, because models and most tests do not need it.
        from tensorboardX import record_writer
        from tensorboardX.proto import event_pb2

        self._event, self._flushed, self._broken = event_pb2.Event, time.monotonic(), True
        with metrics.writing(self._folder):
            record_writer.directory_check(str(self._folder))
            # TensorBoard reads files with `tfevents` in their names, in their order.
            # The number tells files of one second apart.
            name = f'events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{self._files}'
            self._file = record_writer.RecordWriter(os.path.join(str(self._folder), name))
        self._files += 1
        self._broken = False
        self._add(file_version='brain.Event:2')

    def rewind(self, step: int) -> None:
        """Hides what was logged after `step`, because the run takes those steps again."""
        if step:
            from tensorboardX.proto import event_pb2

            session_log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(step=step + 1, session_log=session_log)

    def write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        from tensorboardX import summary

        for name, value in {**numbers, **timing}.items():
            # Other values could not be drawn.
            if math.isfinite(value):
                self._add(step=step, summary=summary.scalar(f'{kind}/{name}', value))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            with self._writing():
                self._file.flush()
            self._flushed = time.monotonic()

    def _add(self, **event: Any) -> None:
        if self._broken:
            with contextlib.suppress(Exception):
                self._file.close()
            self._open()
        with self._writing():
            self._file.write(self._event(wall_time=time.time(), **event).SerializeToString())

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        self._broken = True
        with metrics.writing(self._folder):
            yield
        self._broken = False

    def add_files(self, name: str, kind: str, path: epath.Path) -> None:
        """Nothing: TensorBoard shows numbers."""

    def close(self) -> None:
        with metrics.writing(self._folder):
            self._file.close()
