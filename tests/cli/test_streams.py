"""Closed, full or abandoned standard streams: training continues, and commands that only print results stop."""

import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import termios
import threading

import pytest

from remixer_t5x.cli import console, main
from tests.support import compare_runs, feed_forward, paths
from tests.support.real_processes import Process

TINY = [
    *('--gin.NUM_ENCODER_LAYERS=1', '--gin.NUM_DECODER_LAYERS=1', '--gin.EMBED_DIM=16', '--gin.MLP_DIM=16'),
    *('--gin.BATCH_SIZE=4', "--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 16}", '--gin.WARMUP_STEPS=1'),
    *('--gin.LOG_PERIOD=1', '--gin.EVAL_PERIOD=2', '--gin.CHECKPOINT_PERIOD=2', *feed_forward.FLAGS),
]
TRAIN = [
    *('train', '--gin_file=models/t5_1_1.gin', '--gin_file=sizes/tiny.gin', '--gin_file=data/own_text.gin'),
    *('--gin_file=optimizers/adamw_rms.gin', '--gin_file=hardware/cpu.gin', '--gin_file=runs/pretrain.gin', *TINY),
    *('--gin.VOCABULARY=@vocabularies.byte()', '--gin.VOCAB_SIZE=384', '--gin.EVAL_STEPS=1', '--gin.TRAIN_STEPS=2'),
]
# Targets of file descriptors 1 and 2.
STREAM_TARGETS = {
    'standard output without a reader': ('pipe', 'file'),
    'standard output on a full disk, and closed standard error': ('/dev/full', None),
}


def run_with_streams(targets, argv):
    """Runs a command with standard output and error redirected to `targets`, as in a new process."""
    for descriptor, target in enumerate(targets, 1):
        if target == 'pipe':
            read, write = os.pipe()
            os.dup2(write, descriptor)
            os.close(read)
            os.close(write)
        elif target is None:
            os.close(descriptor)
        elif target != 'file':
            os.dup2(os.open(target, os.O_WRONLY), descriptor)
    if targets[1] is None:
        sys.stderr = sys.__stderr__ = None
    console.protect_standard_streams()
    try:
        return main.main(argv)
    except SystemExit as end:
        return end.code


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'cache'))
    path = tmp_path / 'text.txt'
    path.write_text('\n\n'.join(f'The number {i} is after {i - 1}. ' * 4 for i in range(200)))
    return path


@pytest.mark.parametrize('targets', STREAM_TARGETS.values(), ids=STREAM_TARGETS)
def test_train_runs_with_closed_or_broken_standard_streams(targets, text, tmp_path):
    """The cache is empty, so that the data are also parsed in this process."""
    argv = [*TRAIN, f'--gin.FILES={text}', f'--gin.MODEL_DIR={tmp_path}/run']
    process = Process(run_with_streams, targets, argv, output=tmp_path / 'output.txt')
    assert process.wait() == 0, process.output()
    assert compare_runs.checkpoint_steps(tmp_path / 'run')[-1] == 2
    assert 'Traceback' not in process.output()


def run_on_terminal(argv, run):
    """Runs a command on a new terminal, which closes after the third step."""
    outer, inner = os.openpty()
    os.setsid()
    fcntl.ioctl(inner, termios.TIOCSCTTY, 0)
    for descriptor in range(3):
        os.dup2(inner, descriptor)
    os.close(inner)

    def close():
        while compare_runs.last_step(run) < 3:
            os.read(outer, 1000)
        os.close(outer)
        # The shell sends a second SIGHUP to its jobs.
        os.kill(os.getpid(), signal.SIGHUP)

    threading.Thread(target=close, daemon=True).start()
    # The tests may run under nohup, which ignores SIGHUP.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    console.protect_standard_streams()
    return main.main(argv)


def test_a_closed_terminal_saves_a_checkpoint_like_sigterm(text, tmp_path):
    run = tmp_path / 'run'
    argv = [*TRAIN, f'--gin.FILES={text}', f'--gin.MODEL_DIR={run}']
    argv += ['--gin.TRAIN_STEPS=100000', '--gin.CHECKPOINT_PERIOD=100000', '--gin.EVAL_PERIOD=None']
    process = Process(run_on_terminal, argv, run, output=tmp_path / 'output.txt')
    assert process.wait() == 128 + signal.SIGHUP, process.output()
    assert compare_runs.checkpoint_steps(run) == [compare_runs.last_step(run)]


LOST_RESULTS = {
    'no reader': ('pipe', 128 + signal.SIGPIPE, ''),
    'full disk': ('/dev/full', 2, 'error: standard output cannot be written'),
}


@pytest.mark.parametrize(('target', 'code', 'error'), LOST_RESULTS.values(), ids=LOST_RESULTS)
def test_a_command_ends_if_its_result_cannot_be_written(target, code, error, tmp_path):
    argv = ['info', '--gin_file=models/t5_1_1.gin', '--gin_file=sizes/tiny.gin']
    process = Process(run_with_streams, (target, 'file'), argv, output=tmp_path / 'error.txt')
    assert process.wait() == code, process.output()
    assert process.output().startswith(error) and len(process.output().splitlines()) == bool(error)


def test_ctrl_c_in_a_callback_of_the_garbage_collector_is_not_lost():
    code = (
        'import gc, signal, time\nfrom remixer_t5x.cli import console\nconsole.silence_library_logs()\n'
        'def interrupt(*_):\n    gc.callbacks.clear()\n    signal.raise_signal(signal.SIGINT)\n'
        'gc.callbacks.append(interrupt)\ngc.collect()\ntime.sleep(60)'
    )
    done = subprocess.run([sys.executable, '-c', code], env=paths.environment(), capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == 'KeyboardInterrupt'


def test_exit_code_is_2_if_the_output_pipe_is_closed():
    command = f'{sys.executable} -m remixer_t5x.cli.main trian 2>&1 | true; exit ${{PIPESTATUS[0]}}'
    assert subprocess.run(['bash', '-c', command], env=paths.environment()).returncode == 2


def test_closed_descriptors_are_not_reused_by_files(tmp_path):
    code = (
        'import os\nfrom remixer_t5x.cli import console\nconsole.protect_standard_streams()\n'
        f'file = open({str(tmp_path / "checkpoint")!r}, "w")\nos.write(1, b"text"); os.write(2, b"text")\n'
        'assert file.fileno() > 2\nprint("more")'
    )
    bash = f'exec {sys.executable} -c "$0" <&- >&- 2>&-'
    done = subprocess.run(['bash', '-c', bash, code], env=paths.environment())
    assert done.returncode == 0 and pathlib.Path(tmp_path / 'checkpoint').read_text() == ''


def test_a_character_outside_of_the_locale_is_written_as_an_escape():
    code = 'from remixer_t5x.cli import console\nconsole.protect_standard_streams()\nprint("loss · é\\udcff")'
    done = subprocess.run(
        [sys.executable, '-c', code], env=paths.environment(PYTHONIOENCODING='ascii'), stdout=subprocess.PIPE
    )
    assert done.stdout == b'loss \\xb7 \\xe9\\udcff\n'
