"""Helpers of the launch tests: fake programs on PATH, a tiny training run, and the environment of the scripts."""

import os
import pathlib
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.launch.clusters.fake_commands import TIMEOUT
from tests.support import feed_forward, paths

SLURM = ('sbatch', 'srun', 'scontrol')
LAUNCH = paths.SCRIPTS / 'launch'
COMMAND = ['--', 'train', '--gin_file=experiments/python_docs.gin', '--gin.FILES=a b $x']
STEPS = 20
TEXT = '\n\n'.join(f'Paragraph {i}: the sum of {i} and {i} is {2 * i}, as everybody knows.' for i in range(400))
TRAIN = (
    *('train', '--gin_file=models/t5_1_1.gin', '--gin_file=sizes/tiny.gin', '--gin_file=data/own_text.gin'),
    *('--gin_file=optimizers/adafactor_constant.gin', '--gin_file=hardware/cpu.gin', '--gin_file=runs/pretrain.gin'),
    *('--gin.NUM_ENCODER_LAYERS=1', '--gin.NUM_DECODER_LAYERS=1', '--gin.EMBED_DIM=16', '--gin.MLP_DIM=16'),
    *feed_forward.FLAGS,
    *('--gin.VOCABULARY=@vocabularies.byte()', '--gin.VOCAB_SIZE=384'),
    *('--gin.BATCH_SIZE=4', "--gin.TASK_FEATURE_LENGTHS={'inputs': 16, 'targets': 12}", '--gin.EVAL_PERIOD=None'),
    *('--gin.CHECKPOINT_PERIOD=5', '--gin.LOG_PERIOD=1', f'--gin.TRAIN_STEPS={STEPS}', '--gin.KEEP_CHECKPOINTS=None'),
)


def write_program(path: pathlib.Path, *lines: str) -> pathlib.Path:
    """Writes an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text('\n'.join(['#!/usr/bin/env bash', *lines, '']))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def write_programs(folder: pathlib.Path) -> pathlib.Path:
    """Writes the fake programs to a folder for PATH."""
    for name, module in (('gcloud', 'gcloud'), ('kubectl', 'kubectl'), *((name, f'slurm {name}') for name in SLURM)):
        write_program(folder / name, f'exec {sys.executable} -m tests.launch.clusters.{module} "$@"')
    return folder


def run_script(script: str, *arguments: str, env: Mapping[str, str] | None = None, code: int = 0) -> tuple[str, str]:
    """Returns standard output and standard error of a launch script; `env` contains additional variables."""
    done = subprocess.run(
        ['bash', str(LAUNCH / script), *arguments],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def write_venv_python(folder: pathlib.Path, *body: str) -> pathlib.Path:
    """Writes a `python` that runs `body` instead of `-m venv DIR`, with DIR as $3."""
    return write_program(
        folder / 'python_for_venv',
        'if [[ "$1 $2" == "-m venv" ]]; then',
        *body,
        f'else exec {sys.executable} "$@"; fi',
    )


def site_packages() -> Sequence[str]:
    """Returns the folders of the installed libraries of this process."""
    return [entry for entry in sys.path if entry.endswith('site-packages')]


def environment(**changes: str) -> dict[str, str]:
    return {**paths.environment(), **{name: str(value) for name, value in changes.items()}, 'HOME': os.environ['HOME']}
