"""Tests of the documentation: configurations of commands load, links resolve, and pages run."""

import argparse
import ast
import contextlib
import dataclasses
import importlib.util
import json
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from gin import config_parser

from remixer_t5x.cli import conversions, convert, main
from remixer_t5x.cli.info import settings
from remixer_t5x.cli.main import COMMANDS
from remixer_t5x.config import loading, reference_resolver
from remixer_t5x.devices import processes
from remixer_t5x.errors import UserError
from remixer_t5x.extras.reports import compare
from tests.support import feed_forward, paths

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([ROOT / 'README.md', *(ROOT / 'docs').rglob('*.md')])
# Pages that the site does not show.
UNLISTED = [ROOT / 'CONTRIBUTING.md', ROOT / 'tests' / 'README.md']


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / 'scripts' / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run_docs = load_script('run_docs')


def find_commands(page):
    """Yields the remixer-t5x command lines of a page, except those with variables or omitted arguments."""
    text = '\n'.join(run_docs.extract_code_blocks(page.read_text(), r'(?:bash|text|console|)'))
    # Skip the contents of files that the page writes.
    text = re.sub(r"<<'END'\n.*?^END$", '', text, flags=re.DOTALL | re.MULTILINE)
    for line in text.replace('\\\n', ' ').splitlines():
        if not re.match(r'\s*(PYTHONPATH=\S+ )?remixer-t5x ', line):
            continue
        words = shlex.split(line, comments=True)
        words = words[words.index('remixer-t5x') + 1 :]
        words = words[: next((i for i, word in enumerate(words) if word in ('||', '|', '>')), None)]
        if not any('...' in word or '$' in word for word in words):
            yield words


def fenced_blocks(page, languages='bash|text|console|'):
    """Returns the text of fenced blocks, which may be indented in a list, with continued lines joined."""
    blocks = re.findall(rf'^( *)```(?:{languages})\n(.*?)^\1```$', page.read_text(), re.DOTALL | re.MULTILINE)
    return [re.sub(rf'^{indent}', '', text, flags=re.MULTILINE).replace('\\\n', ' ') for indent, text in blocks]


def python_sources(page):
    """Yields Python code that a page shows, writes into a file, or passes to `python -` or `python -c`."""
    for text in fenced_blocks(page, 'python'):
        # gin is highlighted as Python.
        if 'dynamic_registration' in text:
            list(config_parser.ConfigParser(text, loading.ReferenceCollector()))
        else:
            yield text
    for text in fenced_blocks(page):
        yield from re.findall(r"^(?:cat > \S+\.py|python -) <<'END'\n(.*?)^END$", text, re.DOTALL | re.MULTILINE)
        yield from (
            first or second for first, second in re.findall(r"python -c (?:'(.*?)'|\"(.*?)\")", text, re.DOTALL)
        )


SOURCES = [(page, source) for page in (*PAGES, *UNLISTED) for source in python_sources(page)]
# Packages whose attributes are checked; others may not be installed or are written by the page.
CHECKED_PACKAGES = ('remixer_t5x', 'remixer_tasks', 'jax', 'numpy', 'flax', 'optax')


@pytest.mark.parametrize(('page', 'source'), SOURCES, ids=[f'{page.name}-{i}' for i, (page, _) in enumerate(SOURCES)])
def test_python_code_names_what_exists(page, source):
    tree = ast.parse(source)
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.partition('.')[0] in CHECKED_PACKAGES:
            module = importlib.import_module(node.module)
            imported |= {alias.asname or alias.name: _get_attribute(module, alias.name) for alias in node.names}
        for alias in node.names if isinstance(node, ast.Import) else ():
            package = alias.name.partition('.')[0]
            if package in CHECKED_PACKAGES:
                module = importlib.import_module(alias.name)
                imported |= {alias.asname: module} if alias.asname else {package: sys.modules[package]}
    for node in ast.walk(tree):
        chain, inner = [], node
        while isinstance(inner, ast.Attribute):
            chain.append(inner.attr)
            inner = inner.value
        if chain and isinstance(inner, ast.Name) and inner.id in imported:
            value = imported[inner.id]
            for name in reversed(chain):
                value = _get_attribute(value, name)


def _get_attribute(value, name):
    """Returns an attribute, or imports a submodule."""
    if not hasattr(value, name) and hasattr(value, '__path__'):
        return importlib.import_module(f'{value.__name__}.{name}')
    assert hasattr(value, name), f'{value} has no attribute {name}'
    return getattr(value, name)


def test_the_troubleshooting_page_quotes_messages_of_the_code():
    """`…` replaces the variable parts of a message; messages of Python and gin begin with `No`."""
    code = '\n'.join(path.read_text() for folder in ('remixer_t5x', 'tasks') for path in (ROOT / folder).rglob('*.py'))
    code = re.sub(r"""['"]\s*\n\s*f?['"]""", '', code)
    symptoms = re.findall(r'^\| (.*?) \|', (ROOT / 'docs' / 'guide' / 'troubleshooting.md').read_text(), re.MULTILINE)
    spans = [span for symptom in symptoms for span in symptom.split('`')[1::2]]
    messages = [span for span in spans if ' ' in span and not span.startswith('No ')]
    parts = [part.strip() for message in messages for part in message.split('…')]
    assert len(messages) >= 10 and [part for part in parts if part not in code] == []


def test_the_installation_page_lists_every_extra():
    extras = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['optional-dependencies']
    rows = re.findall(r'^\| (`.*?) \|', (ROOT / 'docs/guide/install.md').read_text(), re.MULTILINE)
    assert {name for row in rows for name in re.findall('`(.*?)`', row)} == set(extras)


@pytest.mark.parametrize('page', [*PAGES, *UNLISTED], ids=lambda page: page.name)
def test_shell_code_names_scripts_flags_and_packages_that_exist(page):
    """Also checks the lines that `test_configuration_of_every_command_loads` skips."""
    for text in fenced_blocks(page, 'bash'):
        subprocess.run(['bash', '-n'], input=text.replace('...', ''), text=True, check=True)
    extras = {*tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['optional-dependencies']}
    for text in fenced_blocks(page):
        written = re.findall(r"^cat > (\S+) <<'END'", text, re.MULTILINE)
        text = re.sub(r"<<'END'\n.*?^END$", '', text, flags=re.DOTALL | re.MULTILINE)
        for names in re.findall(r'^pip install .*\[([\w,-]+)\]', text, re.MULTILINE):
            assert {*names.split(',')} <= extras
        for line in text.splitlines():
            line, _, command = line.partition(' -- ')
            if script := re.search(r'(?<!\S)scripts/\S+|(?<=-m )tests\.\S+', line):
                _check_script(line, script[0].replace('.', '/') if 'tests.' in script[0] else script[0])
            if match := re.match(r'remixer-t5x (.*)', line) or re.match(r'python -m t5x\.\w+ (.*)', line):
                _check_flags(match[1].split(' # ')[0], written, 'remixer-t5x' in line)
            if command:
                _check_flags(command, written, True)


def _check_script(line, path):
    """Checks that a script exists, and that its text or that of files next to it contains the flags."""
    candidates = (ROOT / path, ROOT / f'{path}.py', ROOT / path / '__main__.py')
    script = next(candidate for candidate in candidates if candidate.exists())
    texts = ' '.join(file.read_text() for file in script.parent.rglob('*') if file.suffix in ('.py', '.sh', '.sbatch'))
    if script.suffix != '.sbatch':
        for flag in re.findall(r' (--[\w-]+)', line.split(' # ')[0]):
            assert flag in texts or flag[2:] in texts, f'{path} has no {flag}'


def _check_flags(line, written, ours):
    """Checks gin files, macros and flags of a command line, which may contain `...` and variables."""
    words = shlex.split(line, comments=True)
    words = words[: next((i for i, word in enumerate(words) if word in ('||', '|', '>')), None)]
    macros = {row.name for row in settings.find_macros()} | {'MIXTURE_OR_TASK_MODULE', 'TRAIN_STEP'}
    command = max((c for c in COMMANDS if f'{line} '.startswith(f'{c.name} ')), key=lambda c: len(c.name), default=None)
    parser = argparse.ArgumentParser()
    if command:
        command.add_arguments(parser)
    known = {*re.findall(r'--\w+', parser.format_help()), '--verbose'}
    for word in words:
        flag, _, value = word.partition('=')
        if flag == '--gin_file' and re.fullmatch(r'[a-z_]+/[a-z0-9_]+\.gin', value) and value not in written:
            assert (ROOT / 'configs' / value).exists() or value.endswith(('/model.gin', '/config.gin')), word
        if re.fullmatch(r'--gin\.[A-Z_0-9]+', flag):
            assert flag.removeprefix('--gin.') in macros, word
        elif flag.startswith('--') and not flag.startswith('--gin.') and ours and command:
            assert flag in known, word


class ConfigurationLoaded(Exception):
    """Raised instead of running the command."""


PAGE_COMMANDS = [(page, words) for page in PAGES for words in find_commands(page)]


@pytest.mark.parametrize(
    ('page', 'words'), PAGE_COMMANDS, ids=[f'{page.name}-{i}' for i, (page, _) in enumerate(PAGE_COMMANDS)]
)
@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_configuration_of_every_command_loads(page, words, tmp_path, monkeypatch):
    """Checks flags, files, macros and imports without running the command; creates the files that the page writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [str(tmp_path), *sys.path])
    for name in re.findall(r"^cat > (\S+) <<'END'$", page.read_text(), re.MULTILINE):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(run_docs.extract_heredoc(page.read_text(), name))
    _write_user_files(tmp_path, words)
    monkeypatch.setattr(conversions, 'get_or_convert_model_dir', lambda path: tmp_path / 'kept')

    def call(root, *args, **options):
        raise ConfigurationLoaded

    # Commands that read no gin files have only arguments to check, and no configuration to load.
    plain = {command.name: call for command in COMMANDS if not _reads_gin_files(command)} | {'reproduce': call}
    plain['compare'] = lambda args: call(compare.build_plan(args))
    if '--settings' in words:
        plain['info'] = call
    if not any('.gin' in word for word in words):
        plain['convert'] = lambda args: call(convert.select_conversion(args))
        if any(word.startswith('--checkpoint') for word in words):
            # The configuration is read from the run.
            plain.update(dict.fromkeys(('eval', 'infer', 'export'), call))
    commands = tuple(dataclasses.replace(c, run=plain.get(c.name, c.run)) for c in COMMANDS)
    monkeypatch.setattr(main, 'COMMANDS', commands)
    monkeypatch.setattr(reference_resolver, 'call_configured', call)
    monkeypatch.setattr(reference_resolver, 'evaluate_macro', call)
    monkeypatch.setattr(processes, 'connect_processes', lambda *args, **kwargs: contextlib.nullcontext())
    monkeypatch.setattr(main.console, 'silence_library_logs', lambda: None)
    if words == ['--version'] or '--help' in words:
        with pytest.raises(SystemExit):
            main._run_command(words, own_process=False)
    elif 'TRAIN_STEP=60' in ' '.join(words):
        with pytest.raises(UserError, match='TRAIN_STEPS'):  # a mistake in the guide that shows its error
            main._run_command(words, own_process=False)
    else:
        with pytest.raises(ConfigurationLoaded):
            main._run_command(words, own_process=False)


def _reads_gin_files(command):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return '--gin_file' in parser.format_usage()


def _write_user_files(folder, words):
    """Writes the model.gin of a converted folder and the config.gin of a run that the command reads."""
    for word in (*words, '--gin_file=kept/model.gin'):
        path = word.partition('--gin_file=')[2]
        if path.endswith('/model.gin'):
            paths.write_text(
                folder / path,
                "include 'models/t5_1_1.gin'\ninclude 'sizes/small.gin'\nfrom __gin__ import "
                'dynamic_registration\nfrom remixer_tasks import vocabularies\nVOCABULARY = @vocabularies.byte()\n',
            )
        if path.endswith('/config.gin'):
            paths.write_text(folder / path, "include 'experiments/python_docs.gin'\n")


@pytest.mark.parametrize('page', [*PAGES, *UNLISTED], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r'\]\(([^)\s]+)\)', page.read_text()):
        if '://' in target:
            continue
        path, _, heading = target.partition('#')
        linked = page.parent / path if path else page
        assert linked.exists(), f'{page.name} links to {target}'
        if heading:
            titles = re.findall(r'^#+ (.*)$', linked.read_text(), re.MULTILINE)
            anchors = [re.sub(r'[^\w -]', '', title.lower()).replace(' ', '-') for title in titles]
            assert heading in anchors, f'{page.name} links to {target}'


def test_the_page_about_a_new_mixer_runs(tmp_path, warm_python):
    # tests/cli/test_compare.py tests the command of the last section.
    page = tmp_path / 'page.md'
    page.write_text((ROOT / 'docs/guide/new_mixer.md').read_text().partition('## Compare it')[0])
    done = run_docs.run_page(page, tmp_path / 'page', shlex.join(warm_python.command))
    assert done.returncode == 0, done.stdout[-3000:]
    assert 'MovingAverage' in (tmp_path / 'page/runs/average/config.gin').read_text()
    # The contract of tests/models/sublayers, for the mixer of the page.
    assert re.search(r'^  decode +decoder +passed$', done.stdout, re.MULTILINE)


def test_a_failing_page_is_reported(tmp_path):
    page = tmp_path / 'page.md'
    page.write_text('```bash\necho first\n```\ntext\n```text\nfalse\n```\n```bash\nfalse\necho never\n```\n')
    done = run_docs.run_page(page, tmp_path / 'folder')
    assert done.returncode == 1 and 'first' in done.stdout and '\nnever' not in done.stdout


def test_the_notebook_runs_from_start_to_end(tmp_path, warm_python):
    notebook = ROOT / 'docs/guide/first_run.ipynb'
    assert all(not cell.get('outputs') for cell in json.loads(notebook.read_text())['cells'])
    done = run_docs.run_page(notebook, tmp_path / 'page', shlex.join(warm_python.command))
    assert done.returncode == 0, done.stdout[-3000:]
    assert (tmp_path / 'page/runs/notebook.html').exists()


def _normalize(line):
    """Replaces the numbers and the answer in a printed line, and removes the mark of the best step."""
    if line.startswith('  answer '):
        return 'answer'
    return re.sub(r'\d[\d.,]*(e-\d+)?', '0', line.removesuffix(' · the best so far'))


@pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::ResourceWarning')
def test_the_readme_shows_what_the_quickstart_prints(tmp_path, monkeypatch, capsys):
    """A smaller model trained for two steps prints the same lines, except for numbers and answers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'cache'))
    smaller = {'EMBED_DIM': 8, 'NUM_ENCODER_LAYERS': 1, 'NUM_DECODER_LAYERS': 1, **feed_forward.SETTINGS}
    shorter = {'TRAIN_STEPS_RELATIVE': 2, 'LOG_PERIOD': 1, 'EVAL_EXAMPLES': 5, 'EVAL_STEPS': 1, 'EVAL_BATCH_SIZE': 8}
    flags = [f'--gin.{name}={value}' for name, value in (smaller | shorter).items()]
    assert main.main(['train', '--gin_file=experiments/quickstart.gin', *flags]) == 0
    printed = {_normalize(line) for line in capsys.readouterr().out.splitlines()}
    (block,) = [
        block
        for block in run_docs.extract_code_blocks((ROOT / 'README.md').read_text(), 'text')
        if '  answer ' in block
    ]
    shown = [_normalize(line) for line in block.splitlines() if line != '...']
    assert len(shown) > 15 and set(shown) <= printed


def test_contributing_names_files_and_constants_that_exist():
    text = (ROOT / 'CONTRIBUTING.md').read_text()
    files = [
        path for part in ('remixer_t5x', 'tasks', 'tests', 'configs', 'scripts') for path in (ROOT / part).rglob('*')
    ]
    files += [path for path in (ROOT / 'docs').rglob('*.md')]
    named = {path for path in re.findall(r'`([\w/]+/\w+\.\w+)`', text) if 'NAME' not in path}
    missing = {name for name in named if not any(path.as_posix().endswith(f'/{name}') for path in files)}
    code = '\n'.join(path.read_text() for path in files if path.suffix in ('.py', '.gin'))
    constants = {*re.findall(r'`([A-Z_]{4,})`', text)} - {'NAME'}
    missing |= {name for name in constants if not re.search(rf'\b{name}\b', code)}
    assert named and constants and not missing
