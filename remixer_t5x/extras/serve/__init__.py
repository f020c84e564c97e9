"""`remixer-t5x serve`: serves a trained model over HTTP, described in docs/serving.md."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
from typing import Any

from remixer_t5x.cli import arguments
from remixer_t5x.cli.arguments import Command
from remixer_t5x.errors import UserError, import_optional, root_cause_message


def add_arguments(parser: argparse.ArgumentParser) -> None:
    path = 'a MODEL_DIR (its gin text is executed), a checkpoint, a Hugging Face folder, or hf://NAME'
    parser.add_argument('model', metavar='DIR', help=path)
    parser.add_argument(
        '--host', metavar='ADDRESS', default='127.0.0.1', help='address to listen on (default 127.0.0.1)'
    )
    port = 'port to listen on; 0 selects a free port (default 8000)'
    parser.add_argument('--port', metavar='N', type=arguments.make_whole_number_type(0), default=8000, help=port)
    parser.add_argument('--name', metavar='TEXT', help="the model's name in requests (default: the last part of DIR)")
    count: Any = {'metavar': 'N', 'type': arguments.make_whole_number_type(1)}
    parser.add_argument('--batch_size', **count, default=16, help='maximum number of texts per batch (default 16)')
    queue = 'maximum number of queued texts; further texts are rejected with status 429 (default 256)'
    parser.add_argument('--max_queue', **count, default=256, help=queue)
    parser.add_argument(
        '--max_input_tokens', **count, help='maximum number of tokens per input (default: as in training)'
    )
    parser.add_argument('--max_tokens', **count, help='maximum number of tokens per answer (default: as in training)')


def run(args: argparse.Namespace) -> int:
    """Serves requests until SIGTERM or SIGINT, and returns 128 plus the signal number."""
    name = args.name or os.path.basename(os.path.abspath(args.model))
    listener = socket.socket(socket.AF_INET6 if ':' in args.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((args.host, args.port))
    except (OSError, OverflowError) as error:
        raise UserError(
            f'cannot listen on {args.host}:{args.port} ({root_cause_message(error)}); use another --host or --port'
        ) from error
    import_optional('uvicorn', 'serve', 'serve')
    from remixer_t5x.api import saved_models
    from remixer_t5x.extras.serve import server

    lengths = {'inputs': args.max_input_tokens, 'targets': args.max_tokens}
    trained = saved_models.load(args.model, lengths={side: length for side, length in lengths.items() if length})
    return asyncio.run(server.serve(trained, name, listener, args.batch_size, args.max_queue))


COMMAND = Command(
    'serve',
    'answer HTTP requests in OpenAI format with a trained model',
    add_arguments,
    run,
    ('remixer-t5x serve runs/mine --port=8000',),
    keeps_buffers=True,
)
