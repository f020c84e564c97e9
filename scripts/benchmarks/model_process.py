"""Runs our models and Hugging Face's T5 v1.1 of the same size in separate processes that take turns."""

import argparse
import importlib.util
import multiprocessing
from collections.abc import Callable
from typing import Any

# Maps each size to (width, hidden size, number of layers, number of heads).
_SIZES = {'tiny': (256, 512, 4, 4), 'small': (512, 1024, 8, 6), 'base': (768, 2048, 12, 12)}


class ModelProcess:
    """A process that runs `serve(pipe, name, args)`, which receives requests from `send_request` and sends answers."""

    def __init__(self, serve: Callable[..., None], name: str, args: argparse.Namespace):
        context = multiprocessing.get_context('spawn')
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=serve, args=(child_pipe, name, args), daemon=True)
        self._process.start()

    def send_request(self, request: Any = 'go') -> Any:
        """Sends a request and returns the answer."""
        self._pipe.send(request)
        return self._pipe.recv()

    def stop(self) -> None:
        self._pipe.send('stop')
        self._process.join()


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


def start_processes(serve: Callable[..., None], peer: str, args: argparse.Namespace) -> dict[str, ModelProcess]:
    """Starts a process for each of our models, and for `peer` if torch and transformers are installed."""
    names = args.models.split(',')
    missing = [package for package in ('torch', 'transformers') if importlib.util.find_spec(package) is None]
    if args.peer != 'none' and missing:
        print(f'Hugging Face is not measured: {" and ".join(missing)} not installed (pip install "remixer-t5x[hf]")')
    elif args.peer != 'none':
        names.append(peer)
    return {name: ModelProcess(serve, name, args) for name in names}


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
