"""Commands run no Python file of the current folder, except for modules that the user's gin files and flags name."""

import subprocess
import sys

from remixer_t5x.extras.reports import sweep
from tests.support import feed_forward, paths

TRAP = 'open({log!r}, "a").write(f"{{__name__}}\\n")\n'
# Runs commands in one process, and writes a trap file for every module that Python looks for.
SCRIPT = """
import importlib, os, sys
from remixer_t5x.cli import main
from remixer_tasks.files import workers

class SetTraps:
    def find_spec(self, name, path=None, target=None):
        if path is None and not (os.path.exists(name) or os.path.exists(f'{name}.py')):
            open(f'{name}.py', 'w').write(TRAP)
            importlib.invalidate_caches()

sys.meta_path.insert(0, SetTraps())
for command in COMMANDS:
    sys.argv = ['remixer-t5x', *command]
    code = main.main()
    print('exit code', code, command, flush=True)
    assert code == 0
assert list(workers.map_in_order(len, [('abc',)], 1)) == [3]
"""
TINY = [
    *('--gin_file=models/t5_1_1.gin', '--gin_file=sizes/tiny.gin', '--gin.EMBED_DIM=16', '--gin.MLP_DIM=16'),
    *('--gin.NUM_HEADS=1', '--gin.NUM_ENCODER_LAYERS=1', '--gin.NUM_DECODER_LAYERS=1'),
]
OWN_TEXT = [
    *('--gin_file=experiments/own_text.gin', '--model=t5_1_1', *TINY[1:], *feed_forward.FLAGS),
    *('--gin_file=hardware/cpu.gin', '--gin.FILES=text.txt', '--gin.TXT_DOCUMENTS=line', '--gin.VOCAB_SIZE=384'),
    *('--gin.VOCABULARY=@vocabularies.byte()', "--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 16}"),
    *('--gin.BATCH_SIZE=2', '--gin.TRAIN_STEPS=1', '--gin.EVAL_PERIOD=None', '--gin.MODEL_DIR=run'),
]
USER = ['--gin_file=mixers.gin', '--gin.ENCODER_FEED_FORWARD=@my_package.mixers.Another']
COMMANDS = [
    ['data', 'list'],
    ['train', *OWN_TEXT],
    ['report', 'run'],
    ['infer', '--checkpoint=run', '--input=text.txt', '--output=answers.jsonl', '--gin.INFER_BATCH_SIZE=200'],
    ['convert', '--checkpoint=run', '--to_shared=shared'],
    ['info', *TINY, *USER],
]


def test_only_modules_named_by_gin_files_and_flags_are_imported(tmp_path):
    """Modules that the named modules import are also found in the folder, but no library finds a module there."""
    folder, log = tmp_path / 'folder', tmp_path / 'log'
    trap = TRAP.format(log=str(log))
    (folder / 'jax_plugins' / 'stranger').mkdir(parents=True)
    (folder / 'jax_plugins' / 'stranger' / '__init__.py').write_text(trap)
    # Traps with the names of standard library modules and of optional modules that libraries try to import.
    names = {*sys.stdlib_module_names, 'libtpu', 'zstandard', 'cloudpickle', 'brotli', 'jax_cuda12_plugin'}
    for name in names - {'antigravity'}:
        (folder / f'{name}.py').write_text(trap)
    (folder / 'text.txt').write_text(''.join(f'a line of text, number {number}\n' for number in range(200)))
    (folder / 'my_mixers.py').write_text('def make():\n    pass\nfrom my_helpers import FNet as Mine\n')
    (folder / 'my_helpers.py').write_text('from remixer_t5x.models.sublayers.fnet import FNet\n')
    (folder / 'my_package').mkdir()
    (folder / 'my_package' / 'mixers.py').write_text('from my_mixers import Mine as Another\n')
    (folder / 'mixers.gin').write_text(
        'from __gin__ import dynamic_registration\nimport my_mixers\nENCODER_MIXER = @my_mixers.Mine\n'
    )
    script = tmp_path / 'script.py'
    script.write_text(f'TRAP, COMMANDS = {trap!r}, {COMMANDS!r}\n{SCRIPT}')
    # -P: the folder of the script is not on sys.path.
    words = [sys.executable, '-P', str(script)]
    environment = paths.environment(REMIXER_T5X_CACHE=str(folder / 'cache'))
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count('f_net') >= 2
    children = subprocess.run([*sweep.PROGRAM, '--version'], cwd=folder, env=paths.environment(), capture_output=True)
    assert children.returncode == 0, children.stderr
    assert not log.exists(), log.read_text()
    assert len(list(folder.glob('*.py'))) > len(names)
