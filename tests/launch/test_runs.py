"""Launch scripts on fake clusters: runs are installed from a wheel, preempted, and restarted.

Each test kills all processes of a run after a checkpoint. The script, Slurm or the JobSet restarts the run, which
resumes from the checkpoint; runs with two processes end bit-identical to an uninterrupted run.
"""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.launch.clusters import fake_commands, harness
from tests.launch.clusters.fake_commands import TIMEOUT
from tests.support import compare_runs, ports
from tests.support.warm_python import WarmPython

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / '.git').exists(), reason='the scripts copy files with git, and this is not a checkout'
)


@pytest.fixture(scope='module')
def shared_folder(tmp_path_factory):
    return tmp_path_factory.mktemp('launch')


@pytest.fixture(scope='module')
def command(shared_folder):
    """A program that runs `remixer-t5x` in processes that have already imported the libraries."""
    python = WarmPython()
    words = shlex.join([*python.command, '-m', 'tests.support.command_without_autograph'])
    yield harness.write_program(shared_folder / 'remixer-t5x', f'exec {words} "$@"')
    python.close()


@pytest.fixture(scope='module')
def wheel(shared_folder):
    """The wheel that the launch scripts build."""
    pytest.importorskip('setuptools', reason='setuptools is required to build the wheel')
    source = 'source scripts/environment.sh; source scripts/launch/command_line.sh; make_wheel "$1"'
    copy = shared_folder / 'copy'
    copy.mkdir()
    env = harness.environment(PYTHON=sys.executable, PIP_NO_BUILD_ISOLATION='0', PIP_NO_INDEX='1')
    subprocess.run(['bash', '-euc', source, 'bash', copy], cwd=ROOT, env=env, check=True)
    [built] = (copy / 'dist').glob('remixer_t5x-*.whl')
    return built


@pytest.fixture(scope='module')
def installed(shared_folder, wheel, command):
    """A virtual environment into which `worker.sh` installs the wheel; it uses the libraries of this process."""
    lines = '\\n'.join(harness.site_packages())
    python = harness.write_venv_python(
        shared_folder,
        f'{sys.executable} -m venv --without-pip "$3"',
        f'cd "$3"/lib/*/site-packages && printf "{lines}\\n" > shared.pth',
    )
    folder = shared_folder / 'venv'
    env = harness.environment(
        VENV=folder, PYTHON=python, PIP_NO_DEPS='1', PIP_NO_INDEX='1', RUN_DIR=shared_folder / 'none'
    )
    stamp, stamps = folder / '.remixer_t5x_stamp', ''
    for extra in ('gpu', 'tpu'):
        output = harness.run_script('worker.sh', 'install', extra, str(wheel), env=env)
        assert f'installing remixer_t5x[train,{extra}]' in output[0]
        stamps += stamp.read_text()
    # Marks the environment as up to date for hosts with GPUs and with TPUs.
    stamp.write_text(stamps)
    env.pop('PYTHONPATH')
    version = subprocess.run(
        [folder / 'bin' / 'remixer-t5x', '--version'], env=env, cwd=shared_folder, capture_output=True, text=True
    )
    assert version.stdout.startswith('remixer-t5x '), version.stderr
    [package] = folder.glob('lib/*/site-packages/remixer_t5x')
    assert (package / 'configs' / 'hardware' / 'cpu.gin').exists()
    shutil.copy(command, folder / 'bin' / 'remixer-t5x')
    return folder


@pytest.fixture
def cluster(tmp_path, monkeypatch, installed, command, shared_folder):
    """Environment variables for the scripts; CLUSTER is the folder of the fakes."""
    monkeypatch.setattr(fake_commands, 'CLUSTER', tmp_path)
    programs = harness.write_programs(tmp_path / 'bin')
    env = harness.environment(CLUSTER=tmp_path, PORT=ports.reserve(), POLL_SECONDS='0.3', REMIXER_T5X=command)
    env |= {
        'PATH': f'{programs}:{env["PATH"]}',
        'REMIXER_T5X_CACHE': str(shared_folder / 'cache'),
        'METADATA': 'http://127.0.0.1:9',
    }
    yield env
    refused = tmp_path / 'refused'
    assert not refused.exists(), refused.read_text()


@pytest.fixture(scope='module')
def files_flag(shared_folder):
    (shared_folder / 'text.txt').write_text(harness.TEXT)
    return f'--gin.FILES={shared_folder}/text.txt'


@pytest.fixture(scope='module')
def uninterrupted(shared_folder, command, files_flag):
    """The folder of an uninterrupted run with two processes."""
    folder = shared_folder / 'uninterrupted'
    words = [command, *harness.TRAIN, files_flag, f'--gin.MODEL_DIR={folder}']
    env = harness.environment(REMIXER_T5X_CACHE=shared_folder / 'cache', JAX_NUM_PROCESSES=2)
    env['JAX_COORDINATOR_ADDRESS'] = f'127.0.0.1:{ports.reserve()}'
    started = [subprocess.Popen(words, env={**env, 'JAX_PROCESS_ID': str(i)}) for i in range(2)]
    assert [process.wait() for process in started] == [0, 0]
    return folder


def train(folder, files_flag):
    return ['--', *harness.TRAIN, files_flag, f'--gin.MODEL_DIR={folder}']


def has_checkpoint(folder):
    return lambda: compare_runs.checkpoint_steps(folder)


def has_text(path):
    return lambda: path.exists() and path.read_text()


def assert_resumed(folder, uninterrupted_run):
    assert compare_runs.difference(folder, uninterrupted_run, harness.STEPS) is None


def test_several_tpu_slices_restart_and_resume_a_run(cluster, tmp_path, files_flag, uninterrupted, wheel, installed):
    from tests.launch.clusters import gcloud

    bucket = tmp_path / 'buckets' / 'mine' / 'run'
    # On the hosts, `python -m venv` copies the environment in which the wheel is installed.
    python = harness.write_venv_python(tmp_path, f'mkdir -p "$3" && cp -r {installed}/. "$3"')
    cluster |= {'PYTHON': str(python), 'PIP_NO_DEPS': '1', 'PIP_NO_INDEX': '1'}
    where = ['--name=mixer', '--zone=us-east5-a', '--slices=2', '--spot']
    words = ['--type=v5litepod-4', f'--wheel={wheel}', *train(bucket, files_flag)]
    with (tmp_path / 'output').open('w') as output:
        command = ['bash', str(harness.LAUNCH / 'tpu_vm.sh'), 'supervise', *where, *words]
        supervisor = subprocess.Popen(command, env=cluster, stdout=output, stderr=output, start_new_session=True)
        try:
            fake_commands.wait_until(has_checkpoint(bucket), 'a checkpoint')
            gcloud.preempt('mixer')
            assert supervisor.wait(TIMEOUT) == 0
        finally:
            fake_commands.kill_group(supervisor.pid)
            supervisor.wait()
    output = (tmp_path / 'output').read_text()
    assert 'mixer was preempted' in output and 'the command has succeeded' in output
    harness.run_script('tpu_vm.sh', 'delete', *where, env=cluster)
    assert_resumed(bucket, uninterrupted)


def test_a_jobset_is_restarted_and_resumes(cluster, tmp_path, files_flag, uninterrupted):
    pytest.importorskip('yaml', reason='PyYAML reads the JobSet: pip install pyyaml')
    run, options = tmp_path / 'claims' / 'disk' / 'run', ['--claim=disk', '--name=mixer']
    image = '--image=registry.example/remixer-t5x:gpu'
    harness.run_script(
        'kubernetes.sh', *options, image, '--nodes=2', '--gpus=1', *train('/data/run', files_flag), env=cluster
    )
    fake_commands.wait_until(has_checkpoint(run), 'a checkpoint')
    for pod in (tmp_path / 'pods').read_text().split():
        fake_commands.kill_group(int(pod))
    fake_commands.wait_until(has_text(tmp_path / 'ended'), 'the end of the JobSet')
    assert (tmp_path / 'ended').read_text() == 'Completed', (tmp_path / 'pod_0.log').read_text()
    assert (tmp_path / 'attempts').read_text().splitlines()[1:] == ['[0, 0]']
    assert_resumed(run, uninterrupted)


def test_a_slurm_job_is_requeued_and_resumes(cluster, tmp_path, files_flag, uninterrupted, installed):
    run = tmp_path / 'run'
    cluster.pop('REMIXER_T5X')
    job = ['--nodes=2', '--ntasks-per-node=1', 'scripts/launch/slurm.sbatch', *train(run, files_flag)]
    submitted = subprocess.run(
        ['sbatch', *job], env={**cluster, 'VENV': str(installed)}, cwd=ROOT, capture_output=True, text=True
    )
    assert submitted.stdout == 'Submitted batch job 7\n', submitted.stderr
    fake_commands.wait_until(has_checkpoint(run), 'a checkpoint')
    # Simulates the loss of a node, after which Slurm requeues the job.
    (tmp_path / 'requeue').touch()
    fake_commands.kill_group(int((tmp_path / 'job').read_text()))
    fake_commands.wait_until(has_text(tmp_path / 'ended'), 'the end of the job')
    assert (tmp_path / 'ended').read_text() == '0', (tmp_path / 'detached.log').read_text()
    assert_resumed(run, uninterrupted)


def test_a_gpu_node_restarts_and_resumes_a_run(cluster, tmp_path, files_flag, installed, wheel):
    run = tmp_path / 'run'
    harness.write_program(tmp_path / 'bin' / 'nvidia-smi', 'echo "GPU 0"')
    wrapper = harness.write_program(
        tmp_path / 'bin' / 'wrapper', f'echo $$ > {tmp_path}/child', f'exec {cluster["REMIXER_T5X"]} "$@"'
    )
    shutil.copytree(installed, tmp_path / 'venv', symlinks=True)
    shutil.copy(wrapper, tmp_path / 'venv' / 'bin' / 'remixer-t5x')
    env = {**cluster, 'VENV': str(tmp_path / 'venv'), 'RESTART_SECONDS': '0', 'RUN_DIR': str(tmp_path / 'none')}
    words = [f'--wheel={wheel}', *train(run, files_flag), '--verbose']
    with (tmp_path / 'output').open('w') as output:
        node = subprocess.Popen(
            ['bash', str(harness.LAUNCH / 'gpu_node.sh'), *words], env=env, stdout=output, stderr=output
        )
        try:
            fake_commands.wait_until(has_checkpoint(run), 'a checkpoint')
            os.kill(int((tmp_path / 'child').read_text()), 9)
            assert node.wait(TIMEOUT) == 0, (tmp_path / 'output').read_text()
        finally:
            node.kill()
            node.wait()
    output = (tmp_path / 'output').read_text()
    assert 'remixer-t5x ended with 137; start 2 of 4' in output and 'resuming at step ' in output
    assert max(compare_runs.checkpoint_steps(run)) == harness.STEPS
