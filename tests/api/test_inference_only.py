"""The Python API and the commands for trained models in a process that cannot import TensorFlow or seqio."""

import json
import os
import subprocess
import sys

import numpy as np

import remixer_t5x
from remixer_t5x import lazy_imports
from tests.support import saved_run
from tests.support.paths import environment

COMMANDS = [
    'info --gin_file=run/config.gin',
    'infer --checkpoint=run --input=texts.txt --output=predictions.jsonl',
    'infer --checkpoint=run --input=texts.txt --output=embeddings.npz --embed',
    'score run pairs.jsonl --output=scores.jsonl',
    'convert --gin_file=run/config.gin --checkpoint=run --to_hf=hf',
    'convert --from_hf=hf --to=again',
    'convert --checkpoint=run --to_shared=shared',
    'export --checkpoint=run --to=exported --formats=stablehlo --functions=score',
    'report run',
]
NEED_TASKS = [
    'train --gin_file=experiments/quickstart.gin --gin.MODEL_DIR=new',
    'eval --gin_file=experiments/quickstart.gin --checkpoint=run',
    'data --gin_file=data/mini_cogs.gin',
    'export --checkpoint=run --to=served --formats=saved_model',
]
PROGRAM = f"""
import json, sys
sys.modules.update(dict.fromkeys({lazy_imports.TASK_LIBRARIES!r}))
import remixer_t5x
from remixer_t5x.cli.main import main

trained = remixer_t5x.load('run')
print(json.dumps(trained.score(['ab'], ['c']).tolist()))
for command in {[*COMMANDS, *NEED_TASKS]!r}:
    sys.stdout.flush()
    code = main(command.split())
    print('exit code', code, command, file=sys.stderr)
"""


def test_trained_models_run_without_tensorflow(tmp_path):
    task = 'from remixer_tasks import vocabularies\nfrom remixer_tasks import names\n'
    config = saved_run.CONFIG.replace('from remixer_tasks import vocabularies\n', task)
    config += "include 'hardware/cpu.gin'\n"
    run = saved_run.write_run(tmp_path / 'run', config, steps=(1,))
    record = {'kind': 'train', 'step': 1, 'loss': 2.5, 'timing': {'clock': 0.0, 'seconds': 1.0}}
    (run / 'metrics.jsonl').write_text(json.dumps(record) + '\n')
    (tmp_path / 'texts.txt').write_text('ab\nc\n')
    (tmp_path / 'pairs.jsonl').write_text('{"inputs": "ab", "targets": "c"}\n')
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    codes = [line.split()[2] for line in done.stderr.splitlines() if line.startswith('exit code')]
    assert codes == ['0'] * len(COMMANDS) + ['2'] * len(NEED_TASKS), done.stderr
    assert done.stderr.count(lazy_imports.INSTALL_COMMAND) == len(NEED_TASKS) and not {'new', 'served'} & {
        *os.listdir(tmp_path)
    }
    scores = json.loads(done.stdout.splitlines()[0])
    np.testing.assert_allclose(scores, remixer_t5x.load(str(run)).score(['ab'], ['c']), rtol=1e-6)
    assert len((tmp_path / 'predictions.jsonl').read_text().splitlines()) == 2
