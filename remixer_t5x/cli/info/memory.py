"""`remixer-t5x info --memory`: what the training step of a configuration takes of a described device's memory."""

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from remixer_t5x.architecture import stack
from remixer_t5x.cli import arguments, console, quiet
from remixer_t5x.cli.info.model import check_lengths
from remixer_t5x.config import loading
from remixer_t5x.costs import counts, memory_advice, memory_table, step_memory
from remixer_t5x.costs.step_memory import Step, StepMemory
from remixer_t5x.devices import mesh
from remixer_t5x.devices.hypothetical import Hardware
from remixer_t5x.errors import UserError
from remixer_t5x.layers.single_cpu import as_for_accelerator

_CPU_NOTE = (
    'partitioning follows the described mesh; temporaries are laid out by XLA:CPU, which computes '
    'bfloat16 in float32: take temporaries as a rough upper bound'
)


# What runs/pretrain.gin would give where no other file does.
_DEFAULTS = {
    **{'TASK_FEATURE_LENGTHS': {'inputs': 512, 'targets': 114}, 'TRAIN_STEPS': 524288, 'BATCH_SIZE': 128},
    **{'MICROBATCHES': 1, 'LOSS_NORMALIZING_FACTOR': None, 'DROPOUT_RATE': 0.0, 'PACK': False},
}
_MACROS = (
    *('MODEL', 'OPTIMIZER', 'PARTITIONER', 'TASK_FEATURE_LENGTHS', 'BATCH_SIZE', 'PACK', 'MICROBATCHES'),
    *('LOSS_NORMALIZING_FACTOR', 'DROPOUT_RATE', 'PLATFORM', 'DEVICES', 'DEVICE_MEMORY', 'TOPOLOGY'),
)


def read(args: argparse.Namespace) -> tuple[Step, Hardware]:
    """The training step that the gin files and flags of the command line describe, and what it is compiled for."""
    found = arguments.values(args, *_MACROS, defaults=_DEFAULTS)
    model, optimizer, partitioner, lengths, size, pack, *step, platform, devices, memory, topology = found
    check_lengths(lengths)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UserError(f'BATCH_SIZE is {size!r}; type a whole number from 1, such as --gin.BATCH_SIZE=128')
    microbatches, loss_normalizing_factor, dropout_rate = step
    batch = counts.abstract_batch(lengths, size, pack)
    memory = memory if args.device_memory is None else args.device_memory
    return (
        Step(model, optimizer, partitioner, batch, microbatches, loss_normalizing_factor, dropout_rate > 0),
        Hardware(platform, args.devices or devices, memory, topology, args.compiler),
    )


def show(step: Step, hardware: Hardware, trials: int) -> None:
    """Prints the table, and what to change where the step does not fit.

    Args:
        step: the training step.
        hardware: what it is compiled for.
        trials: how many changes to compile, at most, where it does not fit.

    Raises:
        UserError: the mesh does not fit the devices, or the batch the mesh.
    """
    with quiet.imports(tensorflow=False):
        devices, compiler = hardware.compile_devices()
    step = dataclasses.replace(step, partitioner=dataclasses.replace(step.partitioner, devices=devices))
    say = functools.partial(console.show, pipe_width=110)
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


def _full_remat() -> contextlib.AbstractContextManager[None]:
    """Models traced within recompute everything: gin makes their stacks only then."""
    return loading.bound(f'{stack.__name__}.Stack.remat_policy', stack.full_remat)


def _describe(step: Step, hardware: Hardware, compiler: str) -> str:
    lengths = [step.batch[name].shape[1] for name in ('encoder_input_tokens', 'decoder_target_tokens')]
    target = f'for {hardware.topology}' if compiler == 'XLA:TPU' else 'on virtual CPU devices'
    return (
        f'training step of {step.rows} x ({lengths[0]}, {lengths[1]}) tokens in {step.microbatches} microbatch(es) on '
        f'{step.partitioner.mesh.size} devices ({hardware.platform}), {mesh.spelt(step.partitioner.mesh.shape)}; '
        f'compiling with {compiler} {target}, which takes a minute or several; nothing is run'
    )
