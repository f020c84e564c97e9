"""Prints the test files that a change can affect: those that reach a changed file by imports or by naming it.

    python scripts/changed_tests.py                 commits since the main branch, and what is not committed yet
    python scripts/changed_tests.py --since HEAD~3  commits since a revision, and what is not committed yet

A file depends on what it imports, on modules it names in a string, and on paths it mentions (gin files, scripts, pages
of the documentation); a test also depends on the fixtures that it uses. The reason for each choice goes to stderr.
pytest-testmon would trace the lines a test runs, but half of our tests read gin files and start processes, which it
does not see; grimp sees neither gin files nor test folders. `scripts/test.sh --changed` runs the result.
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
# Folders from which a path or a module is written down.
PATH_ROOTS = ('', 'configs/', 'docs/', 'docs/guide/', 'scripts/', 'scripts/studies/', 'remixer_t5x/', 'tests/')
MODULE_ROOTS = ('', 'tasks/', 'scripts/studies/')
# Every test depends on these.
EVERYTHING = {'tests/conftest.py', 'pyproject.toml', 'setup.py', 'scripts/environment.sh'}
EVERYTHING |= {'requirements.lock', 'requirements-py311.lock'}
EVERYTHING |= {'remixer_t5x/__init__.py'}
# Files that no test reads.
UNREAD = {'LICENSE', 'SECURITY.md', '.gitignore', '.ci/run', 'scripts/test.sh', '.github/pull_request_template.md'}


def git(*words: str) -> list[str]:
    done = subprocess.run(['git', '-C', str(ROOT), *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f'error: git {" ".join(words)}: {done.stderr.strip()}; name a revision with --since REV')
    return done.stdout.splitlines()


def main_branch() -> str:
    """The commit where this branch left the main branch."""
    for name in ('origin/HEAD', 'origin/main', 'main', 'master'):
        done = subprocess.run(['git', '-C', str(ROOT), 'merge-base', 'HEAD', name], capture_output=True, text=True)
        if not done.returncode:
            return done.stdout.strip()
    raise SystemExit('error: there is no branch main to compare with; name a revision with --since REV')


def changed_files(since: str) -> set[str]:
    """Files changed, added or deleted since a commit, with those that git does not know yet."""
    known = git('diff', '--name-only', '--no-renames', since, '--')
    return {*known, *git('ls-files', '--others', '--exclude-standard')}


class Files:
    """The files of the checkout, and which of them each one depends on."""

    def __init__(self, names: set[str]):
        self.names = names
        self.tests = sorted(name for name in names if re.search(r'^tests/(.*/)?test_\w+\.py$', name))

    def module(self, dotted: str) -> Iterator[str]:
        """The files of the longest part of a dotted name that is a module, and of the packages around it."""
        parts = dotted.split('.')
        for root in MODULE_ROOTS:
            for end in range(len(parts), 0, -1):
                path = root + '/'.join(parts[:end])
                found = [name for name in (f'{path}.py', f'{path}/__init__.py') if name in self.names]
                if found:
                    # The top-level package lazily imports every module that it names.
                    packages = [f'{root}{"/".join(parts[:k])}/__init__.py' for k in range(2, end)]
                    yield from (name for name in (*found, *packages) if name in self.names)
                    break

    def path(self, word: str) -> Iterator[str]:
        yield from (root + word for root in PATH_ROOTS if root + word in self.names)

    @functools.cache  # noqa: B019 one object lives as long as the command
    def below(self, folder: str) -> list[str]:
        return [name for name in self.names if name.startswith(folder)]

    @functools.cache  # noqa: B019
    def depends_on(self, name: str) -> set[str]:
        """Files that `name` imports or names."""
        path = ROOT / name
        if not path.is_file() or path.suffix not in ('.py', '.gin', '.md', '.ipynb', '.sh', '.sbatch', '.toml'):
            return set()
        if path.name == 'conftest.py':
            return set()  # a test depends on the fixtures that it uses, see `_conftests`
        text = path.read_text(encoding='utf-8')
        if path.suffix != '.md':
            text = re.sub(r'^\s*#[^!].*', '', text, flags=re.MULTILINE)
        if path.suffix != '.py':
            return {*self._statements(text), *self._words(text)} - {name}
        tree = ast.parse(text)
        if name.startswith(('remixer_t5x/', 'tasks/')):
            # Comments and messages name files as examples; a file that a test reads is a complete string.
            strings: set[object] = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
            return {*self._imports(tree), *self._strings(strings)} - {name}
        found = {*self._imports(tree), *self._words(text)}
        if name in self.tests:
            found |= set(self._conftests(name, text))
        return found - {name}

    def _conftests(self, test: str, text: str) -> Iterator[str]:
        """The `conftest.py` files above a test, and what the fixtures that the test names import."""
        wanted = _fixtures_of(ast.parse(text))
        for folder in pathlib.PurePosixPath(test).parents:
            conftest = f'{folder}/conftest.py'
            if conftest in self.names and (ROOT / conftest).is_file():
                yield conftest
                body = ast.parse((ROOT / conftest).read_text(encoding='utf-8')).body
                functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
                texts = {name: ast.unparse(node) for name, node in functions.items()}
                used = {name for name in functions if name in wanted or 'autouse' in texts[name]}
                for _ in functions:  # fixtures and helpers of those that are used
                    used |= {name for name in functions if any(re.search(rf'\b{name}\b', texts[user]) for user in used)}
                kept = [node for node in body if not isinstance(node, ast.FunctionDef) or node.name in used]
                yield from self._imports(ast.Module(kept, []))

    def _imports(self, tree: ast.AST) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self.module(alias.name)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    yield from self.module(f'{node.module}.{alias.name}')

    def _statements(self, text: str) -> Iterator[str]:
        for module, name in re.findall(r'^\s*from ([\w.]+) import (\w+)', text, re.MULTILINE):
            yield from self.module(f'{module}.{name}')

    def _strings(self, strings: set[object]) -> Iterator[str]:
        for string in strings:
            if isinstance(string, str) and re.fullmatch(r'remixer_\w+(\.\w+)+', string):
                yield from self.module(string)
            elif isinstance(string, str) and re.fullmatch(r'[\w/-]+\.\w+', string):
                yield from self.path(string)

    def _words(self, text: str) -> Iterator[str]:
        """Whatever a test, a script or a page mentions: modules, files, whole folders, models."""
        text = text.replace("' / '", '/')
        for dotted in set(re.findall(r'\b(?:remixer_t5x|remixer_tasks|tests)(?:\.\w+)+', text)):
            yield from self.module(dotted)
        for word in set(re.findall(r'[\w.-]+(?:/[\w.-]+)*/?', text)):
            if '/' in word or '.' in word:
                yield from self.path(word)
        # A test depends on a folder in which it lists files, or that is part of a path such as f'models/{name}.gin'.
        folders = set(re.findall(r'([\w-]+)/[{*]', text))
        if 'glob(' in text:
            folders |= set(re.findall(r"'([\w/-]+)'", text))
        for folder in folders:
            for root in PATH_ROOTS:
                yield from self.below(f'{root}{folder}/')
        for models in set(re.findall(r'--models?[= ]([\w,]+)', text)):
            yield from self.names & {f'configs/models/{model}.gin' for model in models.split(',')}

    def reason(self, test: str, changed: set[str]) -> list[str] | None:
        """The shortest chain of files from a test to a changed one; None if there is none."""
        seen, chains = {test}, [[test]]
        while chains:
            reached = []
            for chain in chains:
                if chain[-1] in changed:
                    return chain
                for name in sorted(self.depends_on(chain[-1]) - seen):
                    seen.add(name)
                    reached.append([*chain, name])
            chains = reached
        return None


def _fixtures_of(tree: ast.AST) -> set[str]:
    """Names that may be fixtures: arguments of functions, and strings such as those of `usefixtures`."""
    names = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return names | {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def choose(files: Files, changed: set[str]) -> dict[str, str]:
    """The tests to run, each with its reason; all of them where a changed file is one that we cannot place."""
    general = sorted(changed & EVERYTHING)
    if general:
        return dict.fromkeys(files.tests, f'every test depends on {general[0]}')
    chains = {test: files.reason(test, changed) for test in files.tests}
    chosen = {test: ' > '.join(chain[1:]) or 'changed itself' for test, chain in chains.items() if chain}
    for name in sorted(changed - UNREAD):
        if not any(files.reason(test, {name}) for test in files.tests):
            return dict.fromkeys(files.tests, f'no test is known to read {name}, so all run')
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--since', metavar='REV', help='the revision to compare with (default: the main branch)')
    since = parser.parse_args().since or main_branch()
    changed = changed_files(since)
    files = Files({*git('ls-files'), *changed})
    chosen = choose(files, changed)
    print(f'{len(changed)} files changed since {since[:12]}:', *sorted(changed), sep='\n  ', file=sys.stderr)
    print(f'{len(chosen)} of {len(files.tests)} test files depend on them:', file=sys.stderr)
    for test, why in chosen.items():
        print(f'  {test}: {why}', file=sys.stderr)
    print(*(test for test in chosen if (ROOT / test).exists()), sep='\n')
    return 0


if __name__ == '__main__':
    sys.exit(main())
