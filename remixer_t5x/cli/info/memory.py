"""`remixer-t5x info --memory`: what the training step of a configuration takes of a described device's memory."""

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from remixer_t5x.cli import arguments, console, quiet
from remixer_t5x.cli.info.model import checked_lengths
from remixer_t5x.costs import memory_advice, memory_table, step_memory
from remixer_t5x.costs.step_memory import Step, StepMemory
from remixer_t5x.data import frames
from remixer_t5x.devices import gpu_targets, jax_workarounds, mesh
from remixer_t5x.devices.hardware_table import Topology
from remixer_t5x.devices.hypothetical import GPU_SHARE, Hardware
from remixer_t5x.errors import UserError
from remixer_t5x.kernels.compile_target import compiling_for
from remixer_t5x.models import lora
from remixer_t5x.models.architecture import stack
from remixer_t5x.optim import trainable
from remixer_t5x.optim.parameter_averages import averaged
from remixer_t5x.optim.train_step import NUM_REAL_TARGET_TOKENS

_CPU_NOTE = (
    'partitioning follows the described mesh; temporaries are laid out by XLA:CPU, which computes '
    'bfloat16 in float32: take temporaries as a rough upper bound'
)


# What runs/pretrain.gin would give where no other file does.
_DEFAULTS = {
    **{'TASK_FEATURE_LENGTHS': None, 'TRAIN_STEPS': 524288, 'BATCH_SIZE': 128},
    **{'TRAINABLE': None, 'LORA': None, 'LORA_RANK': 8},
    **{'MICROBATCHES': 1, 'LOSS_NORMALIZING_FACTOR': NUM_REAL_TARGET_TOKENS, 'DROPOUT_RATE': 0.0, 'PACK': False},
    'EMA_DECAY': None,
}
_MACROS = (
    *('MODEL', 'OPTIMIZER', 'PARTITIONER', 'TASK_FEATURE_LENGTHS', 'BATCH_SIZE', 'PACK'),
    *('TRAINABLE', 'LORA', 'LORA_RANK', 'MICROBATCHES', 'LOSS_NORMALIZING_FACTOR', 'DROPOUT_RATE', 'EMA_DECAY'),
    *('XLA_OPTIONS', 'PLATFORM', 'DEVICES', 'DEVICE_MEMORY', 'TOPOLOGY'),
)


def read(args: argparse.Namespace) -> tuple[Step, Hardware]:
    """The training step that the gin files and flags of the command line describe, and what it is compiled for."""
    found = arguments.values(args, *_MACROS, defaults=_DEFAULTS)
    model, optimizer, partitioner, lengths, size, pack, trained, modules, rank, *others = found
    *step, platform, devices, memory, topology = others
    lengths = checked_lengths(model.frame, lengths)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UserError(f'BATCH_SIZE is {size!r}; type a whole number from 1, such as --gin.BATCH_SIZE=128')
    microbatches, loss_normalizing_factor, dropout_rate, ema_decay, options = step
    batch = frames.abstract_batch(model.frame, lengths, size, pack)
    model = lora.adapted(model, modules, rank)
    optimizer = trainable.only(averaged(optimizer, ema_decay), trained, modules)
    memory = memory if args.device_memory is None else args.device_memory
    return (
        Step(
            *(model, optimizer, partitioner, batch, microbatches, loss_normalizing_factor),
            dropout=dropout_rate > 0,
            xla_options=options,
        ),
        Hardware(platform, args.devices or devices, memory, topology, args.compiler),
    )


def recomputing(args: argparse.Namespace) -> Any:
    """The model of that step, recomputing everything."""
    remat = {'REMAT_POLICY': stack.full_remat}
    return lora.adapted(*arguments.values(args, 'MODEL', 'LORA', 'LORA_RANK', defaults=_DEFAULTS, objects=remat))


def show(step: Step, hardware: Hardware, recomputing_model: Any, trials: int) -> None:
    """Prints the table, and what to change where the step does not fit.

    Args:
        step: the training step.
        hardware: what it is compiled for.
        recomputing_model: the step's model, recomputing everything.
        trials: how many changes to compile, at most, where it does not fit.

    Raises:
        UserError: the mesh does not fit the devices, or the batch the mesh.
    """
    with quiet.imports(tensorflow=False):
        devices, compiler = hardware.compile_devices()
    step = placed(step, hardware, devices)
    say = functools.partial(console.show, pipe_width=110)
    say(describe(step, hardware, compiler))
    with tracing_for(hardware, compiler):
        found = _measure(step)
        say(memory_table.memory_table(found, hardware.memory_bytes))
        if compiler == 'XLA:CPU' and hardware.platform != 'cpu':
            say(_CPU_NOTE)
        say(memory_table.verdict(found, hardware.memory_bytes))
        if hardware.memory is not None and hardware.memory_share < 1:
            say(_share_note(hardware))
        if hardware.memory_bytes is not None and found.total > hardware.memory_bytes and trials:
            _try(step, found, recomputing_model, hardware.memory_bytes, trials, say)


def _share_note(hardware: Hardware) -> str:
    return (
        f'JAX takes {hardware.memory_share:.0%} of a GPU: {memory_table.gibibytes(hardware.memory_bytes or 0)} of '
        f'{hardware.memory:g} GiB; {GPU_SHARE}=0.95 before the command gives a run more'
    )


def placed(step: Step, hardware: Hardware, devices: Sequence[Any]) -> Step:
    """The step with a mesh of these devices, which `hardware` describes."""
    partitioner = dataclasses.replace(step.partitioner, devices=devices)
    nodes = len({device.process_index for device in devices})
    if hardware.platform == 'gpu' and nodes > 1:
        # JAX does not report the node of a GPU that is only described.
        partitioner = dataclasses.replace(partitioner, slices=nodes)
    return dataclasses.replace(step, partitioner=partitioner)


@contextlib.contextmanager
def tracing_for(hardware: Hardware, compiler: str) -> Iterator[None]:
    """What is traced within is for the described devices and this compiler."""
    # XLA:CPU, in place of an accelerator's compiler, knows none of its kernels.
    in_place = compiler == 'XLA:CPU' and hardware.platform != 'cpu'
    with contextlib.ExitStack() as contexts:
        chip = Topology.parse(hardware.topology).chip if hardware.topology else None
        contexts.enter_context(compiling_for('accelerator' if in_place else hardware.platform, chip=chip))
        if compiler == 'XLA:GPU':
            contexts.enter_context(jax_workarounds.cudnn_of_described_gpu(gpu_targets.CUDNN_VERSION))
        yield


def _try(
    step: Step, found: StepMemory, recomputing_model: Any, available: int, trials: int, say: Callable[[Any], None]
) -> None:
    def measure(step: Step, full_remat: bool) -> StepMemory:
        return _measure(dataclasses.replace(step, model=recomputing_model) if full_remat else step)

    say('changes, each on top of those before it, compiled in turn:')
    # By flag, as a later value replaces an earlier one.
    kept: dict[str, str] = {}
    fits = False
    for result in memory_advice.search(step, found, available, measure, trials):
        say(memory_table.outcome(result))
        if result.kept:
            kept[result.change.flag] = result.change.typed
        fits = result.memory.total <= available
    say(f'{"fits with" if fits else "still too large with"} {" ".join(kept.values())}' if kept else 'nothing helps')


def _measure(step: Step) -> StepMemory:
    # XLA complains there about compilations that take minutes.
    with quiet.imports(tensorflow=False):
        return step_memory.measure(step)


def describe(step: Step, hardware: Hardware, compiler: str) -> str:
    """A sentence that says what is compiled, and for what."""
    lengths = frames.token_lengths({name: array.shape for name, array in step.batch.items()})
    target = 'on virtual CPU devices' if compiler == 'XLA:CPU' else f'for {hardware.topology}'
    return (
        f'training step of {step.rows} x ({", ".join(map(str, lengths))}) tokens in {step.microbatches} microbatch(es) '
        f'on {step.partitioner.mesh.size} devices ({hardware.platform}), {mesh.spelt(step.partitioner.mesh.shape)}; '
        f'compiling with {compiler} {target}, which takes a minute or several; nothing is run'
    )
