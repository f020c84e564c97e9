"""Workflows, hooks and metadata of the repository: structure, and the steps that run without a network."""

import os
import re
import subprocess
import tomllib

import pytest

import remixer_t5x
from tests.support.paths import ROOT

yaml = pytest.importorskip('yaml', reason='PyYAML reads the workflows: pip install pyyaml')

PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
WORKFLOWS = sorted((ROOT / '.github/workflows').glob('*.yml'))


def jobs(path):
    return yaml.safe_load(path.read_text())['jobs']


def steps():
    return [
        (path, name, step) for path in WORKFLOWS for name, job in jobs(path).items() for step in job.get('steps', ())
    ]


SCRIPTS = [step['run'] for _, _, step in steps() if 'run' in step]


@pytest.mark.parametrize('path', WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_complete(path):
    workflow = yaml.safe_load(path.read_text())
    # YAML 1.1 reads the key `on` as True.
    assert workflow[True] and workflow['name'] and workflow['permissions'] == {'contents': 'read'}
    for name, job in workflow['jobs'].items():
        assert {job['needs']} <= {*workflow['jobs']} if 'needs' in job else True, name
        if 'uses' in job:
            assert 'workflow_call' in yaml.safe_load((ROOT / job['uses']).read_text())[True]
            continue
        assert job['runs-on'] and job['timeout-minutes']
        matrix = job.get('strategy', {}).get('matrix', {})
        assert {*re.findall(r'\$\{\{ matrix\.(\w+) \}\}', str(job))} == {*matrix}, name
        for step in job['steps']:
            assert ('uses' in step) != ('run' in step)
            if 'uses' in step:
                assert re.fullmatch(r'[\w-]+/[\w-]+@(v\d+|release/v\d+)', step['uses'])


def test_scripts_of_steps_are_correct_shell_and_name_what_exists():
    for script in SCRIPTS:
        subprocess.run(['bash', '-n'], input=script, text=True, check=True)
        for path in re.findall(r'(?<![\w$"/.=])(?:scripts|remixer_t5x|requirements)[\w./-]*\.\w+', script):
            assert (ROOT / path).exists(), path
        for extras in re.findall(r'\.\[([\w,]+)\]', script):
            assert {*extras.split(',')} <= {*PROJECT['optional-dependencies']}
        for gin in re.findall(r'--gin_file=(\S+)', script):
            assert (ROOT / 'configs' / gin).exists()


@pytest.mark.parametrize(('tag', 'code'), [(f'v{remixer_t5x.__version__}', 0), ('v9.9.9', 1), ('', 1)])
def test_a_release_needs_the_tag_of_the_version(tag, code):
    [step] = [step for path, job, step in steps() if job == 'version' and 'run' in step]
    env, words = {**os.environ, 'GITHUB_REF_NAME': tag}, ['bash', '-eo', 'pipefail', '-c', step['run']]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == code and (not code or remixer_t5x.__version__ in done.stdout)


def test_the_citation_is_that_of_the_package():
    citation = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
    assert citation['version'] == remixer_t5x.__version__ and citation['license'] == PROJECT['license']
    assert citation['repository-code'] == PROJECT['urls']['Source']
    assert [author['name'] for author in citation['authors']] == [author['name'] for author in PROJECT['authors']]
