"""Prints the test files that a change can affect, because they import or mention a changed file.

    python scripts/changed_tests.py                 commits since the main branch, and uncommitted changes
    python scripts/changed_tests.py --since HEAD~3  commits since a revision, and uncommitted changes

A file depends on the modules that it imports or names in a string, and on the paths that it mentions (gin files,
scripts, pages of the documentation). A test also depends on its fixtures. `scripts/test.sh --changed` runs the selected
tests. pytest-testmon is not used, because it records neither gin files nor child processes, on which half of the tests
depend, and because a function that an earlier test has compiled with JAX is not executed again.
"""

import argparse
import ast
import functools
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Folders to which a path or a module name may be relative.
PATH_ROOTS = ('', 'configs/', 'docs/', 'docs/guide/', 'scripts/', 'scripts/studies/', 'remixer_t5x/', 'tests/')
MODULE_ROOTS = ('', 'tasks/', 'scripts/studies/')
# Files that every test depends on.
AFFECTS_ALL_TESTS = {
    *('tests/conftest.py', 'pyproject.toml', 'setup.py', 'scripts/environment.sh', 'remixer_t5x/__init__.py'),
    *('requirements.lock', 'requirements-py311.lock'),
}
# Files that no test reads.
UNREAD_FILES = {
    *('LICENSE', 'SECURITY.md', '.gitignore', '.ci/run', '.github/pull_request_template.md'),
    *('scripts/test.sh', 'scripts/changed_tests.py'),
}
READ_SUFFIXES = ('.py', '.gin', '.md', '.ipynb', '.sh', '.sbatch', '.toml')


def run_git(*words: str) -> list[str]:
    done = subprocess.run(['git', '-C', str(ROOT), *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f'error: git {" ".join(words)}: {done.stderr.strip()}; specify a revision with --since REV')
    return done.stdout.splitlines()


class DependencyGraph:
    """The files of the checkout and their dependencies."""

    def __init__(self, names: set[str]):
        self.names = names
        self.tests = sorted(name for name in names if re.search(r'^tests/(.*/)?test_\w+\.py$', name))

    def find_module_files(self, dotted: str) -> Iterator[str]:
        """Returns the files of the module that the longest prefix of a dotted name refers to, and of its packages."""
        parts = dotted.split('.')
        for root in MODULE_ROOTS:
            for end in range(len(parts), 0, -1):
                path = root + '/'.join(parts[:end])
                found = [name for name in (f'{path}.py', f'{path}/__init__.py') if name in self.names]
                if found:
                    # The top-level package is excluded, because it imports most modules lazily.
                    packages = [f'{root}{"/".join(parts[:k])}/__init__.py' for k in range(2, end)]
                    yield from (name for name in (*found, *packages) if name in self.names)
                    break

    @functools.cache  # noqa: B019 (there is one object, which lives as long as the process)
    def find_dependencies(self, name: str) -> set[str]:
        """Returns the files that the file `name` imports or mentions."""
        path = ROOT / name
        # The fixtures of a conftest.py are dependencies only of the tests that use them, see `_find_conftest_files`.
        if path.name == 'conftest.py' or name in AFFECTS_ALL_TESTS | UNREAD_FILES:
            return set()
        if not path.is_file() or path.suffix not in READ_SUFFIXES:
            return set()
        text = path.read_text(encoding='utf-8')
        if path.suffix != '.md':
            text = re.sub(r'^\s*#[^!].*', '', text, flags=re.MULTILINE)
        tree = ast.parse(text) if path.suffix == '.py' else ast.Module([], [])
        dependencies = {*self._find_imported_files(tree)}
        if path.suffix == '.py' and name.startswith(('remixer_t5x/', 'tasks/')):
            # Only strings that consist of a name are dependencies, because messages also name files as examples.
            constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
            words = {word for word in constants if isinstance(word, str) and re.fullmatch(r'[\w./-]+', word)}
        else:
            text = re.sub(r'^\s*from ([\w.]+) import (\w+)', r'\1.\2', text.replace("' / '", '/'), flags=re.MULTILINE)
            words = set(re.findall(r'[\w.-]+(?:/[\w.-]+)*', text))
            dependencies |= {*self._find_folder_files(text)}
            for models in re.findall(r'--models?[= ]([\w,]+)', text):
                words |= {f'models/{model}.gin' for model in models.split(',')}
        if name in self.tests:
            dependencies |= {*self._find_conftest_files(name, text)}
        for word in words:
            if '/' in word or '.' in word:
                dependencies |= {root + word for root in PATH_ROOTS} & self.names
            if re.fullmatch(r'(remixer_t5x|remixer_tasks|tests)(\.\w+)+', word):
                dependencies |= {*self.find_module_files(word)}
        return dependencies - {name}

    def _find_imported_files(self, tree: ast.AST) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                package = f'{node.module}.' if isinstance(node, ast.ImportFrom) else ''
                for alias in node.names:
                    yield from self.find_module_files(package + alias.name)

    def _find_conftest_files(self, test: str, text: str) -> Iterator[str]:
        """Returns the `conftest.py` files of a test, and the imports of the fixtures that the test mentions."""
        for folder in pathlib.PurePosixPath(test).parents:
            conftest = f'{folder}/conftest.py'
            if conftest in self.names and (ROOT / conftest).is_file():
                yield conftest
                for node in ast.parse((ROOT / conftest).read_text(encoding='utf-8')).body:
                    if not isinstance(node, ast.FunctionDef) or re.search(rf'\b{node.name}\b', text):
                        yield from self._find_imported_files(node)

    def _find_folder_files(self, text: str) -> Iterator[str]:
        """Returns all files in a folder if a path has a variable part, such as f'models/{name}.gin'."""
        folders = set(re.findall(r'([\w-]+)/[{*]', text))
        if 'glob(' in text:
            folders |= set(re.findall(r"'([\w/-]+)'", text))
        prefixes = tuple(f'{root}{folder}/' for folder in folders for root in PATH_ROOTS)
        return (name for name in self.names if name.startswith(prefixes))

    def depends_on(self, test: str, changed: set[str]) -> bool:
        """Returns whether a test depends on a changed file, directly or through other files."""
        reached, seen = {test}, set[str]()
        while reached and not reached & changed:
            seen |= reached
            reached = set().union(*map(self.find_dependencies, reached)) - seen
        return bool(reached)


def select_tests(files: DependencyGraph, changed: set[str]) -> list[str]:
    """Returns the tests that depend on a changed file; all tests if the dependents of a changed file are unknown."""
    for name in sorted(changed - UNREAD_FILES):
        if name in AFFECTS_ALL_TESTS or not any(files.depends_on(test, {name}) for test in files.tests):
            print(f'all tests run, because every test or no known test depends on {name}', file=sys.stderr)
            return files.tests
    return [test for test in files.tests if files.depends_on(test, changed)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--since', metavar='REV', help='the revision to compare with (default: branch main)')
    since = parser.parse_args().since or run_git('merge-base', 'HEAD', 'main')[0]
    changed = {
        *run_git('diff', '--name-only', '--no-renames', since, '--'),
        *run_git('ls-files', '--others', '--exclude-standard'),
    }
    files = DependencyGraph({*run_git('ls-files'), *changed})
    print(*(test for test in select_tests(files, changed) if (ROOT / test).exists()), sep='\n')


if __name__ == '__main__':
    main()
