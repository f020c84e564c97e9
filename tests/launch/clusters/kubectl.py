"""A fake of `kubectl` (kubernetes.io/docs/reference/kubectl) and of a cluster with JobSet (jobset.sigs.k8s.io).

A pod is a process, and a PersistentVolumeClaim is a folder. `apply` starts a controller in the background, which
restarts all pods when one fails, until the pod failure policy of the JobSet fails the job.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from tests.launch.clusters.fake_commands import (
    CLUSTER,
    check_positionals,
    parse_options,
    record_call,
    refuse,
    start_detached,
)

NAME = r'[a-z]([a-z0-9-]*[a-z0-9])?'


def check_pod(pod: dict) -> None:
    """Rejects images that a node cannot pull, and volumes that user 1000, the user of the image, cannot write."""
    for container in pod['containers']:
        registry, slash, _ = container['image'].partition('/')
        if not slash or not re.search('[.:]', registry):
            refuse(f'ErrImagePull: {container["image"]} has no registry')
        in_bucket = any('MODEL_DIR=gs://' in word for word in container.get('args', ()))
        claims = [volume for volume in pod['volumes'] if 'persistentVolumeClaim' in volume]
        if claims and in_bucket:
            refuse('the pods would wait for a claim that they do not need')
        if claims and pod.get('securityContext', {}).get('fsGroup') != 1000:
            refuse('/data: permission denied for user 1000')


def apply(words: list[str]) -> int:
    import yaml

    positional, options = parse_options(words, {'filename': '-|.+', 'namespace': NAME}, (), ('filename',))
    check_positionals(positional, 0)
    jobset = yaml.safe_load(sys.stdin if options['filename'] == '-' else pathlib.Path(options['filename']).read_text())
    if (jobset['apiVersion'], jobset['kind']) != ('jobset.x-k8s.io/v1alpha2', 'JobSet'):
        refuse('unknown apiVersion or kind')
    [job] = jobset['spec']['replicatedJobs']
    check_pod(job['template']['spec']['template']['spec'])
    (CLUSTER / 'jobset.json').write_text(json.dumps(jobset))
    start_detached(sys.executable, '-m', __spec__.name, 'controller')
    print(f'jobset.jobset.x-k8s.io/{jobset["metadata"]["name"]} created')
    return 0


class Pods:
    """The pods of the single replicated job, which are processes."""

    def __init__(self, jobset: dict):
        [self._replicated] = jobset['spec']['replicatedJobs']
        self._job = self._replicated['template']['spec']
        self._pod = self._job['template']['spec']
        [self._container] = self._pod['containers']
        name, subdomain = jobset['metadata']['name'], jobset['spec']['network']['subdomain']
        # The host name of the first pod in the headless service, which only pods can resolve.
        self._coordinator = f'{name}-{self._replicated["name"]}-0-0.{subdomain}:8476'

    def run(self) -> list[int]:
        """Returns the exit codes of the pods. After the first failure, ends the other pods and omits their codes."""
        count = self._job['completions']
        started = [self._start(index) for index in range(count)]
        (CLUSTER / 'pods').write_text(' '.join(str(pod.pid) for pod in started))
        grace = self._pod['terminationGracePeriodSeconds']
        while any(pod.poll() is None for pod in started):
            if any(pod.poll() for pod in started):
                return [code for code in (_end(pod, grace) for pod in started) if code is not None]
            time.sleep(0.02)
        return [pod.returncode for pod in started]

    def fails_job(self, code: int) -> bool:
        """Returns whether the pod failure policy fails the job, and thereby the JobSet, after this exit code."""
        rules = [rule['onExitCodes']['values'] for rule in self._job['podFailurePolicy']['rules']]
        return any(code in values for values in rules)

    def _start(self, index: int) -> subprocess.Popen:
        variables: dict[str, str] = {}
        for entry in self._container['env']:
            source = entry.get('valueFrom', {}).get('fieldRef', {}).get('fieldPath', '')
            variables[entry['name']] = str(index) if 'job-completion-index' in source else entry.get('value', '')
        words = [_expand(word, variables) for word in self._container['args']]
        # Replaces the host name of the first pod with a local address, and the mounted volume with a folder.
        words = [word.replace(self._coordinator, f'127.0.0.1:{os.environ["PORT"]}') for word in words]
        words = [word.replace('=/data', f'={claim(self._pod)}') for word in words]
        environment = {**os.environ, **variables, 'JOB_COMPLETION_INDEX': str(index)}
        log = (CLUSTER / f'pod_{index}.log').open('a')
        return subprocess.Popen(
            [os.environ['REMIXER_T5X'], *words], env=environment, stdout=log, stderr=log, start_new_session=True
        )


def _expand(word: str, variables: dict[str, str]) -> str:
    """Replaces $(NAME) with its value, and $$ with $."""
    return re.sub(r'\$\$|\$\((\w+)\)', lambda match: variables[match[1]] if match[1] else '$', word)


def claim(pod: dict) -> pathlib.Path:
    """Returns the folder of the claim that is mounted at /data."""
    [container] = pod['containers']
    [mounted] = [mount['name'] for mount in container['volumeMounts'] if mount['mountPath'] == '/data']
    [volume] = [volume for volume in pod['volumes'] if volume['name'] == mounted]
    return CLUSTER / 'claims' / volume['persistentVolumeClaim']['claimName']


def _end(pod: subprocess.Popen, grace: float) -> int | None:
    """Returns the exit code of a pod that has ended. Stops other pods (SIGKILL after `grace`), and returns None."""
    if pod.poll() is not None:
        return pod.returncode
    os.killpg(pod.pid, signal.SIGTERM)
    try:
        pod.wait(grace)
    except subprocess.TimeoutExpired:
        os.killpg(pod.pid, signal.SIGKILL)
        pod.wait()
    return None


def controller() -> int:
    jobset = json.loads((CLUSTER / 'jobset.json').read_text())
    pods = Pods(jobset)
    for _ in range(jobset['spec']['failurePolicy']['maxRestarts'] + 1):
        codes = [code if code >= 0 else 128 - code for code in pods.run()]
        with (CLUSTER / 'attempts').open('a') as file:
            file.write(f'{sorted(codes)}\n')
        if not any(codes) or any(map(pods.fails_job, codes)):
            break
    (CLUSTER / 'ended').write_text('Completed' if not any(codes) else 'Failed')
    return 0


def main(words: list[str]) -> int:
    if words == ['controller']:
        return controller()
    record_call()
    if words[0] != 'apply':
        refuse(f'unknown command {words[0]}')
    return apply(words[1:])


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
