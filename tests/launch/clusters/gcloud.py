"""`gcloud compute tpus` and `gcloud storage rsync`, by cloud.google.com/sdk/gcloud/reference.

A slice has two hosts, or one where a queued resource has several slices. A host is a folder, which is its HOME. What a
TPU's metadata would tell JAX about the processes comes in variables. A queued resource waits twice before it is active.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

from tests.launch.clusters.strictly import CLUSTER, called, kill_group, options, positionals, refuse

NAME = r'[a-z]([a-z0-9-]*[a-z0-9])?'
WHERE = {'zone': r'[a-z0-9-]+', 'project': r'[a-z0-9-]+'}
# A single host, all, a list, or a range.
HOSTS = r'all|\d+(-\d+)?(,\d+(-\d+)?)*'
TO_HOSTS = {**WHERE, 'worker': HOSTS}
CREATE = {**WHERE, 'accelerator-type': r'v\d+[a-z]*-\d+'}
LIST = {**WHERE, 'filter': f'name~/{NAME}\\$'}
# https://cloud.google.com/tpu/docs/runtimes, for JAX.
RUNTIMES = {
    **dict.fromkeys(('v2', 'v3', 'v4'), 'tpu-ubuntu2204-base'),
    **{'v5litepod': 'v2-alpha-tpuv5-lite', 'v5p': 'v2-alpha-tpuv5', 'v6e': 'v2-alpha-tpuv6e'},
}
STATES = ('WAITING_FOR_RESOURCES', 'PROVISIONING', 'ACTIVE')


def place(name: str) -> pathlib.Path:
    return CLUSTER / 'tpus' / name


def about(name: str) -> dict:
    file = place(name) / 'about.json'
    return json.loads(file.read_text()) if file.exists() else {}


def write(name: str, **changes) -> None:
    found = {**about(name), **changes}
    place(name).mkdir(parents=True, exist_ok=True)
    (place(name) / 'about.json').write_text(json.dumps(found))


def make(name: str, kind: str, slices: int, accelerator: str, runtime: str, **more) -> None:
    if RUNTIMES[accelerator.partition('-')[0]] != runtime:
        refuse(f'{runtime} is not the software of {accelerator}')
    if about(name):
        refuse(f'{name} already exists')
    workers = 2 if slices == 1 else 1
    for node in range(slices):
        for worker in range(workers):
            host(name, node, worker).mkdir(parents=True)
    write(name, kind=kind, slices=slices, workers=workers, **more)


def host(name: str, node: int, worker: int) -> pathlib.Path:
    return place(name) / f'host_{node}_{worker}'


def chosen(name: str, found: dict[str, str]) -> list[pathlib.Path]:
    """The hosts that --node and --worker name; 0 is gcloud's default."""
    known = about(name)
    if not known or known['state'] not in ('READY', 'ACTIVE'):
        # A slice may be taken away at any time: no mistake of the caller.
        sys.exit(f'{name} is not there, or not ready')
    if known['slices'] > 1 and known['kind'] != 'queued-resources':
        refuse('several slices are reached through their queued resource')
    numbers = [
        range(count) if found.get(option, '0') == 'all' else [int(found.get(option, '0'))]
        for option, count in (('node', known['slices']), ('worker', known['workers']))
    ]
    hosts = [host(name, node, worker) for node in numbers[0] for worker in numbers[1]]
    return [each if each.exists() else refuse(f'there is no {each.name} of {name}') for each in hosts]


def variables(home: pathlib.Path) -> dict[str, str]:
    every = sorted(home.parent.glob('host_*'))
    return {
        'HOME': str(home),
        'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{os.environ["PORT"]}',
        'JAX_NUM_PROCESSES': str(len(every)),
        'JAX_PROCESS_ID': str(every.index(home)),
    }


def ssh(words, kind: str) -> int:
    values = {**TO_HOSTS, 'command': '.+', **({'node': HOSTS} if kind == 'queued-resources' else {})}
    positional, found = options(words, values, (), ('command',))
    [name] = positionals(positional, 1)
    command = ['bash', '-c', found['command']]
    started = [
        subprocess.Popen(command, cwd=home, env={**os.environ, **variables(home)}, stdin=subprocess.DEVNULL)
        for home in chosen(name, found)
    ]
    return max(process.wait() for process in started)


def scp(words, kind: str) -> int:
    values = {**TO_HOSTS, 'node': HOSTS} if kind == 'queued-resources' else TO_HOSTS
    positional, found = options(words, values, ('recurse',))
    source, target = positionals(positional, 2)
    name, colon, path = target.partition(':')
    if colon:
        for home in chosen(name, found):
            shutil.copy(source, home / path)
        return 0
    name, colon, path = source.partition(':')
    if not colon or 'recurse' not in found:
        refuse('one of both is NAME:PATH, and a folder needs --recurse')
    [home] = chosen(name, found)
    shutil.copytree(home / path, pathlib.Path(target) / pathlib.Path(path).name)
    return 0


def listed(words, kind: str) -> int:
    wanted = 'value(state.state)' if kind == 'queued-resources' else 'value(state)'
    _, found = options(words, {**LIST, 'format': re.escape(wanted)}, (), ('zone', 'filter', 'format'))
    name = found['filter'].removeprefix('name~/').removesuffix('$')
    known = about(name)
    if not known:
        return 0
    if kind == 'queued-resources' and known['kind'] == kind:
        if known['state'] in STATES[:-1]:
            write(name, state=STATES[STATES.index(known['state']) + 1])
        print(known['state'])
    elif kind == 'tpu-vm' and known['slices'] == 1:
        print(known['state'].replace('ACTIVE', 'READY'))
    return 0


def create(words, kind: str) -> int:
    is_queued = kind == 'queued-resources'
    version = 'runtime-version' if is_queued else 'version'
    values = {**CREATE, version: '[a-z0-9-]+'}
    if is_queued:
        values |= {'node-id': NAME, 'node-count': r'[1-9]\d*'}
    positional, found = options(words, values, ('spot',), ('accelerator-type', version, 'zone'))
    [name] = positionals(positional, 1)
    if is_queued and ('node-id' in found) == ('node-count' in found):
        refuse('one of --node-id and --node-count is needed')
    state, slices = STATES[0] if is_queued else 'READY', int(found.get('node-count', 1))
    make(name, kind, slices, found['accelerator-type'], found[version], state=state)
    return 0


def delete(words, kind: str) -> int:
    flags = ('force', 'quiet') if kind == 'queued-resources' else ('quiet',)
    positional, found = options(words, WHERE, flags, ('zone', 'quiet'))
    [name] = positionals(positional, 1)
    if kind == 'queued-resources' and about(name).get('state') in ('ACTIVE', 'SUSPENDED') and 'force' not in found:
        refuse(f'{name} has nodes; --force deletes them too')
    if not about(name):
        refuse(f'{name} is not there')
    shutil.rmtree(place(name))
    return 0


def preempt(name: str) -> None:
    """For tests: takes the slices away, with all that runs there.

    Nobody reaches the hosts from then on. Otherwise a supervisor that sees the end of a command could start it again
    just before the slices are gone, and nothing would end that one.
    """
    write(name, state='SUSPENDED' if about(name)['kind'] == 'queued-resources' else 'PREEMPTED')
    for group in place(name).glob('host_*/remixer_t5x_run/pid'):
        kill_group(int(group.read_text()))


def rsync(words) -> int:
    positional, _ = options(words, {}, ('recursive', 'delete-unmatched-destination-objects'), ('recursive',))
    source, target = positionals(positional, 2)
    if not source.startswith('gs://') or not pathlib.Path(target).is_dir():
        refuse('the source is a gs:// folder, and the destination a folder that exists')
    shutil.copytree(CLUSTER / 'buckets' / source.removeprefix('gs://'), target, dirs_exist_ok=True)
    return 0


def main(words: list[str]) -> int:
    called()
    if words[:2] == ['storage', 'rsync']:
        return rsync(words[2:])
    actions = {'list': listed, 'create': create, 'delete': delete, 'ssh': ssh, 'scp': scp}
    if words[:2] != ['compute', 'tpus'] or words[2] not in ('tpu-vm', 'queued-resources') or words[3] not in actions:
        refuse('no such command')
    return actions[words[3]](words[4:], words[2])


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
