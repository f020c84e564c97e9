"""`scripts/test.sh --quick` and `--changed` select the documented tests."""

import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def load_module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='module')
def changed_tests():
    return load_module(ROOT / 'scripts/changed_tests.py')


@pytest.fixture(scope='module')
def files(changed_tests):
    """Returns the files of the checkout, found without git."""
    folders = ('remixer_t5x', 'tasks', 'tests', 'configs', 'docs', 'scripts')
    nested = [path for folder in folders for path in (ROOT / folder).rglob('*') if '__pycache__' not in path.parts]
    top = [path for path in ROOT.iterdir() if path.is_file()]
    return changed_tests.DependencyGraph(
        {path.relative_to(ROOT).as_posix() for path in [*nested, *top] if path.is_file()}
    )


def test_quick_runs_each_contract_test_for_each_sublayer_module():
    contract = load_module(ROOT / 'tests/models/sublayers/test_sublayer_contract.py')
    modules = {
        f'remixer_t5x.models.sublayers.{path.stem}'
        for path in (ROOT / 'remixer_t5x/models/sublayers').glob('[a-z]*.py')
    }
    rows = contract.covering_cases()
    factories = [factory for name, side in rows for factory in getattr(contract.SUBLAYERS[name], side)]
    assert {cls.__module__ for factory in factories for cls in contract.sublayer_classes(factory)} == modules
    sides = [side for case in contract.SUBLAYERS.values() for side in (case.encoder, case.decoder) if side]
    assert len(rows) < len(sides), '--quick runs all cases'


CHANGES = {
    'remixer_t5x/kernels/reshaping.py': ('models/sublayers/test_sublayer_contract', 'test_configs'),
    'remixer_t5x/cli/info/model.py': ('cli/test_info', 'test_docs'),
    'docs/guide/new_mixer.md': ('testing/test_check_sublayer', 'test_docs'),
    'tests/support/tiny_training.py': ('train/test_resume',),
    'scripts/launch/worker.sh': ('launch/test_scripts',),
}


@pytest.mark.parametrize('changed', CHANGES)
def test_a_change_selects_only_the_tests_that_depend_on_it(changed_tests, files, changed):
    chosen = changed_tests.select_tests(files, {changed})
    assert {f'tests/{name}.py' for name in CHANGES[changed]} <= set(chosen)
    assert 'tests/remixer_tasks/test_submissions.py' not in chosen
    assert changed.startswith(('remixer_t5x', 'tests')) or 'tests/interop/test_gpt2.py' not in chosen


@pytest.mark.parametrize('changed', ['pyproject.toml', 'remixer_t5x/unknown_to_all_tests.py'])
def test_a_change_that_cannot_be_classified_selects_all_tests(changed_tests, files, changed):
    assert changed_tests.select_tests(files, {changed}) == files.tests
