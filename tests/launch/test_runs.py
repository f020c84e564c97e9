"""Launch scripts on fake clusters: runs are installed from a wheel, preempted, and restarted.

Each scenario is one run of real processes on loopback, all of which are killed once there is a checkpoint. What starts
it again (the script, Slurm, the JobSet) continues from that checkpoint, and it ends in the bits of an unbroken run.
"""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.launch.clusters import rented, strictly
from tests.launch.clusters.strictly import PATIENCE
from tests.support import compare_runs, ports
from tests.support.warm_python import WarmPython

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / '.git').exists(), reason='the scripts copy what git knows; this is no checkout'
)


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    return tmp_path_factory.mktemp('rented')


@pytest.fixture(scope='module')
def command(place, compiled):
    """A program that runs `remixer-t5x` in processes that have already imported the libraries."""
    python = WarmPython(compiled)
    words = shlex.join([*python.command, '-m', 'tests.support.quick_command'])
    yield rented.program(place / 'remixer-t5x', f'exec {words} "$@"')
    python.close()


@pytest.fixture(scope='module')
def wheel(place):
    """The wheel that the launch scripts build."""
    pytest.importorskip('setuptools', reason='setuptools builds the wheel')
    source = 'source scripts/environment.sh; source scripts/launch/command_line.sh; make_wheel "$1"'
    copy = place / 'copy'
    copy.mkdir()
    env = rented.environment(PYTHON=sys.executable, PIP_NO_BUILD_ISOLATION='0', PIP_NO_INDEX='1')
    subprocess.run(['bash', '-euc', source, 'bash', copy], cwd=ROOT, env=env, check=True)
    [built] = (copy / 'dist').glob('remixer_t5x-*.whl')
    return built


@pytest.fixture(scope='module')
def installed(place, wheel, command):
    """An environment with the wheel, made by `worker.sh install`; the libraries are those of this process."""
    lines = '\\n'.join(rented.site_packages())
    python = rented.python_for_venv(
        place,
        f'{sys.executable} -m venv --without-pip "$3"',
        f'cd "$3"/lib/*/site-packages && printf "{lines}\\n" > shared.pth',
    )
    folder = place / 'venv'
    env = rented.environment(VENV=folder, PYTHON=python, PIP_NO_DEPS='1', PIP_NO_INDEX='1', RUN_DIR=place / 'none')
    stamp, stamps = folder / '.remixer_t5x_stamp', ''
    for extra in ('gpu', 'tpu'):
        said = rented.bash('worker.sh', 'install', extra, str(wheel), env=env)
        assert f'installing remixer_t5x[train,{extra}]' in said[0]
        stamps += stamp.read_text()
    # Both kinds of hosts have all packages.
    stamp.write_text(stamps)
    env.pop('PYTHONPATH')
    asked = subprocess.run(
        [folder / 'bin' / 'remixer-t5x', '--version'], env=env, cwd=place, capture_output=True, text=True
    )
    assert asked.stdout.startswith('remixer-t5x '), asked.stderr
    [package] = folder.glob('lib/*/site-packages/remixer_t5x')
    assert (package / 'configs' / 'hardware' / 'cpu.gin').exists()
    shutil.copy(command, folder / 'bin' / 'remixer-t5x')
    return folder


@pytest.fixture
def cluster(tmp_path, monkeypatch, installed, command, place):
    """Environment variables for the scripts; CLUSTER is the folder of the stand-ins."""
    monkeypatch.setattr(strictly, 'CLUSTER', tmp_path)
    programs = rented.programs(tmp_path / 'bin')
    env = rented.environment(CLUSTER=tmp_path, PORT=ports.reserve(), POLL_SECONDS='0.05', REMIXER_T5X=command)
    env |= {
        'PATH': f'{programs}:{env["PATH"]}',
        'REMIXER_T5X_CACHE': str(place / 'cache'),
        'METADATA': 'http://127.0.0.1:9',
    }
    yield env
    refused = tmp_path / 'refused'
    assert not refused.exists(), refused.read_text()


@pytest.fixture(scope='module')
def text(place):
    (place / 'text.txt').write_text(rented.TEXT)
    return f'--gin.FILES={place}/text.txt'


@pytest.fixture(scope='module')
def unbroken(place, command, text):
    """Returns `unbroken(count)`: the folder of an uninterrupted run with `count` processes."""
    folders: dict[int, pathlib.Path] = {}

    def run(count):
        if count not in folders:
            folders[count] = place / f'unbroken_{count}'
            words = [command, *rented.TRAIN, text, f'--gin.MODEL_DIR={folders[count]}']
            env = rented.environment(REMIXER_T5X_CACHE=place / 'cache', JAX_NUM_PROCESSES=count)
            env['JAX_COORDINATOR_ADDRESS'] = f'127.0.0.1:{ports.reserve()}'
            started = [subprocess.Popen(words, env={**env, 'JAX_PROCESS_ID': str(i)}) for i in range(count)]
            assert [process.wait() for process in started] == [0] * count
        return folders[count]

    return run


def train(folder, text):
    return ['--', *rented.TRAIN, text, f'--gin.MODEL_DIR={folder}']


def has_checkpoint(folder):
    return lambda: compare_runs.checkpoint_steps(folder)


def assert_resumed(folder, unbroken_run):
    assert compare_runs.difference(folder, unbroken_run, rented.STEPS) is None


def test_several_tpu_slices_restart_and_resume_a_run(cluster, tmp_path, text, unbroken, wheel, installed):
    from tests.launch.clusters import gcloud

    bucket = tmp_path / 'buckets' / 'mine' / 'run'
    # `python -m venv` of a host copies the environment in which the wheel is installed.
    python = rented.python_for_venv(tmp_path, f'mkdir -p "$3" && cp -r {installed}/. "$3"')
    cluster |= {'PYTHON': str(python), 'PIP_NO_DEPS': '1', 'PIP_NO_INDEX': '1'}
    where = ['--name=mixer', '--zone=us-east5-a', '--slices=2', '--spot']
    words = ['--type=v5litepod-4', f'--wheel={wheel}', *train(bucket, text)]
    with (tmp_path / 'said').open('w') as said:
        command = ['bash', str(rented.LAUNCH / 'tpu_vm.sh'), 'supervise', *where, *words]
        supervisor = subprocess.Popen(command, env=cluster, stdout=said, stderr=said, start_new_session=True)
        try:
            strictly.until(has_checkpoint(bucket), 'a checkpoint')
            gcloud.preempt('mixer')
            assert supervisor.wait(PATIENCE) == 0
        finally:
            strictly.kill_group(supervisor.pid)
            supervisor.wait()
    said = (tmp_path / 'said').read_text()
    assert 'mixer was preempted' in said and 'the command has succeeded' in said
    rented.bash('tpu_vm.sh', 'fetch', *where, '--from=gs://mine/run', f'--to={tmp_path}/mine', env=cluster)
    rented.bash('tpu_vm.sh', 'delete', *where, env=cluster)
    assert_resumed(tmp_path / 'mine', unbroken(2))


def test_a_jobset_is_restarted_and_resumes(cluster, tmp_path, text, unbroken):
    pytest.importorskip('yaml', reason='PyYAML reads the JobSet: pip install pyyaml')
    run, options = tmp_path / 'claims' / 'disk' / 'run', ['--claim=disk', '--name=mixer']
    image = '--image=registry.example/remixer-t5x:gpu'
    rented.bash('kubernetes.sh', *options, image, '--nodes=2', '--gpus=1', *train('/data/run', text), env=cluster)
    strictly.until(has_checkpoint(run), 'a checkpoint')
    for pod in (tmp_path / 'pods').read_text().split():
        strictly.kill_group(int(pod))
    strictly.until((tmp_path / 'ended').exists, 'the end of the JobSet')
    assert (tmp_path / 'ended').read_text() == 'Completed', (tmp_path / 'pod_0.log').read_text()
    assert (tmp_path / 'attempts').read_text().splitlines()[1:] == ['[0, 0]']
    rented.bash('kubernetes.sh', 'fetch', *options, '--from=/data/run', f'--to={tmp_path}/mine', env=cluster)
    assert_resumed(tmp_path / 'mine', unbroken(2))


def test_a_slurm_job_is_requeued_and_resumes(cluster, tmp_path, text, unbroken, installed):
    run = tmp_path / 'run'
    cluster.pop('REMIXER_T5X')
    job = ['--nodes=2', '--ntasks-per-node=1', 'scripts/launch/slurm.sbatch', *train(run, text)]
    asked = subprocess.run(
        ['sbatch', *job], env={**cluster, 'VENV': str(installed)}, cwd=ROOT, capture_output=True, text=True
    )
    assert asked.stdout == 'Submitted batch job 7\n', asked.stderr
    strictly.until(has_checkpoint(run), 'a checkpoint')
    # A node is lost, and Slurm requeues the job.
    (tmp_path / 'requeue').touch()
    strictly.kill_group(int((tmp_path / 'job').read_text()))
    strictly.until((tmp_path / 'ended').exists, 'the end of the job')
    assert (tmp_path / 'ended').read_text() == '0', (tmp_path / 'detached.log').read_text()
    assert_resumed(run, unbroken(2))


def test_a_gpu_node_restarts_and_resumes_a_run(cluster, tmp_path, text, unbroken, installed, wheel):
    run = tmp_path / 'run'
    rented.program(tmp_path / 'bin' / 'nvidia-smi', 'echo "GPU 0"')
    kill = rented.program(
        tmp_path / 'bin' / 'noted', f'echo $$ > {tmp_path}/child', f'exec {cluster["REMIXER_T5X"]} "$@"'
    )
    shutil.copytree(installed, tmp_path / 'venv', symlinks=True)
    shutil.copy(kill, tmp_path / 'venv' / 'bin' / 'remixer-t5x')
    env = {**cluster, 'VENV': str(tmp_path / 'venv'), 'RESTART_SECONDS': '0', 'RUN_DIR': str(tmp_path / 'none')}
    words = [f'--wheel={wheel}', *train(run, text), '--verbose']
    with (tmp_path / 'said').open('w') as said:
        node = subprocess.Popen(['bash', str(rented.LAUNCH / 'gpu_node.sh'), *words], env=env, stdout=said, stderr=said)
        try:
            strictly.until(has_checkpoint(run), 'a checkpoint')
            os.kill(int((tmp_path / 'child').read_text()), 9)
            assert node.wait(PATIENCE) == 0, (tmp_path / 'said').read_text()
        finally:
            node.kill()
            node.wait()
    said = (tmp_path / 'said').read_text()
    assert 'remixer-t5x ended with 137; start 2 of 4' in said
    assert_resumed(run, unbroken(1))
