"""Reads bytes, text, JSON and JSON lines from untrusted files, with size limits, and checks untrusted folders.

Only regular files and objects in buckets are opened, because opening a pipe would block. In parsed JSON, all numbers
are finite and all strings can be encoded.

Links and file names in an untrusted folder must not lead outside of the folder. The folder itself may be a link,
because the user chose it. `check_links_inside` takes milliseconds for thousands of files, because it lists folders
without opening files. Buckets have no links.
"""

import contextlib
import errno
import functools
import io
import json
import math
import os
import pathlib
import re
import stat
from collections.abc import Iterator
from typing import Any, NamedTuple

from remixer_t5x.errors import UserError, root_cause_message, to_one_line

Path = str | os.PathLike[str]
# Maximum size of a file in bytes; the largest published configurations and indices have a few megabytes.
MAX_BYTES = 100_000_000
# Maximum size in bytes of one line of a JSON lines file, such as a prediction with its input.
LONGEST_LINE = 50_000_000
# Maximum number of digits of an integer. Longer numbers may exceed float64, and parsing them takes quadratic time.
_MAX_DIGITS = 300
_DEFAULT_ADVICE = 'copy or download it again'
_LONE_SURROGATE = re.compile(r'\\u[dD][89a-fA-F]')


class InvalidJsonError(ValueError):
    """Raised for invalid JSON, and for numbers that are too long or not finite. The message is one short line."""


def open_file(path: Path) -> io.BufferedReader:
    """Opens a regular file or an object in a bucket for reading bytes. Raises OSError for other paths."""
    name = os.fspath(path)
    if '://' in name:
        return _open_remote_file(name)  # type: ignore[return-value]
    # Without O_NONBLOCK, opening a pipe would block until another process opened it for writing.
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, 'rb')
    kind = 'a folder' if stat.S_ISDIR(os.fstat(descriptor).st_mode) else 'a pipe, socket or device'
    os.close(descriptor)
    raise OSError(errno.EINVAL, f'it is {kind}, not a file', name)


@contextlib.contextmanager
def _open_remote_file(name: str) -> Iterator[Any]:
    # Import lazily, because only buckets need this library.
    from etils import epath

    try:
        with epath.Path(name).open('rb') as file:
            yield file
    except Exception as error:
        # Convert TensorFlow's exceptions, because epath reads buckets through TensorFlow.
        if not type(error).__module__.startswith('tensorflow'):
            raise
        raise OSError(errno.EIO, str(error).partition('\n')[0], name) from error


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Reads a whole file. Raises OSError if the file cannot be opened or has more than `limit` bytes."""
    with open_file(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f'it has more than {limit:,} bytes', os.fspath(path))
    return content


def read_text(path: Path, advice: str = _DEFAULT_ADVICE, limit: int = MAX_BYTES) -> str:
    """Reads a UTF-8 file. Raises UserError with `advice` if the file is not readable or not UTF-8."""
    with convert_to_user_errors(path, advice):
        return _decode_utf8(read_bytes(path, limit))


def read_json_object(path: Path, advice: str = _DEFAULT_ADVICE, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Reads a file with one JSON object. Raises UserError with `advice` for any other file."""
    return _read_json(path, advice, limit, dict, 'object')


def read_json_list(path: Path, advice: str = _DEFAULT_ADVICE, limit: int = MAX_BYTES) -> list[Any]:
    """Reads a file with one JSON array. Raises UserError with `advice` for any other file."""
    return _read_json(path, advice, limit, list, 'array')


def _read_json(path: Path, advice: str, limit: int, kind: type, name: str) -> Any:
    with convert_to_user_errors(path, advice):
        value = parse_json(read_bytes(path, limit))
        if not isinstance(value, kind):
            raise InvalidJsonError(f'it does not contain a JSON {name}')
        return value


@contextlib.contextmanager
def convert_to_user_errors(path: Path, advice: str = _DEFAULT_ADVICE) -> Iterator[None]:
    """Converts OSError and InvalidJsonError to a UserError whose message names `path` and ends with `advice`."""
    try:
        yield
    except (OSError, InvalidJsonError) as error:
        raise UserError(
            f'{to_one_line(os.fspath(path))} cannot be read: {root_cause_message(error)}; {advice}'
        ) from error


class JsonLine(NamedTuple):
    """A line of a JSON lines file: the line number (from 1), the size in bytes, and either a value or an error.

    `ended` is False if the line does not end with a newline; a killed process may have truncated such a line.
    `is_blank` is True if the line contains only white space, which is also an error.
    """

    number: int
    size: int
    value: Any
    error: str | None
    ended: bool
    is_blank: bool = False


def read_json_lines(path: Path, longest: int = LONGEST_LINE, odd_numbers: bool = False) -> Iterator[JsonLine]:
    """Yields the lines of a JSON lines file. Stops after the first line of more than `longest` bytes.

    Raises OSError if the file cannot be opened. If `odd_numbers` is true, NaN, Infinity and numbers
    beyond float64 are parsed as None.
    """
    with open_file(path) as file:
        # Read a bucket object as a whole, because its `readline` does not support a limit.
        lines = file if '://' not in os.fspath(path) else io.BytesIO(file.read(10 * MAX_BYTES))
        number = 0
        while line := lines.readline(longest + 1):
            number += 1
            size, ended = len(line), line.endswith(b'\n')
            if size > longest and not ended:
                # Stop here, because the rest of the line may be endless.
                yield JsonLine(number, size, None, f'it has more than {longest:,} bytes', ended=True)
                return
            try:
                yield JsonLine(number, size, parse_json(line, odd_numbers), None, ended)
            except InvalidJsonError as error:
                yield JsonLine(number, size, None, str(error), ended, is_blank=not line.strip())


def parse_json(text: str | bytes, odd_numbers: bool = False) -> Any:
    """Parses JSON in a string or in UTF-8 bytes. Replaces lone surrogates, which UTF-8 cannot encode, with '?'.

    If `odd_numbers` is true, NaN, Infinity and numbers beyond float64, which are invalid JSON, are parsed as None.
    Raises InvalidJsonError if the text is not JSON, is nested too deeply, or contains a whole number of more than 300
    digits.
    """
    try:
        text = _decode_utf8(text) if isinstance(text, bytes) else text
        value = _build_decoder(odd_numbers).decode(text)
        return _replace_surrogates(value) if _LONE_SURROGATE.search(text) else value
    except InvalidJsonError:
        raise
    except RecursionError:
        raise InvalidJsonError('it is nested too deeply') from None
    except ValueError as error:
        raise InvalidJsonError(f'invalid JSON ({to_one_line(str(error))[:150]})') from None


@functools.cache
def _build_decoder(odd_numbers: bool) -> json.JSONDecoder:
    def parse_int(digits: str) -> int:
        if len(digits) > _MAX_DIGITS:
            raise InvalidJsonError(f'it has a number of {len(digits):,} digits')
        return int(digits)

    def parse_float(text: str) -> float | None:
        if math.isfinite(value := float(text)):
            return value
        if odd_numbers:
            return None
        raise InvalidJsonError(f'it contains the number {text[:30]}, which is not finite')

    return json.JSONDecoder(parse_int=parse_int, parse_float=parse_float, parse_constant=parse_float)


def _decode_utf8(content: bytes) -> str:
    try:
        return content.decode('utf-8-sig')
    except UnicodeDecodeError as error:
        raise InvalidJsonError(f'invalid UTF-8 at byte {error.start}') from None


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode('utf-8', 'replace').decode()
    if isinstance(value, list):
        return [_replace_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_replace_surrogates(name): _replace_surrogates(item) for name, item in value.items()}
    return value


def check_links_inside(folder: str | os.PathLike[str]) -> None:
    """Raises UserError if `folder` contains a link to a path outside of the folder, or a pipe, socket or device.

    In Hugging Face's cache, links from snapshots/<revision> into the neighbouring blobs folder are allowed.
    """
    root = os.fspath(folder)
    if '://' in root or not os.path.isdir(root):
        return
    roots = _find_allowed_roots(root)
    waiting = [root]
    while waiting:
        try:
            with os.scandir(current := waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif not entry.is_file(follow_symlinks=False):
                        _check_link_target(entry.path, roots, root)
        except OSError as error:
            raise UserError(
                f'{to_one_line(current)} cannot be read ({error.strerror}); check its permissions'
            ) from error


def resolve_path_inside(folder: str | os.PathLike[str], name: object, source: str) -> pathlib.Path:
    """Returns the path of a file in `folder` whose `name` comes from an untrusted file.

    Raises UserError if `name` is not a string, is absolute, contains '..' or a forbidden character, or is a link to a
    path outside of `folder`. The error message names the untrusted file, `source`.
    """
    root = os.fspath(folder)
    parts = name.replace('\\', '/').split('/') if isinstance(name, str) and name.isprintable() else []
    if not parts or not str(name).strip() or '..' in parts or not parts[0] or ':' in parts[0]:
        raise UserError(
            f'{source} names the file {name!a:.100}, which is invalid or outside of {root}; correct the name'
        )
    path = os.path.join(root, str(name))
    _check_link_target(path, _find_allowed_roots(root), root)
    return pathlib.Path(path)


def _find_allowed_roots(folder: str) -> tuple[str, ...]:
    """Returns the folders into which links may point: `folder`, and the blobs folder of Hugging Face's cache."""
    real = os.path.realpath(folder)
    blobs = os.path.join(os.path.dirname(os.path.dirname(real)), 'blobs')
    is_cache = os.path.basename(os.path.dirname(real)) == 'snapshots' and os.path.isdir(blobs)
    return (real, blobs) if is_cache and not os.path.islink(blobs) else (real,)


def _check_link_target(path: str, roots: tuple[str, ...], folder: str) -> None:
    target = os.path.realpath(path)
    if not any(target == root or target.startswith(root.rstrip('/') + '/') for root in roots):
        raise UserError(
            f'{to_one_line(path)} is a link to {to_one_line(target)}, which is outside of {folder}; if you trust it, '
            'copy the folder with the linked files (cp -rL)'
        )
    # Ignore missing files, which are reported when they are read.
    if os.path.exists(target) and not stat.S_ISREG(mode := os.stat(target).st_mode) and not stat.S_ISDIR(mode):
        raise UserError(f'{to_one_line(path)} is a pipe, socket or device, not a file; remove it')
