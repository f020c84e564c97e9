"""How far a run has read its data. Does not load TensorFlow, because checkpoints store it."""

import base64
import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Position:
    """`batches` were consumed; `states` has the state of each stream, by its number, after `captured_at` of them (empty
    bytes mean the start). The processes of a run may have captured their streams at different batches.
    """

    batches: int = 0
    captured_at: Mapping[int, int] = dataclasses.field(default_factory=lambda: {0: 0})
    states: Mapping[int, bytes] = dataclasses.field(default_factory=lambda: {0: b''})

    @classmethod
    def captured(cls, batches: int, states: Mapping[int, bytes]) -> 'Position':
        """The position of a source whose streams were all captured after `batches` batches."""
        return cls(batches, dict.fromkeys(states, batches), states)

    @classmethod
    def start(cls, streams: int) -> 'Position':
        """The position of a source with this many streams, before its first batch."""
        return cls.captured(0, dict.fromkeys(range(streams), b''))

    @property
    def is_saved(self) -> bool:
        """Whether a source can go to it: False for a run that drew batches and saved no states."""
        return all(self.states[index] or not at for index, at in self.captured_at.items())

    def behind(self, drawn: int) -> list[int]:
        """The streams of which more than `drawn` batches were consumed since their states were captured."""
        return [index for index, at in self.captured_at.items() if self.batches - at > drawn]

    def begin_again(self) -> 'Position':
        """The same number of batches, with a source at its start."""
        return self.captured(self.batches, dict.fromkeys(self.states, b''))

    def to_json(self) -> dict[str, dict[str, Any]]:
        """The record of each stream, by its number."""
        return {str(index): self._record(index) for index in self.states}

    def _record(self, index: int) -> dict[str, Any]:
        packed = base64.b64encode(zlib.compress(self.states[index], 1)).decode('ascii')
        return {'batches': self.batches, 'captured_at': self.captured_at[index], 'state': packed}

    @classmethod
    def from_json(cls, records: Sequence[dict[str, Any]]) -> 'Position':
        """The position from the records of all streams, in order."""
        states = {index: zlib.decompress(base64.b64decode(record['state'])) for index, record in enumerate(records)}
        captured_at = {index: record['captured_at'] for index, record in enumerate(records)}
        return cls(records[0]['batches'], captured_at, states)
