"""Times the forward and backward pass of our attention and of plain attention, and prints the ratio.

    python scripts/benchmarks/attention.py --batch 8 --length 512 --heads 6

Compares plain attention with autodiff, our recomputing backward pass over the whole batch, and our recomputing backward
pass one row at a time, which is used on a single CPU. All variants have a position bias whose gradient is summed over
the batch.
"""

import argparse
import time

import jax
import jax.numpy as jnp

from remixer_t5x.kernels.attention import formula as module


def plain_attention(query, key, value, mask, bias):
    logits = jnp.einsum('bqhd,bkhd->bhqk', query, key) + bias
    weights = jax.nn.softmax(jnp.where(mask, logits, module.MASKED), axis=-1)
    return jnp.einsum('bhqk,bkhd->bqhd', weights, value)


def time_gradient(attention, by_rows: bool, arrays, rounds: int) -> tuple[float, float]:
    """Returns the time of the fastest gradient computation in seconds, and the temporary memory in megabytes."""
    module.on_single_cpu = lambda: by_rows

    def loss(query, key, value, mask, bias):
        return jnp.sum(attention(query, key, value, mask, bias) ** 2)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 4))).lower(*arrays).compile()
    jax.block_until_ready(gradient(*arrays))
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(gradient(*arrays))
        seconds.append(time.perf_counter() - start)
    return min(seconds), gradient.memory_analysis().temp_size_in_bytes / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--batch', type=int, default=8)
    parser.add_argument('--length', type=int, default=512)
    parser.add_argument('--heads', type=int, default=6)
    parser.add_argument('--head_dim', type=int, default=64)
    parser.add_argument('--rounds', type=int, default=7)
    args = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (args.batch, args.length, args.heads, args.head_dim)
    query, key, value = (0.3 * jax.random.normal(k, shape) for k in keys[:3])
    bias = jax.random.normal(keys[3], (1, args.heads, args.length, args.length))
    mask = jnp.ones((args.batch, 1, 1, args.length), bool)
    print(f'{jax.devices()[0].device_kind} x {jax.device_count()}; batch {args.batch}, length {args.length}, '
          f'{args.heads} heads of {args.head_dim}, float32, forward and backward')  # fmt: skip
    implementations = {
        'plain formula': (plain_attention, False),
        'recomputing, whole batch': (module.dot_product_attention, False),
        'recomputing, row by row': (module.dot_product_attention, True),
    }
    baseline = None
    for name, (attention, by_rows) in implementations.items():
        seconds, megabytes = time_gradient(attention, by_rows, (query, key, value, mask, bias), args.rounds)
        baseline = baseline or seconds
        print(f'{name:26s} {1e3 * seconds:7.1f} ms, {baseline / seconds:4.2f} times the speed, {megabytes:7.1f} MB')


if __name__ == '__main__':
    main()
