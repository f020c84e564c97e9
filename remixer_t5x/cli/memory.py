"""`remixer-t5x info --memory`: what the training step of a configuration takes of a described device's memory."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gin
import jax
from rich.console import Console

from remixer_t5x.architecture import stack
from remixer_t5x.cli import quiet
from remixer_t5x.cli.info import check_lengths
from remixer_t5x.costs import counts, memory_advice, memory_table, step_memory
from remixer_t5x.costs.step_memory import Step, StepMemory
from remixer_t5x.devices import mesh
from remixer_t5x.devices.hypothetical import Hardware
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.layers.single_cpu import as_for_accelerator

_PIPE_WIDTH = 110
_CPU_NOTE = (
    'the partitioning is that of the described mesh; the layout of temporaries is that of XLA:CPU, which computes '
    'bfloat16 in float32: take temporaries as a rough upper bound'
)


def batch(feature_lengths: Mapping[str, int], batch_size: int, pack: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a global batch, without any data."""
    check_lengths(feature_lengths)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise UserError(f'BATCH_SIZE is {batch_size!r}; type a whole number from 1, such as --gin.BATCH_SIZE=128')
    return counts.abstract_batch(feature_lengths, batch_size, pack)


def step(
    model: Any,
    optimizer: Callable[[Any], Any],
    partitioner: Partitioner,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    microbatches: int = 1,
    loss_normalizing_factor: float | None = None,
    dropout_rate: float = 0.0,
) -> Step:
    """A training step as `runs/pretrain.gin` would make it; the macros have the same names."""
    return Step(model, optimizer, partitioner, batch, microbatches, loss_normalizing_factor, dropout_rate > 0)


def run(step: Step, hardware: Hardware, trials: int = 8) -> None:
    """Prints the table, and what to change where the step does not fit; gin binds the arguments in `runs/memory.gin`.

    Args:
        step: the training step.
        hardware: what it is compiled for.
        trials: how many changes to compile, at most, where it does not fit.

    Raises:
        UserError: the mesh does not fit the devices, or the batch the mesh.
    """
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 0:
        raise UserError(f'--memory is {trials!r}; type how many changes to try, such as --memory=8, or --memory=0')
    with quiet.imports(tensorflow=False):
        devices, compiler = hardware.compile_devices()
    step = dataclasses.replace(step, partitioner=dataclasses.replace(step.partitioner, devices=devices))
    say = _printer()
    say(_describe(step, hardware, compiler))
    with as_for_accelerator() if hardware.platform != 'cpu' else contextlib.nullcontext():
        found = _measure(step, False)
        say(memory_table.memory_table(found, hardware.memory_bytes))
        if compiler == 'XLA:CPU' and hardware.platform != 'cpu':
            say(_CPU_NOTE)
        say(memory_table.verdict(found, hardware.memory_bytes))
        if hardware.memory_bytes is not None and found.total > hardware.memory_bytes and trials:
            _try(step, found, hardware.memory_bytes, trials, say)


def _try(step: Step, found: StepMemory, available: int, trials: int, say: Callable[[Any], None]) -> None:
    say('changes, each on top of those before it, compiled in turn:')
    # By flag, as a later value replaces an earlier one.
    kept: dict[str, str] = {}
    fits = False
    for result in memory_advice.search(step, found, available, _measure, trials):
        say(memory_table.outcome(result))
        if result.kept:
            kept[result.change.flag] = result.change.typed
        fits = result.memory.total <= available
    say(f'{"fits with" if fits else "still too large with"} {" ".join(kept.values())}' if kept else 'nothing helps')


def _measure(step: Step, full_remat: bool) -> StepMemory:
    # XLA complains there about compilations that take minutes.
    with quiet.imports(tensorflow=False), _full_remat() if full_remat else contextlib.nullcontext():
        return step_memory.measure(step)


@contextlib.contextmanager
def _full_remat() -> Iterator[None]:
    """Models traced within recompute everything: their stacks are made by gin only then."""
    name = f'{stack.__name__}.Stack.remat_policy'
    with gin.unlock_config():
        before = gin.query_parameter(name)
        gin.bind_parameter(name, stack.full_remat)
        try:
            yield
        finally:
            gin.bind_parameter(name, before)


def _describe(step: Step, hardware: Hardware, compiler: str) -> str:
    lengths = [step.batch[name].shape[1] for name in ('encoder_input_tokens', 'decoder_target_tokens')]
    target = f'for {hardware.topology}' if compiler == 'XLA:TPU' else 'on virtual CPU devices'
    return (
        f'training step of {step.rows} x ({lengths[0]}, {lengths[1]}) tokens in {step.microbatches} microbatch(es) on '
        f'{step.partitioner.mesh.size} devices ({hardware.platform}), {mesh.spelt(step.partitioner.mesh.shape)}; '
        f'compiling with {compiler} {target}, which takes a minute or several; nothing is run'
    )


def _printer() -> Callable[[Any], None]:
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)

    def say(what: Any) -> None:
        # Written by us, because rich would end the process itself when the reader of a pipe has left.
        with console.capture() as captured:
            console.print(what, soft_wrap=isinstance(what, str), markup=False)
        sys.stdout.write(captured.get())
        sys.stdout.flush()

    return say
