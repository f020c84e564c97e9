"""A local fake of Google Cloud Storage: its JSON API with buckets in memory, and injected faults.

Environment variables redirect TensorStore and google-cloud-storage to the server. The URLs of TensorFlow are fixed, so
the server is also an HTTPS proxy (`CONNECT`), which answers with a self-signed certificate that the environment trusts.
"""

import base64
import contextlib
import dataclasses
import datetime
import json
import pathlib
import re
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import google_crc32c

HOSTS = ('www.googleapis.com', 'storage.googleapis.com', 'oauth2.googleapis.com')


@dataclasses.dataclass(frozen=True)
class StoredObject:
    """The content of an object, and its generation, which increases with each write to any object."""

    data: bytes
    generation: int


# Status of a fault that performs the request and closes the connection after half of the response.
TRUNCATED = 0


@dataclasses.dataclass
class Fault:
    """A fault of the next `times` requests whose 'METHOD object_name' matches `pattern`.

    A request with an error `status` has no effect; None closes the connection without a response. `seconds` only delays
    the response.
    """

    pattern: str
    times: int
    status: int | None = 503
    seconds: float = 0.0


class FakeGcs:
    """A server in threads of this process. `buckets` maps the names of buckets to their objects by name."""

    def __init__(self, folder: pathlib.Path, *buckets: str):
        self.buckets: dict[str, dict[str, StoredObject]] = {name: {} for name in buckets}
        self.lock = threading.RLock()
        self.uploads: dict[str, tuple[str, str, bytes]] = {}
        self._faults: list[Fault] = []
        self._generation = 1000
        self._certificate = folder / 'certificate.pem'
        self.tls = _make_tls(folder / 'key.pem', self._certificate)
        self._server = _Server(('127.0.0.1', 0), _Handler)
        self._server.store = self
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def environment(self) -> dict[str, str]:
        """Returns environment variables that redirect the three libraries to this server, without credentials."""
        address = f'127.0.0.1:{self._server.server_port}'
        return {
            'TENSORSTORE_GCS_HTTP_URL': f'http://{address}',
            'STORAGE_EMULATOR_HOST': f'http://{address}',
            'https_proxy': f'http://{address}',
            'no_proxy': '127.0.0.1,localhost',
            'CURL_CA_BUNDLE': str(self._certificate),
            'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'token',
            'NO_GCE_CHECK': 'true',
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fail(self, pattern: str, times: int = 10**9, status: int | None = 503) -> None:
        with self.lock:
            self._faults.append(Fault(pattern, times, status))

    def delay(self, pattern: str, times: int = 10**9, seconds: float = 3600.0) -> None:
        with self.lock:
            self._faults.append(Fault(pattern, times, seconds=seconds))

    def clear_faults(self) -> None:
        with self.lock:
            self._faults.clear()

    def names(self, bucket: str, prefix: str = '') -> list[str]:
        with self.lock:
            return sorted(name for name in self.buckets[bucket] if name.startswith(prefix))

    def read(self, bucket: str, name: str) -> bytes:
        with self.lock:
            return self.buckets[bucket][name].data

    def write(self, bucket: str, name: str, data: bytes) -> StoredObject:
        with self.lock:
            self._generation += 1
            self.buckets[bucket][name] = StoredObject(data, self._generation)
            return self.buckets[bucket][name]

    def copy(self, bucket: str, prefix: str, folder: pathlib.Path) -> pathlib.Path:
        """Writes the objects that start with `prefix` as files into `folder`, and returns `folder`."""
        for name in self.names(bucket, prefix):
            if not name.endswith('/'):
                file = folder / name.removeprefix(prefix).lstrip('/')
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(self.read(bucket, name))
        return folder

    def remove(self, bucket: str, name: str) -> None:
        with self.lock:
            del self.buckets[bucket][name]

    def next_fault(self, request: str) -> Fault | None:
        """Returns the fault of this request, if any, and decrements its `times`."""
        with self.lock:
            for fault in self._faults:
                if fault.times > 0 and re.search(fault.pattern, request):
                    fault.times -= 1
                    return fault
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    store: FakeGcs


class _AlreadyAnswered(Exception):
    """Raised after a response has been sent, to stop handling the request."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        pass

    def handle(self) -> None:
        # Killed clients close their connections.
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            super().handle()

    def finish(self) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            super().finish()
        # The server closes only the socket that it accepted, not the TLS socket that wraps it.
        self.connection.close()

    def do_CONNECT(self) -> None:
        self.connection.sendall(b'HTTP/1.1 200 Connection established\r\n\r\n')
        self.connection = self.server.store.tls.wrap_socket(self.connection, server_side=True)
        self.rfile = self.connection.makefile('rb')
        self.wfile = self.connection.makefile('wb', buffering=0)
        self.close_connection = False

    def _handle(self) -> None:
        self.store: FakeGcs = self.server.store
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        # TensorFlow sends Content-Length too, although the body is chunked.
        if self.headers.get('Transfer-Encoding') == 'chunked':
            self.body = b''.join(_chunks(self.rfile))
        else:
            self.body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        fault = self.store.next_fault(f'{self.command} {self._object_name(url.path)}')
        self.truncated = fault is not None and fault.status == TRUNCATED
        if fault is not None and fault.seconds:
            time.sleep(fault.seconds)
        elif fault is not None and fault.status is None:
            self.close_connection = True
            return
        elif fault is not None and not self.truncated:
            self._error(fault.status, 'a fault injected by the test')
            return
        with contextlib.suppress(_AlreadyAnswered):
            self._route(url.path)

    do_GET = do_POST = do_PUT = do_DELETE = _handle

    def _object_name(self, path: str) -> str:
        if 'upload_id' in self.query:
            return self.store.uploads.get(self.query['upload_id'], ('', '?'))[1]
        if 'name' in self.query:
            return self.query['name']
        match = re.match(r'/storage/v1/b/[^/]+/o/([^/]+)', path) or re.match(r'/(?!storage/v1|upload)[^/]+/(.+)', path)
        return urllib.parse.unquote(match[1]) if match else path

    def _route(self, path: str) -> None:
        if path.startswith('/upload/') and 'upload_id' in self.query:
            return self._continue_upload()
        for pattern, method in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and method.startswith(f'_{self.command.lower()}_'):
                parts = [urllib.parse.unquote(part) for part in match.groups()]
                if parts[0] not in self.store.buckets:
                    return self._error(404, 'The specified bucket does not exist.')
                return getattr(self, method)(*parts)
        self._error(501, f'{self.command} {path} is not implemented')

    def _get_bucket(self, bucket: str) -> None:
        self._json({'name': bucket, 'location': 'US'})

    def _get_layout(self, bucket: str) -> None:
        self._json({'bucket': bucket, 'locationType': 'region', 'hierarchicalNamespace': {'enabled': False}})

    def _get_list(self, bucket: str) -> None:
        """Sends a single page with all objects, or the first `maxResults`."""
        prefix, delimiter = self.query.get('prefix', ''), self.query.get('delimiter')
        with self.store.lock:
            entries: dict[str, dict[str, str] | None] = {}
            for name in self.store.names(bucket, prefix):
                first, slash, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, '', '')
                if slash:
                    entries[f'{prefix}{first}{slash}'] = None
                else:
                    entries[name] = _metadata(name, self.store.buckets[bucket][name])
        page = list(entries.items())[: int(self.query.get('maxResults', len(entries)))]
        items, prefixes = [item for _, item in page if item], [name for name, item in page if not item]
        self._json({'items': items, 'prefixes': prefixes})

    def _get_object(self, bucket: str, name: str) -> None:
        stored = self._find_object(bucket, name)
        if self.query.get('alt') == 'media':
            return self._media(stored)
        self._json(_metadata(name, stored))

    def _get_media(self, bucket: str, name: str) -> None:
        self._media(self._find_object(bucket, name))

    def _media(self, stored: StoredObject) -> None:
        size = len(stored.data)
        headers = {'x-goog-generation': str(stored.generation), 'x-goog-stored-content-length': str(size)}
        match = re.fullmatch(r'bytes=(\d+)-(\d+)', self.headers.get('Range', ''))
        if not match:
            return self._answer(200, stored.data, headers)
        first, last = int(match[1]), min(int(match[2]), size - 1)
        if first >= size:
            return self._answer(416, b'', {**headers, 'Content-Range': f'bytes */{size}'})
        headers['Content-Range'] = f'bytes {first}-{last}/{size}'
        self._answer(206, stored.data[first : last + 1], headers)

    def _delete_object(self, bucket: str, name: str) -> None:
        self._find_object(bucket, name)
        with self.store.lock:
            self.store.buckets[bucket].pop(name, None)
        self._answer(204, b'')

    def _post_rewrite(self, bucket: str, name: str, other: str, target: str) -> None:
        stored = self.store.write(other, target, self._find_object(bucket, name).data)
        size = str(len(stored.data))
        resource = _metadata(target, stored)
        self._json({'done': True, 'totalBytesRewritten': size, 'objectSize': size, 'resource': resource})

    def _post_upload(self, bucket: str) -> None:
        name = self.query['name']
        if self.query['uploadType'] == 'media':
            return self._store(bucket, name, self.body)
        with self.store.lock:
            token = str(len(self.store.uploads))
            self.store.uploads[token] = (bucket, name, b'')
        url = f'https://{self.headers["Host"]}/upload/storage/v1/b/{bucket}/o'
        self._answer(200, b'', {'Location': f'{url}?uploadType=resumable&upload_id={token}'})

    def _continue_upload(self) -> None:
        token = self.query['upload_id']
        if token not in self.store.uploads:
            return self._error(404, 'no such upload')
        bucket, name, so_far = self.store.uploads[token]
        match = re.fullmatch(r'bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)', self.headers.get('Content-Range', ''))
        if match and match[1]:
            so_far = so_far[: int(match[1])] + self.body
        elif not match:
            so_far = self.body
        self.store.uploads[token] = (bucket, name, so_far)
        if match and (match[3] == '*' or len(so_far) < int(match[3])):
            return self._answer(308, b'', {'Range': f'bytes=0-{len(so_far) - 1}'} if so_far else {})
        self._store(bucket, name, so_far)

    def _store(self, bucket: str, name: str, data: bytes) -> None:
        with self.store.lock:
            self._check_generation(bucket, name)
            stored = self.store.write(bucket, name, data)
        self._json(_metadata(name, stored))

    def _find_object(self, bucket: str, name: str) -> StoredObject:
        with self.store.lock:
            stored = self.store.buckets[bucket].get(name)
            if stored is None:
                self._error(404, f'No such object: {bucket}/{name}')
                raise _AlreadyAnswered
            self._check_generation(bucket, name)
            return stored

    def _check_generation(self, bucket: str, name: str) -> None:
        """Sends status 412 or 304 if the generation violates a condition of the request."""
        stored = self.store.buckets[bucket].get(name)
        generation = stored.generation if stored else 0
        match, no_match = self.query.get('ifGenerationMatch'), self.query.get('ifGenerationNotMatch')
        if match not in (None, '') and int(match) != generation:
            self._error(412, 'the generation does not match')
            raise _AlreadyAnswered
        if no_match not in (None, '') and int(no_match) == generation:
            self._answer(304, b'')
            raise _AlreadyAnswered

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {'Content-Type': 'application/json; charset=UTF-8'})

    def _error(self, status: int, message: str) -> None:
        text = json.dumps({'error': {'code': status, 'message': message, 'errors': [{'message': message}]}})
        self._answer(status, text.encode(), {'Content-Type': 'application/json'})

    def _answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status not in (204, 304):
            self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        if status not in (204, 304):
            self.wfile.write(data[: len(data) // 2] if self.truncated else data)
        self.close_connection = self.close_connection or self.truncated


_ROUTES = (
    (r'/storage/v1/b/([^/]+)', '_get_bucket'),
    (r'/storage/v1/b/([^/]+)/storageLayout', '_get_layout'),
    (r'/storage/v1/b/([^/]+)/o/?', '_get_list'),
    (r'/storage/v1/b/([^/]+)/o/([^/]+)', '_get_object'),
    (r'/storage/v1/b/([^/]+)/o/([^/]+)', '_delete_object'),
    (r'/storage/v1/b/([^/]+)/o/([^/]+)/rewriteTo/b/([^/]+)/o/([^/]+)', '_post_rewrite'),
    (r'/upload/storage/v1/b/([^/]+)/o/?', '_post_upload'),
    (r'/(?!storage/v1/|upload/)([^/]+)/(.+)', '_get_media'),
)


def _metadata(name: str, stored: StoredObject) -> dict[str, str]:
    updated = datetime.datetime.fromtimestamp(1.7e9 + stored.generation, datetime.UTC)
    return {
        'name': name,
        'generation': str(stored.generation),
        'size': str(len(stored.data)),
        'updated': updated.strftime('%Y-%m-%dT%H:%M:%S.000Z'),
        'crc32c': base64.b64encode(google_crc32c.Checksum(stored.data).digest()).decode(),
    }


def _chunks(file: Any) -> Iterator[bytes]:
    while size := int(file.readline().split(b';')[0], 16):
        yield file.read(size)
        file.readline()
    file.readline()


def _make_tls(key_file: pathlib.Path, certificate_file: pathlib.Path) -> ssl.SSLContext:
    """Creates the server's TLS context for HOSTS, with a new key and a self-signed certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, 'a test')])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=30))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in HOSTS]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, raw = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key_file.write_bytes(key.private_bytes(pem, raw, serialization.NoEncryption()))
    certificate_file.write_bytes(certificate.public_bytes(pem))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate_file, key_file)
    return context
