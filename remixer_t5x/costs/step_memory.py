"""Computes a training step's memory usage per device, as reported by the compiler.

The step is compiled but not run.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax

from remixer_t5x.devices import compiler_options
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.optim import train_state, train_step
from remixer_t5x.optim.optimizer import Optimizer

_COMPILER_OPTIONS = {
    # Disable LLVM's optimizations, which do not change buffers but take a third of the compile time.
    'cpu': {'xla_backend_optimization_level': 0},
    # Disable autotuning, which requires the GPU, and Triton GEMMs, which require autotuning.
    'gpu': {'xla_gpu_autotune_level': 0, 'xla_gpu_enable_triton_gemm': False},
}


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """Specifies a training step to compile: its model, optimizer, mesh and batch.

    `batch` contains the shapes and dtypes of a global batch. The step is compiled for the partitioner's devices, with
    the XLA options for their platform.
    """

    model: Any
    optimizer: Optimizer
    partitioner: Partitioner
    batch: Mapping[str, jax.ShapeDtypeStruct]
    microbatches: int = 1
    loss_normalizing_factor: float | str | None = train_step.NUM_REAL_TARGET_TOKENS
    xla_options: compiler_options.OptionsByPlatform | None = None

    @property
    def batch_size(self) -> int:
        """The number of rows of a global batch."""
        return next(iter(self.batch.values())).shape[0]

    @functools.cached_property
    def state_plan(self) -> train_state.TrainStatePlan:
        """The shapes and shardings of the train state, cached because tracing the model takes seconds."""
        shapes = {name: array.shape for name, array in self.batch.items()}
        return train_state.plan_train_state(self.model, self.optimizer, shapes, self.partitioner)

    def get_abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes, dtypes and shardings of a global batch."""
        sharding = self.partitioner.batch_sharding
        return {name: array.update(sharding=sharding) for name, array in self.batch.items()}


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """The memory usage of a training step on one device, in bytes.

    Attributes:
        parameters, optimizer_state, batch: sizes of the step's inputs, computed from shapes and shardings.
        padding: additional memory that the device layout of the inputs requires (TPU tiles).
        temporaries: peak memory of gradients, activations and all other arrays during the step.
        outputs: size of the outputs, except for the train state, which is updated in place.
        program: size of the compiled code.
        total: sum of the other fields, or the memory reported by the compiler if it ran out of memory.
    """

    parameters: int
    optimizer_state: int
    batch: int
    padding: int
    temporaries: int
    outputs: int
    program: int
    total: int


def measure_memory(step: StepSpec) -> StepMemory:
    """Compiles a step and returns its memory usage. Raises UserError if the mesh does not evenly divide the batch."""
    try:
        return read_memory_usage(step, compile_step(step))
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory_error(error):
            raise
        return _parse_out_of_memory_error(_count_input_bytes(step), str(error))


def compile_step(step: StepSpec, for_analysis: bool = True) -> jax.stages.Compiled:
    """Compiles a step for the partitioner's devices.

    `for_analysis` skips optimizations that require the device or do not affect memory. Raises UserError if the mesh
    does not evenly divide the batch, and JaxRuntimeError if XLA fails, for example because the TPU's memory is too
    small.
    """
    step.partitioner.check_batch_size(step.batch_size, step.microbatches)
    function = train_step.make_train_step(
        step.model,
        step.state_plan.tx,
        microbatches=step.microbatches,
        loss_normalizing_factor=step.loss_normalizing_factor,
        trainable=getattr(step.optimizer, 'trainable', None),
    )
    jitted = train_step.jit_train_step(function, step.state_plan.shardings, step.partitioner, donate=True)
    device = step.partitioner.mesh.devices.flat[0]
    options = _COMPILER_OPTIONS.get(device.platform, {}) if for_analysis else {}
    options = {**options, **compiler_options.get_training_options(step.xla_options, device)}
    return compiler_options.compile_with_options(
        jitted.lower(step.state_plan.abstract, step.get_abstract_batch()), options
    )


def read_memory_usage(step: StepSpec, program: jax.stages.Compiled) -> StepMemory:
    """Returns the memory usage of the program that `compile_step` returned for `step`."""
    inputs, analysis = _count_input_bytes(step), program.memory_analysis()
    parts = dict(
        inputs,
        padding=max(0, analysis.argument_size_in_bytes - sum(inputs.values())),
        temporaries=analysis.temp_size_in_bytes,
        outputs=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        program=analysis.generated_code_size_in_bytes,
    )
    return StepMemory(**parts, total=sum(parts.values()))


def is_out_of_memory_error(error: Exception) -> bool:
    """Returns whether a compilation failed because the device memory is too small."""
    return 'RESOURCE_EXHAUSTED' in str(error)


def _count_input_bytes(step: StepSpec) -> dict[str, int]:
    state = step.state_plan.abstract
    return dict(
        parameters=count_bytes_per_device(state.params),
        optimizer_state=count_bytes_per_device((state.step, state.opt_state, state.usual_loss)),
        batch=count_bytes_per_device(step.get_abstract_batch()),
    )


def count_bytes_per_device(tree: Any) -> int:
    """Returns the number of bytes that a tree of ShapeDtypeStructs with shardings occupies on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def format_gibibytes(size: int) -> str:
    """Formats a number of bytes in the form `1.23 GiB`."""
    return f'{size / 2**30:,.2f} GiB'


def _parse_out_of_memory_error(inputs: Mapping[str, int], message: str) -> StepMemory:
    """Parses the memory usage in an out-of-memory error of the TPU compiler."""
    used = re.search(r'Used ([\d.]+)([KMGT])i?B? of', message)
    total = int(float(used[1]) * 2 ** (10 * (1 + 'KMGT'.index(used[2])))) if used else sum(inputs.values())
    temporaries = max(0, total - sum(inputs.values()))
    return StepMemory(**inputs, padding=0, temporaries=temporaries, outputs=0, program=0, total=total)
