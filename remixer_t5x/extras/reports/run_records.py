"""Reads the results of runs: metrics, evaluations, settings and predictions; groups runs by settings."""

import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from etils import epath

from remixer_t5x import ranges, untrusted_files
from remixer_t5x.checkpoints import compatibility
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import checkpoint_evaluation
from remixer_t5x.evaluate.checkpoint_evaluation import EVAL_FOLDER
from remixer_t5x.run_folder import metrics, model_dir, object_store

TRAIN = 'train'
# Macros for input and output folders, which do not affect results.
FOLDER_MACROS = ('MODEL_DIR', 'CACHE_DIR', 'DATA_DIR')
SEED = 'SEED'


@dataclasses.dataclass(frozen=True)
class MetricsRecord:
    """A line of metrics.jsonl.

    Attributes:
        kind: 'train', or the name of an evaluation.
        numbers, timing: map metric names to values; None replaces values that are not finite. The first metric of a
            task ranks its checkpoints.
    """

    kind: str
    step: int
    numbers: Mapping[str, float | None]
    timing: Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """The results of a run.

    Attributes:
        name: unique name in the report.
        folder: MODEL_DIR.
        records: metrics that were logged during training.
        config: the operative gin configuration.
        evaluations: metrics from `remixer-t5x eval`.
        predictions: maps each '<task>-<split>' to the rows of the newest prediction file.
    """

    name: str
    folder: str
    records: Sequence[MetricsRecord]
    config: str = ''
    evaluations: Sequence[MetricsRecord] = ()
    predictions: Mapping[str, Sequence[Mapping[str, Any]]] = dataclasses.field(default_factory=dict)

    def select_metric_points(self, kind: str, number: str) -> list[tuple[int, float]]:
        """Returns the finite (step, value) pairs of a metric or timing, sorted by step."""
        values = {}
        for record in self.records:
            value = record.numbers.get(number, record.timing.get(number))
            if record.kind == kind and value is not None:
                values[record.step] = value
        return sorted(values.items())

    def list_evaluation_names(self) -> list[str]:
        """Returns the names of the evaluations during training, in order of first appearance."""
        return list(dict.fromkeys(record.kind for record in self.records if record.kind != TRAIN))

    def find_latest_evaluations(self) -> dict[str, MetricsRecord]:
        """Returns the newest record of each evaluation, during or after training."""
        newest: dict[str, MetricsRecord] = {}
        for record in (*self.records, *self.evaluations):
            if record.kind != TRAIN and (record.kind not in newest or record.step >= newest[record.kind].step):
                newest[record.kind] = record
        return newest

    def until(self, step: int) -> Self:
        """Returns the run without the metrics of later steps."""
        records, evaluations = (
            [record for record in part if record.step <= step] for part in (self.records, self.evaluations)
        )
        return dataclasses.replace(self, records=records, evaluations=evaluations)

    def parse_settings(self) -> dict[str, str]:
        """Returns a dict from macros and names `module.Class.argument` to gin values as strings."""
        return compatibility.parse_bindings(self.config)

    def find_whole_number(self, macro: str) -> int | None:
        """Returns the value of a macro; None if it is not a whole number."""
        return ranges.parse_whole_number(compatibility.parse_literal(self.config, macro), most=10**18)

    @functools.cached_property
    def best_metrics(self) -> Any:
        """The setting BEST_METRICS, which selects the main metric of each task; None if not set."""
        return compatibility.parse_literal(self.config, 'settings.Folder.best_metrics')

    @functools.cached_property
    def evaluated_split(self) -> Any:
        """The split of the evaluations `eval/<task>` during training; None if not set."""
        return compatibility.parse_literal(self.config, 'task_evaluation.TaskEvaluation.split')

    @property
    def seed(self) -> int:
        """The random seed, or the default 0 if not set."""
        return self.find_whole_number(SEED) or 0


@dataclasses.dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seed."""

    name: str
    runs: Sequence[RecordedRun]


def read_metrics_records(metrics_file: str | os.PathLike[str]) -> list[MetricsRecord]:
    """Reads the records of a metrics.jsonl in file order. Skips lines that are not records, such as an incomplete last
    line. Raises UserError if the file cannot be read.
    """
    records = []
    for record in metrics.read_records(epath.Path(metrics_file)):
        numbers, timing = (
            {name: value for name, value in values.items() if value is None or _is_number(value)}
            for values in (record, record.get('timing', {}))
        )
        records.append(MetricsRecord(record['kind'], numbers.pop('step'), numbers, timing))
    return records


def _is_number(value: Any) -> bool:
    # Numbers close to the largest float would overflow in sums and plot axes.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def read_runs(folders: Sequence[str]) -> list[RecordedRun]:
    """Reads the runs in `folders`. Run names are the shortest path suffixes that distinguish all runs.

    Raises UserError for a folder that is not a run, a run without metrics, or an unreadable file.
    """
    paths = list(dict.fromkeys(map(model_dir.to_absolute_path, folders)))
    # Uses as few trailing path components as are needed for distinct names.
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ['/'.join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            break
    runs = []
    for path, name in zip(paths, names, strict=True):
        with object_store.wrap_read_errors(path):
            runs.append(_read_run(path, name))
    return runs


def _read_run(folder: epath.Path, name: str) -> RecordedRun:
    if not (folder / model_dir.MARKER_FILE).exists():
        raise UserError(f'{folder} is not a run (it has no {model_dir.MARKER_FILE}); pass the MODEL_DIR of a run')
    path = folder / model_dir.METRICS
    if not (logged := read_metrics_records(path)):
        raise UserError(f'{folder} has no metrics yet; wait for the first log (LOG_PERIOD steps), or use another run')
    file, evaluations = folder / model_dir.CONFIG, folder / EVAL_FOLDER / model_dir.METRICS
    config = untrusted_files.read_text(file, 'restore or remove the file') if file.exists() else ''
    run = RecordedRun(
        name=name,
        folder=os.fspath(folder),
        records=logged,
        config=config,
        evaluations=read_metrics_records(evaluations),
        predictions=dict(_read_predictions(folder / EVAL_FOLDER / checkpoint_evaluation.PREDICTIONS)),
    )
    return _put_ranking_metrics_first(run) if isinstance(run.best_metrics, dict) else run


def _put_ranking_metrics_first(run: RecordedRun) -> RecordedRun:
    """Sorts the metrics of each task so that its metric in BEST_METRICS is the first, which reports compare."""
    best_metrics = run.best_metrics

    def sort_metrics(record: MetricsRecord) -> MetricsRecord:
        best = str(best_metrics.get(record.kind.partition('/')[2])).removeprefix('-')
        numbers = dict(sorted(record.numbers.items(), key=lambda item: item[0] != best))
        return dataclasses.replace(record, numbers=numbers)

    records, evaluations = (list(map(sort_metrics, part)) for part in (run.records, run.evaluations))
    return dataclasses.replace(run, records=records, evaluations=evaluations)


def _read_predictions(folder: epath.Path) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
    """Yields ('<task>-<split>', rows) from the newest prediction file of each task and split."""
    matches = [re.fullmatch(r'(.+)-(\d+)\.jsonl', path.name) for path in (folder.iterdir() if folder.is_dir() else ())]
    newest = {match[1]: folder / match[0] for match in sorted(filter(None, matches), key=lambda match: int(match[2]))}
    for name, path in sorted(newest.items()):
        # Tasks without examples have empty files.
        rows = checkpoint_evaluation.read_predictions(os.fspath(path))
        if rows:
            yield name, rows


def find_differing_settings(runs: Sequence[RecordedRun]) -> list[tuple[str, list[str | None]]]:
    """Returns (name, value or None for each run) of each setting that differs between runs, macros first."""
    settings_of_runs = [run.parse_settings() for run in runs]
    names = dict.fromkeys(name for settings in settings_of_runs for name in settings if name not in FOLDER_MACROS)
    values = {name: [settings.get(name) for settings in settings_of_runs] for name in names}
    differing = [(name, texts) for name, texts in values.items() if len(set(texts)) > 1]
    return sorted(differing, key=lambda pair: (not pair[0].isupper(), pair[0]))


def group_runs_by_settings(runs: Sequence[RecordedRun]) -> list[RunGroup]:
    """Groups runs by their settings, ignoring seed and folders. A run without settings is a separate group."""
    groups: dict[Any, list[RecordedRun]] = {}
    for run in runs:
        settings = {name: value for name, value in run.parse_settings().items() if name not in (*FOLDER_MACROS, SEED)}
        groups.setdefault(tuple(sorted(settings.items())) or run.folder, []).append(run)
    return [
        RunGroup(members[0].name + (f' × {len(members)}' if len(members) > 1 else ''), members)
        for members in groups.values()
    ]
