"""Forecasts a training step: its time at best on a machine, its memory, and what limits it."""

import dataclasses
from collections.abc import Sequence

from remixer_t5x.costs import counts, step_memory
from remixer_t5x.costs.step_memory import Step, StepMemory
from remixer_t5x.errors import UserError
from remixer_t5x.extras.forecast import compiled_program, machines, roofline
from remixer_t5x.extras.forecast.roofline import Bound
from remixer_t5x.models.layers.compile_target import compiling_for


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A compiled training step.

    Attributes:
        step: what was compiled.
        bound: of one device.
        memory: of one device.
        model_flops: FLOPs of a step by the model's equations, three forward passes, over all devices.
        tokens: input and target tokens of a global batch, with padding.
        devices: how many.
    """

    step: Step
    bound: Bound
    memory: StepMemory
    model_flops: float
    tokens: int
    devices: int

    def mfu(self, seconds: float) -> float:
        """The share of the peak that the model's FLOPs use (Chowdhery et al. 2022, "PaLM") in a step of `seconds`."""
        return self.model_flops / (seconds * self.devices * self.bound.machine.peak('bf16'))

    def dollars_per_million_tokens(self, seconds: float, price: float) -> float:
        """The cost of a million tokens at `price` dollars for a chip and hour."""
        chips = self.devices / self.bound.machine.devices_per_chip
        return price * chips * seconds / 3600 / self.tokens * 1e6


def forecast(step: Step, chip: str, slices: Sequence[int]) -> Forecast:
    """Compiles a step for its partitioner's devices, and bounds its time.

    Args:
        chip: as in a topology.
        slices: the slice or node of each device, in the order of the mesh.

    Raises:
        UserError: the chip is unknown, or its memory is too small for the step.
    """
    machine = machines.find(chip)
    try:
        compiled = step_memory.compile_step(step)
    except Exception as error:
        if not step_memory.is_out_of_memory(error):
            raise
        raise UserError(
            f'the step does not fit into the memory of a {machine.name}; type --memory in place of --speed, '
            'which finds changes with which it fits'
        ) from None
    program = compiled_program.read(compiled.as_text(), len(slices))
    # Kernels hide their products, so the FLOPs of the equations are counted without them.
    with compiling_for('accelerator'):
        row_counts = counts.count_row(step.model, step.batch)
    return Forecast(
        step=step,
        bound=roofline.bound(program, machine, slices),
        memory=step_memory.read_memory(step, compiled),
        model_flops=step.rows * row_counts.training_flops,
        tokens=step.rows * row_counts.tokens,
        devices=len(slices),
    )
