"""Writes resumable_run.tar.gz: a run that was stopped at step 6, and its losses up to step 12.

`python -m tests.golden.make_resumable_run`. Version 0.1.0 with jax 0.12.0.1 and TensorFlow 2.21 wrote the file. If a
later version cannot resume the run, users lose their checkpoints too: restore the format instead of writing a new file.
"""

import json
import pathlib
import tarfile
import tempfile

from tests.support import tiny_training
from tests.support.compare_runs import read_log
from tests.support.paths import GOLDEN

SETTINGS = {'embed': 2, 'log_period': 1, 'eval_period': 100, 'checkpoint_period': 6}
FILES = ('checkpoints', 'config.gin', 'metrics.jsonl', 'remixer_t5x_run.json', 'vocabulary', 'losses.json')


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        stopped, whole = pathlib.Path(temporary, 'run'), pathlib.Path(temporary, 'whole')
        tiny_training.run(str(stopped), 6, **SETTINGS)
        tiny_training.run(str(whole), 12, **SETTINGS)
        losses = [record['loss'] for record in read_log(whole) if record['kind'] == 'train']
        (stopped / 'losses.json').write_text(json.dumps(losses))
        with tarfile.open(GOLDEN / 'resumable_run.tar.gz', 'w:gz') as archive:
            for name in FILES:
                archive.add(stopped / name, f'run/{name}')


if __name__ == '__main__':
    main()
