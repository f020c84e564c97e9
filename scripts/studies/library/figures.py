"""How every study ends its picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(figure: Figure, file: str) -> None:
    """Writes a PNG on white paper, and says where."""
    figure.savefig(file, dpi=150, facecolor='white')
    print(f'figure: {file}')
