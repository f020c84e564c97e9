"""Compares the memory traffic of a decoding step with a lower bound, for a device that need not be attached.

    python scripts/benchmarks/decoding_bytes.py --topology v5e:1x1 --rows 8 64

Compiles greedy generation with the device's compiler (`pip install 'remixer-t5x[forecast]'` for TPUs, `[forecast-gpu]`
for GPUs) and analyzes the optimized program without running it. The lower bound is the size of the decoder parameters
in the dtype of the activations, plus the size of the unpadded caches. This bound excludes the key and value projections
of the cross-attention, which run before the first step.
"""

import argparse
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import meta
from jax.sharding import SingleDeviceSharding

import remixer_t5x
from remixer_t5x.cli.info.memory import trace_for_hardware
from remixer_t5x.devices.chips import CHIPS, Chip
from remixer_t5x.devices.hardware_table import Hardware, Topology
from remixer_t5x.extras.forecast import compiled_program, roofline
from remixer_t5x.models.seq2seq import Seq2Seq

GB = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--topology', default='v5e:1x1', help='one device, such as v5e:1x1 or h100:1')
    parser.add_argument('--model', default='t5_1_1')
    parser.add_argument('--size', default='base')
    parser.add_argument('--rows', type=int, nargs='+', default=[8, 64])
    parser.add_argument('--inputs', type=int, default=512)
    parser.add_argument('--targets', type=int, default=114)
    args = parser.parse_args()
    # The GPU plugin fails without CUDA's libraries if JAX may use it.
    jax.config.update('jax_platforms', 'cpu')
    topology = Topology.from_string(args.topology)
    hardware = Hardware(topology.platform, devices=1, topology=args.topology)
    hardware.require_chip_compiler()
    model: Any = remixer_t5x.build_model(f'models/{args.model}.gin', f'sizes/{args.size}.gin', DTYPE='bfloat16')
    for rows in args.rows:
        print_memory_traffic(model, hardware, CHIPS[topology.chip], rows, args)


def print_memory_traffic(model: Seq2Seq, hardware: Hardware, chip: Chip, rows: int, args: Any) -> None:
    """Compiles generation for `rows` rows; prints a decoding step's memory traffic, the lower bound, and the time."""
    (device,) = hardware.get_target_devices()
    sharding = SingleDeviceSharding(device)
    names = {'encoder_input_tokens': args.inputs, 'decoder_input_tokens': args.targets}
    shapes = {**{name: (rows, length) for name, length in names.items()}, 'decoder_target_tokens': (rows, args.targets)}
    params = meta.unbox(jax.eval_shape(lambda rng: model.init(rng, shapes), jax.random.key(0)))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), params)
    inputs = jax.ShapeDtypeStruct(shapes['encoder_input_tokens'], jnp.int32, sharding=sharding)

    def generate(params, inputs):
        return model.generate(params, {'encoder_input_tokens': inputs}, args.targets)

    with trace_for_hardware(hardware):
        compiled = jax.jit(generate).lower(params, inputs).compile()
    program = compiled_program.parse_program(compiled.as_text())
    # Selects the kernels in the loop over tokens.
    step = [kernel for kernel in program.kernels if kernel.op_name.startswith('jit(generate)/while')]
    moved = sum(kernel.num_runs * kernel.bytes for kernel in step)
    seconds = sum(kernel.num_runs * max(roofline.compute_kernel_times(kernel, chip)) for kernel in step)
    weights, caches = count_minimum_bytes(model, params, inputs, args.targets)
    estimate = ''
    if chip.clock:
        cycles = sum(kernel.num_runs * (kernel.cycles or 0) for kernel in step)
        estimate = f", the compiler's estimate {cycles / chip.clock * 1e3:.2f} ms"
    minimum = weights + caches
    print(
        f'{chip.name}, {args.model} {args.size}, {rows} rows of {args.inputs} to {args.targets}, bfloat16: '
        f'a step moves {moved / GB:.3f} GB, {moved / minimum:.2f} times the {minimum / GB:.3f} GB that it must read '
        f'(parameters {weights / GB:.3f}, caches {caches / GB:.3f}); at least {seconds * 1e3:.2f} ms{estimate}; '
        f'{sum(kernel.num_runs for kernel in step):,} kernels; temporaries '
        f'{compiled.memory_analysis().temp_size_in_bytes / 2**20:,.0f} MiB',
        flush=True,
    )


def count_minimum_bytes(model: Seq2Seq, params: Any, inputs: Any, length: int) -> tuple[int, int]:
    """Returns the sizes in bytes of the parameters that a decoding step reads, and of the full caches."""

    def allocate_caches(params, inputs):
        return model._encode_for_generation(params, inputs, length).allocate(1)

    caches = jax.tree.leaves(jax.eval_shape(allocate_caches, params, inputs))
    output = jax.eval_shape(model.module.get_output_kernel, params)
    used = [math.prod(output.shape)]
    for path, leaf in jax.tree_util.tree_leaves_with_path(params['decoder']):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        if not name.endswith(('cross_attention/key/kernel', 'cross_attention/value/kernel')):
            used.append(leaf.size)
    return sum(used) * jnp.dtype(model.module.dtype).itemsize, sum(leaf.size * leaf.dtype.itemsize for leaf in caches)


if __name__ == '__main__':
    main()
