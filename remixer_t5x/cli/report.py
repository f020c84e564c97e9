"""`remixer-t5x report`: one HTML file about runs; gin builds the arguments (configs/runs/report.gin)."""

import dataclasses
import pathlib
import re
import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from remixer_t5x.cli import report_model, report_run
from remixer_t5x.errors import UserError
from remixer_t5x.reports import page, records
from remixer_t5x.reports.pictures import drawing, gallery
from remixer_t5x.reports.records import Run

TEXT = 'The small dog that the children found in the park did not bark, but it followed them home.'
# Tokens of the model's own answer that its decoder is shown with.
MOST_TARGETS = 24


def run(
    folders: Sequence[str],
    out: str = 'report.html',
    text: str | None = None,
    pictures: bool = False,
    pictures_dir: str | None = None,
) -> None:
    """Writes the report and says where it is.

    Args:
        folders: MODEL_DIRs.
        out: the HTML file.
        text: what models read for the pictures; None takes `TEXT`.
        pictures: whether there are pictures of what was learned. They need the model, and so run each run's config.gin.
        pictures_dir: a folder for each picture as a PNG and an SVG, or None.

    Raises:
        UserError: a folder that is no run, a run without metrics, a file that cannot be read or written.
    """
    _check(text, pictures, pictures_dir)
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True, markup=False)
    target = pathlib.Path(out).expanduser()
    # Before a minute's work, and not after it.
    _writing(target, lambda: target.open('a').close())
    runs = report_run.read_all(folders)
    learned = _learn(runs, text or TEXT, pictures_dir, console.print) if pictures else []
    html = page.render(runs, learned)
    _writing(target, lambda: target.write_text(html, encoding='utf-8'))
    print(f'report       {target}  ({len(html) / 1e6:.1f} MB, one file; open it in any browser)')
    if pictures_dir:
        print(f'pictures     {pictures_dir}')


def _check(text: str | None, pictures: bool, pictures_dir: str | None) -> None:
    if not isinstance(pictures, bool):
        raise UserError(f'--pictures is {pictures!r}; type --pictures=True or --pictures=False')
    if not pictures and (text is not None or pictures_dir is not None):
        given = '--pictures_dir' if text is None else '--text'
        raise UserError(f'{given} is of the pictures; add --pictures, which runs the config.gin of each run')
    if text is not None and not str(text).strip():
        raise UserError('--text is empty; type a sentence, as in --text="A dog barks."')


def _writing(target: pathlib.Path, act: Callable[[], object]) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        act()
    except OSError as error:
        raise UserError(f'{target} cannot be written ({error.strerror}); give another file by --out') from None


def _learn(runs: Sequence[Run], text: str, folder: str | None, say: Callable[[str], None]) -> list[page.Learned]:
    """Pictures of the first run of each group of seeds; of a run whose model cannot be made, the reason."""
    found = []
    for number, group in enumerate(records.by_seed(runs), 1):
        one = group.runs[0]
        say(f'{one.name}: its model, for the pictures')
        try:
            made = _pictures(one, text, number, say)
        except UserError as error:
            reason = ' '.join(str(error).split())
            say(f'{one.name}: no pictures of what was learned: {reason}')
            found.append(page.Learned(one.name, about=f'No pictures of what was learned: {reason}'))
            continue
        found.append(made)
        for picture in made.pictures if folder else ():
            stem = re.sub(r'[^\w.-]+', '_', f'{one.name}-{picture.name.partition("-")[2]}')
            drawing.save(dataclasses.replace(picture, name=stem), folder or '')
    return found


def _pictures(one: Run, text: str, number: int, say: Callable[[str], None]) -> page.Learned:
    trained = report_model.load(one.folder)
    inputs = trained.encode(text)
    targets = trained.answer(inputs, MOST_TARGETS)
    lengths = {'encoder': trained.lengths['inputs'], 'decoder': trained.lengths['targets']}
    say(f'{one.name}: attention weights, then gradients of every token')
    subject = gallery.Subject(
        trained.model,
        trained.params,
        (inputs, trained.pieces(inputs)),
        (targets, trained.pieces(targets)),
        lengths,
        trained.before,
        f'r{number}-',
    )
    about = f'The model of {trained.checkpoint} reads “{text}”; where its decoder is shown, it writes its own answer.'
    return page.Learned(one.name, gallery.draw_all(subject), about)
