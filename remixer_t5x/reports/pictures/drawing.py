"""What all figures share: colours that colour-blind readers tell apart, and the way to files and into a page.

Figures have no background, and one ink. In a page the ink and the colours of lines become CSS variables, so that the
same figure is legible in light and in dark; in a file of its own the background is white.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pathlib
import re
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from remixer_t5x.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID = '#1d2733', '#c9d1d9'
# Okabe and Ito's palette, in an order in which neighbours differ in lightness too.
COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#56b4e9', '#e69f00')
# One hue, more opaque where values are higher: on white and on black alike, what is high stands out.
HEAT = '#1f78c8'


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure with its words: `name` is that of its files, `note` says in plain words what is drawn."""

    name: str
    title: str
    note: str
    figure: Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that needs no display."""
    # The pure canvas instead of pyplot: no global state, and nothing that looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout='constrained', facecolor='none')
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes, title: str = '', x: str = '', y: str = '') -> None:
    """Title on the left, labels, no box, no fill."""
    axes.set_facecolor('none')
    axes.set_title(title, loc='left', color=INK, fontsize=9, parse_math=False)
    axes.set_xlabel(x, color=INK, fontsize=8, parse_math=False)
    axes.set_ylabel(y, color=INK, fontsize=8, parse_math=False)
    axes.tick_params(colors=INK, labelsize=7, length=2)
    axes.spines[['top', 'right']].set_visible(False)
    axes.spines[['left', 'bottom']].set_color(GRID)


def heat_colours() -> Any:
    """A map of [0, 1] to HEAT, from transparent to opaque."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    red, green, blue = to_rgb(HEAT)
    return LinearSegmentedColormap.from_list('heat', [(red, green, blue, 0.0), (red, green, blue, 1.0)])


def piece_label(piece: str) -> str:
    """SentencePiece's mark of a word's start hangs below the line, onto the next label: a dot instead."""
    return piece.replace('▁', '·')


def token_ticks(axes: Axes, x: list[str] | None = None, y: list[str] | None = None) -> None:
    """Pieces of text as labels of the ticks, read as they are: a `$` in them starts no formula."""
    for axis, labels in ((axes.xaxis, x), (axes.yaxis, y)):
        if labels is not None:
            axis.set_ticks(range(len(labels)))
            shown = [piece_label(label) for label in labels]
            axis.set_ticklabels(shown, fontsize=min(6.5, 165 / max(len(labels), 1)), parse_math=False)
    if x is not None:
        axes.tick_params(axis='x', rotation=90)


def inline_svg(picture: Picture) -> str:
    """The figure as an `<svg>` element for a page: ids of its own, text as text, colours from the page's variables."""
    text = _svg(picture.figure, salt=picture.name)
    text = text[text.index('<svg') :]
    text = re.sub(r'<metadata>.*?</metadata>', '', text, flags=re.DOTALL)
    for pattern in (r'( id=")', r'(url\(#)', r'(href="#)'):
        text = re.sub(pattern, rf'\g<1>{picture.name}-', text)
    text = _without_repeats(text)
    text = text.replace(INK, 'currentColor').replace(GRID, 'var(--line)')
    for index, colour in enumerate(COLOURS):
        text = text.replace(colour, f'var(--c{index})')
    text = text.replace('<svg ', '<svg preserveAspectRatio="xMinYMin meet" ', 1)
    # The size in points would keep the figure from shrinking and growing with the page.
    start, end = text.split('>', 1)
    return re.sub(r' (width|height)="[^"]*"', '', start) + '>' + end


def _without_repeats(svg: str) -> str:
    """Equal images and markers have equal ids; a page wants each once, and the first one serves all references."""
    seen: set[str] = set()

    def keep(found: re.Match[str]) -> str:
        repeated = found[1] in seen
        seen.add(found[1])
        return '' if repeated else found[0]

    return re.sub(r' id="([^"]*)"', keep, svg)


def _svg(figure: Figure, salt: str, **options: Any) -> str:
    import matplotlib

    buffer = io.StringIO()
    # Text stays text, which can be found, read aloud, and drawn by the reader's fonts.
    with matplotlib.rc_context({'svg.fonttype': 'none', 'svg.hashsalt': salt}), _any_script():
        figure.savefig(buffer, format='svg', dpi=100, metadata={'Date': None}, **options)
    return buffer.getvalue()


@contextlib.contextmanager
def _any_script() -> Iterator[None]:
    """matplotlib warns of characters that its own font lacks; a box in a PNG is all there is to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='Glyph .* missing from')
        warnings.filterwarnings('ignore', message='Matplotlib currently does not support .* natively')
        yield


def save(picture: Picture, folder: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Writes `<folder>/<name>.png` and `.svg`. Raises UserError where that cannot be."""
    place = pathlib.Path(folder)
    paths = [place / f'{picture.name}.{kind}' for kind in ('png', 'svg')]
    try:
        place.mkdir(parents=True, exist_ok=True)
        with _any_script():
            picture.figure.savefig(paths[0], dpi=150, facecolor='white')
        paths[1].write_text(_svg(picture.figure, picture.name, facecolor='white'), encoding='utf-8')
    except OSError as error:
        raise UserError(f'{place} cannot be written ({error.strerror}); give a folder of yours') from None
    return paths
