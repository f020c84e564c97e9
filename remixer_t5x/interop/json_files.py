"""Reads a JSON object from a file of somebody else; anything else in the file is an error of one line."""

import json
import pathlib
from typing import Any

from remixer_t5x.errors import UserError

# Limit for a config or an index; the largest published files have a few megabytes.
MAX_BYTES = 100_000_000


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """The object in the file. Raises UserError if the file is missing, too large, or not a JSON object."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise UserError(f'{path} has {size:,} bytes, at most {MAX_BYTES:,} are read; copy or download it again')
        found = json.loads(path.read_bytes())
    except UserError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f'{path} cannot be read: {_reason(error)}; copy or download it again') from error
    if not isinstance(found, dict):
        raise UserError(f'{path} does not contain a JSON object; copy or download it again')
    return found


def _reason(error: Exception) -> str:
    return getattr(error, 'strerror', None) or str(error)
