"""What to change if a training step does not fit into a device's memory: changes in order of their price, each
compiled.

Microbatches cost a few small kernels, recomputation a third more FLOPs, sharded parameters network traffic; a smaller
batch and another optimizer change the training. If parameters, gradients and optimizer state alone are too large,
saving activations cannot help, and changes that split or shrink the state come first.
"""

import dataclasses
from collections.abc import Callable, Iterator

from remixer_t5x.costs.step_memory import Step, StepMemory, bytes_per_device
from remixer_t5x.devices import mesh
from remixer_t5x.optim import optimizer

# (step, recompute everything) -> memory of the step.
Measure = Callable[[Step, bool], StepMemory]
_DOUBLINGS = 3


@dataclasses.dataclass(frozen=True)
class Change:
    """One change: the flag and value that the user types for it, and the changed step."""

    flag: str
    value: str | int
    step: Step
    full_remat: bool

    @property
    def typed(self) -> str:
        return f'{self.flag}={self.value}'


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A compiled change; `kept` says whether it saved memory, so that later changes build on it."""

    change: Change
    memory: StepMemory
    kept: bool


def search(step: Step, found: StepMemory, available: int, measure: Measure, limit: int) -> Iterator[Outcome]:
    """Tries changes on top of each other until the step takes at most `available` bytes, with at most `limit`
    compilations.
    """
    current, remat, best = step, False, found
    state_first = 2 * found.parameters + found.optimizer_state > available
    kinds = (_more_fsdp, _adafactor, _microbatches, _full_remat, _smaller_batch)
    in_order = (_microbatches, _full_remat, _more_fsdp, _smaller_batch, _adafactor)
    for kind in kinds if state_first else in_order:
        for _ in range(_DOUBLINGS):
            change = kind(current, remat, best)
            if change is None or limit < 1:
                break
            limit -= 1
            memory = measure(change.step, change.full_remat)
            kept = memory.total < best.total
            yield Outcome(change, memory, kept)
            if not kept:
                break
            current, remat, best = change.step, change.full_remat, memory
            if best.total <= available:
                return


def _microbatches(step: Step, remat: bool, found: StepMemory) -> Change | None:
    microbatches = 2 * step.microbatches
    if step.rows % (step.partitioner.batch_shards * microbatches):
        return None
    return Change('--gin.MICROBATCHES', microbatches, dataclasses.replace(step, microbatches=microbatches), remat)


def _full_remat(step: Step, remat: bool, found: StepMemory) -> Change | None:
    return None if remat else Change('--gin.REMAT_POLICY', '@stack.full_remat', step, True)


def _more_fsdp(step: Step, remat: bool, found: StepMemory) -> Change | None:
    data, fsdp, tensor = step.partitioner.mesh.shape.values()
    if data % 2:
        return None
    text = mesh.spelt_sizes((data // 2, fsdp * 2, tensor))
    # Clears the single sizes, because the text replaces them.
    partitioner = dataclasses.replace(step.partitioner, data=-1, fsdp=1, tensor=1, sizes=text)
    return Change('--mesh', text, dataclasses.replace(step, partitioner=partitioner), remat)


def _smaller_batch(step: Step, remat: bool, found: StepMemory) -> Change | None:
    rows = step.rows // 2
    if rows < 1 or rows % (step.partitioner.batch_shards * step.microbatches):
        return None
    batch = {name: array.update(shape=(rows, *array.shape[1:])) for name, array in step.batch.items()}
    return Change('--gin.BATCH_SIZE', rows, dataclasses.replace(step, batch=batch), remat)


def _adafactor(step: Step, remat: bool, found: StepMemory) -> Change | None:
    factored = optimizer.adafactor(getattr(step.optimizer, 'learning_rate', None) or 1e-3)
    changed = dataclasses.replace(step, optimizer=factored)
    # This needs no compilation. An optimizer that is already Adafactor would not change.
    if bytes_per_device(changed.plan().abstract.opt_state) > 0.9 * found.optimizer_state:
        return None
    return Change('--gin_file', 'optimizers/adafactor.gin', changed, remat)
