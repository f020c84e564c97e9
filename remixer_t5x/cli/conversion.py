"""What `remixer-t5x convert` was asked for: one source, one target, and whether they go together."""

from __future__ import annotations

import dataclasses
from typing import Any

from remixer_t5x.errors import UserError

# Which source goes with which target; a checkpoint or MODEL_DIR of ours is on one side.
TARGETS = {
    'from_hf': ('to',),
    'from_safetensors': ('to',),
    'from_t5x': ('to',),
    'checkpoint': ('to_hf', 'to_safetensors', 'to_t5x'),
}
SOURCES = tuple(TARGETS)
DTYPES = ('float32', 'bfloat16')
# Those that store a dtype of choice.
TYPED = ('to_hf', 'to_safetensors')


@dataclasses.dataclass(frozen=True)
class Places:
    """The places given by flags of the same names, None where a flag is not given."""

    from_hf: str | None = None
    from_safetensors: str | None = None
    from_t5x: str | None = None
    checkpoint: str | None = None
    to: str | None = None
    to_hf: str | None = None
    to_safetensors: str | None = None
    to_t5x: str | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """One conversion: `read` and `written` are names of flags, `source` and `target` what they were given.

    `dtype` is of the arrays in the target, float32 unless `--dtype` says otherwise. Raises UserError where the places
    do not make one conversion.
    """

    places: Places
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in (self.read, self.written):
            if not isinstance(getattr(self.places, name), str):
                raise UserError(f'--{name} is {getattr(self.places, name)!r}; it takes a path')
        if self.dtype is not None:
            if self.written not in TYPED:
                flags = ' and '.join(f'--{name}' for name in TYPED)
                raise UserError(f'--dtype is for {flags}; a checkpoint of ours or of T5X is float32: leave it out')
            if self.dtype not in DTYPES:
                raise UserError(f'--dtype is {self.dtype!r}; allowed are {" and ".join(DTYPES)}')

    @property
    def read(self) -> str:
        """The flag of the source."""
        given = self._given(SOURCES)
        if len(given) != 1:
            raise UserError(
                f'convert takes one source, and was given {_flags(given) or "none"}; give --from_hf=DIR, '
                '--from_safetensors=FILE or --from_t5x=DIR with --to=MODEL_DIR, or --checkpoint=PATH with --to_hf=DIR, '
                '--to_safetensors=FILE or --to_t5x=DIR'
            )
        return given[0]

    @property
    def written(self) -> str:
        """The flag of the target."""
        allowed = TARGETS[self.read]
        given = self._given([name for names in TARGETS.values() for name in names])
        if len(given) != 1 or given[0] not in allowed:
            raise UserError(
                f'--{self.read} goes with {_flags(allowed, " or ")}, and {_flags(given) or "none"} is given'
            )
        return given[0]

    @property
    def source(self) -> str:
        return getattr(self.places, self.read)

    @property
    def target(self) -> str:
        return getattr(self.places, self.written)

    def _given(self, names: Any) -> list[str]:
        return [name for name in dict.fromkeys(names) if getattr(self.places, name) is not None]


def _flags(names: Any, joined: str = ', ') -> str:
    return joined.join(f'--{name}' for name in names)
