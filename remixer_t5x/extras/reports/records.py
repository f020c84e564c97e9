"""The results of a run as plain data: metrics, settings and predictions; groups of runs that differ in their seed."""

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
    """One line of a metrics.jsonl.

    Attributes:
        kind: 'train', or the name of an evaluation.
        step: the step.
        numbers: metrics by name, None if not finite.
        timing: timings by name, None if not finite.
    """

    kind: str
    step: int
    numbers: Mapping[str, float | None]
    timing: Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: a name that is unique in the report.
        folder: MODEL_DIR.
        records: metrics of training.
        config: the operative gin.
        evaluations: metrics of `remixer-t5x eval`.
        predictions: the rows of each file of predictions, of the newest step only, by '<task>-<split>'.
        spent: seconds of its processes by activity, the longest first.
    """

    name: str
    folder: str
    records: Sequence[Record]
    config: str = ''
    evaluations: Sequence[Record] = ()
    predictions: Mapping[str, Sequence[Mapping[str, Any]]] = dataclasses.field(default_factory=dict)
    spent: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def series(self, kind: str, number: str) -> list[tuple[int, float]]:
        """(step, value) of one number or timing, sorted by step, without values that are not finite."""
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
        """The newest record of each evaluation, during training and afterwards; the later line for equal steps."""
        newest: dict[str, Record] = {}
        for record in (*self.records, *self.evaluations):
            if record.kind != TRAIN and (record.kind not in newest or record.step >= newest[record.kind].step):
                newest[record.kind] = record
        return newest

    def settings(self) -> dict[str, str]:
        """Gin values as text, by macro or `module.Class.argument`."""
        return changes.parse_bindings(self.config)

    @property
    def seed(self) -> int:
        """The seed; 0, the default, if the settings have none."""
        text = self.settings().get(SEED, '0')
        return int(text) if text.isdecimal() else 0


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    name: str
    runs: Sequence[Run]


def read(metrics_file: str | os.PathLike[str]) -> list[Record]:
    """The records of a metrics.jsonl in the order of the file.

    Skips an unfinished last line, which a running or killed process leaves behind.

    Raises:
        UserError: the file cannot be read, or one of its lines is not a metrics record.
    """
    advice = 'name the metrics.jsonl of a run'
    records = []
    with untrusted_files.as_user_errors(metrics_file, advice):
        for line in untrusted_files.read_json_lines(metrics_file):
            if not line.ended or line.is_blank:
                continue
            reason = line.error or metrics.describe_invalid_record(line.value)
            if reason:
                raise UserError(f'{metrics_file} line {line.number} is not a metrics record: {reason}; {advice}')
            numbers, timing = (
                {name: value for name, value in values.items() if value is None or _is_number(value)}
                for values in (line.value, line.value.get('timing', {}))
            )
            records.append(Record(line.value['kind'], numbers.pop('step'), numbers, timing))
    return records


def _is_number(value: Any) -> bool:
    # Numbers near the largest float make sums and axes infinite.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str | None]]]:
    """(setting, its value in each run, None if not set) for settings that differ between runs, macros first.

    A setting whose value is a macro has the same text in all runs, so a changed macro is one line.
    """
    settings_of_runs = [run.settings() for run in runs]
    names = dict.fromkeys(name for settings in settings_of_runs for name in settings)
    values = {name: [settings.get(name) for settings in settings_of_runs] for name in names if name not in PLACES}
    differing = [(name, texts) for name, texts in values.items() if len(set(texts)) > 1]
    return sorted(differing, key=lambda pair: (not pair[0].isupper(), pair[0]))


def by_seed(runs: Sequence[Run]) -> list[Group]:
    """Groups runs by their settings, ignoring seed and folders. A run without settings is a separate group."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        settings = {name: value for name, value in run.settings().items() if name not in (*PLACES, SEED)}
        groups.setdefault(tuple(sorted(settings.items())) or run.folder, []).append(run)
    names = {}
    for key, members in groups.items():
        prefix = os.path.commonprefix([run.name for run in members]).rstrip('_-./ ') or members[0].name
        names[key] = members[0].name if len(members) == 1 else f'{prefix} × {len(members)}'
    return [Group(names[key], members) for key, members in groups.items()]
