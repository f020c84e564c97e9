"""Times the forward and backward pass of the token MLP on packed rows by number of examples per row.

    python scripts/benchmarks/packed_token_mlp.py --examples 1 4 8 16

Compares `mix_through_hidden` with one pass over the row per example. Both variants run alternately in one process; the
table shows the fastest run and the matmul FLOPs of each variant.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from remixer_t5x.models.layers import example_blocks, token_mlp


def pass_for_each_example(w_in, value, w_out, ids, examples):
    """Runs one pass over the row per example, with recomputation in the backward pass."""
    mixed = jnp.zeros((*w_out.shape[:-1], value.shape[-1]), value.dtype)
    mix = jax.checkpoint(
        lambda take: token_mlp.project_hidden_units(w_out, token_mlp.compute_hidden_units(w_in, value, take)),
        static_argnums=(),
    )
    for example in range(1, examples + 1):
        mixed = jnp.where((ids == example)[..., None, None], mix(ids == example), mixed)
    return mixed


def mix_blocks(w_in, value, w_out, ids):
    return token_mlp.mix_through_hidden(w_in, value, w_out, ids, ids, packed=True)


def packed_ids(rng, batch, length, examples):
    """Fills a row with examples of random lengths that are at least a quarter of the mean length."""
    rows: list[np.ndarray] = []
    for _ in range(batch):
        shortest = length // examples // 4
        more = rng.multinomial(length - examples * shortest, rng.dirichlet(np.full(examples, 2.0)))
        rows.append(np.repeat(np.arange(1, examples + 1), shortest + more))
    return jnp.asarray(np.stack(rows), jnp.int32)


def tokens_of_blocks(ids):
    """Counts the tokens in the blocks of a row, summed over all steps of the loop."""
    into, _, ranks = example_blocks.sort_by_example(ids, ids)
    longest = np.max(np.asarray(into.count), axis=0)[: int(ranks)]
    return int(np.sum(-(-longest // example_blocks.BLOCK)) * example_blocks.BLOCK)


def fastest_times(runs, repeats):
    """Runs functions alternately, and returns the time of the fastest run of each function in seconds."""
    best = [float('inf')] * len(runs)
    for _ in range(repeats):
        for index, run in enumerate(runs):
            start = time.perf_counter()
            jax.block_until_ready(run())
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--examples', type=int, nargs='+', default=[1, 4, 8, 16])
    parser.add_argument('--rows', type=int, default=8)
    parser.add_argument('--length', type=int, default=512)
    parser.add_argument('--width', type=int, default=512, help='hidden units and features')
    parser.add_argument('--repeats', type=int, default=10)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    shape = (args.rows, args.length, 1, args.width)
    arrays = [jnp.asarray(rng.normal(size=shape) / args.length**0.5, jnp.float32) for _ in range(3)]
    print('| examples | passes, s | blocks, s | passes, GFLOP | blocks, GFLOP |')
    print('|---|---|---|---|---|')
    for examples in args.examples:
        ids = packed_ids(rng, args.rows, args.length, examples)
        mixes = (functools.partial(pass_for_each_example, examples=examples), mix_blocks)
        compiled = []
        for mix in mixes:
            loss = jax.grad(lambda *both, mix=mix: jnp.sum(jnp.sin(mix(*both, ids))), argnums=(0, 1, 2))  # noqa: B023
            compiled.append(jax.jit(loss).lower(*arrays).compile())
        results = [run(*arrays) for run in compiled]
        for actual, expected in zip(*results, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)
        times = fastest_times([functools.partial(run, *arrays) for run in compiled], args.repeats)
        matmuls = 7 * 2 * args.rows * args.width**2 / 1e9
        work = matmuls * args.length * examples, matmuls * tokens_of_blocks(ids)
        print(f'| {examples} | {times[0]:.3f} | {times[1]:.3f} | {work[0]:.1f} | {work[1]:.1f} |', flush=True)


if __name__ == '__main__':
    main()
