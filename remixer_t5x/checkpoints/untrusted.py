"""Checks the arrays that an untrusted checkpoint describes, before a library reads it.

TensorStore aborts the process, without an error that could be caught, if a description needs more memory than there is,
even if it only opens the array; a few bytes of JSON can describe any amount. Descriptions are zarr's
`.zarray` or `zarr.json`, in separate files or in the OCDBT database that Orbax writes and TensorStore lists.
"""

import math
import os
from collections.abc import Iterator

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
_ADVICE = 'copy the checkpoint again, or use another'


def check(folder: str | os.PathLike[str]) -> None:
    """Raises UserError if an entry of `folder` leads out of it, or describes an impossible array.

    Reads names and descriptions, but not arrays. Buckets are not checked: everybody who can write there is trusted.
    """
    safe_paths.check_inside(folder)
    check_descriptions(folder)


def check_descriptions(folder: str | os.PathLike[str]) -> None:
    """The second half of `check`: raises UserError for the description of an impossible array."""
    root = os.fspath(folder)
    if '://' in root:
        return
    described = stored = 0
    for place, _, files in os.walk(root):
        # A link to a file that does not exist has no size; the code that reads it reports it.
        paths = (os.path.join(place, name) for name in files)
        stored += sum(os.path.getsize(path) for path in paths if os.path.exists(path))
        for name, text in _descriptions(place, files):
            try:
                described += _array_bytes(text)
            except (ValueError, KeyError, TypeError) as error:
                path = one_line(os.path.relpath(os.path.join(place, name), root))
                raise UserError(
                    f'{path} in {root} does not describe an array of numbers '
                    f'({one_line(f"{type(error).__name__}: {error}"):.100}); {_ADVICE}'
                ) from error
    if described > SMALL_STATE + MAX_RATIO * stored:
        raise UserError(
            f'the arrays in {root} have {described / 2**30:,.1f} GiB by their descriptions, and the files '
            f'{stored / 2**30:,.3f} GiB; {_ADVICE}'
        )


def _descriptions(place: str, files: list[str]) -> Iterator[tuple[str, bytes]]:
    """The names and contents of the descriptions in one folder."""
    try:
        for name in {*files}.intersection(DESCRIPTIONS):
            yield name, untrusted_files.read_bytes(os.path.join(place, name), MAX_DESCRIPTION_BYTES)
        # Each process writes into its own folder, and the database above refers to it.
        if _DATABASE in files and not os.path.basename(place).startswith('ocdbt.process_'):
            base = {'driver': 'file', 'path': place.rstrip('/') + '/'}
            store = ts.KvStore.open({'driver': 'ocdbt', 'base': base}).result()
            for key in store.list().result():
                if (name := key.decode('utf-8', 'replace')).rpartition('/')[2] in DESCRIPTIONS:
                    yield name, store[key]
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise UserError(f'{place} is damaged: {untrusted_files.reason(error)}; {_ADVICE}') from error


def _array_bytes(text: bytes) -> int:
    """The bytes of the described array. Raises ValueError, KeyError or TypeError if it is impossible."""
    if len(text) > MAX_DESCRIPTION_BYTES:
        raise ValueError(f'it has more than {MAX_DESCRIPTION_BYTES:,} bytes')
    described = untrusted_files.parse_json(text)
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
    array, largest = (math.prod(sizes) * ITEM_BYTES[dtype] for sizes in (shape, chunk))
    if largest > max(SMALL_CHUNK, 4 * array):
        raise ValueError(f'its chunks of {str(chunk):.40} do not fit {str(shape):.40}')
    return array


def _is_size(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**62
