"""The subcommands of `remixer-t5x`: one entry each. A new one is an entry here and a module with a function `run`.

A flag of a command is a short name for a gin macro, so that everything a command reads can also stand in a gin file.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Flag:
    """`--name VALUE` for the macro `macro`."""

    name: str
    macro: str
    help: str


@dataclasses.dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        module: where its function `run` is; gin binds that function's arguments.
        base: gin files it adds before the user's.
        partial: it reads only a part of a training configuration (see `gin_config.load`).
        env: environment variables to set before any library is imported.
        tensorflow: it reads data, so TensorFlow will be loaded.
        examples: what to type, for `--help`.
    """

    name: str
    help: str
    module: str
    base: tuple[str, ...] = ()
    partial: bool = True
    env: tuple[tuple[str, str], ...] = ()
    tensorflow: bool = False
    flags: tuple[Flag, ...] = ()
    examples: tuple[str, ...] = ()


COMMANDS = (
    Command(
        'train',
        'pretrain a model; the same command again resumes',
        'remixer_t5x.cli.train',
        partial=False,
        # glibc gives large buffers back after every step and pays their page faults again; keeping them is faster.
        env=(
            ('MALLOC_MMAP_THRESHOLD_', '4294967296'),
            ('MALLOC_TRIM_THRESHOLD_', '17179869184'),
            ('MALLOC_TOP_PAD_', '268435456'),
        ),
        tensorflow=True,
        examples=(
            'remixer-t5x train --gin_file=experiments/quickstart.gin',
            'remixer-t5x train --gin_file=experiments/quickstart.gin --gin.MODEL_DIR=/tmp/run --gin.TRAIN_STEPS=1000',
        ),
    ),
    Command(
        'info',
        'parameters and FLOPs of a model, module by module, without a device',
        'remixer_t5x.cli.info',
        base=('runs/info.gin',),
        env=(('JAX_PLATFORMS', 'cpu'),),
        flags=(Flag('--depth', 'INFO_DEPTH', 'how many levels of modules to show (default 3)'),),
        examples=('remixer-t5x info --gin_file=models/remixer.gin --gin_file=sizes/base.gin',),
    ),
    Command(
        'data',
        'the first examples of a task, as text and as ids, and how well they pack',
        'remixer_t5x.cli.data',
        base=('runs/data.gin',),
        env=(('JAX_PLATFORMS', 'cpu'),),
        tensorflow=True,
        flags=(
            Flag('--split', 'DATA_SPLIT', "which split to read (default 'train')"),
            Flag('--num_examples', 'NUM_EXAMPLES', 'how many examples to show (default 2)'),
        ),
        examples=('remixer-t5x data --gin_file=data/python_docs.gin --num_examples=1',),
    ),
    Command(
        'vocab',
        'size, special ids and pieces of a vocabulary',
        'remixer_t5x.cli.vocab',
        base=('runs/vocab.gin',),
        env=(('JAX_PLATFORMS', 'cpu'),),
        tensorflow=True,
        flags=(Flag('--text', 'VOCAB_TEXT', 'the text whose pieces are shown'),),
        examples=("remixer-t5x vocab --gin_file=data/python_docs.gin --text='A list of numbers.'",),
    ),
    Command(
        'fill_in',
        'corrupted examples, and what a trained model puts into the gaps',
        'remixer_t5x.cli.fill_in',
        base=('runs/fill_in.gin',),
        tensorflow=True,
        flags=(Flag('--num_examples', 'NUM_EXAMPLES', 'how many examples to show (default 3)'),),
        examples=('remixer-t5x fill_in --gin_file=experiments/quickstart.gin',),
    ),
)
