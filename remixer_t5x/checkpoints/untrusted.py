"""Checks what a checkpoint folder from somebody else describes, before a library reads it.

TensorStore ends the whole process, without an error that we could catch, if a description asks for more memory than
there is; a few bytes of JSON can ask for any amount. Descriptions are zarr's `.zarray` or `zarr.json`, in separate
files or in the OCDBT database that Orbax writes.
"""

import json
import math
import os
from collections.abc import Iterator
from typing import Any

import tensorstore as ts

from remixer_t5x.checkpoints import safe_paths
from remixer_t5x.errors import UserError

DESCRIPTIONS = ('.zarray', 'zarr.json')
_DATABASE = 'manifest.ocdbt'
MAX_DIMENSIONS = 32
# A chunk is unpacked as a whole. It is not larger than its array, except for rounding in small arrays.
SMALL_CHUNK = 2**20
MAX_DESCRIPTION_BYTES = 1_000_000


def check(folder: str | os.PathLike[str]) -> None:
    """Raises UserError if an entry below `folder` leads out of it, or describes an impossible array.

    Reads names and descriptions, but not arrays. Buckets are not checked: everybody who can write there is trusted.
    """
    safe_paths.check_inside(folder)
    check_descriptions(folder)


def check_descriptions(folder: str | os.PathLike[str]) -> None:
    """The second half of `check`: raises UserError for the description of an impossible array."""
    root = os.fspath(folder)
    if '://' in root:
        return
    for name, text in _descriptions(root):
        _check(root, name, text)


def _descriptions(root: str) -> Iterator[tuple[str, bytes]]:
    for place, _, files in os.walk(root):
        for name in files:
            path = os.path.join(place, name)
            if name in DESCRIPTIONS:
                yield os.path.relpath(path, root), _read(path)
        # Each process writes into its own folder, and the database above refers to it.
        if _DATABASE in files and not os.path.basename(place).startswith('ocdbt.process_'):
            yield from _database_descriptions(place, root)


def _read(path: str) -> bytes:
    try:
        with open(path, 'rb') as file:
            return file.read(MAX_DESCRIPTION_BYTES + 1)
    except OSError as error:
        raise UserError(f'{path} cannot be read ({error.strerror}); check the rights there') from error


def _database_descriptions(place: str, root: str) -> Iterator[tuple[str, bytes]]:
    try:
        base = {'driver': 'file', 'path': place.rstrip('/') + '/'}
        store = ts.KvStore.open({'driver': 'ocdbt', 'base': base}).result()
        for key in store.list().result():
            if key.rpartition(b'/')[2].decode('utf-8', 'replace') in DESCRIPTIONS:
                yield os.path.join(os.path.relpath(place, root), key.decode('utf-8', 'replace')), store[key]
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f'{place} is damaged: {reason[:200]}; copy the checkpoint again, or use another') from error


def _check(root: str, name: str, text: bytes) -> None:
    try:
        if len(text) > MAX_DESCRIPTION_BYTES:
            raise ValueError(f'it has more than {MAX_DESCRIPTION_BYTES:,} bytes')
        shape, chunk = _sizes(json.loads(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f'{type(error).__name__}: {error}'
        raise _bad(root, name, f'does not describe an array ({reason[:100]})') from error
    if math.prod(chunk) > max(SMALL_CHUNK, 4 * math.prod(shape)):
        raise _bad(root, name, f'has chunks of {str(chunk):.100} for an array of {str(shape):.100}')


def _sizes(described: dict[str, Any]) -> tuple[list[int], list[int]]:
    if 'chunks' in described:
        shape, chunk = described['shape'], described['chunks']
    else:
        shape, chunk = described['shape'], described['chunk_grid']['configuration']['chunk_shape']
    for name, sizes in (('shape', shape), ('chunks', chunk)):
        if not isinstance(sizes, list) or len(sizes) > MAX_DIMENSIONS or not all(map(_is_size, sizes)):
            raise ValueError(f'{name} is {ascii(sizes)[:60]}')
    return shape, chunk


def _is_size(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**62


def _bad(root: str, name: str, what: str) -> UserError:
    shown = name if name.isprintable() else ascii(name)
    return UserError(f'{shown} in {root} {what}; copy the checkpoint again, or use another')
