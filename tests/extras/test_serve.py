"""`remixer-t5x serve`: a real server process on loopback, and the decoder for batches of requests."""

import asyncio
import base64
import concurrent.futures
import dataclasses
import json
import re
import signal
import socket
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remixer_t5x
from remixer_t5x.cli.main import main
from remixer_t5x.evaluate import predictions
from remixer_t5x.models import decoding
from remixer_t5x.train import preemption
from tests.support import real_processes, saved_run
from tests.support.saved_run import write_run

for module in ('starlette', 'uvicorn', 'prometheus_client'):
    pytest.importorskip(module, reason='installed by the extra [serve]')
httpx = pytest.importorskip('httpx', reason='the tests need an HTTP client')
TEXTS = [f'{"a longer " * (number % 3)}{number}' for number in range(32)]


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp('serve') / 'run', steps=(1,))


@pytest.fixture(scope='module')
def trained(run):
    return remixer_t5x.load(str(run))


@pytest.fixture
def served(run, tmp_path):
    """Starts a server, waits until it is ready, and yields its process and a client."""
    command = ['serve', str(run), '--port=0', '--batch_size=8', '--max_queue=300', '--max_input_tokens=24']
    process = real_processes.Process(main, command, output=tmp_path / 'log.txt')
    try:
        process.wait_until(lambda: 'ready after' in process.output(), 'ready')
        assert 'compiled 1 of ' in process.output()
        address = re.search(r'http://[\d.:]+', process.output()).group()
        with httpx.Client(base_url=address, timeout=300) as client:
            yield process, client
    finally:
        process.kill()


def complete(client, prompt, **settings):
    return client.post('/v1/completions', json={'prompt': prompt, 'temperature': 0, **settings})


def metric(client, name, **labels):
    """Returns the sum of the samples of a metric that have these labels."""
    from prometheus_client import parser

    samples = [
        row for each in parser.text_string_to_metric_families(client.get('/metrics').text) for row in each.samples
    ]
    matching = [row for row in samples if row.name == f'remixer_t5x_{name}' and labels.items() <= row.labels.items()]
    return sum(row.value for row in matching)


def test_a_server_answers_like_infer_and_finishes_accepted_requests(served, run, trained, tmp_path):
    process, client = served
    assert client.get('/health').json() == {'status': 'ready'}
    assert [model['id'] for model in client.get('/v1/models').json()['data']] == ['run']

    (tmp_path / 'texts.txt').write_text(''.join(f'{text}\n' for text in TEXTS))
    files = [f'--input={tmp_path / "texts.txt"}', f'--output={tmp_path / "out.jsonl"}']
    gin_files = [f'--gin_file={run / "config.gin"}', '--gin_file=hardware/cpu.gin']
    assert main(['infer', *gin_files, f'--checkpoint={run}', *files]) == 0
    expected = [json.loads(line)['prediction'] for line in (tmp_path / 'out.jsonl').read_text().splitlines()]
    with concurrent.futures.ThreadPoolExecutor(32) as threads:
        responses = list(threads.map(lambda text: complete(client, text), TEXTS))
    assert [response.status_code for response in responses] == [200] * 32
    assert [response.json()['choices'][0]['text'] for response in responses] == expected
    usage = [response.json()['usage'] for response in responses]
    assert [each['prompt_tokens'] for each in usage] == [len(text) + 1 for text in TEXTS]
    for kind in ('prompt', 'completion'):
        assert metric(client, 'tokens_total', kind=kind) == sum(each[f'{kind}_tokens'] for each in usage)
    path = '/v1/completions'
    assert metric(client, 'requests_total', path=path) == metric(client, 'request_seconds_count', path=path) == 32

    short = complete(client, TEXTS, max_tokens=3, stream=False, logprobs=None, user='a user').json()
    assert short['usage']['completion_tokens'] == 96
    assert {choice['finish_reason'] for choice in short['choices']} == {'length'}
    stopped = complete(client, TEXTS[0], stop=['not in the text', expected[0][:2]]).json()['choices'][0]
    assert (stopped['text'], stopped['finish_reason']) == ('', 'stop')

    sampled = complete(client, TEXTS[:2], temperature=0.7, top_p=0.8, n=2, seed=5).json()
    sampling = remixer_t5x.Sampling(temperature=0.7, top_p=0.8)
    repeated = [''] * 5 + [text for text in TEXTS[:2] for _ in range(2)]
    expected_samples = [answer.text for answer in trained.generate(repeated, decoder=sampling)[5:]]
    assert [choice['text'] for choice in sampled['choices']] == expected_samples

    body = {'inputs': TEXTS[:9], 'targets': ['one'] * 9}
    scores = client.post('/v1/score', json=body).json()['data']
    np.testing.assert_allclose([row['score'] for row in scores], trained.score(**body), rtol=1e-4)
    assert {row['tokens'] for row in scores} == {4}
    for encoding, parse in (('float', list), ('base64', lambda text: np.frombuffer(base64.b64decode(text), '<f4'))):
        body = {'input': TEXTS[:9], 'encoding_format': encoding}
        rows = client.post('/v1/embeddings', json=body).json()['data']
        vectors = [parse(row['embedding']) for row in rows]
        np.testing.assert_allclose(vectors, trained.encode(TEXTS[:9]).mean, atol=1e-5)

    for path, content, status, words in MISTAKES:
        response = client.post(path, content=content)
        assert response.status_code == status, (content, response.text)
        assert '\n' not in response.text and words in response.json()['error']['message']
    refused = client.get('/v1/completions')
    assert (refused.status_code, refused.headers['allow']) == (405, 'POST')

    total = metric(client, 'tokens_total', kind='prompt') + 8 * sum(len(text) + 1 for text in TEXTS)
    with concurrent.futures.ThreadPoolExecutor(32) as threads:
        answers = [threads.submit(complete, client, [text] * 8) for text in TEXTS]
        process.wait_until(lambda: metric(client, 'tokens_total', kind='prompt') == total, 'all requests are accepted')
        process.send(signal.SIGTERM)
        responses = [answer.result() for answer in answers]
    assert [response.status_code for response in responses] == [200] * 32
    assert [[choice['text'] for choice in response.json()['choices']] for response in responses] == [
        [text] * 8 for text in expected
    ]
    assert process.wait() == 128 + signal.SIGTERM
    assert all(' /v1/' in line for line in process.output().partition('ready after')[2].splitlines()[1:])


def serve_slowly(method, command):
    """Runs the command `serve` with an engine that compiles nothing, and whose method `method` sleeps for an hour."""
    from remixer_t5x.extras.serve.engine import Engine

    Engine._warm_up = lambda engine: None
    setattr(Engine, method, lambda *_: time.sleep(3600))
    return main(command)


def test_a_signal_stops_a_server_that_is_compiling(run, tmp_path):
    command = ['serve', str(run), '--port=0']
    process = real_processes.Process(serve_slowly, '_warm_up', command, output=tmp_path / 'log.txt')
    try:
        process.wait_until(lambda: 'listening on' in process.output(), 'listening')
        address = re.search(r'http://[\d.:]+', process.output()).group()
        assert httpx.get(f'{address}/health', timeout=300).status_code == 503
        process.send(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        process.kill()


def test_a_second_signal_stops_a_server_that_is_computing_a_batch(run, tmp_path):
    command = ['serve', str(run), '--port=0']
    process = real_processes.Process(serve_slowly, '_run_model', command, output=tmp_path / 'log.txt')
    try:
        process.wait_until(lambda: 'ready after' in process.output(), 'ready')
        host, port = re.search(r'http://([\d.]+):(\d+)', process.output()).groups()
        with socket.create_connection((host, int(port))) as client:
            body = b'{"prompt": "one"}'
            client.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n' % len(body) + body)
            url = f'http://{host}:{port}'
            process.wait_until(lambda: 'texts 1.0' in httpx.get(f'{url}/metrics').text, 'queued')
            # A launcher forwards a signal that the server has received too.
            for number in (signal.SIGINT, signal.SIGTERM):
                process.send(number)
            process.wait_until(lambda: httpx.get(f'{url}/health').json()['status'] == 'stopping', 'stopping')
            time.sleep(preemption.REPEAT_SECONDS)
            process.send(signal.SIGTERM)
            assert process.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        process.kill()


def _completion(**fields):
    return '/v1/completions', json.dumps({'prompt': 'one', **fields})


MISTAKES = [
    (*_completion(prompt='x' * 24), 400, '24 tokens'),
    (*_completion(prompt='\ud800'), 400, 'list of strings'),
    (*_completion(prompt=['one'] * 3, n=101), 400, '300'),
    (*_completion(prompt='x' * (2 << 20)), 413, 'bytes'),
    (*_completion(max_tokens=13), 400, 'from 1 to 12'),
    (*_completion(temperature=float('nan')), 400, 'temperature'),
    (*_completion(model='another'), 404, "'run'"),
    (*_completion(stream=True), 400, 'stream'),
    ('/v1/completions', '[' * 100_000, 400, 'JSON'),
    ('/v1/score', '{"inputs": ["one"], "targets": ["a", "b"]}', 400, 'targets'),
    ('/v1/embeddings', '{"input": "one", "encoding_format": "int8"}', 400, 'encoding_format'),
]


def connect_engine(trained):
    """Returns an engine with a queue of three texts, and a client, in this process."""
    from remixer_t5x.extras.serve import engine, server

    queue = engine.Engine(trained, batch_size=4, max_queue=3)
    transport = httpx.ASGITransport(server.HttpApi(queue, 'run').build_application())
    return queue, httpx.AsyncClient(transport=transport, base_url='http://server')


def test_a_full_queue_and_a_stopping_server_reject_requests(trained):
    async def post_requests():
        queue, connected = connect_engine(trained)
        async with connected as client:
            responses = [await client.get('/health'), await client.post('/v1/completions', json={'prompt': 'one'})]
            queue.state = 'ready'
            accepted = asyncio.create_task(client.post('/v1/embeddings', json={'input': ['one', 'two']}))
            while not queue.waiting:
                await asyncio.sleep(0.01)
            responses.append(await client.post('/v1/completions', json={'prompt': ['one', 'two']}))
            queue.state = 'stopping'
            responses.append(await client.post('/v1/completions', json={'prompt': 'one'}))
            for _, future in queue.waiting:
                future.set_result(np.ones(2))
            responses.append(await accepted)
        return responses

    responses = asyncio.run(post_requests())
    assert [response.status_code for response in responses] == [503, 503, 429, 503, 200]
    assert [response.headers.get('retry-after') for response in responses] == [None, '1', '1', '1', None]


def test_prompts_without_tokens_are_answered(trained):
    async def post_requests():
        queue, connected = connect_engine(dataclasses.replace(trained, ends_inputs=False))
        queue.state = 'ready'
        async with connected as client:
            answer = asyncio.create_task(client.post('/v1/score', json={'inputs': '', 'targets': 'one'}))
            while not queue.waiting:
                await asyncio.sleep(0.01)
            [(row, future)] = queue.waiting
            future.set_result(-1.5)
            return row.inputs, await answer, await client.post('/v1/embeddings', json={'input': ['one', '']})

    inputs, scored, embedded = asyncio.run(post_requests())
    assert inputs == [] and scored.json()['data'][0]['score'] == -1.5
    assert embedded.status_code == 400 and '1 token' in embedded.json()['error']['message']


POOLING = """
from remixer_t5x.models.architecture import encoder_only
POOLING = @encoder_only.first_token
"""


def test_embeddings_are_those_of_an_embedding_model(tmp_path, monkeypatch):
    from remixer_t5x.extras.serve.engine import Engine, RequestRow

    config = f"{saved_run.CONFIG}include 'model_types/embedding.gin'\n{POOLING}"
    folder = str(write_run(tmp_path / 'run', config, steps=(1,)))
    trained, texts = remixer_t5x.load(folder), ['one', 'a longer text', '']
    encoded = trained.encode(texts)
    expected = encoded.hidden[:, 0] / np.linalg.norm(encoded.hidden[:, 0], axis=1, keepdims=True)
    np.testing.assert_allclose(encoded.sentence, expected, rtol=1e-4, atol=1e-5)

    rows = [RequestRow('encode', [*trained.vocabulary.encode(text), 1]) for text in texts]
    np.testing.assert_allclose(Engine(trained, 4, 4)._compute_row_results(rows), expected, rtol=1e-4, atol=1e-5)

    (tmp_path / 'texts.txt').write_text('\n'.join(texts) + '\n')
    flags = [f'--gin_file={folder}/config.gin', '--gin_file=hardware/cpu.gin', f'--checkpoint={folder}']
    flags += [f'--input={tmp_path}/texts.txt', '--embed']
    # Without --pooling, no token vectors are computed.
    monkeypatch.setattr(predictions.Predictor, 'encode', lambda *_: pytest.fail('computed token vectors'))
    assert main(['infer', *flags, f'--output={tmp_path}/vectors.npz']) == 0
    with np.load(tmp_path / 'vectors.npz') as file:
        np.testing.assert_allclose(file['sentences'], expected, rtol=1e-4, atol=1e-5)


def test_the_default_name_of_the_current_folder_is_its_name(run, monkeypatch):
    from remixer_t5x.extras.serve import server

    async def return_name(trained, name, *options):
        return name

    monkeypatch.setattr(server, 'serve', return_name)
    monkeypatch.chdir(run)
    assert main(['serve', '.', '--port=0']) == run.name


def test_an_address_that_cannot_be_used_raises_an_error_that_names_the_flags(run, capsys):
    with socket.create_server(('127.0.0.1', 0)) as listener:
        assert main(['serve', str(run), f'--port={listener.getsockname()[1]}']) == 2
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and 'use another --host or --port' in error


def test_a_length_that_the_model_does_not_support_raises_an_error_in_one_line(tmp_path, capsys):
    config = saved_run.CONFIG.replace('t5_1_1', 'mixer_enc_dec').replace("'inputs': 40", "'inputs': 8")
    folder = write_run(tmp_path / 'run', config, steps=(1,))
    assert main(['serve', str(folder), '--port=0', '--max_input_tokens=9']) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert 'MLPMixer.max_length must be at least the sequence length of 9' in error and 'bug' not in error


def test_each_row_samples_from_its_k_most_likely_tokens_and_its_nucleus():
    from remixer_t5x.extras.serve.engine import NO_TOP_K, PerRequestDecoder

    probabilities = np.asarray([0.1, 0.4, 0.2, 0.3], np.float32)
    rows = [
        # (temperature, top_k, top_p, possible tokens): after top_k = 3, token 1 has 4 / 9 and token 3 has 3 / 9.
        (1.0, NO_TOP_K, 1.0, {0, 1, 2, 3}),
        (1.0, 2, 1.0, {1, 3}),
        (1.0, NO_TOP_K, 0.5, {1, 3}),
        (1.0, 3, 0.75, {1, 3}),
        (1.0, 3, 0.8, {1, 2, 3}),
        (0.0, NO_TOP_K, 1.0, {1}),
    ]
    temperature, top_k, top_p, possible = zip(*rows, strict=True)
    count, length = len(rows), 200
    step = lambda tokens, cache: (jnp.broadcast_to(jnp.log(probabilities), (count, 4)), cache)  # noqa: E731
    generation = decoding.GenerationInputs(count, lambda rows: (), step, length, eos_id=9)
    settings = {'temperature': temperature, 'top_k': top_k, 'top_p': top_p, 'max_tokens': [length - 1] * count}
    decoder = PerRequestDecoder(**{name: jnp.asarray(values) for name, values in settings.items()}, end_id=9)
    tokens = decoder(generation, jax.random.split(jax.random.key(0), count)).tokens[:, 0]
    assert [{*row.tolist()} for row in tokens[:, :-1]] == list(possible)
    assert tokens[:, -1].tolist() == [9] * count
