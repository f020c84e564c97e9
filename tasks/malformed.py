"""Records of a user's files that cannot be read: counted and skipped, or refused."""

from remixer_t5x.errors import UserError

_SHOWN = 3


class Malformed:
    """Collects malformed records. strict: the first one raises UserError instead."""

    def __init__(self, strict: bool):
        self._strict = strict
        self._first: list[str] = []
        self.count = 0

    def record(self, path: str, line: int, reason: str) -> None:
        """Notes that line (or row) `line`, from 1, of `path` cannot be read. Raises UserError when strict."""
        where = f'{path}:{line}: {reason}'
        if self._strict:
            raise UserError(f'{where}; correct the line, or skip such lines with STRICT = False')
        self.count += 1
        if self.count <= _SHOWN:
            self._first.append(where)

    def summary(self) -> str:
        """What was skipped and where, for the end of a line; empty when nothing was."""
        if not self.count:
            return ''
        more = ', ...' if self.count > _SHOWN else ''
        return f', {self.count:,} malformed skipped ({", ".join(self._first)}{more})'
