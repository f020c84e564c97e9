"""Checks what a checkpoint folder from somebody else describes, before a library reads it.

TensorStore ends the whole process, without an error that we could catch, if a description asks for more memory than
there is, also when it only opens the array; a few bytes of JSON can ask for any amount. Descriptions are zarr's
`.zarray` or `zarr.json`, in separate files or in the OCDBT database that Orbax writes.
"""

import math
import os
from collections.abc import Iterator
from typing import Any

import tensorstore as ts

from remixer_t5x import safe_paths, untrusted_files
from remixer_t5x.errors import UserError, one_line

DESCRIPTIONS = ('.zarray', 'zarr.json')
_DATABASE = 'manifest.ocdbt'
MAX_DIMENSIONS = 32
# Bytes of a chunk, which is unpacked as a whole. It is not larger than its array, except for rounding in small arrays.
SMALL_CHUNK = 2**20
# Bytes of all arrays: a chunk of one value needs no file, so the arrays of a state before its first step are larger
# than the files. Trained parameters, a third of a state at least, are not.
SMALL_STATE, MAX_RATIO = 2**30, 100
# Bytes of an element, of the dtypes of zarr 2 and 3 that have numbers. Others, such as structures, can have any size.
_ZARR_2 = {f'{order}{kind}{size}': size for order in '<>|' for kind in 'fiu' for size in (1, 2, 4, 8)} | {'|b1': 1}
_ZARR_3 = {f'{kind}{8 * size}': size for kind in ('float', 'int', 'uint') for size in (1, 2, 4, 8)}
ITEM_BYTES = {**_ZARR_2, **_ZARR_3, 'bool': 1, 'bfloat16': 2, 'float8_e4m3fn': 1, 'float8_e5m2': 1, 'int4': 1}
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
    total = sum(_check(root, name, text) for name, text in _descriptions(root))
    held = sum(_bytes(os.path.join(place, name)) for place, _, names in os.walk(root) for name in names)
    if total > SMALL_STATE + MAX_RATIO * held:
        raise UserError(
            f'the arrays in {root} have {total / 2**30:,.1f} GiB by their descriptions, and the files '
            f'{held / 2**30:,.3f} GiB; copy the checkpoint again, or use another'
        )


def _bytes(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        # A link to a file that does not exist; the code that reads it says so.
        return 0


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
        return untrusted_files.read_bytes(path, MAX_DESCRIPTION_BYTES)
    except OSError as error:
        raise _bad(os.path.dirname(path), os.path.basename(path), f'cannot be read ({error.strerror})') from error


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


def _check(root: str, name: str, text: bytes) -> int:
    """The bytes of the array. Raises UserError if it is impossible."""
    try:
        if len(text) > MAX_DESCRIPTION_BYTES:
            raise ValueError(f'it has more than {MAX_DESCRIPTION_BYTES:,} bytes')
        shape, chunk, item = _sizes(untrusted_files.parse(text))
    except (ValueError, KeyError, TypeError) as error:
        reason = one_line(f'{type(error).__name__}: {error}')
        raise _bad(root, name, f'does not describe an array of numbers ({reason[:100]})') from error
    if math.prod(chunk) * item > max(SMALL_CHUNK, 4 * math.prod(shape) * item):
        raise _bad(root, name, f'has chunks of {str(chunk):.100} for an array of {str(shape):.100}')
    return math.prod(shape) * item


def _sizes(described: dict[str, Any]) -> tuple[list[int], list[int], int]:
    """Shape, shape of a chunk, and bytes of an element."""
    if 'chunks' in described:
        shape, chunk, dtype = described['shape'], described['chunks'], described['dtype']
    else:
        shape, chunk = described['shape'], described['chunk_grid']['configuration']['chunk_shape']
        dtype = described['data_type']
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f'dtype is {ascii(dtype)[:40]}')
    for name, sizes in (('shape', shape), ('chunks', chunk)):
        if not isinstance(sizes, list) or len(sizes) > MAX_DIMENSIONS or not all(map(_is_size, sizes)):
            raise ValueError(f'{name} is {ascii(sizes)[:60]}')
    return shape, chunk, ITEM_BYTES[dtype]


def _is_size(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**62


def _bad(root: str, name: str, what: str) -> UserError:
    shown = name if name.isprintable() else ascii(name)
    return UserError(f'{shown} in {root} {what}; copy the checkpoint again, or use another')
