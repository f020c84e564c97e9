"""Folders in a bucket, `gs://bucket/folder`: what they need, what is in them, and why they fail, in one line.

Three libraries reach a bucket. etils' paths read and write small files through TensorFlow, TensorStore reads and writes
arrays, and Orbax lists and deletes checkpoints through google-cloud-storage. An object appears as a whole or not at
all. It cannot be appended to, renamed in one step, or locked.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

from etils import epath

from remixer_t5x import temporary
from remixer_t5x.errors import UserError

GOOGLE = 'gs://'
LIBRARY = 'google.cloud.storage'
# Seconds in which a bucket must answer before a run starts.
PATIENCE = 30.0
# The beginning of a checksum that a store computed; a checksum of ours is a SHA-256 and has no such beginning.
CRC32C = 'crc32c='


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether the path is a URL, and not a path on this machine or a file system it has mounted."""
    return '://' in os.fspath(path)


def replace(path: epath.Path, text: str) -> None:
    """Writes `text` as the file `path`, which has the old text or the new text if this process or the machine stops."""
    if is_remote(path):
        path.write_text(text)
        return
    fresh = path.parent / (path.name + '.new')
    fresh.write_text(text)
    temporary.commit(fresh, path)


def check_writable(folder: epath.Path) -> None:
    """Raises UserError if a run cannot keep its checkpoints in this bucket. A local folder is not looked at."""
    if not is_remote(folder):
        return
    try:
        bucket = _bucket(folder)
    except ImportError as error:
        raise UserError(
            f'{folder} is in a bucket, which needs google-cloud-storage ({reason(error)}); '
            "type pip install 'remixer-t5x[gcs]'"
        ) from error
    except Exception as error:
        raise UserError(f'{_bucket_name(folder)} cannot be used: {reason(error)}') from error
    has_control = importlib.util.find_spec('google.cloud.storage_control_v2') is not None
    if getattr(bucket, 'hierarchical_namespace_enabled', False) and not has_control:
        raise UserError(
            f'{_bucket_name(folder)} has a hierarchical namespace, which Orbax handles with another package; type '
            'pip install google-cloud-storage-control, or give a bucket without it'
        )


def contents(folder: epath.Path) -> dict[str, list[int | str]] | None:
    """The objects below `folder`: name relative to it -> [bytes, CRC32C and the checksum that the store computed].

    None if this machine cannot ask for checksums: google-cloud-storage or credentials are missing. Raises UserError if
    the bucket cannot be read.
    """
    from_bucket = os.fspath(folder).removeprefix(GOOGLE).partition('/')[2].rstrip('/') + '/'
    try:
        blobs = list(_client().list_blobs(_bucket_name(folder).removeprefix(GOOGLE), prefix=from_bucket))
    except Exception as error:
        if isinstance(error, ImportError) or type(error).__name__ == 'DefaultCredentialsError':
            return None
        raise UserError(f'{os.fspath(folder)} cannot be read: {reason(error)}') from error
    # Names that end with a slash mark folders.
    found = (blob for blob in blobs if not blob.name.endswith('/'))
    return {blob.name.removeprefix(from_bucket): [int(blob.size), f'{CRC32C}{blob.crc32c}'] for blob in found}


def errors() -> tuple[type[BaseException], ...]:
    """What a read or a write can raise, for `except`. TensorFlow is loaded if one of its errors has been raised."""
    tensorflow = sys.modules.get('tensorflow')
    return (OSError,) if tensorflow is None else (OSError, tensorflow.errors.OpError)


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns an error of the store into a UserError that says why `path` cannot be read."""
    try:
        yield
    except errors() as error:
        raise UserError(f'{os.fspath(path)} cannot be read: {reason(error)}') from error


def reason(error: BaseException) -> str:
    """Why the store failed, on one line, and what to do about it where that is known."""
    text = getattr(error, 'message', None) or getattr(error, 'strerror', None) or str(error)
    text = ' '.join(str(text).split('\n\t')[0].split()) or type(error).__name__
    name = type(error).__name__
    for words, shown in _KNOWN:
        if any(word in text or word == name for word in words):
            return shown
    # A library names its operation first and the system's message last.
    return text if len(text) <= 200 else f'{text[:80]} ... {text[-110:]}'


# Names of exceptions or parts of their messages -> what a reader can do.
_KNOWN = (
    (
        ('DefaultCredentialsError', 'RefreshError', 'Unauthorized', 'UNAUTHENTICATED', 'response code 401'),
        'there are no valid credentials; type gcloud auth application-default login, or set '
        'GOOGLE_APPLICATION_CREDENTIALS to the file of a service account',
    ),
    (
        ('Forbidden', 'PERMISSION_DENIED', 'response code 403'),
        'the credentials are not allowed to do that; a run needs the roles Storage Object Admin and Storage Legacy '
        'Bucket Reader (roles/storage.objectAdmin, roles/storage.legacyBucketReader) on the bucket',
    ),
    (
        ('Project was not passed',),
        'the credentials do not name a project; set GOOGLE_CLOUD_PROJECT',
    ),
    (
        ('bucket does not exist',),
        'there is no such bucket; correct the name, or create the bucket',
    ),
    (
        ('libcurl code', 'Max retries exceeded', 'TransportError', 'RetryError', 'ConnectionError'),
        'the storage server does not answer; check the network of this machine',
    ),
)


def _client() -> Any:
    return importlib.import_module(LIBRARY).Client()


def _bucket(folder: epath.Path) -> Any:
    client, retry = _client(), importlib.import_module(f'{LIBRARY}.retry').DEFAULT_RETRY.with_timeout(PATIENCE)
    return client.get_bucket(_bucket_name(folder).removeprefix(GOOGLE), retry=retry, timeout=PATIENCE)


def _bucket_name(folder: epath.Path) -> str:
    return GOOGLE + os.fspath(folder).removeprefix(GOOGLE).partition('/')[0]
