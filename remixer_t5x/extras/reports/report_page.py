"""Renders a report about runs as a self-contained HTML page. Text from files is escaped."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jinja2

from remixer_t5x.extras.reports import curves, overview, run_records
from remixer_t5x.extras.reports.pictures import drawing
from remixer_t5x.extras.reports.pictures.drawing import Picture
from remixer_t5x.extras.reports.run_records import RecordedRun
from remixer_t5x.train import progress

if TYPE_CHECKING:
    from remixer_t5x.extras.reports.comparison import ModelComparison


@dataclasses.dataclass(frozen=True)
class WeightPictures:
    """Pictures of the learned weights of a run. `about` is a caption, or the reason why there are no pictures."""

    run: str
    pictures: Sequence[Picture] = ()
    about: str = ''


def render_page(
    runs: Sequence[RecordedRun],
    learned: Sequence[WeightPictures] = (),
    comparison: ModelComparison | None = None,
) -> str:
    """Renders the HTML page.

    Args:
        learned: pictures of learned parameters, in the order of the runs.
        comparison: results of `compare`, which define groups of runs; if None, runs are grouped by their settings.
    """
    groups = comparison.groups if comparison else run_records.group_runs_by_settings(runs)
    overviews = comparison.overviews if comparison else {run.name: overview.summarize_run(run) for run in runs}
    rows = overview.build_task_table(groups)
    measures = overview.collect_compared_measures(groups, rows, overviews)
    headline = overview.describe_measure_differences(measures, overviews)
    memory = {name for numbers in overviews.values() for name in numbers.memory}
    return _load_template().render(
        runs=runs,
        groups=groups,
        overviews=list(overviews.values()),
        comparison=comparison,
        headline=comparison.difference_sentences if comparison else headline,
        charts={
            heading: [curves.draw_chart(chart, f'{heading}-{number}') for number, chart in enumerate(charts)]
            for heading, charts in overview.build_charts(runs).items()
        },
        smoothing=curves.SMOOTHING,
        memory={name: title for name, title in overview.MEMORY_TITLES.items() if name in memory},
        tasks=rows,
        main_rows=overview.select_main_metric_rows(rows),
        breakdowns=overview.build_breakdown_tables(groups),
        samples=overview.select_prediction_samples(runs),
        learned=learned,
        differences=run_records.find_differing_settings(runs),
        created=datetime.datetime.now().strftime('%Y-%m-%d %H:%M'),
        colours=len(drawing.COLOURS),
    )


@functools.cache
def _load_template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader('remixer_t5x.extras.reports', '.'),
        autoescape=True,
        # An undefined template variable raises an error instead of rendering as an empty string.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        duration=progress.format_duration,
        short='{:.4g}'.format,
        count='{:,.0f}'.format,
        svg=drawing.build_inline_svg,
        unit=overview.find_metric_unit,
    )
    return environment.get_template('report.html.jinja')
