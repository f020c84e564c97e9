"""Step, loss and time left of the run that a sweep waits for, from what the run has logged."""

import pathlib
import sys
import time

from remixer_t5x.errors import UserError

# Seconds between two lines of progress in a log that is not a terminal.
SAY_EVERY = 60.0


class Watched:
    """A run in `folder` that may be in progress."""

    def __init__(self, folder: pathlib.Path):
        self._folder, self._step, self._due = folder, -1, 0.0

    def look(self) -> str:
        """A line if the run has logged another step, otherwise nothing; without a terminal at most one a minute."""
        if time.monotonic() < self._due:
            return ''
        step, line = progress_of(self._folder)
        if step <= self._step:
            return ''
        self._step = step
        self._due = time.monotonic() + (0 if sys.stderr.isatty() else SAY_EVERY)
        return line


def progress_of(folder: pathlib.Path) -> tuple[int, str]:
    """The last logged step of a run, and a line about it: step, loss, time left. -1 if nothing can be read yet."""
    from remixer_t5x.extras.reports import overview, records, run_folders
    from remixer_t5x.train import progress

    try:
        (run,) = run_folders.read_all([str(folder)])
    except UserError:
        return -1, ''
    found, seconds = overview.overview(run), run.series(records.TRAIN, 'seconds_per_step')
    parts = [f'step {found.step:,}' + (f' of {found.steps:,}' if found.steps else '')]
    if found.train_loss is not None:
        parts.append(f'loss {found.train_loss:.4f}')
    if found.steps and seconds:
        parts.append(f'{progress.duration((found.steps - found.step) * seconds[-1][1])} left')
    return found.step, ', '.join(parts)
