"""A local fake of the Hugging Face Hub: the part of its HTTP API for reading repositories and uploading models."""

import base64
import collections
import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAIN = 'main'


class FakeHub:
    """A server in threads of this process.

    Attributes:
        models: files by name of the model or dataset, and revision.
        pull_requests: (author, number, status) by name of the model.
        private: names of private models.
        messages: messages of commits.
        requests: number of requests by method and path.
    """

    def __init__(self):
        self.models: dict[str, dict[str, dict[str, bytes]]] = {}
        self.pull_requests: dict[str, list[tuple[str, int, str]]] = {}
        self.private: set[str] = set()
        self.messages: list[str] = []
        self.requests: collections.Counter[str] = collections.Counter()
        self._server = ThreadingHTTPServer(('127.0.0.1', 0), type('Handler', (_Handler,), {'hub': self}))
        self._server.daemon_threads = True
        self.address = f'http://127.0.0.1:{self._server.server_port}'
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def add(self, name: str, folder, revision: str = MAIN, without: str = ' ') -> None:
        """Adds the files of `folder`, except those that end in `without`."""
        files = [file for file in sorted(folder.iterdir()) if not file.name.endswith(without)]
        self.models.setdefault(name, {})[revision] = {file.name: file.read_bytes() for file in files}

    def use(self, monkeypatch, cache) -> None:
        """Redirects huggingface_hub to this server, with a new cache and a logged-in user."""
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

    def use_for_datasets(self, monkeypatch, folder) -> None:
        """Redirects huggingface_hub and datasets to this server, with new caches in `folder`."""
        import datasets

        self.use(monkeypatch, folder / 'hub')
        monkeypatch.setattr(datasets.config, 'HF_ENDPOINT', self.address)
        monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', str(folder / 'datasets'))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Error(Exception):
    """An error response: (text, status, error code)."""


def _commit(files):
    return hashlib.sha1(b''.join(name.encode() + data for name, data in sorted(files.items()))).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True
    hub: FakeHub

    def log_message(self, *args) -> None:
        pass

    def _handle(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query))
        self.body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        self.hub.requests[f'{self.command} {url.path}'] += 1
        for methods, pattern, answer in _ROUTES:
            match = re.fullmatch(pattern, url.path)
            if match and self.command in methods:
                try:
                    result = answer(self, *map(urllib.parse.unquote, match.groups()))
                    if result is not None:
                        self._send(200, json.dumps(result).encode(), {'Content-Type': 'application/json'})
                except _Error as error:
                    text, status, code = error.args
                    self._send(status, json.dumps({'error': text}).encode(), {'X-Error-Code': code})
                return
        self._send(501, f'{self.command} {url.path} is not implemented'.encode())

    do_GET = do_HEAD = do_POST = _handle

    def _files(self, name, revision):
        """The files of a revision or commit."""
        if name not in self.hub.models or (name in self.hub.private and not self.headers.get('Authorization')):
            raise _Error('Repository not found', 404, 'RepoNotFound')
        for known, files in self.hub.models[name].items():
            if revision in (known, _commit(files)):
                return files
        raise _Error('Revision not found', 404, 'RevisionNotFound')

    def _revision(self, name, revision=MAIN):
        files = self._files(name, revision)
        siblings = [{'rfilename': file} for file in files]
        private = name in self.hub.private
        return {'id': name, 'sha': _commit(files), 'siblings': siblings, 'private': private, 'tags': []}

    def _tree(self, name, revision):
        return [
            {'type': 'file', 'path': file, 'size': len(data), 'oid': hashlib.sha1(data).hexdigest()}
            for file, data in self._files(name, revision).items()
        ]

    def _no_folder(self, name, revision, folder):
        raise _Error('Entry not found', 404, 'EntryNotFound')

    def _resolve(self, name, revision, file):
        files = self._files(name, revision)
        if file not in files:
            raise _Error('Entry not found', 404, 'EntryNotFound')
        data, size = files[file], len(files[file])
        headers = {'ETag': f'"{hashlib.sha1(data).hexdigest()}"', 'X-Repo-Commit': _commit(files)}
        match = re.fullmatch(r'bytes=(\d+)-(\d*)', self.headers.get('Range') or '')
        if match is None:
            self._send(200, data, headers)
            return
        first, last = int(match[1]), min(int(match[2] or size - 1), size - 1)
        self._send(206, data[first : last + 1], {**headers, 'Content-Range': f'bytes {first}-{last}/{size}'})

    def _discussions(self, name):
        discussions = [
            {'title': 'Adding `safetensors` variant of this model', 'num': number, 'author': {'name': author},
             'createdAt': '2023-04-01T00:00:00.000Z', 'status': status, 'isPullRequest': True,
             'repo': {'name': name, 'type': 'model'}}
            for author, number, status in self.hub.pull_requests.get(name, ())
            if author == self.query.get('author', author)
        ]  # fmt: skip
        return {'discussions': discussions, 'count': len(discussions), 'start': 0}

    def _create(self):
        if not self.headers.get('Authorization'):
            raise _Error('Invalid username or password.', 401, '')
        settings = json.loads(self.body)
        name = f'{settings.get("organization") or "somebody"}/{settings["name"]}'
        # As on the Hub, the visibility of an existing model does not change.
        if name not in self.hub.models and (settings.get('private') or settings.get('visibility') == 'private'):
            self.hub.private.add(name)
        self.hub.models.setdefault(name, {MAIN: {}})
        return {'url': f'{self.hub.address}/{name}', 'name': name, 'id': name}

    def _preupload(self, name, revision):
        paths = [file['path'] for file in json.loads(self.body)['files']]
        return {'files': [{'path': path, 'uploadMode': 'regular', 'shouldIgnore': False} for path in paths]}

    def _commit_files(self, name, revision):
        files = dict(self.hub.models[name].get(revision, {}))
        for line in map(json.loads, self.body.decode().splitlines()):
            if line['key'] == 'header':
                self.hub.messages.append(line['value']['summary'])
            else:
                files[line['value']['path']] = base64.b64decode(line['value']['content'])
        self.hub.models[name][revision] = files
        commit = _commit(files)
        return {'success': True, 'commitOid': commit, 'commitUrl': f'{self.hub.address}/{name}/commit/{commit}'}

    def _send(self, status, data, headers=None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), 'Content-Length': str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(data)


_NAME = '([^/]+/[^/]+)'
_REPO_TYPE = '(?:models|datasets)'
_ROUTES = (
    (('GET',), rf'/api/{_REPO_TYPE}/{_NAME}', _Handler._revision),
    (('GET',), rf'/api/{_REPO_TYPE}/{_NAME}/revision/(.+)', _Handler._revision),
    (('GET',), rf'/api/{_REPO_TYPE}/{_NAME}/tree/([^/]+)', _Handler._tree),
    (('GET',), rf'/api/datasets/{_NAME}/tree/([^/]+)/(.+)', _Handler._no_folder),
    (('GET',), rf'/api/models/{_NAME}/discussions', _Handler._discussions),
    (('POST',), '/api/repos/create', _Handler._create),
    (('POST',), '/api/validate-yaml', lambda _: {'errors': [], 'warnings': []}),
    (('POST',), rf'/api/models/{_NAME}/preupload/([^/]+)', _Handler._preupload),
    (('POST',), rf'/api/models/{_NAME}/commit/([^/]+)', _Handler._commit_files),
    (('HEAD', 'GET'), rf'(?:/datasets)?/{_NAME}/resolve/([^/]+)/(.+)', _Handler._resolve),
)
