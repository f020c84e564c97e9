"""Saves figures of studies."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(figure: Figure, file: str) -> None:
    """Writes a PNG with a white background and prints its path."""
    figure.savefig(file, dpi=150, facecolor='white')
    print(f'figure: {file}')
