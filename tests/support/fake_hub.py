"""The Hugging Face Hub on this machine, for tests: the part of its HTTP API that reads models and data sets and writes
models, in memory."""

import base64
import collections
import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAIN = 'main'


class FakeHub:
    """A server in threads of this process.

    `models` maps NAME/MODEL, or the name of a data set, and a revision to files; `pull_requests` lists (author, number,
    status) of a model; `requests` counts what was asked for. A file of more than `large` bytes is uploaded as the Hub
    wants large files.
    """

    def __init__(self, large: int = 2000):
        self.models: dict[str, dict[str, dict[str, bytes]]] = {}
        self.pull_requests: dict[str, list[tuple[str, int, str]]] = {}
        self.private: set[str] = set()
        self.messages: list[str] = []
        self.requests: collections.Counter[str] = collections.Counter()
        self.stored: dict[str, bytes] = {}
        self.large = large
        self._server = _Server(('127.0.0.1', 0), _Handler)
        self._server.hub = self
        self.address = f'http://127.0.0.1:{self._server.server_port}'
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def add(self, name: str, folder, revision: str = MAIN, without: str = '') -> None:
        """Puts the files of `folder`, but for those that end in `without`, under a name."""
        files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
        kept = {name: data for name, data in files.items() if not without or not name.endswith(without)}
        self.models.setdefault(name, {})[revision] = kept

    def use(self, monkeypatch, cache) -> None:
        """Sends huggingface_hub here, with a cache of its own and somebody logged in."""
        from huggingface_hub import constants

        for name, value in {
            'ENDPOINT': self.address,
            'HUGGINGFACE_CO_URL_TEMPLATE': f'{self.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}',
            'HF_HUB_CACHE': str(cache),
            'HF_HUB_OFFLINE': False,
            'HF_HUB_DISABLE_XET': True,
            'HF_HUB_DISABLE_PROGRESS_BARS': True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv('HF_TOKEN', 'hf_of_a_test')

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: FakeHub


def _commit(files: dict[str, bytes]) -> str:
    return hashlib.sha1(b''.join(name.encode() + data for name, data in sorted(files.items()))).hexdigest()


def _entry(file: str, data: bytes) -> dict[str, Any]:
    return {'type': 'file', 'path': file, 'size': len(data), 'oid': hashlib.sha1(data).hexdigest()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        self.hub: FakeHub = self.server.hub
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query))
        self.body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        if self.headers.get('Transfer-Encoding') == 'chunked':
            self.body = b''.join(self._chunks())
        self.hub.requests[f'{self.command} {url.path}'] += 1
        for method, pattern, answer in _ROUTES:
            found = re.fullmatch(pattern, url.path)
            if found and self.command in method:
                answer(self, *map(urllib.parse.unquote, found.groups()))
                return
        self._json({'error': f'{self.command} {url.path} is not in this stand-in'}, 501)

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _chunks(self):
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _files(self, name: str, revision: str) -> dict[str, bytes] | None:
        """The files of a revision or commit; answers and returns None where there are none."""
        if name not in self.hub.models or (name in self.hub.private and not self.headers.get('Authorization')):
            self._json({'error': 'Repository not found'}, 404, {'X-Error-Code': 'RepoNotFound'})
            return None
        revisions = self.hub.models[name]
        for known, files in revisions.items():
            if revision in (known, _commit(files)):
                return files
        self._json({'error': 'Revision not found'}, 404, {'X-Error-Code': 'RevisionNotFound'})
        return None

    def _revision(self, name: str, revision: str = MAIN) -> None:
        files = self._files(name, revision)
        if files is not None:
            siblings = [{'rfilename': file} for file in files]
            self._json({'id': name, 'sha': _commit(files), 'siblings': siblings, 'private': False, 'tags': []})

    def _tree(self, name: str, revision: str) -> None:
        files = self._files(name, revision)
        if files is not None:
            self._json([_entry(file, data) for file, data in files.items()])

    def _no_folder(self, name: str, revision: str, folder: str) -> None:
        self._json({'error': 'Entry not found'}, 404, {'X-Error-Code': 'EntryNotFound'})

    def _paths(self, name: str, revision: str) -> None:
        files = self._files(name, revision)
        if files is not None:
            wanted = urllib.parse.parse_qs(self.body.decode()).get('paths') or json.loads(self.body)['paths']
            self._json([_entry(file, files[file]) for file in wanted if file in files])

    def _resolve(self, name: str, revision: str, file: str) -> None:
        files = self._files(name, revision)
        if files is None:
            return
        if file not in files:
            self._json({'error': 'Entry not found'}, 404, {'X-Error-Code': 'EntryNotFound'})
            return
        tag = hashlib.sha1(files[file]).hexdigest()
        headers = {'ETag': f'"{tag}"', 'X-Repo-Commit': _commit(files)}
        asked = re.fullmatch(r'bytes=(\d+)-(\d*)', self.headers.get('Range') or '')
        if asked is None:
            self._answer(200, files[file], headers)
            return
        size, first = len(files[file]), int(asked[1])
        last = min(int(asked[2] or size - 1), size - 1)
        self._answer(206, files[file][first : last + 1], {**headers, 'Content-Range': f'bytes {first}-{last}/{size}'})

    def _discussions(self, name: str) -> None:
        found = [one for one in self.hub.pull_requests.get(name, ()) if one[0] == self.query.get('author', one[0])]
        described = [
            {'title': 'Adding `safetensors` variant of this model', 'num': number, 'author': {'name': author},
             'createdAt': '2023-04-01T00:00:00.000Z', 'status': status, 'isPullRequest': True,
             'repo': {'name': name, 'type': 'model'}}
            for author, number, status in found
        ]  # fmt: skip
        self._json({'discussions': described, 'count': len(described), 'start': 0})

    def _create(self) -> None:
        if not self.headers.get('Authorization'):
            self._json({'error': 'Invalid username or password.'}, 401)
            return
        given = json.loads(self.body)
        name = f'{given.get("organization") or "somebody"}/{given["name"]}'
        if given.get('private') or given.get('visibility') == 'private':
            self.hub.private.add(name)
        self.hub.models.setdefault(name, {MAIN: {}})
        self._json({'url': f'{self.hub.address}/{name}', 'name': name, 'id': name})

    def _valid(self) -> None:
        self._json({'errors': [], 'warnings': []})

    def _preupload(self, name: str, revision: str) -> None:
        files = [
            {'path': file['path'], 'uploadMode': 'lfs' if file['size'] > self.hub.large else 'regular',
             'shouldIgnore': False}
            for file in json.loads(self.body)['files']
        ]  # fmt: skip
        self._json({'files': files})

    def _batch(self, name: str) -> None:
        objects = [
            {'oid': one['oid'], 'size': one['size'],
             'actions': {'upload': {'href': f'{self.hub.address}/store/{one["oid"]}'}}}
            for one in json.loads(self.body)['objects']
        ]  # fmt: skip
        self._json({'transfer': 'basic', 'objects': objects})

    def _put(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.hub.stored[oid] = self.body
        self._answer(200, b'')

    def _commit_files(self, name: str, revision: str) -> None:
        files = dict(self.hub.models[name].get(revision, {}))
        for line in self.body.decode().splitlines():
            one = json.loads(line)
            value = one['value']
            if one['key'] == 'header':
                self.hub.messages.append(value['summary'])
            elif one['key'] == 'file':
                files[value['path']] = base64.b64decode(value['content'])
            elif one['key'] == 'lfsFile':
                files[value['path']] = self.hub.stored[value['oid']]
        self.hub.models[name][revision] = files
        commit = _commit(files)
        self._json({'success': True, 'commitOid': commit, 'commitUrl': f'{self.hub.address}/{name}/commit/{commit}'})

    def _json(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self._answer(status, data, {'Content-Type': 'application/json', **(headers or {})})

    def _answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), 'Content-Length': str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(data)


_N = '([^/]+/[^/]+)'
_KIND = '(?:models|datasets)'
_ROUTES = (
    (('GET',), rf'/api/{_KIND}/{_N}', _Handler._revision),
    (('GET',), rf'/api/{_KIND}/{_N}/revision/(.+)', _Handler._revision),
    (('GET',), rf'/api/{_KIND}/{_N}/tree/([^/]+)', _Handler._tree),
    (('GET',), rf'/api/datasets/{_N}/tree/([^/]+)/(.+)', _Handler._no_folder),
    (('POST',), rf'/api/datasets/{_N}/paths-info/([^/]+)', _Handler._paths),
    (('GET',), rf'/api/models/{_N}/discussions', _Handler._discussions),
    (('POST',), '/api/repos/create', _Handler._create),
    (('POST',), '/api/validate-yaml', _Handler._valid),
    (('POST',), rf'/api/models/{_N}/preupload/([^/]+)', _Handler._preupload),
    (('POST',), rf'/api/models/{_N}/commit/([^/]+)', _Handler._commit_files),
    (('POST',), rf'/{_N}\.git/info/lfs/objects/batch', _Handler._batch),
    (('PUT',), '/store/([0-9a-f]+)', _Handler._put),
    (('HEAD', 'GET'), rf'(?:/datasets)?/{_N}/resolve/([^/]+)/(.+)', _Handler._resolve),
)
