"""Checks the array descriptions in an untrusted checkpoint before TensorStore opens it.

TensorStore aborts the process if opening an array requires more memory than is available, and a few bytes of JSON can
describe an array of any size. The descriptions are zarr's `.zarray` or `zarr.json` files, or the corresponding entries
of Orbax's OCDBT database.
"""

import math
import os
from collections.abc import Iterator

import tensorstore as ts

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError, to_one_line

DESCRIPTION_FILES = ('.zarray', 'zarr.json')
_OCDBT_MANIFEST = 'manifest.ocdbt'
# Chunks up to this size in bytes are always accepted. Larger chunks must not exceed four times the size of the array,
# because a chunk is decompressed as a whole.
SMALL_CHUNK = 2**20
# The total size of the arrays is limited to SMALL_STATE bytes plus MAX_SIZE_RATIO times the size of the files. Constant
# chunks are not stored, so the arrays of an optimizer state before the first step are larger than the files.
SMALL_STATE, MAX_SIZE_RATIO = 2**30, 100
# Bytes per element of the numeric dtypes of zarr 2 and 3. Other dtypes are rejected, because a structured dtype can
# have any size.
_ZARR2_BYTES = {f'{order}{kind}{size}': size for order in '<>|' for kind in 'fiu' for size in (1, 2, 4, 8)} | {'|b1': 1}
_ZARR3_BYTES = {f'{kind}{8 * size}': size for kind in ('float', 'int', 'uint') for size in (1, 2, 4, 8)}
ITEM_BYTES = {**_ZARR2_BYTES, **_ZARR3_BYTES, 'bool': 1, 'bfloat16': 2, 'float8_e4m3fn': 1, 'float8_e5m2': 1, 'int4': 1}
MAX_DESCRIPTION_BYTES = 1_000_000
_ADVICE = 'copy the checkpoint again, or use another'


def check_untrusted_checkpoint(folder: str | os.PathLike[str]) -> None:
    """Raises UserError if a link points outside of `folder`, or if an array description is invalid or too large.

    Reads file names and array descriptions, but no arrays. Does not check buckets, because all users with write access
    to a bucket are trusted.
    """
    untrusted_files.check_links_inside(folder)
    check_array_metadata(folder)


def check_array_metadata(folder: str | os.PathLike[str]) -> None:
    """Raises UserError if an array description is invalid, or if the described arrays are too large."""
    root = os.fspath(folder)
    if '://' in root:
        return
    described = file_bytes = 0
    for subfolder, _, files in os.walk(root):
        # Skip broken links here; reading them later raises an error.
        paths = (os.path.join(subfolder, name) for name in files)
        file_bytes += sum(os.path.getsize(path) for path in paths if os.path.exists(path))
        for name, text in _read_array_metadata(subfolder, files):
            try:
                described += _compute_array_bytes(text)
            except (ValueError, KeyError, TypeError) as error:
                path = to_one_line(os.path.relpath(os.path.join(subfolder, name), root))
                raise UserError(
                    f'{path} in {root} does not describe a numeric array '
                    f'({to_one_line(f"{type(error).__name__}: {error}"):.100}); {_ADVICE}'
                ) from error
    if described > SMALL_STATE + MAX_SIZE_RATIO * file_bytes:
        raise UserError(
            f'{root} describes {described / 2**30:,.1f} GiB of arrays, but its files contain only '
            f'{file_bytes / 2**30:,.3f} GiB; {_ADVICE}'
        )


def _read_array_metadata(folder: str, files: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yields the name and content of each array description in a folder."""
    try:
        for name in {*files}.intersection(DESCRIPTION_FILES):
            yield name, untrusted_files.read_bytes(os.path.join(folder, name), MAX_DESCRIPTION_BYTES)
        # Skip the databases of individual processes, because the database of the parent folder includes their content.
        if _OCDBT_MANIFEST in files and not os.path.basename(folder).startswith('ocdbt.process_'):
            base = {'driver': 'file', 'path': folder.rstrip('/') + '/'}
            store = ts.KvStore.open({'driver': 'ocdbt', 'base': base}).result()
            for key in store.list().result():
                if (name := key.decode('utf-8', 'replace')).rpartition('/')[2] in DESCRIPTION_FILES:
                    yield name, store[key]
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise UserError(f'{folder} is damaged: {untrusted_files.root_cause_message(error)}; {_ADVICE}') from error


def _compute_array_bytes(text: bytes) -> int:
    """Returns the size in bytes of the array described by the JSON in `text`.

    Raises ValueError, KeyError or TypeError if the description is invalid.
    """
    if len(text) > MAX_DESCRIPTION_BYTES:
        raise ValueError(f'the description has more than {MAX_DESCRIPTION_BYTES:,} bytes')
    described = untrusted_files.parse_json(text)
    if 'chunks' in described:
        shape, chunk, dtype = described['shape'], described['chunks'], described['dtype']
    else:
        shape, chunk = described['shape'], described['chunk_grid']['configuration']['chunk_shape']
        dtype = described['data_type']
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f'dtype is {ascii(dtype)[:40]}')
    for name, sizes in (('shape', shape), ('chunks', chunk)):
        is_shape = isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)
        if not is_shape or math.prod(sizes) >= 2**62:
            raise ValueError(f'{name} is {ascii(sizes)[:60]}')
    array, largest = (math.prod(sizes) * ITEM_BYTES[dtype] for sizes in (shape, chunk))
    if largest > max(SMALL_CHUNK, 4 * array):
        raise ValueError(f'chunks of shape {str(chunk):.40} do not fit an array of shape {str(shape):.40}')
    return array
