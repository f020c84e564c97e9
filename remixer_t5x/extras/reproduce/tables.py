"""Loads the tables of the papers from `papers/*.toml`: rows, recipes and published numbers.

Each file contains a `title` and the following sections. In stages and models, `paper` and `small` contain the gin
`files` and `flags` of a scale; `small` is for runs that take about a minute on two CPU cores.

- `stages`: training runs, see `TrainingStage`. In the settings of a scale, `after` names the previous stage. A column
  exists at small scale only if its stage does.
- `models`: the value of `--model`, and `flags` for both scales. `small = false` excludes a model from the small scale.
- `tables`: a `title`, `columns`, `rows`, and optionally a `note` and the row that is the `baseline` (default: the
  first). A column has a `stage` and a `metric`, which is one of COUNTED_METRICS or, as in metrics.jsonl, a kind and a
  name ('eval/cogs_v001 exact_match'); `small` is the metric at small scale. A row lists the published number of each
  column; nan if there is none.
- `excluded`: the titles of tables and figures that cannot be reproduced, and the reasons.
"""

import dataclasses
import functools
import math
import pathlib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from remixer_t5x.errors import UserError, suggest_similar_name

PAPER, SMALL = 'paper', 'small'
# Metrics that are counted without training. FLOPs are relative to the FLOPs of the baseline.
PARAMETERS, FLOPS = 'parameters', 'relative FLOPs'
COUNTED_METRICS = (PARAMETERS, FLOPS)
_FOLDER = pathlib.Path(__file__).parent / 'papers'


@dataclasses.dataclass(frozen=True)
class TrainingStage:
    """A training stage, with one run for each model of a table.

    Attributes:
        command: 'train' or 'finetune'.
        flags: gin settings, applied after the files.
        previous_stage: name of the stage whose checkpoint initializes this stage; '' for random parameters.
    """

    name: str
    command: str
    files: Sequence[str]
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    previous_stage: str = ''


@dataclasses.dataclass(frozen=True)
class TableRow:
    """A table row, which defines one model and contains its published numbers.

    Attributes:
        model: value of `--model`.
        files: gin files, loaded after those of the stage.
        flags: gin settings, applied after those of the stage.
        numbers: the published number in each column, or None.
    """

    name: str
    model: str
    files: Sequence[str]
    flags: Mapping[str, Any]
    numbers: Sequence[float | None]


@dataclasses.dataclass(frozen=True)
class TableColumn:
    """A table column: a metric in COUNTED_METRICS, or a metric that an evaluation reports at the end of a stage."""

    name: str
    stage: TrainingStage
    evaluation: str
    metric: str


@dataclasses.dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper at one scale.

    Attributes:
        name: name of the paper and the table, such as 'remixers/table_4'.
        baseline: name of the row that all other rows are compared to.
        stages: the training stages of `columns`, in training order.
        note: known differences from the paper.
    """

    name: str
    title: str
    columns: Sequence[TableColumn]
    rows: Sequence[TableRow]
    baseline: str
    stages: Sequence[TrainingStage]
    note: str = ''

    @property
    def has_only_counted_columns(self) -> bool:
        """Whether all columns can be counted without a training run."""
        return are_counted_metrics(column.metric for column in self.columns)


def are_counted_metrics(metrics: Iterable[str]) -> bool:
    return set(metrics) <= set(COUNTED_METRICS)


@functools.cache
def read_papers() -> dict[str, dict[str, Any]]:
    """Parses all files in `papers`, and returns a dict from paper names to file contents."""
    return {path.stem: tomllib.loads(path.read_text(encoding='utf-8')) for path in sorted(_FOLDER.glob('*.toml'))}


def list_tables() -> dict[str, dict[str, Any]]:
    """Returns a dict from names such as 'remixers/table_4' to tables; irreproducible tables have a `reason`."""
    entries: dict[str, dict[str, Any]] = {}
    for paper, content in read_papers().items():
        entries |= {f'{paper}/{name}': entry for name, entry in content['tables'].items()}
        for name, (title, reason) in content['excluded'].items():
            entries[f'{paper}/{name}'] = {'title': title, 'reason': reason}
    return entries


def load_table(name: str, scale: str) -> PaperTable:
    """Loads a paper's results table at the given scale.

    Tables that contain only COUNTED_METRICS always use the paper's scale. Raises UserError for an unknown table, a
    table that cannot be reproduced, or a missing small scale.
    """
    entries = list_tables()
    if name not in entries:
        suggestion = suggest_similar_name(name, entries) or '; run reproduce --list'
        raise UserError(f'{name} is not a table of a paper{suggestion}')
    entry, paper = entries[name], read_papers()[name.partition('/')[0]]
    if reason := entry.get('reason'):
        raise UserError(f'{name} cannot be reproduced: {reason}')
    if are_counted_metrics(column['metric'] for column in entry['columns'].values()):
        scale = PAPER
    columns: list[TableColumn] = []
    indices: list[int] = []
    for index, (label, column) in enumerate(entry['columns'].items()):
        if text := column['metric'] if scale == PAPER else column.get('small'):
            evaluation, metric = ('', text) if text in COUNTED_METRICS else text.split()
            columns.append(TableColumn(label, _load_training_stage(paper, column['stage'], scale), evaluation, metric))
            indices.append(index)
    if not columns:
        raise UserError(f'{name} has no small-scale version; pass --scale=paper --dry_run to estimate its cost')

    def select_columns(numbers: Sequence[Any]) -> list[float | None]:
        return [None if math.isnan(numbers[index]) else numbers[index] for index in indices]

    rows = []
    for label, numbers in entry['rows'].items():
        model = paper['models'][label]
        if (settings := model.get(scale, {})) is not False:
            flags = {**model.get('flags', {}), **settings.get('flags', {})}
            rows.append(TableRow(label, model['model'], settings.get('files', ()), flags, select_columns(numbers)))
    stages: dict[str, TrainingStage] = {}
    for column in columns:
        chain = [column.stage]
        while chain[0].previous_stage:
            chain.insert(0, _load_training_stage(paper, chain[0].previous_stage, scale))
        stages |= {stage.name: stage for stage in chain}
    baseline, note = entry.get('baseline', rows[0].name), entry.get('note', '')
    return PaperTable(name, entry['title'], columns, rows, baseline, list(stages.values()), note)


def _load_training_stage(paper: Mapping[str, Any], name: str, scale: str) -> TrainingStage:
    entry = paper['stages'][name]
    if scale not in entry:
        raise UserError(f'stage {name} has no settings for the scale {scale}; add them to the file of its paper')
    settings = entry[scale]
    return TrainingStage(
        name, entry['command'], settings['files'], settings.get('flags', {}), settings.get('after', '')
    )
