"""The header of a safetensors file, checked before a library reads by it.

A file is 8 bytes with the header's length N (little endian), N bytes of JSON, and the arrays' bytes. The format demands
that the arrays lie one after another without a gap, from the header's end to the file's; see the README of safetensors.
The library checks most of this too; it takes the last of two equal names, and says less about what is wrong.
"""

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from remixer_t5x.errors import UserError

# The library's limit as well. Headers of published models have a few megabytes at most.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 32
METADATA = '__metadata__'
BITS = {
    'BOOL': 8, 'U8': 8, 'I8': 8, 'F8_E5M2': 8, 'F8_E4M3': 8, 'F8_E8M0': 8, 'F8_E4M3FNUZ': 8, 'F8_E5M2FNUZ': 8,
    'I16': 16, 'U16': 16, 'F16': 16, 'BF16': 16, 'I32': 32, 'U32': 32, 'F32': 32, 'I64': 64, 'U64': 64, 'F64': 64,
    'C64': 64, 'F4': 4, 'F6_E2M3': 6, 'F6_E3M2': 6,
}  # fmt: skip


def check(path: str | os.PathLike[str]) -> None:
    """Raises UserError unless the header of the file `path` describes exactly the bytes that follow it."""
    where = os.fspath(path)
    try:
        with open(where, 'rb') as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), 'little')
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                said = f'says {length:,} bytes' if size >= 8 else 'is cut off'
                raise _bad(where, f'its header {said}, and the file has {size:,}')
            header = file.read(length)
    except OSError as error:
        raise UserError(f'{where} cannot be read ({error.strerror}); check the path and the rights') from error
    _check_arrays(where, _parsed(where, header), size - 8 - length)


def _parsed(where: str, header: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f'{_cut(next(n for n in names if names.count(n) > 1))} stands in it twice')
        return found

    try:
        parsed = json.loads(header, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _bad(where, f'its header is no JSON that can be read ({_first_line(error)})') from error
    if not isinstance(parsed, dict):
        raise _bad(where, 'its header is no JSON object')
    metadata = parsed.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _bad(where, f'{METADATA} in its header is no map of texts')
    return parsed


def _check_arrays(where: str, arrays: Mapping[str, Any], data_bytes: int) -> None:
    places = sorted((*_place(where, name, entry), name) for name, entry in arrays.items())
    end = 0
    for first, last, name in places:
        if first != end:
            raise _bad(where, f'{_cut(name)} begins at byte {first:,} of the arrays instead of {end:,}')
        end = last
    if end != data_bytes:
        raise _bad(where, f'its arrays take {end:,} bytes, and {data_bytes:,} follow the header')


def _place(where: str, name: str, entry: Any) -> tuple[int, int]:
    """First byte, and the one after the last, of an array whose size is what its shape says."""
    if not isinstance(entry, dict) or entry.keys() != {'dtype', 'shape', 'data_offsets'}:
        raise _bad(where, f'{_cut(name)} is not described by dtype, shape and data_offsets')
    dtype, shape, offsets = entry['dtype'], entry['shape'], entry['data_offsets']
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _bad(where, f'{_cut(name)} has the dtype {_cut(dtype)}')
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_count, shape)):
        raise _bad(where, f'{_cut(name)} has the shape {_cut(shape)}')
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise _bad(where, f'{_cut(name)} has data_offsets {_cut(offsets)}')
    first, last = offsets
    if math.prod(shape) * BITS[dtype] != 8 * (last - first):
        raise _bad(where, f'{_cut(name)} is {dtype} {_cut(shape)}, and has {last - first:,} bytes')
    return first, last


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**63


def _bad(where: str, what: str) -> UserError:
    return UserError(f'{where} cannot be read as safetensors: {what}; copy or download it again')


def _first_line(error: Exception) -> str:
    return _cut(next(iter(str(error).splitlines()), ''), quote=False)


def _cut(value: object, quote: bool = True) -> str:
    text = ascii(value) if quote else str(value)
    return text if len(text) <= 80 else f'{text[:80]}...'
