"""How far a run has read its data. Does not load TensorFlow, because checkpoints store it."""

import base64
import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Position:
    """`batches` were consumed; `states` is the state of the source after `captured_at` of them (empty bytes mean the
    start).
    """

    batches: int = 0
    captured_at: int = 0
    states: Mapping[int, bytes] = dataclasses.field(default_factory=lambda: {0: b''})

    @classmethod
    def start(cls, streams: int) -> 'Position':
        """The position of a source with this many streams, before its first batch."""
        return cls(states=dict.fromkeys(range(streams), b''))

    @property
    def is_saved(self) -> bool:
        """Whether a source can go to it: False for a run that drew batches and saved no states."""
        return not self.captured_at or all(self.states.values())

    def begin_again(self) -> 'Position':
        """The same number of batches, with a source at its start."""
        return Position(self.batches, self.batches, dict.fromkeys(self.states, b''))

    def to_json(self) -> dict[str, dict[str, Any]]:
        """The record of each stream, by its number."""
        return {str(index): self._record(state) for index, state in self.states.items()}

    def _record(self, state: bytes) -> dict[str, Any]:
        packed = base64.b64encode(zlib.compress(state, 1)).decode('ascii')
        return {'batches': self.batches, 'captured_at': self.captured_at, 'state': packed}

    @classmethod
    def from_json(cls, records: Sequence[dict[str, Any]]) -> 'Position':
        """The position from the records of all streams, in order."""
        states = {index: zlib.decompress(base64.b64decode(record['state'])) for index, record in enumerate(records)}
        return cls(records[0]['batches'], records[0]['captured_at'], states)
