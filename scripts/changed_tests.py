"""Prints the test files that a change can affect, because they import or mention a changed file.

    python scripts/changed_tests.py                 commits since the main branch, and uncommitted changes
    python scripts/changed_tests.py --since HEAD~3  commits since a revision, and uncommitted changes

A file depends on the modules that it imports or names in a string, and on the paths that it mentions (gin files,
scripts, pages of the documentation). A test also depends on its fixtures. The reason for each selection is printed to
stderr. `scripts/test.sh --changed` runs the selected tests. pytest-testmon is not used, because it cannot trace gin
files and child processes, on which half of the tests depend.
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
    'tests/conftest.py',
    'pyproject.toml',
    'setup.py',
    'scripts/environment.sh',
    'remixer_t5x/__init__.py',
}
AFFECTS_ALL_TESTS |= {'requirements.lock', 'requirements-py311.lock'}
# Files that no test reads.
UNREAD_FILES = {
    'LICENSE',
    'SECURITY.md',
    '.gitignore',
    '.ci/run',
    'scripts/test.sh',
    '.github/pull_request_template.md',
}


def run_git(*words: str) -> list[str]:
    done = subprocess.run(['git', '-C', str(ROOT), *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f'error: git {" ".join(words)}: {done.stderr.strip()}; specify a revision with --since REV')
    return done.stdout.splitlines()


def find_branch_point() -> str:
    """Returns the commit at which this branch diverged from the main branch."""
    for name in ('origin/HEAD', 'origin/main', 'main', 'master'):
        done = subprocess.run(['git', '-C', str(ROOT), 'merge-base', 'HEAD', name], capture_output=True, text=True)
        if not done.returncode:
            return done.stdout.strip()
    raise SystemExit('error: there is no branch main to compare with; specify a revision with --since REV')


def find_changed_files(since: str) -> set[str]:
    """Returns the files that were changed, added or deleted since a commit, including untracked files."""
    known = run_git('diff', '--name-only', '--no-renames', since, '--')
    return {*known, *run_git('ls-files', '--others', '--exclude-standard')}


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

    def find_path_files(self, word: str) -> Iterator[str]:
        yield from (root + word for root in PATH_ROOTS if root + word in self.names)

    @functools.cache  # noqa: B019 (there is one object, which lives as long as the process)
    def find_dependencies(self, name: str) -> set[str]:
        """Returns the files that the file `name` imports or mentions."""
        path = ROOT / name
        if not path.is_file() or path.suffix not in ('.py', '.gin', '.md', '.ipynb', '.sh', '.sbatch', '.toml'):
            return set()
        if path.name == 'conftest.py':
            return set()  # only the fixtures that a test uses are dependencies, see `_find_conftest_files`
        text = path.read_text(encoding='utf-8')
        if path.suffix != '.md':
            text = re.sub(r'^\s*#[^!].*', '', text, flags=re.MULTILINE)
        if path.suffix != '.py':
            return {*self._find_files_in_import_lines(text), *self._find_mentioned_files(text)} - {name}
        tree = ast.parse(text)
        if name.startswith(('remixer_t5x/', 'tasks/')):
            # Only strings that consist of a path are dependencies, because messages also name files as examples.
            strings: set[object] = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
            return {*self._find_imported_files(tree), *self._find_files_in_strings(strings)} - {name}
        found = {*self._find_imported_files(tree), *self._find_mentioned_files(text)}
        if name in self.tests:
            found |= set(self._find_conftest_files(name, text))
        return found - {name}

    def _find_conftest_files(self, test: str, text: str) -> Iterator[str]:
        """Returns the `conftest.py` files of a test, and the imports of the fixtures that the test mentions."""
        for folder in pathlib.PurePosixPath(test).parents:
            conftest = f'{folder}/conftest.py'
            if conftest in self.names and (ROOT / conftest).is_file():
                yield conftest
                for node in ast.parse((ROOT / conftest).read_text(encoding='utf-8')).body:
                    if not isinstance(node, ast.FunctionDef) or re.search(rf'\b{node.name}\b', text):
                        yield from self._find_imported_files(node)

    def _find_imported_files(self, tree: ast.AST) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self.find_module_files(alias.name)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    yield from self.find_module_files(f'{node.module}.{alias.name}')

    def _find_files_in_import_lines(self, text: str) -> Iterator[str]:
        for module, name in re.findall(r'^\s*from ([\w.]+) import (\w+)', text, re.MULTILINE):
            yield from self.find_module_files(f'{module}.{name}')

    def _find_files_in_strings(self, strings: set[object]) -> Iterator[str]:
        for string in strings:
            if isinstance(string, str) and re.fullmatch(r'remixer_\w+(\.\w+)+', string):
                yield from self.find_module_files(string)
            elif isinstance(string, str) and re.fullmatch(r'[\w/-]+\.\w+', string):
                yield from self.find_path_files(string)

    def _find_mentioned_files(self, text: str) -> Iterator[str]:
        """Returns the files that a test, script or page mentions by module, path, folder or model name."""
        text = text.replace("' / '", '/')
        for dotted in set(re.findall(r'\b(?:remixer_t5x|remixer_tasks|tests)(?:\.\w+)+', text)):
            yield from self.find_module_files(dotted)
        for word in set(re.findall(r'[\w.-]+(?:/[\w.-]+)*/?', text)):
            if '/' in word or '.' in word:
                yield from self.find_path_files(word)
        # A path with a variable part, such as f'models/{name}.gin', is a dependency on all files in the folder.
        folders = set(re.findall(r'([\w-]+)/[{*]', text))
        if 'glob(' in text:
            folders |= set(re.findall(r"'([\w/-]+)'", text))
        for folder in folders:
            for root in PATH_ROOTS:
                yield from (name for name in self.names if name.startswith(f'{root}{folder}/'))
        for models in set(re.findall(r'--models?[= ]([\w,]+)', text)):
            yield from self.names & {f'configs/models/{model}.gin' for model in models.split(',')}

    def find_dependency_chain(self, test: str, changed: set[str]) -> list[str] | None:
        """Returns the shortest dependency chain from a test to a changed file, or None."""
        seen, chains = {test}, [[test]]
        while chains:
            reached = []
            for chain in chains:
                if chain[-1] in changed:
                    return chain
                for name in sorted(self.find_dependencies(chain[-1]) - seen):
                    seen.add(name)
                    reached.append([*chain, name])
            chains = reached
        return None


def select_tests(files: DependencyGraph, changed: set[str]) -> dict[str, str]:
    """Maps each test to run to the reason; selects all tests if the dependents of a changed file are unknown."""
    general = sorted(changed & AFFECTS_ALL_TESTS)
    if general:
        return dict.fromkeys(files.tests, f'every test depends on {general[0]}')
    chains = {test: files.find_dependency_chain(test, changed) for test in files.tests}
    chosen = {test: ' > '.join(chain[1:]) or 'changed itself' for test, chain in chains.items() if chain}
    for name in sorted(changed - UNREAD_FILES):
        if not any(files.find_dependency_chain(test, {name}) for test in files.tests):
            return dict.fromkeys(files.tests, f'no known test reads {name}, so all tests run')
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--since', metavar='REV', help='the revision to compare with (default: the main branch)')
    since = parser.parse_args().since or find_branch_point()
    changed = find_changed_files(since)
    files = DependencyGraph({*run_git('ls-files'), *changed})
    chosen = select_tests(files, changed)
    print(f'{len(changed)} files changed since {since[:12]}:', *sorted(changed), sep='\n  ', file=sys.stderr)
    print(f'{len(chosen)} of {len(files.tests)} test files depend on them:', file=sys.stderr)
    for test, why in chosen.items():
        print(f'  {test}: {why}', file=sys.stderr)
    print(*(test for test in chosen if (ROOT / test).exists()), sep='\n')
    return 0


if __name__ == '__main__':
    sys.exit(main())
