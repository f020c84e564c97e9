"""Time and memory of whole models by the length of their inputs, next to what the machine could do at best.

    python scripts/studies/whole_models.py --lengths 128,512,2048 --figure whole_models.png
    python scripts/studies/whole_models.py --lengths 128,512,2048,8192,16384 --memory_gb 60 --hardware hardware/gpu.gin

Three programs of each model, on one example in the dtype of --hardware: `encode` is the encoder on inputs of a length;
`train` is the loss and its gradients, with a quarter of that length as targets; `decode` generates --outputs tokens
with a cache, after it has encoded the inputs. Memory is what XLA plans for arrays within a program, parameters and
gradients aside. The roofline is the time of the program's matrix products and Fourier transforms at the speed of one
large matrix product, which the study measures first, in the same dtype.

A program that XLA plans more than --memory_gb for is compiled and not run. Results are appended to --out as they are
known; started again, the study does what is missing.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from library import figures
from library.records import Records
from library.small_task import exit_with_one_line

from remixer_t5x.config import loading
from remixer_t5x.costs import counts
from remixer_t5x.data import batch_formats
from remixer_t5x.models import interface

MODELS = ('t5_1_1', 'remixer', 'hyper_mixer', 'mixer_enc', 'gmlp', 'amlp', 'tim', 'fnet', 'linear_transformer')
PROGRAMS = ('encode', 'train', 'decode')
# Never generated, so that decoding does not end early.
NO_EOS = -1


@dataclasses.dataclass(frozen=True)
class Cell:
    """All that a result depends on; `length` in tokens of the inputs."""

    model: str
    program: str
    length: int
    outputs: int
    size: str
    hardware: str
    memory_gb: float
    rounds: int
    device: str


def model_of(cell: Cell) -> Any:
    """The model of the cell, whose learned positions reach as far as its inputs."""
    lengths = {'MAX_INPUT_LENGTH': cell.length, 'MAX_TARGET_LENGTH': max(cell.length // 4, cell.outputs)}
    files = [f'models/{cell.model}.gin', cell.size, cell.hardware]
    flags = [(name, str(length)) for name, length in lengths.items()]
    return loading.values(loading.Given(files, [*flags, ('VOCAB_SIZE', '2048'), ('REMAT_POLICY', 'None')]), 'MODEL')[0]


def lengths_of(cell: Cell) -> dict[str, int]:
    return {'inputs': cell.length, 'targets': cell.length // 4}


def program_of(cell: Cell, model: Any) -> tuple[Callable, Mapping[str, jax.ShapeDtypeStruct]]:
    """A function of parameters and a batch, and the shapes of the batch."""
    batch = batch_formats.abstract_batch(model.model_type, lengths_of(cell), 1)
    if cell.program == 'train':
        return lambda params, batch: jax.value_and_grad(lambda p: model.loss(p, batch)[0])(params), batch
    inputs = {'encoder_input_tokens': batch['encoder_input_tokens']}
    if cell.program == 'encode':
        return lambda params, batch: model.encode(params, batch['encoder_input_tokens']), inputs
    return lambda params, batch: model.generate(params, batch, cell.outputs, NO_EOS), inputs


def fastest(run: Callable[[], Any], rounds: int) -> float:
    """Seconds of the fastest of `rounds` calls, after one that does not count."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - start)
    return min(taken)


def measured(cell: Cell) -> dict[str, float | None]:
    """Seconds (None: too large), planned bytes, and FLOPs."""
    model = model_of(cell)
    function, batch = program_of(cell, model)
    params = nn.unbox(interface.param_shapes(model, batch_formats.batch_shapes(model.model_type, lengths_of(cell))))
    compiled = jax.jit(function).lower(params, batch).compile()
    planned = compiled.memory_analysis().temp_size_in_bytes
    result = {'bytes': planned, 'flops': counts.total_flops(function, params, batch), 'seconds': None}
    if planned <= cell.memory_gb * 2**30:
        rng = np.random.default_rng(0)
        # Random numbers instead of the model's own: a program that makes those takes longer to compile than this.
        made = jax.tree.map(lambda leaf: jnp.asarray(0.05 * rng.normal(size=leaf.shape), leaf.dtype), params)
        rows = {name: jnp.asarray(rng.integers(3, 2000, array.shape), array.dtype) for name, array in batch.items()}
        result['seconds'] = fastest(lambda: compiled(made, rows), cell.rounds)
    return result


def peak_of(dtype: Any, rounds: int = 10) -> float:
    """FLOPs a second of one product of two matrices of 2048 x 2048."""
    matrix = jnp.ones((2048, 2048), dtype)
    product = jax.jit(jnp.matmul)
    return 2 * 2048**3 / fastest(lambda: product(matrix, matrix), rounds)


def print_tables(found: Mapping[Cell, Mapping[str, Any]], args: argparse.Namespace, peak: float) -> None:
    by_place = {(cell.model, cell.program, cell.length): result for cell, result in found.items()}

    def cell_of(model: str, program: str, length: int) -> str:
        result = by_place.get((model, program, length))
        if result is None:
            return 'not yet run'
        memory = f'{result["bytes"] / 2**20:,.0f} MiB'
        if result['seconds'] is None:
            return f'too large, {memory}'
        share = result['flops'] / peak / result['seconds']
        return f'{1e3 * result["seconds"]:,.1f} ms, {share:.0%}, {memory}'

    for program in PROGRAMS:
        print(f'\n{program}: time, share of the roofline, memory')
        print('| | ' + ' | '.join(f'{length:,}' for length in args.lengths) + ' |')
        print('|---' * (len(args.lengths) + 1) + '|')
        for model in args.models:
            print('| ' + ' | '.join([model, *(cell_of(model, program, length) for length in args.lengths)]) + ' |')


def draw(found: Mapping[Cell, Mapping[str, Any]], args: argparse.Namespace, peak: float, file: str) -> None:
    """Time above and memory below, a column for each program; the roofline of each model dotted in its colour."""
    from remixer_t5x.extras.reports.pictures import drawing

    figure = drawing.new_figure(13.2, 7.0)
    panels = figure.subplots(2, len(PROGRAMS), sharex=True)
    for column, program in enumerate(PROGRAMS):
        for number, model in enumerate(args.models):
            results = {c.length: r for c, r in found.items() if (c.model, c.program) == (model, program)}
            style = '-' if number < len(drawing.COLOURS) else '--'
            colour = drawing.COLOURS[number % len(drawing.COLOURS)]
            lines: tuple[tuple[Any, str, Callable[[Any], float]], ...] = (
                (panels[0][column], style, lambda r: 1e3 * r['seconds'] if r['seconds'] else np.nan),
                (panels[0][column], ':', lambda r: 1e3 * r['flops'] / peak),
                (panels[1][column], style, lambda r: r['bytes'] / 2**20),
            )
            for axes, line, value in lines:
                points = [(length, value(results[length])) for length in sorted(results)]
                label = model if line != ':' else None
                axes.plot(*zip(*points, strict=True), line, marker='o' if line != ':' else '', markersize=3,
                          color=colour, label=label)  # fmt: skip
        for axes, label in ((panels[0][column], 'ms'), (panels[1][column], 'MiB')):
            axes.set_xscale('log', base=2)
            axes.set_yscale('log')
            axes.grid(color=drawing.GRID, linewidth=0.5)
            drawing.style_axes(axes, program if label == 'ms' else '', 'length [tokens]', label)
            axes.set_xticks(args.lengths, labels=[f'{length:,}' for length in args.lengths])
    panels[0][-1].legend(frameon=False, fontsize=8, handlelength=3, loc='upper left', bbox_to_anchor=(1.01, 1.02))
    figures.save(figure, file)


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--lengths', default='128,512,2048,8192', help='tokens of the inputs, by comma')
    parser.add_argument('--models', default=','.join(MODELS), help='by comma')
    parser.add_argument('--size', default='sizes/mini.gin', help='a gin file')
    parser.add_argument('--hardware', default='hardware/cpu.gin', help='a gin file with DTYPE')
    parser.add_argument('--outputs', type=int, default=32, help='tokens that decode generates')
    parser.add_argument('--memory_gb', type=float, default=4.0, help='programs that need more are not run')
    parser.add_argument('--rounds', type=int, default=3, help='runs, of which the fastest counts')
    parser.add_argument('--out', default='runs/studies/whole_models.jsonl', help='results, one line each')
    parser.add_argument('--figure', default='', help='write a PNG here')
    parser.add_argument('--show', action='store_true', help='run nothing, show what is in --out')
    args = parser.parse_args(given)
    args.models = args.models.split(',')
    if unknown := [name for name in args.models if name not in MODELS]:
        parser.error(f'--models has {unknown[0]!r}; known are {", ".join(MODELS)}')
    try:
        args.lengths = sorted({int(length) for length in args.lengths.split(',')})
    except ValueError:
        parser.error(f'--lengths is {args.lengths!r}; give whole numbers, as in 128,512,2048')
    if args.lengths[0] < 4 or args.rounds < 1 or args.outputs < 1:
        parser.error('--lengths needs 4 or more, --rounds and --outputs 1 or more')
    return args


def main() -> None:
    args = parse_arguments()
    device = f'{jax.devices()[0].device_kind} x {jax.device_count()}'
    (dtype,) = loading.values(loading.Given([args.hardware], []), 'DTYPE')
    peak = peak_of(dtype)
    print(f'{device}, {args.hardware}, {args.size}, one example; peak {peak / 1e9:,.0f} GFLOPs a second', flush=True)
    make = functools.partial(Cell, outputs=args.outputs, size=args.size, hardware=args.hardware, device=device,
                             memory_gb=args.memory_gb, rounds=args.rounds)  # fmt: skip
    # All models at one length after the other, so that those which are compared run close to each other.
    cells = [make(model, program, length) for length in args.lengths for program in PROGRAMS for model in args.models]
    records = Records(args.out)
    for cell in [] if args.show else cells:
        if records.get(dataclasses.asdict(cell)) is None:
            result = measured(cell)
            records.add(dataclasses.asdict(cell), result)
            seconds = result['seconds']
            shown = 'too large' if seconds is None else f'{1e3 * seconds:,.1f} ms'
            print(f'{cell.model} {cell.program} at {cell.length:,}: {shown}', flush=True)
    known = {cell: records.get(dataclasses.asdict(cell)) for cell in cells}
    found = {cell: result for cell, result in known.items() if result is not None}
    print_tables(found, args, peak)
    if args.figure:
        draw(found, args, peak, args.figure)


if __name__ == '__main__':
    exit_with_one_line(main)
