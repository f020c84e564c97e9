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
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import model_process

PEER = 'PyTorch T5'


Calls = dict[None, Callable[[], None]]


def build_step(model_name: str, args: argparse.Namespace) -> tuple[Calls, dict[str, Any]]:
    """Returns {None: function that runs a step}, and a dict that describes the model (empty for PyTorch).

    The dict contains the parameter count, training FLOPs, compilation time, device, and measured FLOP/s of a matmul.
    """
    if model_name == PEER:
        return build_torch_step(args), {}

    import jax
    import numpy as np

    from remixer_t5x.api.model_building import build_model
    from remixer_t5x.costs import model_counts
    from remixer_t5x.devices import partition
    from remixer_t5x.extras.reproduce import table_runs
    from remixer_t5x.optim import optimizer, schedules, train_state, train_step

    lengths = {'inputs': args.inputs, 'targets': args.targets}
    files = [f'models/{model_name}.gin', f'sizes/{args.size}.gin', *args.gin_file]
    model = build_model(*files, DTYPE=args.dtype)
    counted = model_counts.count_model_costs(model, lengths)
    batch = {
        'encoder_input_tokens': (args.batch, args.inputs),
        'decoder_input_tokens': (args.batch, args.targets),
        'decoder_target_tokens': (args.batch, args.targets),
    }
    rng = np.random.default_rng(0)
    partitioner = partition.Partitioner()
    plan = train_state.plan_train_state(model, optimizer.adafactor(schedules.rsqrt()), batch, partitioner)
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

    def run_step() -> None:
        nonlocal state
        state, metrics = jitted(state, data)
        jax.block_until_ready((state, metrics))

    return {None: run_step}, {
        'parameters': counted.total_parameters,
        'flops': counted.training_flops * args.batch,
        'compile': seconds,
        'device': f'{jax.devices()[0].device_kind} x {jax.device_count()}',
        'matmul': table_runs.measure_matmul_flops_per_second(),
    }


def build_torch_step(args: argparse.Namespace) -> Calls:
    """Builds a training step of Hugging Face's T5 v1.1 of the same size, with torch's Adafactor."""
    import torch

    model = model_process.build_huggingface_t5(args.size).train()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    inputs = torch.randint(1, 32128, (args.batch, args.inputs))
    labels = torch.randint(1, 32128, (args.batch, args.targets))

    def run_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=inputs, labels=labels).loss.backward()
        optimizer.step()

    return {None: run_step}


def main() -> None:
    parser = model_process.build_parser(__doc__, 't5_1_1,remixer')
    parser.add_argument('--targets', type=int, default=114)
    args = parser.parse_args()
    processes = model_process.start_processes(build_step, PEER, args)
    facts = {name: process.send_request() for name, process in processes.items()}
    first = next(iter(facts.values()))
    print(
        f'{first["device"]}, {os.cpu_count()} cores; batch {args.batch}, {args.inputs} to {args.targets}, {args.size}, '
        f'{args.dtype}; plain matmul {first["matmul"] / 1e9:,.0f} GFLOP/s',
        flush=True,
    )
    times: dict[str, list[float]] = {name: [] for name in processes}
    for _ in range(args.rounds):
        for name, process in processes.items():
            process.send_request()  # Not timed: the first step after idling is slower.
            times[name].append(process.send_request()[0])
    print_times(times, facts, args)


def print_times(times: dict[str, list[float]], facts: dict[str, dict], args: argparse.Namespace) -> None:
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
