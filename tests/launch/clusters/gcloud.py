"""A fake of `gcloud compute tpus` (cloud.google.com/sdk/gcloud/reference).

A slice has two hosts; if a queued resource has several slices, each has one host. A host is a folder, which is its
HOME. Environment variables replace the TPU metadata with which JAX connects the processes. A queued resource passes
through two waiting states before it is active.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

from tests.launch.clusters.fake_commands import (
    CLUSTER,
    check_positionals,
    kill_group,
    parse_options,
    record_call,
    refuse,
)

NAME = r'[a-z]([a-z0-9-]*[a-z0-9])?'
WHERE = {'zone': r'[a-z0-9-]+', 'project': r'[a-z0-9-]+'}
# All hosts, a single host, a range, or a list.
HOSTS = r'all|\d+(-\d+)?(,\d+(-\d+)?)*'
TO_HOSTS = {**WHERE, 'worker': HOSTS}
CREATE = {**WHERE, 'accelerator-type': r'v\d+[a-z]*-\d+'}
LIST = {**WHERE, 'filter': f'name~/{NAME}\\$'}
STATES = ('WAITING_FOR_RESOURCES', 'PROVISIONING', 'ACTIVE')


def resource_folder(name: str) -> pathlib.Path:
    return CLUSTER / 'tpus' / name


def read_resource(name: str) -> dict:
    file = resource_folder(name) / 'about.json'
    return json.loads(file.read_text()) if file.exists() else {}


def update_resource(name: str, **changes) -> None:
    record = {**read_resource(name), **changes}
    resource_folder(name).mkdir(parents=True, exist_ok=True)
    (resource_folder(name) / 'about.json').write_text(json.dumps(record))


def create_resource(name: str, kind: str, slices: int, state: str) -> None:
    if read_resource(name):
        refuse(f'{name} already exists')
    workers = 2 if slices == 1 else 1
    for node in range(slices):
        for worker in range(workers):
            host_folder(name, node, worker).mkdir(parents=True)
    update_resource(name, kind=kind, slices=slices, workers=workers, state=state)


def host_folder(name: str, node: int, worker: int) -> pathlib.Path:
    return resource_folder(name) / f'host_{node}_{worker}'


def selected_hosts(name: str, options: dict[str, str]) -> list[pathlib.Path]:
    """Returns the hosts that --node and --worker select (default: 0)."""
    resource = read_resource(name)
    if not resource or resource['state'] not in ('READY', 'ACTIVE'):
        # Not an invalid argument, because a slice can be preempted at any time.
        sys.exit(f'{name} does not exist or is not ready')
    if resource['slices'] > 1 and resource['kind'] != 'queued-resources':
        refuse('several slices must be accessed through their queued resource')
    numbers = [
        range(count) if options.get(option, '0') == 'all' else [int(options.get(option, '0'))]
        for option, count in (('node', resource['slices']), ('worker', resource['workers']))
    ]
    hosts = [host_folder(name, node, worker) for node in numbers[0] for worker in numbers[1]]
    return [home if home.exists() else refuse(f'{name} has no {home.name}') for home in hosts]


def host_variables(home: pathlib.Path) -> dict[str, str]:
    hosts = sorted(home.parent.glob('host_*'))
    return {
        'HOME': str(home),
        'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{os.environ["PORT"]}',
        'JAX_NUM_PROCESSES': str(len(hosts)),
        'JAX_PROCESS_ID': str(hosts.index(home)),
    }


def ssh(words, kind: str) -> int:
    values = {**TO_HOSTS, 'command': '.+', **({'node': HOSTS} if kind == 'queued-resources' else {})}
    positional, options = parse_options(words, values, (), ('command',))
    [name] = check_positionals(positional, 1)
    command = ['bash', '-c', options['command']]
    started = [
        subprocess.Popen(command, cwd=home, env={**os.environ, **host_variables(home)}, stdin=subprocess.DEVNULL)
        for home in selected_hosts(name, options)
    ]
    return max(process.wait() for process in started)


def scp(words, kind: str) -> int:
    values = {**TO_HOSTS, 'node': HOSTS} if kind == 'queued-resources' else TO_HOSTS
    positional, options = parse_options(words, values)
    source, target = check_positionals(positional, 2)
    name, colon, path = target.partition(':')
    if not colon:
        refuse('the target must be NAME:PATH')
    for home in selected_hosts(name, options):
        shutil.copy(source, home / path)
    return 0


def list_states(words, kind: str) -> int:
    output_format = 'value(state.state)' if kind == 'queued-resources' else 'value(state)'
    _, options = parse_options(words, {**LIST, 'format': re.escape(output_format)}, (), ('zone', 'filter', 'format'))
    name = options['filter'].removeprefix('name~/').removesuffix('$')
    resource = read_resource(name)
    if not resource:
        return 0
    if kind == 'queued-resources' and resource['kind'] == kind:
        if resource['state'] in STATES[:-1]:
            update_resource(name, state=STATES[STATES.index(resource['state']) + 1])
        print(resource['state'])
    elif kind == 'tpu-vm' and resource['slices'] == 1:
        print(resource['state'].replace('ACTIVE', 'READY'))
    return 0


def create(words, kind: str) -> int:
    is_queued = kind == 'queued-resources'
    version = 'runtime-version' if is_queued else 'version'
    values = {**CREATE, version: '[a-z0-9-]+'}
    if is_queued:
        values |= {'node-id': NAME, 'node-count': r'[1-9]\d*'}
    positional, options = parse_options(words, values, ('spot',), ('accelerator-type', version, 'zone'))
    [name] = check_positionals(positional, 1)
    if is_queued and ('node-id' in options) == ('node-count' in options):
        refuse('exactly one of --node-id and --node-count is required')
    state, slices = STATES[0] if is_queued else 'READY', int(options.get('node-count', 1))
    create_resource(name, kind, slices, state)
    return 0


def delete(words, kind: str) -> int:
    flags = ('force', 'quiet') if kind == 'queued-resources' else ('quiet',)
    positional, options = parse_options(words, WHERE, flags, ('zone', 'quiet'))
    [name] = check_positionals(positional, 1)
    has_nodes = read_resource(name).get('state') in ('ACTIVE', 'SUSPENDED')
    if kind == 'queued-resources' and has_nodes and 'force' not in options:
        refuse(f'{name} has nodes; --force deletes them too')
    if not read_resource(name):
        refuse(f'{name} does not exist')
    shutil.rmtree(resource_folder(name))
    return 0


def preempt(name: str) -> None:
    """Preempts the slices and kills their processes. Called by tests.

    The state changes first, which makes the hosts inaccessible. Otherwise a supervisor could notice the end of the
    command and restart it before the state changes, and the new process would not be killed.
    """
    update_resource(name, state='SUSPENDED' if read_resource(name)['kind'] == 'queued-resources' else 'PREEMPTED')
    for group in resource_folder(name).glob('host_*/remixer_t5x_run/pid'):
        kill_group(int(group.read_text()))


def main(words: list[str]) -> int:
    record_call()
    actions = {'list': list_states, 'create': create, 'delete': delete, 'ssh': ssh, 'scp': scp}
    if words[:2] != ['compute', 'tpus'] or words[2] not in ('tpu-vm', 'queued-resources') or words[3] not in actions:
        refuse('no such command')
    return actions[words[3]](words[4:], words[2])


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
