"""The contents of the wheel and the sdist, and their installation into an empty environment."""

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests.launch.clusters import harness
from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
SHIPPED = ('pyproject.toml', 'setup.py', 'MANIFEST.in', 'README.md', 'LICENSE', 'CHANGELOG.md')
SHIPPED += ('requirements.lock', 'requirements-py311.lock', 'remixer_t5x', 'tasks', 'configs')


def run(*words, cwd):
    env = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    env |= {'PIP_NO_INDEX': '1', 'PIP_DISABLE_PIP_VERSION_CHECK': '1', 'TF_CPP_MIN_LOG_LEVEL': '3'}
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope='module')
def sdist(tmp_path_factory):
    """Builds the sdist from a copy, because setuptools adds files of older builds in the checkout."""
    pytest.importorskip('setuptools', reason='setuptools builds the package')
    copy = tmp_path_factory.mktemp('checkout')
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns('__pycache__', '*.egg-info'))
        else:
            shutil.copy(ROOT / name, copy / name)
    build = 'from setuptools import build_meta; build_meta.build_sdist("dist")'
    run(sys.executable, '-c', build, cwd=copy)
    [sdist] = (copy / 'dist').glob('*.tar.gz')
    return sdist


def test_names_of_extras_are_normalized():
    """setuptools normalizes names (PEP 685), and pip before 23.3 ignores extras that are typed with an underscore."""
    assert [name for name in PROJECT['optional-dependencies'] if not re.fullmatch('[a-z0-9-]+', name)] == []


def test_an_installed_sdist_trains_without_extras(sdist, tmp_path):
    pip = (sys.executable, '-m', 'pip', '--quiet')
    run(sys.executable, '-m', 'venv', '--without-pip', 'venv', cwd=tmp_path)
    # pip install does the same in one command, but needs setuptools in the new environment to build an sdist.
    run(*pip, 'wheel', '--no-deps', '--no-build-isolation', '--wheel-dir=wheels', sdist, cwd=tmp_path)
    [wheel] = (tmp_path / 'wheels').glob('*.whl')
    run(*pip, '--python', tmp_path / 'venv', 'install', '--no-deps', wheel, cwd=tmp_path)
    [packages] = (tmp_path / 'venv').glob('lib/*/site-packages')
    # Dependencies are imported from the environment of this process.
    (packages / 'dependencies.pth').write_text('\n'.join(harness.site_packages()))

    installed = {path.relative_to(packages).as_posix() for path in packages.rglob('*') if path.is_file()}
    assert {'remixer_t5x/py.typed', 'remixer_tasks/py.typed'} <= installed
    for source, package in {'remixer_t5x': 'remixer_t5x', 'tasks/remixer_tasks': 'remixer_tasks'}.items():
        files = {path.relative_to(ROOT / source) for path in (ROOT / source).rglob('*') if path.is_file()}
        missing = {f'{package}/{path}' for path in files if '__pycache__' not in path.parts} - installed
        assert not missing
    gin = {f'remixer_t5x/configs/{path.relative_to(ROOT / "configs")}' for path in (ROOT / 'configs').rglob('*.gin')}
    assert gin <= installed
    assert {path.partition('/')[0] for path in installed if '/' in path} == {
        *('remixer_t5x', 'remixer_tasks'),
        next(name.partition('/')[0] for name in installed if name.endswith('/METADATA')),
    }

    shutil.rmtree(packages / 'remixer_t5x/extras')
    command = tmp_path / 'venv/bin/remixer-t5x'
    (tmp_path / 'text.txt').write_text(harness.TEXT)
    train = (*harness.TRAIN, '--gin.TRAIN_STEPS=5', '--gin.FILES=text.txt', '--gin.MODEL_DIR=run')
    run(command, *train, cwd=tmp_path)
    assert (tmp_path / 'run/checkpoints/5').is_dir()
