"""Creates figures with colour-blind safe colours, and writes figures to files and HTML pages.

Figures have a transparent background, and use one colour for text and axes. In a page, CSS variables replace this
colour and the line colours, so that figures are legible in light and dark mode. In a file, the background is white.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import io
import os
import pathlib
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import markupsafe
import numpy as np
from etils import epath

from remixer_t5x.run_folder import object_store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar('T')
TEXT_COLOUR, GRID = '#1d2733', '#c9d1d9'
# Okabe and Ito's palette, ordered so that neighbours also differ in lightness.
COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#56b4e9', '#e69f00')
# Heat maps vary only the opacity of this colour, so that high values stand out on white and black backgrounds.
HEAT_MAP_COLOUR = '#1f78c8'
# If a text has more tokens than this, their labels would overlap, so the axes show indices instead.
MAX_TICK_LABELS = 48


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure with a title, an explanatory `note`, and the `name` of its files."""

    name: str
    title: str
    note: str
    figure: Figure


def select_evenly_spaced(items: Sequence[T], most: int) -> list[T]:
    """Selects at most `most` evenly spaced items, including the first and the last."""
    indices = np.linspace(0, len(items) - 1, min(most, len(items))).round()
    return [items[int(index)] for index in indices]


def create_figure(width: float, height: float) -> Figure:
    """Creates an empty figure of `width` x `height` inches."""
    # pyplot is not used, because it has global state and may require a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout='constrained', facecolor='none')
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: Axes, title: str = '', x: str = '', y: str = '') -> None:
    """Sets the title (left-aligned) and labels of axes, and removes the box and fill."""
    axes.set_facecolor('none')
    axes.set_title(title, loc='left', color=TEXT_COLOUR, fontsize=9, parse_math=False)
    axes.set_xlabel(x, color=TEXT_COLOUR, fontsize=8, parse_math=False)
    axes.set_ylabel(y, color=TEXT_COLOUR, fontsize=8, parse_math=False)
    axes.tick_params(colors=TEXT_COLOUR, labelsize=7, length=2)
    axes.spines[['top', 'right']].set_visible(False)
    axes.spines[['left', 'bottom']].set_color(GRID)


def draw_heat_map(axes: Axes, values: np.ndarray, largest: float) -> None:
    """Draws a matrix with colours from transparent at 0 to opaque at `largest`."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    colours = LinearSegmentedColormap.from_list(
        'heat', [(*to_rgb(HEAT_MAP_COLOUR), 0.0), (*to_rgb(HEAT_MAP_COLOUR), 1.0)]
    )
    axes.imshow(values, cmap=colours, vmin=0, vmax=largest, interpolation='nearest', aspect='auto')


def label_token_ticks(axes: Axes, x: list[str] | None = None, y: list[str] | None = None) -> None:
    """Labels ticks with tokens. `$` characters are not interpreted as math text."""
    for axis, labels in ((axes.xaxis, x), (axes.yaxis, y)):
        if labels is not None:
            axis.set_ticks(range(len(labels)))
            # Replaces SentencePiece's word boundary mark, which would overlap the next label.
            texts = [label.replace('▁', '·') for label in labels]
            axis.set_ticklabels(texts, fontsize=min(6.5, 165 / max(len(labels), 1)), parse_math=False)
    if x is not None:
        axes.tick_params(axis='x', rotation=90)


@dataclasses.dataclass(frozen=True)
class MatrixPanel:
    """A matrix [rows, columns] to draw, with optional token labels for rows and columns.

    With `off_diagonal`, the colour scale ignores the diagonal, for matrices with a dominant diagonal.
    """

    title: str
    weights: np.ndarray
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    off_diagonal: bool = False


def draw_matrices(grid: Sequence[Sequence[MatrixPanel]], row_names: Sequence[str] = ()) -> Figure:
    """Plots a grid of matrices, as in figure 2 of the Remixers paper; `row_names` labels the rows of the grid.

    The colours of each matrix are scaled to its maximum. Values beyond the scale use the darkest colour.
    """
    width = max(len(row) for row in grid)
    size = 2.6 if width > 1 else 4.2
    figure = create_figure(size * width + 0.9, (size + 0.25) * len(grid) + 0.3)
    for row, (panels, row_axes) in enumerate(zip(grid, figure.subplots(len(grid), width, squeeze=False), strict=True)):
        for column, axes in enumerate(row_axes):
            if column < len(panels):
                _draw_panel(axes, panels[column], is_first=column == 0)
            else:
                axes.set_axis_off()
        if row < len(row_names):
            row_axes[0].set_ylabel(row_names[row], color=TEXT_COLOUR, fontsize=9, parse_math=False)
    return figure


def _draw_panel(axes: Axes, panel: MatrixPanel, is_first: bool) -> None:
    magnitude = np.abs(np.asarray(panel.weights, np.float64))
    scaled = magnitude[~np.eye(*magnitude.shape, dtype=bool)] if panel.off_diagonal else magnitude
    largest = float(scaled.max(initial=0.0))
    draw_heat_map(axes, magnitude, largest or 1.0)
    style_axes(axes, ' · '.join(filter(None, (panel.title, f'max. {largest:.2g}'))))
    rows, columns = (
        None if pieces is None or len(pieces) > MAX_TICK_LABELS else list(pieces)
        for pieces in (panel.rows, panel.columns)
    )
    label_token_ticks(axes, columns, rows if is_first else None)
    if rows and not is_first:
        axes.set_yticks([])
    axes.spines[['top', 'right']].set_visible(True)
    for spine in axes.spines.values():
        spine.set_color(GRID)


def build_inline_svg(picture: Picture, prefix: str = '') -> markupsafe.Markup:
    """Converts the figure to an `<svg>` element with selectable text, and colours from CSS variables.

    `prefix` and the picture's name together must be unique on the page. Texts of the figure need not be escaped.
    """
    text = _render_svg(picture.figure, salt=prefix + picture.name)
    text = text[text.index('<svg') :]
    text = re.sub(r'<metadata>.*?</metadata>', '', text, flags=re.DOTALL)
    # Keep only ids to which the figure refers. The salt makes them differ between pictures.
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else '', text)
    text = text.replace(TEXT_COLOUR, 'currentColor').replace(GRID, 'var(--line)')
    for index, colour in enumerate(COLOURS):
        text = text.replace(colour, f'var(--c{index})')
    label = f'role="img" aria-label="{html.escape(picture.title)}"'
    text = text.replace('<svg ', f'<svg {label} preserveAspectRatio="xMinYMin meet" ', 1)
    # Without a size in points, the figure scales with the page width.
    start, end = text.split('>', 1)
    return markupsafe.Markup(re.sub(r' (width|height)="[^"]*"', '', start) + '>' + end)


def _render_svg(figure: Figure, salt: str, **options: Any) -> str:
    import matplotlib

    buffer = io.StringIO()
    # Text is not converted to paths, so that it works with search, screen readers and page fonts.
    with matplotlib.rc_context({'svg.fonttype': 'none', 'svg.hashsalt': salt}), _ignore_missing_glyphs():
        figure.savefig(buffer, format='svg', dpi=100, metadata={'Date': None}, **options)
    return buffer.getvalue()


@contextlib.contextmanager
def _ignore_missing_glyphs() -> Iterator[None]:
    """Suppresses matplotlib's warnings about missing glyphs, which appear as boxes in a PNG."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='Glyph .* missing from')
        warnings.filterwarnings('ignore', message='Matplotlib currently does not support .* natively')
        yield


def save_picture(picture: Picture, folder: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Writes `<folder>/<name>.png` and `.svg`. Raises UserError if a file cannot be written."""
    paths = [pathlib.Path(folder) / f'{picture.name}.{kind}' for kind in ('png', 'svg')]
    with object_store.wrap_write_errors(epath.Path(folder)), _ignore_missing_glyphs():
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        picture.figure.savefig(paths[0], dpi=150, facecolor='white')
        paths[1].write_text(_render_svg(picture.figure, picture.name, facecolor='white'), encoding='utf-8')
    return paths
