"""`remixer-t5x info --memory`: forecasts the device memory of a training step, without access to the device."""

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from remixer_t5x import lazy_imports, ranges
from remixer_t5x.cli import console
from remixer_t5x.cli.info.model import load_model_macros, resolve_feature_lengths
from remixer_t5x.costs import step_memory
from remixer_t5x.costs.step_memory import StepMemory, StepSpec, format_gibibytes
from remixer_t5x.data import batch_formats
from remixer_t5x.devices import jax_workarounds, mesh
from remixer_t5x.devices.hardware_table import CUDNN_VERSION, GPU_SHARE, Hardware, Topology
from remixer_t5x.kernels.compile_target import compile_for_platform
from remixer_t5x.models import lora
from remixer_t5x.optim import trainable
from remixer_t5x.optim.parameter_averages import average_params
from remixer_t5x.optim.train_step import NUM_REAL_TARGET_TOKENS

_CPU_NOTE = (
    'partitioning follows the described mesh; temporaries are laid out by XLA:CPU, which computes bfloat16 in float32: '
    'their size is a rough upper bound'
)
# Default values from runs/pretrain.gin, for macros that no other gin file sets.
_DEFAULTS = {
    **{'TASK_FEATURE_LENGTHS': None, 'TRAIN_STEPS': 524288, 'BATCH_SIZE': 128},
    **{'LORA_RANK': 8, 'PACK': False, 'EMA_DECAY': None},
    **{'TRAINABLE': None, 'LORA': None, 'FRESH_PARAMETERS': None, 'INITIAL_CHECKPOINT_MAP': {}},
    **{'MICROBATCHES': 1, 'LOSS_NORMALIZING_FACTOR': NUM_REAL_TARGET_TOKENS},
}
# The macros of the settings of `trainable.restrict_to_trainable`, in order.
_RESTRICTIONS = ('TRAINABLE', 'LORA', 'MODEL', 'FRESH_PARAMETERS', 'INITIAL_CHECKPOINT_MAP')
_MACROS = (
    *('OPTIMIZER', 'PARTITIONER', 'TASK_FEATURE_LENGTHS', 'BATCH_SIZE', 'PACK'),
    *(*_RESTRICTIONS, 'LORA_RANK', 'MICROBATCHES', 'LOSS_NORMALIZING_FACTOR', 'EMA_DECAY'),
    *('XLA_OPTIONS', 'PLATFORM', 'DEVICES', 'DEVICE_MEMORY', 'TOPOLOGY'),
)
_ROWS = {
    'parameters': 'parameters',
    'optimizer_state': 'optimizer state',
    'batch': 'batch',
    'padding': 'layout padding of the above',
    'temporaries': 'temporaries: gradients, activations',
    'outputs': 'results other than the state',
    'program': 'program',
}
# Changes that reduce the memory, in order of their cost.
_SAVINGS = (
    'to save memory: --gin.MICROBATCHES=2 or more, --gin.REMAT_POLICY=@stack.full_remat, --mesh=fsdp=-1, or a smaller '
    '--gin.BATCH_SIZE'
)
_print = functools.partial(console.print_with_rich, pipe_width=110)


def read_step_spec(args: argparse.Namespace) -> tuple[StepSpec, Hardware]:
    """Reads the training step and its hardware from the gin files and flags of the command line."""
    values = dict(zip(_MACROS, load_model_macros(args, *_MACROS, defaults=_DEFAULTS), strict=True))
    model, size = values['MODEL'], values['BATCH_SIZE']
    ranges.check_setting('BATCH_SIZE', size, ranges.Count)
    lengths = resolve_feature_lengths(model.model_type, values['TASK_FEATURE_LENGTHS'])
    step = StepSpec(
        lora.with_adapters(model, values['LORA'], values['LORA_RANK']),
        trainable.restrict_to_trainable(
            average_params(values['OPTIMIZER'], values['EMA_DECAY']), *(values[name] for name in _RESTRICTIONS)
        ),
        values['PARTITIONER'],
        batch_formats.get_abstract_batch(model.model_type, lengths, size, values['PACK']),
        values['MICROBATCHES'],
        values['LOSS_NORMALIZING_FACTOR'],
        xla_options=values['XLA_OPTIONS'],
    )
    memory = values['DEVICE_MEMORY'] if args.device_memory is None else args.device_memory
    devices = args.devices or values['DEVICES']
    return step, Hardware(values['PLATFORM'], devices, memory, values['TOPOLOGY'], args.compiler)


def print_memory_tables(args: argparse.Namespace) -> None:
    """Prints the memory table, and suggests changes if the step does not fit into memory."""
    step, hardware = read_step_spec(args)
    with lazy_imports.discard_stderr():
        devices = hardware.get_target_devices()
    step, available = place_step_on_devices(step, devices), hardware.memory_bytes
    _print(describe_train_step(step, hardware))
    # XLA prints warnings about slow compilations to standard error.
    with trace_for_hardware(hardware), lazy_imports.discard_stderr():
        memory = step_memory.measure_memory(step)
    _print(build_memory_table(memory, available))
    if hardware.compiler_name == 'XLA:CPU' and hardware.platform != 'cpu':
        _print(_CPU_NOTE)
    _print(describe_memory_fit(memory, available))
    if available is not None and hardware.memory_share < 1:
        _print(
            f'JAX uses {hardware.memory_share:.0%} of a GPU: {format_gibibytes(available)} of '
            f'{hardware.memory:g} GiB; set {GPU_SHARE}=0.95 to use more'
        )
    if available is not None and memory.total > available:
        _print(_SAVINGS)
        if memory.optimizer_state >= memory.parameters:
            _print('the optimizer state is smaller with --gin_file=optimizers/adafactor.gin')


def build_memory_table(memory: StepMemory, available: int | None) -> Table:
    """Returns a table of the memory by component and in total. The table has percentages if `available` is not None."""
    first = 'on each device'
    shares = [] if available is None else [f'% of {format_gibibytes(available)}']
    table = console.build_table(first, 'bytes', 'MiB', *shares, words=(first,))
    for name, label in {**_ROWS, 'total': 'total'}.items():
        size = getattr(memory, name)
        share = [] if available is None else [f'{100 * size / available:.1f}']
        if name == 'total':
            table.add_section()
        table.add_row(label, f'{size:,}', f'{size / 2**20:,.1f}', *share)
    return table


def describe_memory_fit(memory: StepMemory, available: int | None) -> str:
    """Describes whether the training step fits into `available` bytes of device memory."""
    if available is None:
        return 'the hardware file does not specify the memory of a device; pass it in GiB, such as --device_memory=16'
    if memory.total > available:
        return f'does not fit: {format_gibibytes(memory.total)} needed, {format_gibibytes(available)} available'
    return f'fits: {format_gibibytes(available - memory.total)} of {format_gibibytes(available)} are left'


def place_step_on_devices(step: StepSpec, devices: Sequence[Any]) -> StepSpec:
    """Places the step on a mesh of `devices`, which may be absent."""
    return dataclasses.replace(step, partitioner=dataclasses.replace(step.partitioner, devices=devices))


@contextlib.contextmanager
def trace_for_hardware(hardware: Hardware) -> Iterator[None]:
    """Returns a context manager in which JAX traces models for the devices and the compiler of `hardware`."""
    # XLA:CPU, which is used if the compiler of the accelerator is not available, cannot compile custom kernels, and
    # those for TPUs do not support TPU v3 in bfloat16.
    chip = Topology.from_string(hardware.topology).chip if hardware.topology else None
    has_no_kernels = hardware.compiler_name == 'XLA:CPU' and hardware.platform != 'cpu' or chip == 'v3'
    platform = 'accelerator' if has_no_kernels else hardware.platform
    assume_cudnn = jax_workarounds.assume_cudnn_version(CUDNN_VERSION)
    with compile_for_platform(platform):
        with assume_cudnn if hardware.compiler_name == 'XLA:GPU' else contextlib.nullcontext():
            yield


def describe_train_step(step: StepSpec, hardware: Hardware) -> str:
    """Describes the training step to compile, the hardware, and the compiler."""
    lengths = batch_formats.get_row_lengths({name: array.shape for name, array in step.batch.items()})
    compiler = hardware.compiler_name
    target = 'on virtual CPU devices' if compiler == 'XLA:CPU' else f'for {hardware.topology}'
    shape = step.partitioner.mesh.shape
    return (
        f'training step of {step.batch_size} x ({", ".join(map(str, lengths))}) tokens in {step.microbatches} '
        f'microbatch(es) on {step.partitioner.mesh.size} devices ({hardware.platform}), '
        f'{mesh.format_mesh_shape(shape)}; compiling with {compiler} {target}, which takes minutes; nothing is run'
    )
