"""Reads runs, draws pictures of what their models learned, and writes the page."""

import contextlib
import dataclasses
import errno
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

from remixer_t5x import temporary
from remixer_t5x.api import saved_models
from remixer_t5x.data import frames
from remixer_t5x.errors import UserError
from remixer_t5x.extras.reports import page, records, run_folders, run_model
from remixer_t5x.extras.reports.pictures import drawing, gallery
from remixer_t5x.extras.reports.records import Run

TEXT = 'The small dog that the children found in the park did not bark, but it followed them home.'
# Tokens of the model's own answer that its decoder is shown with.
MOST_TARGETS = 24


def write(
    folders: Sequence[str], out: str, text: str = TEXT, pictures: bool = False, pictures_dir: str | None = None
) -> None:
    """Writes the report about MODEL_DIRs and says where it is.

    Args:
        folders: MODEL_DIRs.
        out: the HTML file.
        text: what models read for the pictures.
        pictures: whether there are pictures of what was learned. They need the model, and so run each run's config.gin.
        pictures_dir: a folder for each picture as a PNG and an SVG, or None.

    Raises:
        UserError: a folder that is not a run, a run without metrics, a file that cannot be read or written.
    """
    target = pathlib.Path(out).expanduser()
    # Opened before a minute's work, and not after it.
    with _appearing(target) as file:
        runs = run_folders.read_all(folders)
        learned = _learn(runs, text, pictures_dir, _say) if pictures else []
        html = page.render(runs, learned)
        # The names of folders can have bytes that are not UTF-8, which Python keeps as lone surrogates.
        file.write(html.encode('utf-8', 'replace'))
    print(f'report       {target}  ({len(html) / 1e6:.1f} MB, one file; open it in any browser)')
    if pictures_dir and any(one.pictures for one in learned):
        print(f'pictures     {pictures_dir}')


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _appearing(target: pathlib.Path) -> Iterator[BinaryIO]:
    """A file that becomes `target` when the block ends well; until then, what was there stays as it is."""
    unfinished = target.with_name(f'{target.name}.unfinished')
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_file():
            raise IsADirectoryError(errno.EISDIR, 'it is not a file')
        with unfinished.open('wb') as file:
            yield file
        temporary.commit(unfinished, target)
    except OSError as error:
        raise UserError(f'{target} cannot be written ({error.strerror}); give another file by --out') from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


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
    trained = saved_models.load(one.folder)
    if trained.model.frame != frames.ENCODER_DECODER:
        raise UserError(f'they are drawn of an encoder-decoder, and FRAME is {trained.model.frame!r}')
    inputs = run_model.encode(trained, text)
    targets = run_model.answer(trained, inputs, MOST_TARGETS)
    lengths = {'encoder': trained.lengths['inputs'], 'decoder': trained.lengths['targets']}
    say(f'{one.name}: attention weights, then gradients of every token')
    subject = gallery.Subject(
        trained.model,
        trained.params,
        (inputs, run_model.pieces(trained, inputs)),
        (targets, run_model.pieces(trained, targets)),
        lengths,
        run_model.initial_params(trained),
        f'r{number}-',
    )
    about = f'The model of {trained.source} reads “{text}”; where its decoder is shown, it writes its own answer.'
    return page.Learned(one.name, gallery.draw_all(subject), about)
