"""How much memory a training step takes on each device, according to the compiler. The step does not run."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from remixer_t5x.devices import compiler_options
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.optim import train_state, train_step

_OPTIONS = {
    # LLVM's optimisations do not change buffers, and take a third of the time.
    'cpu': {'xla_backend_optimization_level': 0},
    # Choosing kernels by their time needs the GPU, as do the kernels that are only used where they were faster.
    'gpu': {'xla_gpu_autotune_level': 0, 'xla_gpu_enable_triton_gemm': False},
}


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step computes, with the names of `train_step.make_train_step` and `train_state.plan`.

    `batch` has the shapes of a global batch. The step is compiled for the partitioner's devices, with XLA's options for
    their platform.
    """

    model: Any
    optimizer: Callable[[Any], Any]
    partitioner: Partitioner
    batch: Mapping[str, jax.ShapeDtypeStruct]
    microbatches: int = 1
    loss_normalizing_factor: float | str | None = train_step.NUM_REAL_TARGET_TOKENS
    dropout: bool = False
    xla_options: compiler_options.ByPlatform | None = None

    @property
    def rows(self) -> int:
        """Rows of a global batch."""
        return next(iter(self.batch.values())).shape[0]

    def plan(self) -> train_state.StatePlan:
        """The shapes of the state that the step changes."""
        return self._plan

    @functools.cached_property
    def _plan(self) -> train_state.StatePlan:
        # To trace the model takes seconds.
        shapes = {name: array.shape for name, array in self.batch.items()}
        return train_state.plan(self.model, self.optimizer, shapes, self.partitioner)


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes on one device.

    Attributes:
        parameters, optimizer_state, batch: inputs of the step, from their shapes and shardings.
        padding: additional memory for the layout of these three (TPU tiles).
        temporaries: the peak of gradients, activations and everything else between start and end.
        results: outputs other than the state, which replaces the input state.
        program: the compiled code.
        total: the sum of all these. If the compiler gave up for lack of memory, what it says it would have needed.
    """

    parameters: int
    optimizer_state: int
    batch: int
    padding: int
    temporaries: int
    results: int
    program: int
    total: int


def measure(step: Step) -> StepMemory:
    """Compiles `step` as `training.loop` would run it.

    Raises:
        UserError: the batch does not divide over the mesh.
    """
    try:
        return of_compiled(step, compiled(step))
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return _out_of_memory(_given(step), str(error))


def compiled(step: Step) -> jax.stages.Compiled:
    """The program of a step for the partitioner's devices.

    Raises:
        UserError: the batch does not divide over the mesh.
        JaxRuntimeError: among others, the TPU compiler found that the device's memory is too small.
    """
    device = step.partitioner.mesh.devices.flat[0]
    own = compiler_options.for_training(step.xla_options, device)
    return compiler_options.compiled(lowered(step), {**_OPTIONS.get(device.platform, {}), **own})


def lowered(step: Step) -> jax.stages.Lowered:
    """The traced step. Raises UserError if the batch does not divide over the mesh."""
    step.partitioner.check_batch_size(step.rows, step.microbatches)
    plan = step.plan()
    function = train_step.make_train_step(
        step.model,
        plan.tx,
        microbatches=step.microbatches,
        loss_normalizing_factor=step.loss_normalizing_factor,
        dropout=step.dropout,
        trainable=getattr(step.optimizer, 'trainable', None),
    )
    return train_step.jit_train_step(function, plan.shardings, step.partitioner, donate=True).lower(
        plan.abstract, abstract_batch(step)
    )


def of_compiled(step: Step, program: jax.stages.Compiled) -> StepMemory:
    """The memory of a program that `compiled` made of `step`."""
    given, found = _given(step), program.memory_analysis()
    parts = dict(
        given,
        padding=max(0, found.argument_size_in_bytes - sum(given.values())),
        temporaries=found.temp_size_in_bytes,
        results=found.output_size_in_bytes - found.alias_size_in_bytes,
        program=found.generated_code_size_in_bytes,
    )
    return StepMemory(**parts, total=sum(parts.values()))


def is_out_of_memory(error: Exception) -> bool:
    """Whether a compiler refused a program because the device's memory is too small for it."""
    return 'RESOURCE_EXHAUSTED' in str(error)


def abstract_batch(step: Step) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a global batch, with their shardings."""
    sharding = step.partitioner.batch_sharding
    return {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding) for name, array in step.batch.items()
    }


def _given(step: Step) -> dict[str, int]:
    """Bytes of the inputs of the step, by their shapes and shardings."""
    abstract = step.plan().abstract
    return dict(
        parameters=bytes_per_device(abstract.params),
        optimizer_state=bytes_per_device((abstract.step, abstract.opt_state, abstract.usual_loss)),
        batch=bytes_per_device(abstract_batch(step)),
    )


def bytes_per_device(tree: Any) -> int:
    """Bytes that one device holds of a tree of ShapeDtypeStructs with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _out_of_memory(given: Mapping[str, int], message: str) -> StepMemory:
    """The memory of a step that the TPU compiler refuses, because it knows the memory of its device."""
    used = re.search(r'Used ([\d.]+)([KMGT])i?B? of', message)
    total = int(float(used[1]) * 2 ** (10 * (1 + 'KMGT'.index(used[2])))) if used else 0
    rest = max(0, total - sum(given.values()))
    return StepMemory(**given, padding=0, temporaries=rest, results=0, program=0, total=total or sum(given.values()))
