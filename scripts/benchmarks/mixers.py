"""Measures time and temporary memory of a forward and backward pass of attention and all token mixers, by length.

    python scripts/benchmarks/mixers.py --lengths 128,512,1024,2048,4096,16384

The input is one row of random float32 features; mixers are bidirectional as in an encoder, then causal as in a decoder.
The memory is XLA's temporary memory, which excludes parameters, inputs and gradients. Programs that need more than
--memory_gb are not run, and the table shows "too large". The last table shows the time of a decoding step by number of
previous tokens. As in configs/, HyperMixer has one head if bidirectional and twice as many heads as attention if
causal, and the window mixer has as many hidden units as its window has tokens. `--figure=mixers.png` draws the time and
the memory by length.
"""

import argparse
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x.context import SequenceContext
from remixer_t5x.models.sublayers import attention, fnet, gmlp, hyper_mixer, linear_attention, mlp_mixer, remixer, tim

# Number of decoding steps per timed call, to amortize the overhead of the call.
DECODING_STEPS = 50


def build_mixers(
    embed: int, hidden: int, heads: int, length: int, window: int
) -> dict[str, dict[str, functools.partial]]:
    """Returns {side: {mixer name: factory}}, where the side is 'bidirectional' or 'causal'."""
    part = functools.partial
    both: dict[str, functools.partial] = {
        'attention': part(attention.SelfAttention, heads, embed // heads),
        'linear_attention': part(linear_attention.LinearAttention, heads, embed // heads),
        'gmlp_free': part(gmlp.GMLP, hidden_dim=2 * embed, max_length=length, spatial=gmlp.FreeSpatial),
        'gmlp_toeplitz': part(gmlp.GMLP, hidden_dim=2 * embed, max_length=length),
        'amlp': part(gmlp.GMLP, hidden_dim=2 * embed, max_length=length, attention=gmlp.TinyAttention),
        'remixer': part(remixer.Remixer, hidden_dim=hidden, max_length=length),
        'tim_attention': part(tim.TimAttention, num_mechanisms=2, num_heads=heads, head_dim=embed // heads),
    }
    encoder: dict[str, functools.partial] = {
        'hyper_mixer': part(hyper_mixer.HyperMixer, hidden_dim=hidden),
        'mlp_mixer': part(mlp_mixer.MLPMixer, hidden_dim=hidden, max_length=length),
        'fnet': part(fnet.FNet),
    }
    decoder: dict[str, functools.partial] = {
        'hyper_mixer': part(hyper_mixer.HyperMixer, hidden_dim=hidden, num_heads=2 * heads),
        'window_mixer': part(mlp_mixer.WindowMixer, hidden_dim=window, window=window),
    }
    return {'bidirectional': {**both, **encoder}, 'causal': {**both, **decoder}}


def make_context(length: int, causal: bool, **flags) -> SequenceContext:
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    return SequenceContext(jnp.ones((1, length), jnp.int32), positions, causal=causal, **flags)


def time_fastest_call(call: Callable[[], Any], rounds: int) -> float:
    """Returns the time of the fastest of `rounds` calls in seconds, after one call that is not timed."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure_gradient(
    module: nn.Module, length: int, embed: int, causal: bool, rounds: int, limit: float
) -> tuple[float, float]:
    """Times the gradient; returns the fastest time in seconds (inf above the memory limit) and the memory in GiB."""
    ctx = make_context(length, causal)
    x = jax.random.normal(jax.random.key(0), (1, length, embed))
    variables = jax.jit(lambda key: nn.unbox(module.init(key, x, ctx)))(jax.random.key(1))

    def loss(variables, x):
        return jnp.sum(jnp.square(module.apply(variables, x, ctx)))

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(variables, x).compile()
    gigabytes = gradient.memory_analysis().temp_size_in_bytes / 2**30
    if gigabytes > limit:
        return math.inf, gigabytes
    return time_fastest_call(lambda: gradient(variables, x), rounds), gigabytes


def time_decoding_step(module: nn.Module, length: int, embed: int, rounds: int) -> float:
    """Returns the time of a decoding step in seconds, with a nearly full cache of `length` tokens."""
    x = jnp.ones((1, length, embed))
    ctx = make_context(length, causal=True, decode=True)
    params = nn.unbox(module.init(jax.random.key(0), x, make_context(length, causal=True)))['params']
    cache = module.apply({'params': params}, x, ctx, mutable=['cache'])[1]['cache']

    # XLA:CPU would compile this loop to slow scalar code, unlike the larger loop of a complete model.
    @functools.partial(jax.jit, compiler_options={'xla_disable_hlo_passes': 'small-while-loop-hoisting'})
    def run_decoding_steps(cache, x):
        def run_decoding_step(index, carry):
            cache, x = carry
            at = jnp.asarray(length - 1 - DECODING_STEPS, jnp.int32) + index
            facts = dataclasses.replace(make_context(1, causal=True, decode=True), step=at, positions=at[None, None])
            x, variables = module.apply({'params': params, 'cache': cache}, x, facts, mutable=['cache'])
            return variables['cache'], x / (1 + jnp.max(jnp.abs(x)))

        return jax.lax.fori_loop(0, DECODING_STEPS, run_decoding_step, (cache, x))

    token = x[:, :1]
    return time_fastest_call(lambda: run_decoding_steps(cache, token), rounds) / DECODING_STEPS


Results = dict[str, dict[int, tuple[float, float]]]


def measure_mixers(side: str, lengths: list[int], args: argparse.Namespace) -> Results:
    print(f'\n{side}: milliseconds (times attention) and megabytes of temporary memory')
    print(f'{"":18s}' + ''.join(f'{length:>26,}' for length in lengths))
    results: Results = {}
    for name in build_mixers(args.embed, args.hidden, args.heads, lengths[0], args.window)[side]:
        results[name] = {}
        cells = []
        for length in lengths:
            module = build_mixers(args.embed, args.hidden, args.heads, length, args.window)[side][name]()
            causal = side == 'causal'
            seconds, gigabytes = measure_gradient(module, length, args.embed, causal, args.rounds, args.memory_gb)
            results[name][length] = seconds, gigabytes
            ratio = seconds / results['attention'][length][0]
            speed = f'{1e3 * seconds:9.1f} ({ratio:5.2f})' if math.isfinite(seconds) else 'too large'
            cells.append(f'{speed} {1024 * gigabytes:7.1f} MB')
        print(f'{name:18s}' + ''.join(f'{cell:>26s}' for cell in cells), flush=True)
    return results


def print_time_growth(side: str, results: Results, lengths: list[int]) -> None:
    """Prints how much the time grows from the second-largest to the largest length, and the length from which each
    mixer is faster than attention.
    """
    first, last = lengths[-2:]
    print(
        f'{side}: time at {last:,} / time at {first:,} (linear: {last / first:.1f}), faster than attention from length'
    )
    for name, times in results.items():
        growth = times[last][0] / times[first][0]
        ahead = [n for n in lengths if times[n][0] < results['attention'][n][0]]
        since = next((n for n in ahead if all(m in ahead for m in lengths if m >= n)), None)
        print(f'  {name:18s} {growth:6.2f}   {f"{since:,}" if since else "none measured"}')


def draw_results(by_side: dict[str, Results], title: str, path: str) -> None:
    """Draws the time (first row) and the memory (second row) of each mixer by length, with one column per side."""
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(2, len(by_side), figsize=(13, 10), sharex=True, squeeze=False, layout='constrained')
    figure.suptitle(title, x=0.01, ha='left')
    names = list(dict.fromkeys(name for results in by_side.values() for name in results))
    quantities = ('seconds, forward and backward', 'gigabytes of temporary memory')
    for row, quantity in enumerate(quantities):
        for axes, (side, results) in zip(rows[row], by_side.items(), strict=True):
            for name, by_length in results.items():
                colour, width = ('k', 3) if name == 'attention' else (f'C{names.index(name) - 1}', 1)
                values = [measured[row] for measured in by_length.values()]
                axes.loglog(list(by_length), values, 'o-', color=colour, linewidth=width, label=name)
            axes.set_title(f'{side}: {quantity}', loc='left', fontsize='medium')
            axes.set_xticks(list(by_length), [f'{length:,}' for length in by_length])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            axes.spines[['top', 'right']].set_visible(False)
    for axes in rows[-1]:
        axes.set_xlabel('length [tokens]')
    for axes in rows[0]:
        axes.legend(frameon=False, fontsize='small')
    figure.savefig(path, dpi=120)


def print_decoding_times(lengths: list[int], args: argparse.Namespace) -> None:
    print('\nmicroseconds per decoding step, by number of tokens in the cache')
    print(f'{"":18s}' + ''.join(f'{length:>10,}' for length in lengths))
    for name in build_mixers(args.embed, args.hidden, args.heads, lengths[0], args.window)['causal']:
        modules = [build_mixers(args.embed, args.hidden, args.heads, n, args.window)['causal'][name]() for n in lengths]
        times = [time_decoding_step(m, n, args.embed, args.rounds) for m, n in zip(modules, lengths, strict=True)]
        print(f'{name:18s}' + ''.join(f'{1e6 * seconds:10.0f}' for seconds in times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--lengths', default='128,512,1024,2048,4096,16384')
    parser.add_argument('--embed', type=int, default=256)
    parser.add_argument('--hidden', type=int, default=512, help="d' of HyperMixer, F of Remixer, S of MLP-Mixer")
    parser.add_argument('--heads', type=int, default=4)
    parser.add_argument('--window', type=int, default=32)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--memory_gb', type=float, default=12.0)
    parser.add_argument('--parts', default='training,decoding', help='parts to measure, separated by commas')
    parser.add_argument('--figure', metavar='FILE', help='draw the time and the memory by length')
    args = parser.parse_args()
    lengths = sorted(int(n) for n in args.lengths.split(','))
    device = f'{jax.devices()[0].device_kind} x {jax.device_count()}'
    shape = f'batch 1, width {args.embed}, hidden {args.hidden}, {args.heads} heads, window {args.window}, float32'
    print(f'{device}; {shape}; best of {args.rounds}')
    parts = args.parts.split(',')
    if 'training' in parts:
        by_side = {side: measure_mixers(side, lengths, args) for side in ('bidirectional', 'causal')}
        print()
        for side, results in by_side.items():
            print_time_growth(side, results, lengths)
        if args.figure:
            draw_results(by_side, f'Token mixers by length ({device}; {shape})', args.figure)
    if 'decoding' in parts:
        print_decoding_times([n for n in lengths if n > DECODING_STEPS], args)


if __name__ == '__main__':
    main()
