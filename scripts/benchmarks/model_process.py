"""Runs our models and Hugging Face's T5 v1.1 of the same size in separate processes that take turns."""

import argparse
import contextlib
import importlib.util
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

from remixer_t5x.cli.main import keep_freed_buffers

# Maps each size to (width, hidden size, number of layers, number of heads).
_SIZES = {'tiny': (256, 512, 4, 4), 'small': (512, 1024, 8, 6), 'base': (768, 2048, 12, 12)}


class ModelProcess:
    """A process that builds a model, and times calls of the model.

    `build(name, args)` returns a dict of calls, and facts about the model.
    """

    def __init__(self, build: Callable[..., Any], name: str, args: argparse.Namespace):
        context = multiprocessing.get_context('spawn')
        self._pipe, child_pipe = context.Pipe()
        context.Process(target=_serve_requests, args=(child_pipe, build, name, args), daemon=True).start()

    def send_request(self, request: Any = None) -> Any:
        """Returns the facts for the first request, and the wall time and CPU time of the call for later requests."""
        self._pipe.send(request)
        return self._pipe.recv()


def _serve_requests(pipe: Any, build: Callable[..., Any], name: str, args: argparse.Namespace) -> None:
    keep_freed_buffers()
    pipe.recv()
    calls, facts = build(name, args)
    for call in calls.values():
        call()  # Not timed: the first call allocates memory.
    pipe.send(facts)
    # `recv` raises EOFError when the main process ends.
    with contextlib.suppress(EOFError):
        while True:
            request = pipe.recv()
            start, used = time.perf_counter(), time.process_time()
            calls[request]()
            pipe.send((time.perf_counter() - start, time.process_time() - used))


def build_parser(description: str, models: str) -> argparse.ArgumentParser:
    """Returns a parser for the flags that the decoding and training benchmarks share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', default=models, help='files in configs/models, separated by commas')
    parser.add_argument('--size', default='small', choices=_SIZES)
    parser.add_argument('--batch', type=int, default=8)
    parser.add_argument('--inputs', type=int, default=512)
    parser.add_argument('--dtype', default='float32', choices=['float32', 'bfloat16'])
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--peer', default='torch', choices=['torch', 'none'], help="whether to time Hugging Face's T5")
    parser.add_argument(
        '--gin_file', action='append', default=[], help='additional gin file, loaded after the model and size files'
    )
    return parser


def start_processes(build: Callable[..., Any], peer: str, args: argparse.Namespace) -> dict[str, ModelProcess]:
    """Starts a process for each of our models, and for `peer` if torch and transformers are installed."""
    names = args.models.split(',')
    missing = [package for package in ('torch', 'transformers') if importlib.util.find_spec(package) is None]
    if args.peer != 'none' and missing:
        print(f'Hugging Face is not measured: {" and ".join(missing)} not installed (pip install "remixer-t5x[hf]")')
    elif args.peer != 'none':
        names.append(peer)
    return {name: ModelProcess(build, name, args) for name in names}


def build_huggingface_t5(size: str) -> Any:
    """Builds Hugging Face's T5 v1.1 with random parameters and without dropout."""
    import transformers

    transformers.logging.set_verbosity_error()
    width, hidden, layers, heads = _SIZES[size]
    config = transformers.T5Config(
        vocab_size=32128,
        d_model=width,
        d_kv=64,
        d_ff=hidden,
        num_layers=layers,
        num_heads=heads,
        feed_forward_proj='gated-gelu',
        tie_word_embeddings=False,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)
