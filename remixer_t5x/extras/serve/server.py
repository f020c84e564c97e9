"""Implements the HTTP API: OpenAI-compatible completions, embeddings and errors, scores, health, Prometheus metrics.

OpenAI documents the formats at https://platform.openai.com/docs/api-reference/completions and /embeddings.
"""

import asyncio
import base64
import contextlib
import json
import math
import os
import random
import re
import socket
import time
import uuid
from typing import Any

import numpy as np
import prometheus_client as prometheus
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from remixer_t5x.api.trained_model import TrainedModel
from remixer_t5x.errors import root_cause_message
from remixer_t5x.extras.serve.engine import NO_TOP_K, Engine, RequestRow, log
from remixer_t5x.train.preemption import REPEAT_SECONDS

# Seconds after which the server closes an idle connection. Clients such as OpenAI's reuse an idle connection for up to
# 5 seconds; if the server closed it first, the next request could fail.
KEEP_ALIVE_SECONDS = 75
# Maximum size of a request in bytes, and maximum number of samples per prompt.
MAX_BYTES, MAX_SAMPLES = 1 << 20, 128
ERROR_TYPES = {429: 'rate_limit_error', 500: 'server_error', 503: 'server_error'}
# Maps each endpoint to its operation and the supported request fields. Other fields must be null, false, 0 or empty.
ENDPOINTS = {
    '/v1/completions': ('generate', 'prompt max_tokens temperature top_p top_k n seed stop'),
    '/v1/score': ('score', 'inputs targets'),
    '/v1/embeddings': ('encode', 'input encoding_format'),
}


class HttpApi:
    """The HTTP API for a model called `name` in requests and responses."""

    def __init__(self, engine: Engine, name: str):
        self._engine, self._name = engine, name
        self._registry = prometheus.CollectorRegistry()
        options: dict[str, Any] = {'namespace': 'remixer_t5x', 'registry': self._registry}
        self._requests = prometheus.Counter('requests', 'Requests', ['path', 'status'], **options)
        self._seconds = prometheus.Histogram('request_seconds', 'Seconds from request to answer', ['path'], **options)
        self._tokens = prometheus.Counter('tokens', 'Tokens in prompts and completions', ['kind'], **options)
        queue = prometheus.Gauge('queue_texts', 'Texts that are queued or being processed', **options)
        queue.set_function(lambda: len(engine.waiting))

    def build_application(self) -> Starlette:
        engine, metrics = self._engine, self._registry
        model = {'id': self._name, 'object': 'model', 'created': int(time.time()), 'owned_by': 'remixer_t5x'}
        pages: dict[str, Any] = {
            '/v1/models': lambda request: JSONResponse({'object': 'list', 'data': [model]}),
            '/health': lambda request: JSONResponse({'status': engine.state}, 200 if engine.state == 'ready' else 503),
            '/metrics': lambda request: Response(
                prometheus.generate_latest(metrics), media_type=prometheus.CONTENT_TYPE_LATEST
            ),
        }

        async def observe(request: Request, call_next: Any) -> Response:
            start, path = time.perf_counter(), request.url.path
            response = await call_next(request)
            seconds = time.perf_counter() - start
            if path in ENDPOINTS:
                log(f'{request.method} {path} {response.status_code} {seconds:.3f} s')
            path = path if path in (*ENDPOINTS, *pages) else 'other'
            self._requests.labels(path, response.status_code).inc()
            self._seconds.labels(path).observe(seconds)
            return response

        routes = [Route(path, self._handle_request, methods=['POST']) for path in ENDPOINTS]
        routes += [Route(path, page) for path, page in pages.items()]
        middleware = [Middleware(BaseHTTPMiddleware, dispatch=observe)]
        return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _describe_error})

    async def _handle_request(self, request: Request) -> Response:
        operation, fields = ENDPOINTS[request.url.path]
        body = await _read_body(request)
        for name, value in body.items():
            if value and name not in (*fields.split(), 'model', 'user'):
                raise HTTPException(400, f'{name!a:.80} is not supported; omit it')
        if body.get('model') not in (None, self._name):
            raise HTTPException(404, f'model must be {self._name!r}, got {body["model"]!a:.80}')
        if not hasattr(self._engine.trained.model, operation):
            raise HTTPException(404, f'this model cannot {operation}; use another endpoint')
        answer = {'generate': self._complete, 'score': self._score, 'encode': self._embed}[operation]
        return JSONResponse({'model': self._name, **await answer(body)})

    async def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompts, longest = self._tokenize(body, 'prompt', 'inputs'), self._engine.trained.lengths['targets']
        count = _read_number(body, 'n', 1, 1, MAX_SAMPLES)
        seed = _read_number(body, 'seed', random.randrange(2**30), 0, 2**30)
        max_tokens = _read_number(body, 'max_tokens', longest, 1, longest)
        settings = {
            'max_tokens': max_tokens,
            'temperature': _read_number(body, 'temperature', 1.0, 0, 100),
            'top_p': _read_number(body, 'top_p', 1.0, 1e-6, 1),
            'top_k': _read_number(body, 'top_k', NO_TOP_K, 1, NO_TOP_K),
        }
        stops = _read_texts(body, 'stop') if body.get('stop') else []
        if '' in stops:
            raise HTTPException(400, 'each string in stop must have at least 1 character; omit empty strings')
        texts = [ids for ids in prompts for _ in range(count)]
        rows = [RequestRow('generate', ids, settings={**settings, 'number': seed + i}) for i, ids in enumerate(texts)]
        choices, generated = [], 0
        for index, prediction in enumerate(await self._compute_rows(rows)):
            ids = prediction.ids[0][:max_tokens]
            generated += len(ids)
            text = self._engine.trained.vocabulary.decode(ids)
            stop_positions = [text.find(stop) for stop in stops if stop in text]
            is_finished = bool(stop_positions) or self._engine.eos_id in ids
            text = text[: min(stop_positions, default=len(text))]
            finish = 'stop' if is_finished else 'length'
            choices.append({'text': text, 'index': index, 'logprobs': None, 'finish_reason': finish})
        head = {'id': f'cmpl-{uuid.uuid4().hex}', 'object': 'text_completion', 'created': int(time.time())}
        return {**head, 'choices': choices, 'usage': self._count_usage(prompts, generated)}

    async def _score(self, body: dict[str, Any]) -> dict[str, Any]:
        inputs, targets = (self._tokenize(body, side, side) for side in ('inputs', 'targets'))
        if len(inputs) != len(targets):
            raise HTTPException(400, f'targets must have as many texts as inputs ({len(inputs)}), got {len(targets)}')
        pairs = zip(inputs, targets, strict=True)
        scores = await self._compute_rows([RequestRow('score', ids, target_ids) for ids, target_ids in pairs])
        # JSON cannot represent -inf, which is the score of a text with probability 0.
        scores = [score if math.isfinite(score) else None for score in scores]
        data = [{'index': i, 'score': scores[i], 'tokens': len(ids)} for i, ids in enumerate(targets)]
        return {'object': 'list', 'data': data, 'usage': self._count_usage([*inputs, *targets])}

    async def _embed(self, body: dict[str, Any]) -> dict[str, Any]:
        encoding = body.get('encoding_format') or 'float'
        if encoding not in ('float', 'base64'):
            raise HTTPException(400, f"encoding_format must be 'float' or 'base64', got {encoding!a:.80}")
        texts, data = self._tokenize(body, 'input', 'inputs'), []
        if not all(texts):
            raise HTTPException(400, 'each text in input must have at least 1 token; omit empty texts')
        for index, vector in enumerate(await self._compute_rows([RequestRow('encode', ids) for ids in texts])):
            values = np.asarray(vector, '<f4')
            embedding = values.tolist() if encoding == 'float' else base64.b64encode(values.tobytes()).decode()
            data.append({'object': 'embedding', 'index': index, 'embedding': embedding})
        return {'object': 'list', 'data': data, 'usage': self._count_usage(texts)}

    def _tokenize(self, body: dict[str, Any], field: str, side: str) -> list[list[int]]:
        texts = self._engine.trained.build_codec(side)
        encoded = [texts.encode(text, index) for index, text in enumerate(_read_texts(body, field))]
        if any(is_truncated for _, is_truncated in encoded):
            raise HTTPException(400, f'each text in {field} must have at most {texts.longest} tokens; shorten it')
        return [ids for ids, _ in encoded]

    async def _compute_rows(self, rows: list[RequestRow]) -> list[Any]:
        waiting, most = len(self._engine.waiting), self._engine.max_queue
        if self._engine.state != 'ready':
            raise HTTPException(503, f'the server is {self._engine.state}; try again later')
        if len(rows) > most:
            raise HTTPException(400, f'a request must have at most {most} texts (prompts times n), got {len(rows)}')
        if waiting + len(rows) > most:
            raise HTTPException(429, f'{waiting} texts are queued, and the limit is {most}; try again later')
        self._tokens.labels('prompt').inc(sum(len(row.inputs) + len(row.targets) for row in rows))
        return await self._engine.compute(rows)

    def _count_usage(self, texts: list[list[int]], generated: int = 0) -> dict[str, int]:
        self._tokens.labels('completion').inc(generated)
        read = sum(map(len, texts))
        return {'prompt_tokens': read, 'completion_tokens': generated, 'total_tokens': read + generated}


async def serve(trained: TrainedModel, name: str, listener: socket.socket, batch_size: int, max_queue: int) -> int:
    """Serves requests on a bound socket until a signal arrives, and returns 128 plus the signal number."""
    engine = Engine(trained, batch_size, max_queue)

    class Server(uvicorn.Server):
        """A server that finishes pending requests after a signal, but exits immediately unless its state is `ready`.

        As in training, signals within REPEAT_SECONDS of the first are ignored.
        """

        signal_number, signal_time = 0, -math.inf

        def handle_exit(self, sig: int, frame: Any) -> None:
            if time.monotonic() - self.signal_time < REPEAT_SECONDS:
                return
            if engine.state != 'ready':
                # Otherwise, Python would wait for the thread that compiles a program or computes a batch.
                os._exit(128 + sig)
            self.signal_number, self.signal_time, engine.state = sig, time.monotonic(), 'stopping'

        async def on_tick(self, counter: int) -> bool:
            is_drained = engine.state == 'stopping' and not engine.waiting
            return await super().on_tick(counter) or is_drained or worker.done()

    options: dict[str, Any] = {
        **{'log_config': None, 'access_log': False, 'server_header': False, 'lifespan': 'off'},
        **{'timeout_graceful_shutdown': 10, 'timeout_keep_alive': KEEP_ALIVE_SECONDS},
    }
    application = HttpApi(engine, name).build_application()
    server = Server(uvicorn.Config(application, http='h11', ws='none', **options))
    host, port = listener.getsockname()[:2]
    address = f'[{host}]' if ':' in host else host
    log(f'{name}: listening on http://{address}:{port}, compiling')
    worker = asyncio.create_task(engine.run())
    await server.serve(sockets=[listener])
    worker.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await worker
    return 128 + server.signal_number


async def _describe_error(request: Request, error: Any) -> Response:
    kind = ERROR_TYPES.get(error.status_code, 'invalid_request_error')
    body = {'error': {'message': error.detail, 'type': kind, 'param': None, 'code': None}}
    headers = {'Retry-After': '1'} if error.status_code in (429, 503) else error.headers
    return JSONResponse(body, error.status_code, headers)


async def _read_body(request: Request) -> dict[str, Any]:
    content = b''
    try:
        async for chunk in request.stream():
            content += chunk
            if len(content) > MAX_BYTES:
                raise HTTPException(413, f'a request must have at most {MAX_BYTES:,} bytes; send fewer texts')
        body = json.loads(content)
    except (ValueError, RecursionError, ClientDisconnect) as error:
        raise HTTPException(400, f'the body must be JSON ({root_cause_message(error)})') from None
    if not isinstance(body, dict):
        raise HTTPException(400, f'the body must be a JSON object, got {type(body).__name__}')
    return body


def _read_texts(body: dict[str, Any], field: str) -> list[Any]:
    """Reads a text or a list of texts from a field. Raises HTTPException for other values or unpaired surrogates."""
    value = body.get(field)
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) and not re.search('[\ud800-\udfff]', text) for text in texts):
        raise HTTPException(400, f'{field} must be a string or a list of strings, got {value!a:.80}')
    return texts


def _read_number(body: dict[str, Any], field: str, default: Any, least: float, most: float) -> Any:
    """Reads a number, or an integer if `default` is an int. Raises HTTPException if the type or range is wrong."""
    value = default if body.get(field) is None else body[field]
    if type(value) not in (int, type(default)) or not least <= value <= most:
        kind = 'a number' if isinstance(default, float) else 'a whole number'
        raise HTTPException(400, f'{field} must be {kind} from {least} to {most}, got {value!a:.40}')
    return value
