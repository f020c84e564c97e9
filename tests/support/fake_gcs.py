"""Google Cloud Storage on this machine, for tests: its JSON API with the buckets in memory, and faults on demand.

TensorStore and google-cloud-storage are sent here by an address in the environment. TensorFlow's addresses are fixed,
so it comes through a proxy (`CONNECT`), which answers with a certificate of its own that the environment trusts.
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
class Stored:
    """One object: its bytes, and a number that is larger after each write of any object."""

    data: bytes
    generation: int


CUT = 0


@dataclasses.dataclass
class Fault:
    """What happens to the next `times` requests whose 'METHOD name-of-object' matches `pattern`.

    `status` is answered, with nothing stored; None closes the connection without an answer. CUT does what was asked and
    closes the connection after half of the answer. `seconds` delays an answer without a fault.
    """

    pattern: str
    times: int
    status: int | None = 503
    seconds: float = 0.0


class FakeGcs:
    """A server in threads of this process. `buckets` maps names to objects."""

    def __init__(self, folder: pathlib.Path, *buckets: str):
        self.buckets: dict[str, dict[str, Stored]] = {name: {} for name in buckets}
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
        """What sends the three libraries here, without credentials."""
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

    def hold(self, pattern: str, times: int = 10**9, seconds: float = 3600.0) -> None:
        with self.lock:
            self._faults.append(Fault(pattern, times, seconds=seconds))

    def heal(self) -> None:
        with self.lock:
            self._faults.clear()

    def names(self, bucket: str, prefix: str = '') -> list[str]:
        with self.lock:
            return sorted(name for name in self.buckets[bucket] if name.startswith(prefix))

    def read(self, bucket: str, name: str) -> bytes:
        with self.lock:
            return self.buckets[bucket][name].data

    def write(self, bucket: str, name: str, data: bytes) -> Stored:
        with self.lock:
            self._generation += 1
            self.buckets[bucket][name] = Stored(data, self._generation)
            return self.buckets[bucket][name]

    def copy(self, bucket: str, prefix: str, folder: pathlib.Path) -> pathlib.Path:
        """Writes the objects of `prefix` as files into `folder`, and returns it."""
        for name in self.names(bucket, prefix):
            if not name.endswith('/'):
                file = folder / name.removeprefix(prefix).lstrip('/')
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(self.read(bucket, name))
        return folder

    def remove(self, bucket: str, name: str) -> None:
        with self.lock:
            del self.buckets[bucket][name]

    def fault(self, request: str) -> Fault | None:
        """The fault that `request` meets; counts it."""
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


class _Answered(Exception):
    """The request has its answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        pass

    def handle(self) -> None:
        # Clients are killed, and give up.
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            super().handle()

    def finish(self) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            super().finish()
        # The server closes the socket that it accepted, and not what TLS made of it.
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
        # TensorFlow sends both headers, and the body in chunks.
        if self.headers.get('Transfer-Encoding') == 'chunked':
            self.body = b''.join(_chunks(self.rfile))
        else:
            self.body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        fault = self.store.fault(f'{self.command} {self._object_name(url.path)}')
        self.cut = fault is not None and fault.status == CUT
        if fault is not None and fault.seconds:
            time.sleep(fault.seconds)
        elif fault is not None and fault.status is None:
            self.close_connection = True
            return
        elif fault is not None and not self.cut:
            self._error(fault.status, 'a fault of this test')
            return
        with contextlib.suppress(_Answered):
            self._route(url.path)

    do_GET = do_POST = do_PUT = do_DELETE = _handle

    def _object_name(self, path: str) -> str:
        if 'upload_id' in self.query:
            return self.store.uploads.get(self.query['upload_id'], ('', '?'))[1]
        if 'name' in self.query:
            return self.query['name']
        found = re.match(r'/storage/v1/b/[^/]+/o/([^/]+)', path) or re.match(r'/(?!storage/v1|upload)[^/]+/(.+)', path)
        return urllib.parse.unquote(found[1]) if found else path

    def _route(self, path: str) -> None:
        if path.startswith('/upload/') and 'upload_id' in self.query:
            return self._continue_upload()
        for pattern, method in _ROUTES:
            found = re.fullmatch(pattern, path)
            if found and method.startswith(f'_{self.command.lower()}_'):
                parts = [urllib.parse.unquote(part) for part in found.groups()]
                if parts[0] not in self.store.buckets:
                    return self._error(404, 'The specified bucket does not exist.')
                return getattr(self, method)(*parts)
        self._error(501, f'{self.command} {path} is not in this stand-in')

    def _get_bucket(self, bucket: str) -> None:
        self._json({'name': bucket, 'location': 'US'})

    def _get_layout(self, bucket: str) -> None:
        self._json({'bucket': bucket, 'locationType': 'region', 'hierarchicalNamespace': {'enabled': False}})

    def _get_list(self, bucket: str) -> None:
        """The one page of all objects, or of the first `maxResults`."""
        prefix, delimiter = self.query.get('prefix', ''), self.query.get('delimiter')
        with self.store.lock:
            found: dict[str, dict[str, str] | None] = {}
            for name in self.store.names(bucket, prefix):
                first, slash, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, '', '')
                if slash:
                    found[f'{prefix}{first}{slash}'] = None
                else:
                    found[name] = _metadata(name, self.store.buckets[bucket][name])
        page = list(found.items())[: int(self.query.get('maxResults', len(found)))]
        items, prefixes = [item for _, item in page if item], [name for name, item in page if not item]
        self._json({'items': items, 'prefixes': prefixes})

    def _get_object(self, bucket: str, name: str) -> None:
        stored = self._found(bucket, name)
        if self.query.get('alt') == 'media':
            return self._media(stored)
        self._json(_metadata(name, stored))

    def _get_media(self, bucket: str, name: str) -> None:
        self._media(self._found(bucket, name))

    def _media(self, stored: Stored) -> None:
        size = len(stored.data)
        headers = {'x-goog-generation': str(stored.generation), 'x-goog-stored-content-length': str(size)}
        found = re.fullmatch(r'bytes=(\d+)-(\d+)', self.headers.get('Range', ''))
        if not found:
            return self._answer(200, stored.data, headers)
        first, last = int(found[1]), min(int(found[2]), size - 1)
        if first >= size:
            return self._answer(416, b'', {**headers, 'Content-Range': f'bytes */{size}'})
        headers['Content-Range'] = f'bytes {first}-{last}/{size}'
        self._answer(206, stored.data[first : last + 1], headers)

    def _delete_object(self, bucket: str, name: str) -> None:
        self._found(bucket, name)
        with self.store.lock:
            self.store.buckets[bucket].pop(name, None)
        self._answer(204, b'')

    def _post_rewrite(self, bucket: str, name: str, other: str, target: str) -> None:
        stored = self.store.write(other, target, self._found(bucket, name).data)
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
        place = f'{self.headers["Host"]}/upload/storage/v1/b/{bucket}/o'
        self._answer(200, b'', {'Location': f'https://{place}?uploadType=resumable&upload_id={token}'})

    def _continue_upload(self) -> None:
        token = self.query['upload_id']
        if token not in self.store.uploads:
            return self._error(404, 'no such upload')
        bucket, name, so_far = self.store.uploads[token]
        found = re.fullmatch(r'bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)', self.headers.get('Content-Range', ''))
        if found and found[1]:
            so_far = so_far[: int(found[1])] + self.body
        elif not found:
            so_far = self.body
        self.store.uploads[token] = (bucket, name, so_far)
        if found and (found[3] == '*' or len(so_far) < int(found[3])):
            return self._answer(308, b'', {'Range': f'bytes=0-{len(so_far) - 1}'} if so_far else {})
        self._store(bucket, name, so_far)

    def _store(self, bucket: str, name: str, data: bytes) -> None:
        with self.store.lock:
            self._check_generation(bucket, name)
            stored = self.store.write(bucket, name, data)
        self._json(_metadata(name, stored))

    def _found(self, bucket: str, name: str) -> Stored:
        with self.store.lock:
            stored = self.store.buckets[bucket].get(name)
            if stored is None:
                self._error(404, f'No such object: {bucket}/{name}')
                raise _Answered
            self._check_generation(bucket, name)
            return stored

    def _check_generation(self, bucket: str, name: str) -> None:
        """Answers 412 or 304 where a condition of the request does not hold."""
        stored = self.store.buckets[bucket].get(name)
        now = stored.generation if stored else 0
        wanted, unwanted = self.query.get('ifGenerationMatch'), self.query.get('ifGenerationNotMatch')
        if wanted not in (None, '') and int(wanted) != now:
            self._error(412, 'the generation is another')
            raise _Answered
        if unwanted not in (None, '') and int(unwanted) == now:
            self._answer(304, b'')
            raise _Answered

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
            self.wfile.write(data[: len(data) // 2] if self.cut else data)
        self.close_connection = self.close_connection or self.cut


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


def _metadata(name: str, stored: Stored) -> dict[str, str]:
    now = datetime.datetime.fromtimestamp(1.7e9 + stored.generation, datetime.UTC).strftime('%Y-%m-%dT%H:%M:%S.000Z')
    return {
        'name': name,
        'generation': str(stored.generation),
        'size': str(len(stored.data)),
        'updated': now,
        'crc32c': base64.b64encode(google_crc32c.Checksum(stored.data).digest()).decode(),
    }


def _chunks(file: Any) -> Iterator[bytes]:
    while size := int(file.readline().split(b';')[0], 16):
        yield file.read(size)
        file.readline()
    file.readline()


def _make_tls(key_file: pathlib.Path, certificate_file: pathlib.Path) -> ssl.SSLContext:
    """A server's side of TLS for HOSTS, with a new key and a certificate that signs itself."""
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
