"""Implements the experiment trackers TensorBoard and Weights & Biases, and defines the interface of custom trackers.

`BackgroundTrackers` calls each tracker in a separate thread, so that no tracker can stop or delay a run. Commands and
resumed runs read metrics only from `metrics.jsonl`, never from the files of a tracker.
"""

import dataclasses
import importlib.util
import os
import queue
import secrets
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from etils import epath

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError, root_cause_message
from remixer_t5x.run_folder import model_dir, object_store

# File in MODEL_DIR with the id of the W&B run.
WANDB_ID_FILE = 'wandb_id.txt'


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """A run to track: its MODEL_DIR, the step from which it resumes (-1 for a new run), and its named settings."""

    folder: epath.Path
    restored_step: int
    settings: Mapping[str, str]


class TrackerSession(Protocol):
    """A tracker that has been opened for a run. Its methods may raise exceptions or be slow."""

    def write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """Logs metrics of `kind` ('train', or the name of an evaluation) after `step` updates.

        A value may be NaN or infinite. `timing` contains the machine-dependent metrics, such as `seconds_per_step`.
        """

    def rewind(self, step: int) -> None:
        """Called when the run returns to `step`; the metrics of later steps are logged again."""

    def close(self) -> None: ...


class Tracker(Protocol):
    """An experiment tracker that can be listed in the gin macro TRACKERS."""

    def open(self, run: TrackedRun) -> TrackerSession:
        """Opens the tracker. A resumed run repeats steps after `run.restored_step`, and unfinished evaluations."""


TrackerCall = Callable[[TrackerSession], None]


@dataclasses.dataclass(frozen=True)
class TensorBoard(Tracker):
    """Writes event files to MODEL_DIR/tensorboard."""

    def open(self, run: TrackedRun) -> TrackerSession:
        # Import lazily, because importing tensorboardX takes half a second.
        from remixer_t5x.run_folder import tensorboard

        return tensorboard.TensorBoardWriter(run.folder / model_dir.TENSORBOARD, run.restored_step)


@dataclasses.dataclass(frozen=True)
class WandB(Tracker):
    """Logs to Weights & Biases, which reads WANDB_MODE, WANDB_API_KEY and WANDB_BASE_URL from the environment.

    Attributes:
        project, entity, group, tags: arguments that are passed to `wandb.init`.
        name: name of the run; None uses the last component of MODEL_DIR.
        mode: 'online', 'offline' (writes files to MODEL_DIR/wandb for `wandb sync`) or 'disabled'; None uses the
            environment variable WANDB_MODE.
    """

    project: str = 'remixer_t5x'
    entity: str | None = None
    group: str | None = None
    tags: Sequence[str] = ()
    name: str | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in (None, 'online', 'offline', 'disabled'):
            raise UserError(f"WandB.mode must be 'online', 'offline', 'disabled' or None, got {self.mode!r}")
        spec = importlib.util.find_spec('wandb')
        # A spec without an origin belongs to a plain folder, such as the folder `wandb/` in which W&B stores runs.
        if spec is None or spec.origin is None:
            raise UserError(
                "wandb must be installed for @trackers.WandB() in TRACKERS; run pip install 'remixer-t5x[wandb]'"
            )

    def open(self, run: TrackedRun) -> TrackerSession:
        return _WandBSession(self, run)


class _WandBSession:
    """Logs to a run of Weights & Biases. The step is logged as a metric, because W&B's step counter cannot decrease."""

    def __init__(self, tracker: WandB, run: TrackedRun):
        import wandb

        self._wandb, self._tracker = wandb, tracker
        mode = tracker.mode or os.environ.get('WANDB_MODE', 'online')
        # Log in without a prompt, because W&B would otherwise ask for an API key in the terminal.
        if mode == 'online' and not wandb.login(prompt=False, verify=False):
            raise UserError('W&B requires an API key; run `wandb login`, or set WANDB_MODE=offline')
        folder = tempfile.mkdtemp() if object_store.is_remote(run.folder) else str(run.folder)
        self._run = wandb.init(
            project=tracker.project,
            entity=tracker.entity,
            group=tracker.group,
            tags=list(tracker.tags),
            name=tracker.name or run.folder.name,
            mode=cast(Any, tracker.mode),
            id=get_or_create_wandb_id(run.folder),
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
        """Does nothing: the run logs these steps again, and W&B keeps both values of each metric."""

    def close(self) -> None:
        self._run.finish()


def get_or_create_wandb_id(folder: epath.Path) -> str:
    """Returns the id of the W&B run of MODEL_DIR, which the first call creates and stores."""
    path = folder / WANDB_ID_FILE
    if not path.exists():
        object_store.write_atomically(path, secrets.token_hex(4))
    return untrusted_files.read_text(path, 'move it to another folder').strip()


class BackgroundTrackers:
    """Calls each tracker in a separate thread.

    If a tracker fails or hangs, one warning is printed, and only the metrics sent to this tracker are lost. The methods
    never raise errors, and only `close` waits for the trackers.
    """

    def __init__(self, trackers: Sequence[Tracker], run: TrackedRun, warn: Callable[[str], None]):
        self._threads = [_TrackerThread(tracker, run, warn) for tracker in trackers]

    def write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        numbers, timing = dict(numbers), dict(timing)
        self._enqueue_for_all(lambda session: session.write(kind, step, numbers, timing))

    def rewind(self, step: int) -> None:
        self._enqueue_for_all(lambda session: session.rewind(step))

    def close(self, seconds: float = 120.0) -> None:
        """Closes all trackers. Waits at most `seconds` for each tracker, for example for uploads."""
        for thread in self._threads:
            thread.enqueue_call(None)
        for thread in self._threads:
            thread.wait_until_stopped(seconds)

    def _enqueue_for_all(self, call: TrackerCall) -> None:
        for thread in self._threads:
            thread.enqueue_call(call)


class _TrackerThread:
    """Runs queued calls to one tracker in a daemon thread, so that Python can exit even if the tracker hangs."""

    def __init__(self, tracker: Tracker, run: TrackedRun, warn: Callable[[str], None]):
        self._tracker, self._run, self._warn_user = tracker, run, warn
        self._name = type(tracker).__name__
        self._waiting: queue.SimpleQueue[TrackerCall | None] = queue.SimpleQueue()
        self._warned = threading.Lock()
        self._thread = threading.Thread(target=self._run_calls, name=f'tracker {self._name}', daemon=True)
        self._thread.start()

    def enqueue_call(self, call: TrackerCall | None) -> None:
        """Queues a call; None stops the thread after the queued calls."""
        if self._thread.is_alive():
            self._waiting.put(call)

    def wait_until_stopped(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn_once(f'has not closed within {seconds:g} s; metrics that it has not sent are lost')

    def _run_calls(self) -> None:
        try:
            session = self._tracker.open(self._run)
        except BaseException as error:
            return self._warn_once(f'could not start ({root_cause_message(error)})')
        while (call := self._waiting.get()) is not None:
            self._call_tracker(call, session)
        self._call_tracker(lambda session: session.close(), session)

    def _call_tracker(self, call: TrackerCall, session: TrackerSession) -> None:
        try:
            call(session)
        except BaseException as error:
            self._warn_once(f'failed ({root_cause_message(error)})')

    def _warn_once(self, failure: str) -> None:
        """Prints the tracker's first failure as one line, and ignores later failures."""
        if self._warned.acquire(blocking=False):
            self._warn_user(f'warning: the tracker {self._name} {failure}; training continues')
