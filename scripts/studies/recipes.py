"""What the recipes of configs/experiments/papers cost, from their shapes alone.

    python scripts/studies/recipes.py

Each recipe's state and training step are traced for one device; nothing is compiled or run. FLOPs are those of
`costs/counts.py`: matrix products and Fourier transforms of the traced step, forward and backward, times the number of
steps. Hours are of one H100 at --utilization of its bfloat16 peak. State: parameters, optimizer, step. `remixer-t5x
info --memory` has activations too; it compiles the step.
"""

import argparse
import dataclasses
import math
import pathlib
import re

import jax

from remixer_t5x.config import files, loading
from remixer_t5x.costs import counts
from remixer_t5x.costs.step_memory import Step
from remixer_t5x.data import batch_formats
from remixer_t5x.extras.forecast import machines
from remixer_t5x.optim import train_step

FOLDER = 'experiments/papers'
CHIP = 'h100'
UTILIZATION = 0.3
MACROS = ('MODEL', 'OPTIMIZER', 'PARTITIONER', 'TASK_FEATURE_LENGTHS', 'BATCH_SIZE', 'TRAIN_STEPS', 'DROPOUT_RATE')


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of a whole run; bytes of the state, FLOPs of all steps."""

    parameters: int
    state_bytes: int
    steps: int
    flops: float

    def hours(self, utilization: float = UTILIZATION) -> float:
        """Of one chip."""
        return self.flops / (utilization * machines.find(CHIP).peak('bf16')) / 3600

    def line(self) -> str:
        """As a recipe's header has it."""
        hours = f'{self.hours():.0f}' if self.hours() >= 10 else f'{self.hours():.2g}'
        return (
            f'# Cost: {self.parameters / 1e6:.1f}M parameters, {self.state_bytes / 1e9:.2f} GB of state, '
            f'{self.flops:.2g} FLOPs, {hours} H100-hours at {UTILIZATION:.0%} of the peak.'
        )


def names() -> list[str]:
    folder = pathlib.Path(files.find(f'{FOLDER}/remixer_base_c4.gin')).parent
    return sorted(path.name for path in folder.glob('*.gin'))


def traced(name: str) -> Cost:
    """Traces the state and the step of a recipe, on the devices that its hardware file describes."""
    (model, optimizer, partitioner, lengths, batch_size, steps, dropout, devices) = loading.values(
        loading.Given([f'{FOLDER}/{name}'], [('MODEL_DIR', '/nowhere'), ('INITIAL_CHECKPOINT_PATH', 'None')]),
        *MACROS,
        'DEVICES',
    )
    dataclasses.replace(partitioner, devices=devices).check_batch_size(batch_size)
    one = dataclasses.replace(partitioner, devices=jax.devices()[:1])
    step = Step(model, optimizer, one, batch_formats.abstract_batch(model.model_type, lengths, batch_size))
    plan = step.plan
    function = train_step.make_train_step(model, plan.tx, dropout=dropout > 0)
    with one.activate():
        of_a_step = counts.total_flops(function, plan.abstract, step.batch)
    leaves = jax.tree.leaves(plan.abstract)
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(plan.abstract.params))
    return Cost(parameters, size, steps, steps * of_a_step)


def written(name: str) -> str:
    """The line of a recipe's header that says what the recipe costs; empty if the header has no such line."""
    text = pathlib.Path(files.find(f'{FOLDER}/{name}')).read_text(encoding='utf-8')
    found = re.search(r'^# Cost: .*$', text, re.MULTILINE)
    return found[0] if found else ''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--utilization', type=float, default=UTILIZATION, help='part of the peak that a run reaches')
    args = parser.parse_args()
    print(f'| recipe | parameters | state, GB | steps | FLOPs | {CHIP} hours at {args.utilization:.0%} |')
    print('|---' * 6 + '|')
    for name in names():
        cost = traced(name)
        print(
            f'| {name} | {cost.parameters:,} | {cost.state_bytes / 1e9:.2f} | {cost.steps:,} | {cost.flops:.3g} '
            f'| {cost.hours(args.utilization):.3g} |',
            flush=True,
        )


if __name__ == '__main__':
    main()
