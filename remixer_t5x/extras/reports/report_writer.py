"""Writes a report about runs as a self-contained HTML page. Text from files is escaped."""

import dataclasses
import datetime
import functools
import pathlib
import re
import sys
from collections.abc import Sequence

import jinja2
import numpy as np
from etils import epath

from remixer_t5x.api import saved_models
from remixer_t5x.cli import data
from remixer_t5x.data import batch_formats
from remixer_t5x.errors import UserError
from remixer_t5x.extras.reports import curves, overview, run_records
from remixer_t5x.extras.reports.comparison import ModelComparison
from remixer_t5x.extras.reports.pictures import drawing, model_pictures
from remixer_t5x.extras.reports.pictures.drawing import Picture
from remixer_t5x.extras.reports.run_records import RecordedRun, RunGroup
from remixer_t5x.run_folder import object_store
from remixer_t5x.train import progress

DEFAULT_TEXT = 'The small dog that the children found in the park did not bark, but it followed them home.'
# Maximum number of answer tokens in the plots of the decoder.
MAX_ANSWER_TOKENS = 24


@dataclasses.dataclass(frozen=True)
class WeightPictures:
    """Pictures of the learned weights of a run. `about` is a caption, or the reason why there are no pictures."""

    run: str
    pictures: Sequence[Picture] = ()
    about: str = ''


def write_report(
    folders: Sequence[str], out: str, text: str = DEFAULT_TEXT, pictures: bool = False, pictures_dir: str | None = None
) -> None:
    """Writes the report about runs and prints the path of the report.

    Args:
        folders: the MODEL_DIR of each run.
        out: the HTML file.
        text: the input text for the pictures.
        pictures: whether to plot learned parameters; this runs the code in each config.gin.
        pictures_dir: folder for the pictures as PNG and SVG, or None.
    """
    runs = run_records.read_runs(folders)
    learned = _draw_learned_weights(runs, text, pictures_dir) if pictures else []
    write_page(render_page(runs, learned), pathlib.Path(out).expanduser())
    if pictures_dir and any(run.pictures for run in learned):
        print(f'pictures     {pictures_dir}')


def write_page(html: str, target: pathlib.Path) -> None:
    """Writes the page to a file and prints the path. Raises UserError if the file cannot be written."""
    path = epath.Path(target)
    with object_store.wrap_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Folder names may contain bytes that are not UTF-8, which Python represents as lone surrogates.
        object_store.write_atomically(path, html.encode('utf-8', 'replace').decode())
    print(f'report       {target}  ({len(html) / 1e6:.1f} MB, one file; open it in any browser)')


def _draw_learned_weights(runs: Sequence[RecordedRun], text: str, folder: str | None) -> list[WeightPictures]:
    """Plots the learned weights of the first run of each `RunGroup`; if a plot fails, the caption gives the reason."""
    learned = []
    for group in run_records.group_runs_by_settings(runs):
        run = group.runs[0]
        print(f'{run.name}: drawing what its model learned', file=sys.stderr, flush=True)
        try:
            learned.append(_draw_run_weights(run, text))
        except UserError as error:
            reason = f'No pictures of what was learned: {" ".join(str(error).split())}'
            print(f'{run.name}: {reason}', file=sys.stderr, flush=True)
            learned.append(WeightPictures(run.name, about=reason))
        for picture in learned[-1].pictures if folder else ():
            stem = re.sub(r'[^\w.-]+', '_', f'{run.name}-{picture.name}')
            drawing.save_picture(dataclasses.replace(picture, name=stem), folder or '')
    return learned


def _draw_run_weights(run: RecordedRun, text: str) -> WeightPictures:
    trained = saved_models.load(run.folder)
    if trained.model.model_type != batch_formats.ENCODER_DECODER:
        raise UserError(f'--pictures needs an encoder-decoder, but MODEL_TYPE is {trained.model.model_type!r}')
    answer = trained.generate(text, min(MAX_ANSWER_TOKENS, trained.lengths['targets']))[0].text
    inputs, targets = (
        np.asarray(trained.build_codec(side).encode(words, 0)[0], np.int32)
        for side, words in (('inputs', text), ('targets', answer))
    )
    pieces = [[data.decode_piece(trained.vocabulary, int(token)) for token in ids] for ids in (inputs, targets)]
    trained_text = model_pictures.ModelWithText(
        model=trained.model,
        params=trained.params,
        inputs=(inputs, pieces[0]),
        targets=(targets, pieces[1]),
        lengths={'encoder': trained.lengths['inputs'], 'decoder': trained.lengths['targets']},
    )
    about = f'The model of {trained.source} reads “{text}”; its decoder is shown with the model’s answer.'
    return WeightPictures(run.name, model_pictures.draw_all_pictures(trained_text), about)


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
    # Runs of a group have the same colour, unless there is only one group.
    series = groups if len(groups) > 1 else [RunGroup(run.name, [run]) for run in runs]
    colours = {run.name: index for index, group in enumerate(series) for run in group.runs}
    rows = overview.build_task_table(groups)
    measures = overview.collect_compared_measures(groups, rows, overviews)
    return _load_template().render(
        runs=runs,
        groups=groups,
        overviews=list(overviews.values()),
        comparison=comparison,
        headline=overview.describe_measure_differences(measures, overviews),
        charts=curves.draw_charts(runs, colours),
        series=series,
        colours=colours,
        smoothing=curves.SMOOTHING,
        tasks=rows,
        breakdowns=overview.build_breakdown_tables(groups),
        samples=overview.select_prediction_samples(runs),
        learned=learned,
        differences=run_records.find_differing_settings(runs),
        created=datetime.datetime.now().strftime('%Y-%m-%d %H:%M'),
        palette=len(drawing.COLOURS),
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
    )
    return environment.get_template('report.html.jinja')
