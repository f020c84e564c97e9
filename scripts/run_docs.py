"""Runs the commands of the guide: all ```bash blocks of each page, and the cells of the notebook.

Each page runs in an empty folder. A page with `<!-- needs: MODULE -->` is skipped if the module is not installed.

    python scripts/run_docs.py                                all pages of docs/guide, and docs/interop.md
    python scripts/run_docs.py docs/guide/new_mixer.md        one page
    python scripts/run_docs.py --keep=/tmp/pages              keeps the folders

Each page runs in one shell with `set -e` and an empty cache, unless REMIXER_T5X_CACHE is set. `remixer-t5x` and
`python` use the Python that runs this script. If a page fails, its last lines are printed and the exit code is 1.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PATHS = f'{ROOT}:{ROOT}/tasks'
GUIDE = ROOT / 'docs' / 'guide'


def extract_code_blocks(page: str, language: str = 'bash') -> list[str]:
    """Returns the fenced code blocks of a language in order."""
    return re.findall(rf'^```{language}\n(.*?)^```$', page, re.DOTALL | re.MULTILINE)


def build_script(path: pathlib.Path) -> str:
    """Joins the code blocks of a page into a shell script."""
    if path.suffix == '.ipynb':
        cells = json.loads(path.read_text())['cells']
        code = '\n'.join(''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code')
        return f"export MPLBACKEND=Agg\npython - <<'END'\n{code}\nEND\n"
    return '\n'.join(extract_code_blocks(path.read_text()))


def extract_heredoc(page: str, name: str) -> str:
    """Returns the content of the file `name` that a page writes with a here-document."""
    return re.findall(rf"^cat > {re.escape(name)} <<'END'\n(.*?)^END$", page, re.DOTALL | re.MULTILINE)[0]


def find_missing_module(path: pathlib.Path) -> str | None:
    """Returns the first module that the page requires but that is not installed, or None."""
    needed = re.findall(r'<!-- needs: (\w+) -->', path.read_text())
    return next((name for name in needed if importlib.util.find_spec(name) is None), None)


def run_page(page: pathlib.Path, folder: pathlib.Path, python: str = sys.executable) -> subprocess.CompletedProcess:
    """Runs all blocks of a page in one shell and captures the output. `python` is the Python command to use."""
    programs = folder / '.bin'
    programs.mkdir(parents=True)
    # Wrapper scripts are used instead of symlinks, because Python would not find its virtual environment through a
    # symlink.
    for name, start in (('python', python), ('remixer-t5x', f'{python} -m remixer_t5x.cli.main')):
        (programs / name).write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        (programs / name).chmod(0o755)
    environment = {
        'REMIXER_T5X_CACHE': str(folder / '.cache'),
        **os.environ,
        'PATH': f'{programs}:{os.environ["PATH"]}',
        'PYTHONPATH': PATHS,
    }
    script = build_script(page)
    # A page may set PYTHONPATH for its modules, so the path of this package is appended.
    script = script.replace('export PYTHONPATH=.', f'export PYTHONPATH=.:{PATHS}')
    return subprocess.run(
        ['bash', '-euo', 'pipefail', '-x', '-c', script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        'pages',
        nargs='*',
        type=pathlib.Path,
        default=[*sorted([*GUIDE.glob('*.md'), *GUIDE.glob('*.ipynb')]), GUIDE.parent / 'interop.md'],
    )
    parser.add_argument('--keep', type=pathlib.Path, help='folder in which to create and keep the folders of the pages')
    args = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        for page in args.pages:
            if not build_script(page).strip():
                print(f'{page.name}: no commands')
                continue
            if find_missing_module(page):
                print(f'{page.name}: skipped, because {find_missing_module(page)} is not installed')
                continue
            start = time.monotonic()
            done = run_page(page, (args.keep or pathlib.Path(temporary)) / page.name)
            if args.keep:
                (args.keep / page.name / 'output.log').write_text(done.stdout)
            seconds = time.monotonic() - start
            if done.returncode:
                failed.append(page.name)
                print('\n'.join(done.stdout.splitlines()[-30:]))
            print(
                f'{page.name}: {"FAILED" if done.returncode else "passed"} in {seconds:.0f} s',
                flush=True,
            )
    return int(bool(failed))


if __name__ == '__main__':
    sys.exit(main())
