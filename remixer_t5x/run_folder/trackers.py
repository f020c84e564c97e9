"""Trackers, which show a run's metrics while it trains: TensorBoard, Weights & Biases, or a class with their methods.

`Tracking` calls each in a thread of its own, so that none stops or delays a run. Commands and resumed runs read
`metrics.jsonl`, and nothing that a tracker wrote.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import queue
import re
import secrets
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from etils import epath

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError, reason
from remixer_t5x.run_folder import model_dir, object_store

# In MODEL_DIR: the run's id at each tracker that has ids.
IDS = 'trackers.json'
# Maximum number of calls that wait for a slow tracker; more are dropped.
MAX_WAITING = 1000
# Seconds that the end of a run waits for each tracker, for example for uploads.
SECONDS = float(os.environ.get('REMIXER_T5X_TRACKER_SECONDS', '120'))


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """A run as trackers see it: MODEL_DIR, the step that this process starts from, and settings by name."""

    folder: epath.Path
    step: int
    settings: Mapping[str, str]


class Session(Protocol):
    """An open tracker. Each method may raise and may be slow."""

    def write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """Writes metrics of `kind` ('train', or an evaluation's name) after `step` updates."""

    def rewind(self, step: int) -> None:
        """Called when the run goes back to `step`; it writes the metrics after it again."""

    def add_files(self, name: str, kind: str, path: epath.Path) -> None:
        """Stores a file or a folder with the run; `kind` is 'config', 'report' or 'model'."""

    def close(self) -> None: ...


class Tracker(Protocol):
    """An element of TRACKERS."""

    @property
    def takes_files(self) -> bool:
        """Returns whether `add_files` stores files, so that a report is worth writing."""

    def open(self, run: TrackedRun) -> Session: ...


Call = Callable[[Session], None]


@dataclasses.dataclass(frozen=True)
class TensorBoard:
    """Writes event files to MODEL_DIR/tensorboard."""

    @property
    def takes_files(self) -> bool:
        return False

    def open(self, run: TrackedRun) -> Session:
        # Importing tensorboardX takes half a second.
        from remixer_t5x.run_folder import tensorboard

        return tensorboard.TensorBoardWriter(run.folder / model_dir.TENSORBOARD, run.step)


@dataclasses.dataclass(frozen=True)
class WandB:
    """Weights & Biases. Its environment variables (WANDB_MODE, WANDB_API_KEY, WANDB_BASE_URL) apply.

    Attributes:
        project, entity, group, tags: arguments of `wandb.init`.
        name: None for the last part of MODEL_DIR.
        mode: 'online', 'offline' (files in MODEL_DIR/wandb, for `wandb sync`) or 'disabled'; None for WANDB_MODE.
        best_checkpoint: whether the best checkpoint of each task is uploaded at the end of a run.
    """

    project: str = 'remixer_t5x'
    entity: str | None = None
    group: str | None = None
    tags: Sequence[str] = ()
    name: str | None = None
    mode: str | None = None
    best_checkpoint: bool = True

    def __post_init__(self) -> None:
        if self.mode not in (None, 'online', 'offline', 'disabled'):
            raise UserError(f"WandB.mode must be 'online', 'offline', 'disabled' or None, got {self.mode!r}")
        spec = importlib.util.find_spec('wandb')
        # Without an origin it is a folder, such as the `wandb/` that W&B leaves in the folder where a run began.
        if spec is None or spec.origin is None:
            raise UserError(
                "TRACKERS names @trackers.WandB(), and wandb is not installed: pip install 'remixer-t5x[wandb]'"
            )

    @property
    def takes_files(self) -> bool:
        return True

    def open(self, run: TrackedRun) -> Session:
        return _WandBSession(self, run)


class _WandBSession:
    """One `wandb` run. The step is a metric, because W&B's own steps cannot go back."""

    def __init__(self, tracker: WandB, run: TrackedRun):
        import wandb

        self._wandb, self._tracker = wandb, tracker
        mode = tracker.mode or os.environ.get('WANDB_MODE', 'online')
        # W&B would otherwise ask for a key on the terminal of the run.
        if mode == 'online' and not wandb.login(prompt=False, verify=False):
            raise UserError('W&B has no API key; type `wandb login`, or set WANDB_MODE=offline')
        folder = tempfile.mkdtemp() if object_store.is_remote(run.folder) else str(run.folder)
        self._run = wandb.init(
            project=tracker.project,
            entity=tracker.entity,
            group=tracker.group,
            tags=list(tracker.tags),
            name=tracker.name or run.folder.name,
            mode=cast(Any, tracker.mode),
            id=run_id(run.folder, 'wandb'),
            resume='allow',
            dir=folder,
            config=dict(run.settings),
            settings=wandb.Settings(console='off', silent=True, reinit='create_new'),
        )
        self._run.define_metric('step', hidden=True)
        self._run.define_metric('*', step_metric='step')

    def write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        named = {f'{kind}/{name}': value for name, value in {**numbers, **timing}.items()}
        self._run.log({'step': step, **named})

    def rewind(self, step: int) -> None:
        """Does nothing: the steps are logged again, and W&B shows both."""

    def add_files(self, name: str, kind: str, path: epath.Path) -> None:
        if kind == 'model' and not self._tracker.best_checkpoint:
            return
        allowed_name = re.sub(r'[^\w.-]', '-', name)
        artifact = self._wandb.Artifact(f'{self._run.id}-{allowed_name}', kind)
        if object_store.is_remote(path):
            artifact.add_reference(str(path), checksum=False)
        elif path.is_dir():
            # Not `add_dir`, which prints a line.
            for file in sorted(filter(pathlib.Path.is_file, pathlib.Path(path).rglob('*'))):
                artifact.add_file(str(file), name=str(file.relative_to(str(path))))
        else:
            artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()


def run_id(folder: epath.Path, tracker: str) -> str:
    """Returns the id of the run in `folder` at a tracker; the first call creates it.

    Raises UserError if the file that stores it is damaged or cannot be written.
    """
    path = folder / IDS
    advice = 'move it away, and the run gets a new id'
    with object_store.wrap_read_errors(path):
        ids = untrusted_files.read_object(path, advice) if path.exists() else {}
    if not re.fullmatch(r'[\w-]{1,64}', str(ids.get(tracker, 'new'))):
        raise UserError(f'{path} is damaged; {advice}')
    if tracker not in ids:
        ids[tracker] = secrets.token_hex(4)
        with object_store.wrap_write_errors(path):
            object_store.write_atomically(path, json.dumps(ids) + '\n')
    return str(ids[tracker])


class Tracking:
    """Calls each tracker in a thread of its own: one that raises, hangs or is slow only warns and loses its metrics.

    No method raises or waits, except that `close` waits for a while.
    """

    def __init__(self, trackers: Sequence[Tracker], run: TrackedRun, warn: Callable[[str], None]):
        self._threads = [_TrackerThread(tracker, run, warn) for tracker in trackers]
        self.takes_files = any(tracker.takes_files for tracker in trackers)

    def write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        numbers, timing = dict(numbers), dict(timing)
        self._call_all(lambda session: session.write(kind, step, numbers, timing))

    def rewind(self, step: int) -> None:
        self._call_all(lambda session: session.rewind(step))

    def add_files(self, name: str, kind: str, path: epath.Path) -> None:
        self._call_all(lambda session: session.add_files(name, kind, path))

    def close(self, seconds: float | None = None) -> None:
        """Ends all trackers, and waits up to `seconds` for each."""
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            thread.wait(SECONDS if seconds is None else seconds)

    def _call_all(self, call: Call) -> None:
        for thread in self._threads:
            thread.put(call)


class _TrackerThread:
    """The thread of one tracker and its queue of calls. A daemon, so that Python exits while a tracker hangs."""

    def __init__(self, tracker: Tracker, run: TrackedRun, warn: Callable[[str], None]):
        self._tracker, self._run, self._warn_user = tracker, run, warn
        self._name = type(tracker).__name__
        self._waiting: queue.Queue[Call | None] = queue.Queue(MAX_WAITING)
        self._warned = threading.Lock()
        self._thread = threading.Thread(target=self._run_calls, name=f'tracker {self._name}', daemon=True)
        self._thread.start()

    def put(self, call: Call) -> None:
        if self._thread.is_alive():
            try:
                self._waiting.put_nowait(call)
            except queue.Full:
                self._warn(f'is {MAX_WAITING} records behind, and gets no more until it catches up')

    def end(self) -> None:
        while self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                return self._waiting.put_nowait(None)
            with contextlib.suppress(queue.Empty):
                self._waiting.get_nowait()

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn(f'has not ended within {seconds:g} s; what it has not sent is lost')

    def _run_calls(self) -> None:
        try:
            session = self._tracker.open(self._run)
        except BaseException as error:
            return self._warn(f'cannot start ({reason(error)})')
        while (call := self._waiting.get()) is not None:
            self._call(call, session)
        self._call(lambda session: session.close(), session)

    def _call(self, call: Call, session: Session) -> None:
        try:
            call(session)
        except BaseException as error:
            self._warn(f'failed ({reason(error)})')

    def _warn(self, what: str) -> None:
        """Prints the first failure of a tracker in one line; later ones are not printed."""
        if self._warned.acquire(blocking=False):
            self._warn_user(f'warning: the tracker {self._name} {what}; training continues')
