"""Reads metrics, and holds the results of a run as plain data: its metrics, settings and predictions."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from remixer_t5x import untrusted_files
from remixer_t5x.checkpoints import changes
from remixer_t5x.errors import UserError
from remixer_t5x.run_folder import metrics

TRAIN = 'train'
# The folders that a run writes to and reads from do not change what it computes.
PLACES = ('MODEL_DIR', 'CACHE_DIR', 'DATA_DIR')
SEED = 'SEED'


@dataclasses.dataclass(frozen=True)
class Record:
    """One line of a metrics.jsonl. `kind` is 'train' or the name of an evaluation; a number that was not finite is
    None.
    """

    kind: str
    step: int
    numbers: Mapping[str, float | None]
    timing: Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run.

    `records` come from training, `evaluations` from `remixer-t5x eval`; `config` is the operative gin; `predictions`
    are the rows of each file, of the newest step only, by '<task>-<split>'. `spent` has the seconds of its processes by
    activity, the longest first.
    """

    name: str
    folder: str
    records: Sequence[Record]
    config: str = ''
    evaluations: Sequence[Record] = ()
    predictions: Mapping[str, Sequence[Mapping[str, Any]]] = dataclasses.field(default_factory=dict)
    spent: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def series(self, kind: str, number: str) -> list[tuple[int, float]]:
        """(step, value) of one number or timing, in the order of steps, without values that are not finite."""
        values = {}
        for record in self.records:
            value = record.numbers.get(number, record.timing.get(number))
            if record.kind == kind and value is not None:
                values[record.step] = value
        return sorted(values.items())

    def kinds(self) -> list[str]:
        """The evaluations during training, in the order of their first lines."""
        return list(dict.fromkeys(record.kind for record in self.records if record.kind != TRAIN))

    def latest(self) -> dict[str, Record]:
        """The newest record of each evaluation, during training and afterwards; the later line if steps are equal."""
        newest: dict[str, Record] = {}
        for record in (*self.records, *self.evaluations):
            if record.kind != TRAIN and (record.kind not in newest or record.step >= newest[record.kind].step):
                newest[record.kind] = record
        return newest

    def settings(self) -> dict[str, str]:
        """The settings of the configuration: macro or `module.Class.argument` to its value as gin text."""
        return changes.bindings(self.config)


def read(metrics_file: str | os.PathLike[str]) -> list[Record]:
    """The records of a metrics.jsonl in the order of the file, without an unfinished last line.

    Raises:
        UserError: the file cannot be read, or one of its lines is not a metrics record.
    """
    advice = 'name the metrics.jsonl of a run'
    records = []
    with untrusted_files.user_errors(metrics_file, advice):
        for line in untrusted_files.json_lines(metrics_file):
            # A run that is still writing, or was killed, may leave an unfinished last line.
            if not line.ended or line.is_blank:
                continue
            reason = line.error or metrics.difference_from_record(line.value)
            if reason:
                raise UserError(f'{metrics_file} line {line.number} is not a metrics record: {reason}; {advice}')
            records.append(_record(line.value))
    return records


def _record(line: dict[str, Any]) -> Record:
    numbers, timing = (
        {name: value for name, value in values.items() if value is None or _is_number(value)}
        for values in (line, line.get('timing', {}))
    )
    return Record(line['kind'], numbers.pop('step'), numbers, timing)


def _is_number(value: Any) -> bool:
    # A number near the largest float makes sums and axes infinite.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str | None]]]:
    """(setting, its value in each run) for settings in which the runs differ, macros first; None means not set.

    A setting whose value is a macro has the same text everywhere, so a changed macro is one line.
    """
    settings_of_runs = [run.settings() for run in runs]
    names = dict.fromkeys(name for settings in settings_of_runs for name in settings)
    differing = []
    for name in names:
        values = [settings.get(name) for settings in settings_of_runs]
        if name not in PLACES and len(set(values)) > 1:
            differing.append((name, values))
    return sorted(differing, key=lambda pair: (not pair[0].isupper(), pair[0]))


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    name: str
    runs: Sequence[Run]


def seed(run: Run) -> int:
    """The seed of a run; 0, the default, if its settings have none."""
    text = run.settings().get(SEED, '0')
    return int(text) if text.isdecimal() else 0


def by_seed(runs: Sequence[Run]) -> list[Group]:
    """The runs in groups of equal settings, ignoring seed and folders. A run without settings is a separate group."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        settings = {name: value for name, value in run.settings().items() if name not in (*PLACES, SEED)}
        groups.setdefault(tuple(sorted(settings.items())) or run.folder, []).append(run)
    return [Group(_group_name(members), members) for members in groups.values()]


def _group_name(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return runs[0].name
    common = os.path.commonprefix([run.name for run in runs]).rstrip('_-./ ') or runs[0].name
    return f'{common} × {len(runs)}'
