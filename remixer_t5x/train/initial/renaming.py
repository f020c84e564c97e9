"""Which array of a checkpoint each parameter of a model comes from, by INITIAL_CHECKPOINT_MAP and FRESH_PARAMETERS.

The map has regular expressions for whole names of the model's parameters. The first that matches decides: its value is
the name in the checkpoint, which may repeat groups (`\\1`), or None for a fresh parameter. `NAME[4:8]` takes these
layers of a stacked array, for runs that are cut in another way. Other parameters have the same name in both.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from remixer_t5x.errors import UserError

SETTING = 'INITIAL_CHECKPOINT_MAP'
_LAYERS = re.compile(r'(.*)\[(\d+):(\d+)\]')


class Source(NamedTuple):
    """An array of a checkpoint: its name, and the layers to take, all if None."""

    name: str
    layers: tuple[int, int] | None = None

    def taken(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is taken of an array of shape `shape`."""
        if self.layers is None:
            return shape
        first, last = self.layers
        return (max(0, min(last, shape[0]) - first), *shape[1:])


def sources(
    names: Mapping[str, Any], renamed: Mapping[str, str | None], fresh: str | None = None
) -> dict[str, Source | None]:
    """For each parameter of the model, what it comes from; None for a fresh one.

    Raises UserError if an expression is not regular, or matches no parameter.
    """
    if fresh is not None and not any(fresh in name for name in names):
        raise UserError(
            f'FRESH_PARAMETERS is {fresh!r}, which no parameter has in its name; names are like {next(iter(names))}'
        )
    rules = {pattern: _compiled(pattern, to) for pattern, to in renamed.items()}
    used: set[str] = set()
    found: dict[str, Source | None] = {}
    for name in names:
        found[name] = None if fresh is not None and fresh in name else Source(name)
        matches = ((pattern, rule.fullmatch(name)) for pattern, rule in rules.items() if found[name] is not None)
        pattern, match = next(((pattern, match) for pattern, match in matches if match), ('', None))
        if match:
            used.add(pattern)
            found[name] = _source(match, renamed[pattern])
    for pattern in renamed:
        if pattern not in used:
            raise UserError(
                f'{SETTING} has {pattern!r}, which matches no parameter that no line before it has; it is compared '
                f'with whole names, such as {next(iter(names))}'
            )
    return found


def _compiled(pattern: Any, to: Any) -> re.Pattern[str]:
    if not isinstance(pattern, str) or not (to is None or isinstance(to, str)):
        raise UserError(
            f'{SETTING} has {pattern!r}: {to!r}; it takes regular expressions and names in the checkpoint, or None for '
            "fresh parameters: {'.*/hyper_mixer/.*': None}"
        )
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f'{SETTING} has {pattern!r}, which is not a regular expression ({error})') from error


def _source(match: re.Match[str], to: str | None) -> Source | None:
    if to is None:
        return None
    layers = _LAYERS.fullmatch(to)
    try:
        name = match.expand(layers[1] if layers else to)
    except re.error as error:
        raise UserError(f'{SETTING} has {to!r}, which does not fit its expression ({error})') from error
    return Source(name, (int(layers[2]), int(layers[3])) if layers else None)
