"""What the safetensors library does not check in a header: equal names, and the number of an array's dimensions.

A file is 8 bytes with the header's length N (little endian), N bytes of JSON, and the arrays' bytes. The library
refuses a header that does not describe exactly the bytes after it; of two equal names it takes the last one.
"""

import json
import os
from typing import Any

from remixer_t5x.errors import UserError

# NumPy has at most 64 dimensions.
MAX_DIMENSIONS = 32
_METADATA = '__metadata__'


def check(path: str | os.PathLike[str]) -> None:
    """Raises UserError for equal names or too many dimensions in a file whose header the library has read."""
    with open(path, 'rb') as file:
        header = file.read(int.from_bytes(file.read(8), 'little'))
    try:
        arrays = json.loads(header, object_pairs_hook=_unique)
    except ValueError as error:
        raise bad(path, str(error)) from error
    for name, array in arrays.items():
        if name != _METADATA and len(array['shape']) > MAX_DIMENSIONS:
            raise bad(path, f'{name!r} has {len(array["shape"])} dimensions, allowed are {MAX_DIMENSIONS}')


def bad(path: str | os.PathLike[str], reason: str) -> UserError:
    """The error for a file that is damaged or not safetensors; `reason` may quote the file."""
    shown = ascii(reason)[1:-1]
    shown = shown if len(shown) <= 200 else f'{shown[:200]}...'
    return UserError(f'{os.fspath(path)} cannot be read as safetensors: {shown}; copy or download it again')


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f'{next(n for n in names if names.count(n) > 1)!r} is in the header twice')
    return found
