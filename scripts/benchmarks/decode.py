"""Times our decoding and Hugging Face's `generate` with the same shapes, and prints tokens/s and the ratio.

    python scripts/benchmarks/decode.py                       # T5.1.1 small and PyTorch, greedy and with 4 beams
    python scripts/benchmarks/decode.py --models remixer --size tiny --peer none

Each call encodes a batch of random tokens and generates `--outputs` tokens for each sequence; no sequence ends early.
The rate in tokens/s counts one output sequence per input, not all beams. Each model runs in a separate process, and the
processes take turns, so that other load on the machine affects all models equally. The table shows the fastest and the
median call, and the lowest CPU time, which depends less on other processes. Set OMP_WAIT_POLICY=passive to exclude the
busy waiting of PyTorch's threads from the CPU time. Hugging Face's model requires torch and transformers, and is
skipped if they are not installed.
"""

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import model_process

PEER = 'Hugging Face'
NO_EOS = -1


def build_decoders(model_name: str, args: argparse.Namespace) -> tuple[dict[int, Callable[[], Any]], str]:
    """Returns a decoding function for each number of beams (1 is greedy), and the compilation time."""
    if model_name == PEER:
        return build_peer_decoders(args)
    import jax
    import numpy as np
    from flax import linen as nn

    from remixer_t5x.api.model_building import build_model
    from remixer_t5x.models.beam_search import BeamSearch
    from remixer_t5x.models.decoding import Greedy

    files = [f'models/{model_name}.gin', f'sizes/{args.size}.gin', *args.gin_file]
    model: Any = build_model(*files, DTYPE=args.dtype)
    shapes = {'encoder_input_tokens': (1, args.inputs), 'decoder_target_tokens': (1, args.outputs)}
    params = nn.unbox(jax.jit(lambda key: model.init(key, shapes))(jax.random.key(0)))
    inputs = np.random.default_rng(0).integers(2, 32000, (args.batch, args.inputs), np.int32)
    batch = {'encoder_input_tokens': jax.device_put(inputs)}
    calls: dict[int, Callable[[], Any]] = {}
    seconds = []
    for beams in args.beams:
        decoder = Greedy() if beams == 1 else BeamSearch(beams)

        def generate(params, batch, decoder=decoder):
            return model.generate(params, batch, args.outputs, NO_EOS, decoder)

        start = time.perf_counter()
        compiled = jax.jit(generate).lower(params, batch).compile()
        seconds.append(f'{time.perf_counter() - start:.1f}')

        def decode(compiled=compiled):
            jax.block_until_ready(compiled(params, batch))

        calls[beams] = decode
    return calls, f'compiled in {" and ".join(seconds)} s'


def build_peer_decoders(args: argparse.Namespace) -> tuple[dict[int, Callable[[], Any]], str]:
    """Builds the decoding functions of Hugging Face's T5 v1.1, in the format of `build_decoders`."""
    import torch

    model = model_process.build_huggingface_t5(args.size).eval()
    inputs = torch.randint(2, 32000, (args.batch, args.inputs))

    def generate(beams: int) -> None:
        tokens = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=args.outputs,
            eos_token_id=None,
            do_sample=False,
            num_beams=beams,
        )
        assert tokens.shape == (args.batch, args.outputs + 1)

    return {beams: functools.partial(generate, beams) for beams in args.beams}, f'torch {torch.__version__}'


def main() -> None:
    parser = model_process.build_parser(__doc__, 't5_1_1')
    parser.add_argument('--outputs', type=int, default=64)
    parser.add_argument('--beams', type=lambda text: [int(n) for n in text.split(',')], default=[1, 4])
    args = parser.parse_args()
    processes = model_process.start_processes(build_decoders, PEER, args)
    print(f'{os.cpu_count()} cores; batch {args.batch}, {args.inputs} to {args.outputs}, {args.size}, {args.dtype}')
    for name, process in processes.items():
        print(f'{name}: {process.send_request()}', flush=True)
    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        for beams in args.beams:
            for name, process in processes.items():
                times.setdefault((name, beams), []).append(process.send_request(beams))
    print_times(times, args)


def print_times(times: dict[tuple[str, int], list[tuple[float, float]]], args: argparse.Namespace) -> None:
    tokens = args.batch * args.outputs
    best = {key: [min(column) for column in zip(*taken, strict=True)] for key, taken in times.items()}
    for (name, beams), (fastest, processor) in best.items():
        median = statistics.median(seconds for seconds, _ in times[name, beams])
        line = f'{"greedy" if beams == 1 else f"{beams} beams":8s} {name:12s} fastest {fastest:6.2f} s, '
        line += f'median {median:6.2f} s, {tokens / fastest:6.0f} tokens/s, CPU {processor:6.2f} s'
        if name != PEER and (PEER, beams) in times:
            peer = best[PEER, beams]
            line += (
                f'; {PEER} takes {peer[0] / fastest:.2f} times as long and {peer[1] / processor:.2f} times the CPU time'
            )
        print(line)


if __name__ == '__main__':
    main()
