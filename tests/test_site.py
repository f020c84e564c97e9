"""The documentation site builds without warnings and contains every page, command, macro and public name."""

import os
import re
import subprocess
import sys

import pytest

from remixer_t5x.cli.info import settings
from remixer_t5x.cli.main import COMMANDS
from tests.support.paths import ROOT

pytest.importorskip('mkdocstrings', reason="the site needs mkdocs: pip install '.[docs]'")


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    """Builds the site and returns the HTML of each page by its path without `index.html`."""
    folder = tmp_path_factory.mktemp('site')
    command = [sys.executable, '-W', 'ignore', '-m', 'mkdocs', 'build', '--strict']
    command += ['--config-file', str(ROOT / 'docs/site/mkdocs.yml'), '--site-dir', str(folder)]
    environment = {**os.environ, 'NO_MKDOCS_2_WARNING': '1'}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {str(path.parent.relative_to(folder)): path.read_text() for path in folder.rglob('index.html')}


def test_every_page_is_in_the_navigation(site):
    pages = {path.relative_to(ROOT / 'docs').with_suffix('') for path in (ROOT / 'docs').rglob('*.md')}
    assert {*map(str, pages)} - {'README'} <= {*site}
    navigation = site['.'][: site['.'].index('<article')]
    linked = {link.rstrip('/') for link in re.findall(r'href="([^"#:]*/)"', navigation)}
    assert {*site} - {'.'} <= linked


def test_links_outside_the_documentation_lead_to_repository_files(site):
    links = {link for text in site.values() for link in re.findall(r'href="[^"]*/blob/main/([^"#]*)', text)}
    assert 'CONTRIBUTING.md' in links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_reference_has_every_command_macro_and_public_name(site):
    assert all(f'<h2 id="{command.name.replace(" ", "-")}"' in site['reference/commands'] for command in COMMANDS)
    assert '--beams' in site['reference/commands']  # an argument in a group
    assert all(f'id="{row.name}"' in site['reference/macros'] for row in settings.find_macros())
    assert 'remixer_t5x.plan_train_state' in site['reference/python'] and 'trust_gin' in site['reference/python']
    assert 'GatedMLP' in site['reference/sublayers']
