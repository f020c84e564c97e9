"""Times training steps of our models and of Hugging Face's T5 with the same shapes, and prints ratios.

    python scripts/benchmarks/train_step.py                          # T5.1.1 small and Remixer small, and PyTorch
    python scripts/benchmarks/train_step.py --models t5_1_1 --size tiny --peer none

A step consists of the forward pass, backward pass and Adafactor update of a whole model on random tokens without
dropout. Each model runs in a separate process, and the processes take turns, so that other load on the machine affects
all models equally. The table shows the fastest and the median step. The matmul limit assumes that the model's matmuls
run at the speed of a single large matmul, and that all other operations take no time. PyTorch's T5 requires torch and
transformers, and is skipped if they are not installed.
"""

import argparse
import importlib.util
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from remixer_t5x.cli import command

PEER = 'PyTorch T5'


def our_step(model_name: str, args: argparse.Namespace) -> tuple[Callable[[], None], dict[str, Any]]:
    """Returns a function that runs a step, the number of parameters, the training FLOPs, and the compilation time."""
    import jax
    import numpy as np

    from remixer_t5x.api.building import build_model
    from remixer_t5x.costs import counts
    from remixer_t5x.devices import partition
    from remixer_t5x.optim import optimizer, schedules, train_state, train_step

    lengths = {'inputs': args.inputs, 'targets': args.targets}
    files = [f'models/{model_name}.gin', f'sizes/{args.size}.gin', *args.gin_file]
    model = build_model(*files, DTYPE=args.dtype)
    counted = counts.count_model(model, lengths)
    batch = {
        'encoder_input_tokens': (args.batch, args.inputs),
        'decoder_input_tokens': (args.batch, args.targets),
        'decoder_target_tokens': (args.batch, args.targets),
    }
    rng = np.random.default_rng(0)
    partitioner = partition.Partitioner()
    plan = train_state.plan(model, optimizer.adafactor(schedules.rsqrt()), batch, partitioner)
    state = plan.create(jax.random.key(0))
    arrays = {name: rng.integers(1, model.vocab_size, shape, np.int32) for name, shape in batch.items()}
    data = partitioner.shard_batch(arrays)
    jitted = train_step.jit_train_step(
        train_step.make_train_step(model, plan.tx), plan.shardings, partitioner, donate=True
    )
    lowered = jitted.lower(state, data)
    start = time.perf_counter()
    lowered.compile()
    seconds = time.perf_counter() - start

    def step() -> None:
        nonlocal state
        state, metrics = jitted(state, data)
        jax.block_until_ready((state, metrics))

    facts = {'parameters': counted.total_parameters, 'flops': counted.training_flops * args.batch, 'compile': seconds}
    return step, facts


def torch_step(args: argparse.Namespace) -> tuple[Callable[[], None], dict[str, Any]]:
    """Builds a training step of Hugging Face's T5 v1.1 of the same size, with torch's Adafactor."""
    import torch
    import transformers

    sizes = {'tiny': (256, 512, 4, 4), 'small': (512, 1024, 8, 6), 'base': (768, 2048, 12, 12)}
    width, hidden, layers, heads = sizes[args.size]
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
    model = transformers.T5ForConditionalGeneration(config).train()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    inputs = torch.randint(1, 32128, (args.batch, args.inputs))
    labels = torch.randint(1, 32128, (args.batch, args.targets))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=inputs, labels=labels).loss.backward()
        optimizer.step()

    return step, {}


def matmul_flops_per_second() -> float:
    """Measures the best FLOP/s of a [4096, 1024] x [1024, 1024] float32 matmul."""
    import jax
    import jax.numpy as jnp

    a, b = jnp.ones((4096, 1024)), jnp.ones((1024, 1024))
    multiply = jax.jit(lambda a, b: a @ b)
    multiply(a, b).block_until_ready()
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        multiply(a, b).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * 4096 * 1024 * 1024 / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', default='t5_1_1,remixer', help='files in configs/models, separated by commas')
    parser.add_argument('--size', default='small', choices=['tiny', 'small', 'base'])
    parser.add_argument('--batch', type=int, default=8)
    parser.add_argument('--inputs', type=int, default=512)
    parser.add_argument('--targets', type=int, default=114)
    parser.add_argument('--dtype', default='float32', choices=['float32', 'bfloat16'])
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--peer', default='torch', choices=['torch', 'none'])
    parser.add_argument('--gin_file', action='append', default=[], help='more gin files, loaded after model and size')
    args = parser.parse_args()

    names = args.models.split(',')
    missing = [package for package in ('torch', 'transformers') if importlib.util.find_spec(package) is None]
    if args.peer == 'torch' and missing:
        print(f'no peer: {" and ".join(missing)} not installed (pip install "remixer-t5x[hf]")')
    elif args.peer == 'torch':
        names.append(PEER)
    processes = {name: ModelProcess(name, args) for name in names}
    facts = {name: process.call() for name, process in processes.items()}
    first = facts[names[0]]
    print(
        f'{first["device"]}, {os.cpu_count()} cores; batch {args.batch}, {args.inputs} to {args.targets}, {args.size}, '
        f'{args.dtype}; plain matmul {first["matmul"] / 1e9:,.0f} GFLOP/s',
        flush=True,
    )
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name, process in processes.items():
            process.call()  # Not timed: the first step after idling is slower.
            times[name].append(process.call())
    for process in processes.values():
        process.stop()
    report(times, facts, args)


class ModelProcess:
    """A model in a separate process. The first `call` returns the properties of the model; later calls time a step."""

    def __init__(self, name: str, args: argparse.Namespace):
        context = multiprocessing.get_context('spawn')
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_serve_calls, args=(child_pipe, name, args), daemon=True)
        self._process.start()

    def call(self):
        self._pipe.send('go')
        return self._pipe.recv()

    def stop(self) -> None:
        self._pipe.send('stop')
        self._process.join()


def _serve_calls(pipe, name: str, args: argparse.Namespace) -> None:
    command.keep_buffers()
    pipe.recv()
    step, facts = torch_step(args) if name == PEER else our_step(name, args)
    if facts:
        import jax

        facts |= {
            'device': f'{jax.devices()[0].device_kind} x {jax.device_count()}',
            'matmul': matmul_flops_per_second(),
        }
    pipe.send(facts)
    while pipe.recv() == 'go':
        start = time.perf_counter()
        step()
        pipe.send(time.perf_counter() - start)


def report(times: dict[str, list[float]], facts: dict[str, dict], args: argparse.Namespace) -> None:
    tokens = args.batch * (args.inputs + args.targets)
    fastest = {name: min(seconds) for name, seconds in times.items()}
    for name, seconds in times.items():
        line = f'{name:12s} fastest {fastest[name]:6.2f} s, median {statistics.median(seconds):6.2f} s, '
        line += f'{tokens / fastest[name]:7,.0f} tokens/s'
        if facts[name]:
            limit = tokens / (facts[name]['flops'] / facts[name]['matmul'])
            line += f', {100 * tokens / fastest[name] / limit:3.0f}% of the matmul limit of {limit:,.0f}'
            line += f'; compiled in {facts[name]["compile"]:.1f} s, {facts[name]["parameters"]:,} parameters'
        print(line)
    ours, *others = [name for name in times if facts[name]]
    for name in others:
        print(
            f'{name} / {ours}: {fastest[name] / fastest[ours]:.2f} times the step, '
            f'{facts[name]["flops"] / facts[ours]["flops"]:.2f} times the FLOPs'
        )
    if PEER in times:
        print(f'{ours} is {fastest[PEER] / fastest[ours]:.2f} times as fast as PyTorch')


if __name__ == '__main__':
    main()
