"""Measures time and FLOPs of all token mixers for one example, by sequence length (HyperMixer, figure 2).

    python scripts/studies/length.py --lengths 64,256,1024 --figure length.png

Mixers and dimensions are those of scripts/benchmarks/mixers.py (width d = 256, hidden size d' = 512 as in appendix
B.3), with batch size 1, in float32. The forward pass is timed. FLOPs count matrix products and Fourier transforms
(`costs/model_counts.py`), and are printed next to the values of appendix D's formulas. Results are appended to --out;
running the same command again computes only missing results. --show only prints the results in --out.
"""

import argparse
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from library.results_file import ResultsFile, parse_sorted_integers

from remixer_t5x.costs import model_counts
from remixer_t5x.extras.reports.pictures import drawing

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / 'benchmarks'))
import mixers as benchmark  # noqa: E402


def count_operations_by_formula(length: int, args: argparse.Namespace) -> dict[str, int]:
    """Returns the number of operations of each mixer according to the formulas in HyperMixer's appendix D.

    HyperMixing with tied weights takes `d (4 N d' + 9 d') + N (2 d^2 + 2 d' d + 9 d)` operations, and attention takes
    `6 h (d/h)^2 + h N^2 2 (d/h) + 3 N + 2 d N^2`. In the last count, all N tokens are projected, and the softmax is
    computed for each head.
    """
    embed, hidden, heads = args.embed, args.hidden, args.heads
    projections = 6 * heads * (embed // heads) ** 2
    products = 4 * embed * length**2
    return {
        'appendix D: HyperMixing': (
            embed * (4 * length * hidden + 9 * hidden) + length * (2 * embed**2 + 2 * hidden * embed + 9 * embed)
        ),
        'appendix D: attention': projections + products + 3 * length,
        'the same, every token': projections * length + products + 3 * heads * length**2,
    }


def select_mixer_names(side: str, args: argparse.Namespace) -> list[str]:
    return list(benchmark.build_mixers(args.embed, args.hidden, args.heads, args.lengths[0], args.window)[side])


def build_mixer(side: str, name: str, length: int, args: argparse.Namespace) -> nn.Module:
    return benchmark.build_mixers(args.embed, args.hidden, args.heads, length, args.window)[side][name]()


def compute_variable_shapes(module: nn.Module, length: int, embed: int, causal: bool) -> Any:
    """Returns the shapes of the module's variables."""
    x = jnp.zeros((1, length, embed))
    shapes = jax.eval_shape(lambda key: module.init(key, x, benchmark.make_context(length, causal)), jax.random.key(0))
    return nn.unbox(shapes)


def count_forward_flops(module: nn.Module, length: int, embed: int, causal: bool) -> float:
    """Traces the module to count its forward FLOPs for one example."""
    ctx = benchmark.make_context(length, causal)
    x = jax.ShapeDtypeStruct((1, length, embed), jnp.float32)
    variables = compute_variable_shapes(module, length, embed, causal)
    return model_counts.count_total_flops(lambda variables, x: module.apply(variables, x, ctx), variables, x)


def time_forward_pass(
    module: nn.Module, length: int, embed: int, causal: bool, args: argparse.Namespace
) -> float | None:
    """Times --rounds forward passes; returns the fastest time in seconds, or None if XLA needs over --memory_gb."""
    ctx = benchmark.make_context(length, causal)
    rng = np.random.default_rng(0)

    def draw_random_array(shape) -> jax.Array:
        return jnp.asarray(0.1 * rng.normal(size=shape.shape), shape.dtype)

    # Parameters are random numbers, because compiling the module's initialization would take longer than this program.
    variables = jax.tree.map(draw_random_array, compute_variable_shapes(module, length, embed, causal))
    x = draw_random_array(jax.ShapeDtypeStruct((1, length, embed), jnp.float32))
    run = jax.jit(lambda variables, x: module.apply(variables, x, ctx)).lower(variables, x).compile()
    if run.memory_analysis().temp_size_in_bytes / 2**30 > args.memory_gb:
        return None
    return benchmark.time_fastest_call(lambda: run(variables, x), args.rounds)


def build_cell_settings(side: str, name: str, length: int, args: argparse.Namespace) -> dict[str, Any]:
    shared = ('embed', 'hidden', 'heads', 'window', 'rounds', 'memory_gb')
    device = f'{jax.devices()[0].device_kind} x {jax.device_count()}'
    settings = {option: getattr(args, option) for option in shared}
    return {'side': side, 'mixer': name, 'length': length, 'device': device, **settings}


Results = dict[str, dict[int, dict[str, float | None]]]


def measure_missing_lengths(records: ResultsFile, args: argparse.Namespace) -> None:
    """Runs the missing cells in order of length, so that compared mixers run at about the same time."""
    cells = [(side, name, n) for n in args.lengths for side in args.sides for name in select_mixer_names(side, args)]
    missing = [cell for cell in cells if records.find_result(build_cell_settings(*cell, args)) is None]
    print(f'{len(cells)} measurements, {len(cells) - len(missing)} already done', flush=True)
    for number, cell in enumerate(missing, 1):
        side, name, length = cell
        shape = build_mixer(side, name, length, args), length, args.embed, side == 'causal'
        result = {'flops': count_forward_flops(*shape), 'forward': time_forward_pass(*shape, args)}
        records.append_result(build_cell_settings(*cell, args), result)
        time_taken = 'too large' if result['forward'] is None else f'{1e3 * result["forward"]:.3f} ms'
        print(f'{number:3d} of {len(missing)}  {side} {name} at {length:,}: {time_taken}', flush=True)


def collect_results(records: ResultsFile, side: str, args: argparse.Namespace) -> Results:
    """Returns the results of the finished cells for each mixer and length."""
    results: Results = {}
    for name in select_mixer_names(side, args):
        found = {length: records.find_result(build_cell_settings(side, name, length, args)) for length in args.lengths}
        results[name] = {length: result for length, result in found.items() if result is not None}
    return results


def print_table(title: str, results: Results, what: str, scale: float, args: argparse.Namespace) -> None:
    print(f'\n{title} (times attention)')
    print(f'{"":26s}' + ''.join(f'{length:>20,}' for length in args.lengths))
    for name in results:
        print(f'{name:26s}' + ''.join(f'{_format_cell(results, name, n, what, scale):>20s}' for n in args.lengths))


def _format_cell(results: Results, name: str, length: int, what: str, scale: float) -> str:
    if length not in results[name]:
        return 'not yet run'
    value = results[name][length].get(what)
    if value is None:
        return 'too large'
    baseline = results.get('attention', {}).get(length, {}).get(what)
    return f'{scale * value:,.2f}' + (f' ({value / baseline:.2f})' if baseline else '')


def print_formulas(args: argparse.Namespace) -> None:
    print(
        '\nmillions of operations according to the formulas in appendix D '
        f"(d {args.embed}, d' {args.hidden}, {args.heads} heads)"
    )
    by_length = [count_operations_by_formula(length, args) for length in args.lengths]
    for name in by_length[0]:
        print(f'{name:26s}' + ''.join(f'{counted[name] / 1e6:20,.2f}' for counted in by_length))


def plot_figure(results: Results, file: str, args: argparse.Namespace, note: str) -> None:
    """Plots time (left) and FLOPs (right) of the bidirectional mixers."""
    figure = drawing.create_figure(11.4, 4.4)
    panels = figure.subplots(1, 2)
    for panel, what, scale, label in zip(
        panels, ('forward', 'flops'), (1e3, 1e-6), ('ms', 'million FLOPs'), strict=True
    ):
        for number, (name, by_length) in enumerate(results.items()):
            points = [(n, scale * value) for n, result in by_length.items() if (value := result[what])]
            if points:
                style = '-' if number < len(drawing.COLOURS) else '--'
                colour = drawing.COLOURS[number % len(drawing.COLOURS)]
                panel.plot(*zip(*points, strict=True), style, marker='o', markersize=3, color=colour, label=name)
        panel.set_xscale('log', base=2)
        panel.set_yscale('log')
        panel.set_xticks(args.lengths, labels=[f'{length:,}' for length in args.lengths])
        panel.grid(color=drawing.GRID, linewidth=0.5)
        drawing.style_axes(panel, f'Forward pass of one example, {label}', 'length [tokens]', label)
    formula = [count_operations_by_formula(length, args)['appendix D: HyperMixing'] / 1e6 for length in args.lengths]
    panels[1].plot(args.lengths, formula, ':', color=drawing.TEXT_COLOUR, label='appendix D: HyperMixing')
    panels[1].legend(frameon=False, fontsize=8, handlelength=4, loc='upper left', bbox_to_anchor=(1.01, 1.02))
    figure.suptitle(note, x=0.01, ha='left', fontsize=8, color=drawing.TEXT_COLOUR)
    figure.savefig(file, dpi=150, facecolor='white')
    print(f'figure: {file}')


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--lengths', type=parse_sorted_integers, default='64,256,1024,4096', help='comma-separated lengths'
    )
    parser.add_argument('--sides', type=lambda text: text.split(','), default='bidirectional,causal')
    parser.add_argument('--embed', type=int, default=256, help='model width d')
    parser.add_argument('--hidden', type=int, default=512, help="d' of HyperMixer, F of Remixer, S of MLP-Mixer")
    parser.add_argument('--heads', type=int, default=4)
    parser.add_argument('--window', type=int, default=32)
    parser.add_argument('--rounds', type=int, default=10, help='number of forward passes; the fastest is reported')
    parser.add_argument('--memory_gb', type=float, default=4.0)
    parser.add_argument('--out', default='runs/studies/length.jsonl', help='JSON lines file for the results')
    parser.add_argument('--figure', default='', help='PNG file to write')
    parser.add_argument('--show', action='store_true', help='only print the results in --out')
    return parser.parse_args(given)


def main() -> None:
    args = parse_arguments()
    shape = f"batch 1, d {args.embed}, d' {args.hidden}, {args.heads} heads, float32"
    note = f'{jax.devices()[0].device_kind} x {jax.device_count()}; {shape}; best of {args.rounds}'
    print(f'{note}; results in {args.out}')
    records = ResultsFile(args.out)
    if not args.show:
        measure_missing_lengths(records, args)
    by_side = {side: collect_results(records, side, args) for side in args.sides}
    for side, results in by_side.items():
        print_table(f'{side}, forward, milliseconds', results, 'forward', 1e3, args)
        print_table(f'{side}, forward, million FLOPs', results, 'flops', 1e-6, args)
    print_formulas(args)
    if args.figure:
        plot_figure(by_side['bidirectional'], args.figure, args, note)


if __name__ == '__main__':
    main()
