"""The JobSet of kubernetes.sh, and the image of its pods."""

import pathlib
import re
import tomllib

import pytest

from tests.launch.clusters import kubectl
from tests.launch.clusters.harness import COMMAND, LAUNCH, run_script

IMAGE = '--image=registry.example/remixer-t5x:tpu'
ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']


def jobset(text):
    yaml = pytest.importorskip('yaml', reason='PyYAML reads the JobSet: pip install pyyaml')
    resource = yaml.safe_load(text)
    assert (resource['apiVersion'], resource['kind']) == ('jobset.x-k8s.io/v1alpha2', 'JobSet')
    (job,) = resource['spec']['replicatedJobs']
    return resource, job, job['template']['spec']['template']['spec']


@pytest.mark.parametrize('filled_in', [False, True])
def test_pods_restart_except_after_user_errors(filled_in):
    """The file itself is a JobSet of two nodes with 8 GPUs; test_runs starts the pods of a JobSet."""
    # Unquoted, this name would be a number.
    name, nodes, gpus, image = ('007', 4, 2, 'me/it:1') if filled_in else ('remixer-t5x', 2, 8, 'remixer-t5x:gpu')
    text = (LAUNCH / 'kubernetes_jobset.yaml').read_text()
    if filled_in:
        options = [f'--name={name}', f'--nodes={nodes}', f'--gpus={gpus}', f'--image={image}', '--dry_run']
        text, applied = run_script('kubernetes.sh', *options, *COMMAND)
        assert applied.startswith('+ kubectl apply --filename=-')
    resource, job, pod = jobset(text)
    spec, (container,) = job['template']['spec'], pod['containers']
    assert (resource['metadata']['name'], container['image']) == (name, image)
    assert (spec['completions'], spec['parallelism']) == (nodes, nodes)
    assert container['resources']['limits'] == {'nvidia.com/gpu': gpus} and pod['nodeSelector'] == {}
    assert spec['backoffLimit'] == 0 and pod['restartPolicy'] == 'Never'
    policy = resource['spec']['failurePolicy']
    [rule] = policy['rules']
    assert policy['maxRestarts'] > 0
    assert (rule['action'], rule['onJobFailureReasons']) == ('FailJobSet', ['PodFailurePolicy'])
    (rule,) = spec['podFailurePolicy']['rules']
    assert rule['action'] == 'FailJob' and rule['onExitCodes']['values'] == [2]
    if filled_in:
        # Kubernetes replaces $$ with $.
        assert container['args'][:-3] == [*COMMAND[1:-1], '--gin.FILES=a b $$x']


def test_jobset_of_tpu_slices_on_spot_nodes_of_gke():
    options = ['--tpu=tpu-v5-lite-podslice', '--topology=4x4', '--slices=2', '--spot', IMAGE]
    resource, job, pod = jobset(run_script('kubernetes.sh', *options, '--dry_run', *COMMAND)[0])
    spec, (container,) = job['template']['spec'], pod['containers']
    assert (job['replicas'], spec['completions'], spec['parallelism']) == (2, 4, 4)
    assert container['resources']['limits'] == {'google.com/tpu': 4}
    assert pod['nodeSelector'] == {
        'cloud.google.com/gke-spot': 'true',
        'cloud.google.com/gke-tpu-accelerator': 'tpu-v5-lite-podslice',
        'cloud.google.com/gke-tpu-topology': '4x4',
    }
    assert 'alpha.jobset.sigs.k8s.io/exclusive-topology' in resource['metadata']['annotations']
    assert pod['terminationGracePeriodSeconds'] == 15
    # GKE sets the index of each process.
    assert container['args'][-1] == '--gin.FILES=a b $$x'


@pytest.mark.parametrize(
    'folder, claims', [('/data/run', ['disk']), ('gs://bucket/run', []), ('"gs://bucket/run"', [])]
)
def test_pods_can_write_their_model_dir(folder, claims):
    """The fake kubectl checks that the image is in a registry and that the pod can write to its volumes."""
    options = [IMAGE, *(f'--claim={name}' for name in claims), '--service_account=trainer', '--dry_run']
    text, _ = run_script('kubernetes.sh', *options, *COMMAND, f'--gin.MODEL_DIR={folder}')
    _, _, pod = jobset(text)
    kubectl.check_pod(pod)
    assert pod['serviceAccountName'] == 'trainer'
    volumes = {volume['name']: volume for volume in pod['volumes']}
    assert {mount['name'] for mount in pod['containers'][0]['volumeMounts']} == volumes.keys()
    claimed = [volume['persistentVolumeClaim']['claimName'] for volume in volumes.values() if 'emptyDir' not in volume]
    assert claimed == claims


def test_the_image_contains_existing_files_and_extras():
    dockerfile, ignore = (ROOT / 'Dockerfile').read_text(), (ROOT / '.dockerignore').read_text().splitlines()
    copied = [name for line in re.findall(r'^COPY (.*)$', dockerfile, re.M) for name in line.split()[:-1]]
    assert {'remixer_t5x', 'tasks', 'configs', 'setup.py'} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f'!{name}' in ignore, f'.dockerignore excludes {name}'
    # The build requires these files.
    assert {PROJECT['readme'], *PROJECT['license-files']} <= set(copied)
    extras = {*re.findall(r'EXTRA=([\w-]+)', dockerfile), 'gpu-cuda13', 'gpu', 'tpu'}
    assert extras - {'cpu'} <= set(PROJECT['optional-dependencies'])
