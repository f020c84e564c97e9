"""Searches for settings with which a training step fits into a device's memory. Compiles each changed step.

Changes are tried in order of their cost. Microbatches add a few small kernels, recomputation adds a third of the FLOPs,
and sharding the parameters adds network traffic. A smaller batch or a different optimizer changes the training. If
parameters, gradients and optimizer state alone exceed the memory, reducing activations does not help, so changes that
shard or shrink the state are tried first.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from remixer_t5x.costs.step_memory import StepMemory, StepSpec, bytes_per_device
from remixer_t5x.devices import mesh
from remixer_t5x.optim.optimizer import Optimizer

_MAX_REPETITIONS = 3


class SettingChange(NamedTuple):
    """A changed training step, and the command-line flag and value that make the change."""

    flag: str
    value: str | int
    step: StepSpec


class MemoryTrial(NamedTuple):
    """The memory usage of a changed training step. If a change saves memory, later changes are added to it."""

    flag: str
    value: str | int
    memory: StepMemory
    saves_memory: bool


def search_changes(
    step: StepSpec,
    memory: StepMemory,
    available: int,
    recomputing_model: Any,
    adafactor: Optimizer,
    measure: Callable[[StepSpec], StepMemory],
    limit: int,
) -> Iterator[MemoryTrial]:
    """Adds one change after another until the step uses at most `available` bytes. Yields each change that was tried.

    `memory` is the memory usage of `step`. `recomputing_model` is the step's model with full rematerialization.
    `adafactor` is an Adafactor optimizer that averages and trains the same parameters as the step's optimizer.
    `measure` compiles a step and returns its memory usage; it is called at most `limit` times.
    """

    def full_remat(step: StepSpec, memory: StepMemory) -> SettingChange | None:
        changed = dataclasses.replace(step, model=recomputing_model)
        return (
            SettingChange('--gin.REMAT_POLICY', '@stack.full_remat', changed)
            if step.model != recomputing_model
            else None
        )

    def use_adafactor(step: StepSpec, memory: StepMemory) -> SettingChange | None:
        changed = dataclasses.replace(step, optimizer=adafactor)
        # Skip the compilation if the optimizer state would not shrink, for example if the step already uses Adafactor.
        if bytes_per_device(changed.plan.abstract.opt_state) > 0.9 * memory.optimizer_state:
            return None
        return SettingChange('--gin_file', 'optimizers/adafactor.gin', changed)

    state_is_too_large = 2 * memory.parameters + memory.optimizer_state > available
    state_first = (_double_fsdp, use_adafactor, _double_microbatches, full_remat, _halve_batch)
    activations_first = (_double_microbatches, full_remat, _double_fsdp, _halve_batch, use_adafactor)
    for make_change in state_first if state_is_too_large else activations_first:
        for _ in range(_MAX_REPETITIONS):
            change = make_change(step, memory)
            if change is None or limit < 1:
                break
            limit -= 1
            changed_memory = measure(change.step)
            saves_memory = changed_memory.total < memory.total
            yield MemoryTrial(change.flag, change.value, changed_memory, saves_memory)
            if not saves_memory:
                break
            step, memory = change.step, changed_memory
            if memory.total <= available:
                return


def _double_microbatches(step: StepSpec, memory: StepMemory) -> SettingChange | None:
    microbatches = 2 * step.microbatches
    # Do not split the batch of an embedding model, because its negatives are the other rows of a microbatch.
    if step.model.model_type == 'embedding' or step.rows % (step.partitioner.batch_shards * microbatches):
        return None
    return SettingChange('--gin.MICROBATCHES', microbatches, dataclasses.replace(step, microbatches=microbatches))


def _double_fsdp(step: StepSpec, memory: StepMemory) -> SettingChange | None:
    data, fsdp, tensor = step.partitioner.mesh.shape.values()
    if data % 2:
        return None
    text = mesh.format_sizes((data // 2, fsdp * 2, tensor))
    # Reset `data`, `fsdp` and `tensor` to their defaults, because other values cannot be combined with `sizes`.
    partitioner = dataclasses.replace(step.partitioner, data=-1, fsdp=1, tensor=1, sizes=text)
    return SettingChange('--mesh', text, dataclasses.replace(step, partitioner=partitioner))


def _halve_batch(step: StepSpec, memory: StepMemory) -> SettingChange | None:
    rows = step.rows // 2
    if rows < 1 or rows % (step.partitioner.batch_shards * step.microbatches):
        return None
    batch = {name: array.update(shape=(rows, *array.shape[1:])) for name, array in step.batch.items()}
    return SettingChange('--gin.BATCH_SIZE', rows, dataclasses.replace(step, batch=batch))
