"""Builds a corpus of Python's documentation (2 MB) from pydoc's topics and the standard library's docstrings.

The library's files are parsed, not imported.
"""

import ast
import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from remixer_t5x import ranges
from remixer_tasks.corpora.text_corpus import ParsedCorpus
from remixer_tasks.files import cache
from remixer_tasks.files.text_lines import BadRecords

# Folders to skip: tests and tools have few docstrings, and all modules in `encodings` have the same docstring.
_SKIPPED = {
    *('site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idlelib', 'lib2to3', 'turtledemo'),
    *('ensurepip', 'encodings', 'pydoc_data'),
}
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def corpus(validation_fraction: ranges.OpenFraction = 0.05) -> ParsedCorpus:
    """Returns a corpus of this Python version's documentation; holds out `validation_fraction` of the documents."""
    return ParsedCorpus(
        name=f'the documentation of Python {sys.version.split()[0]}',
        identity=cache.hash_cache_key('python docs 1', sys.version, sysconfig.get_path('stdlib')),
        read=read_documentation,
        validation_fraction=validation_fraction,
    )


def read_documentation(malformed: BadRecords) -> Iterator[str]:
    """Yields pydoc's topics, then the docstrings of every module and of its top-level classes and functions."""
    # The topics, chapters of the language reference, are missing from some slim installations.
    with contextlib.suppress(ImportError):
        from pydoc_data.topics import topics

        yield from (topics[name].strip() for name in sorted(topics))
    root = Path(sysconfig.get_path('stdlib'))
    for path in _find_modules(root):
        try:
            tree = ast.parse(path.read_text(encoding='utf-8'))
        except (SyntaxError, ValueError) as error:
            malformed.add_malformed_record(
                str(path), getattr(error, 'lineno', None) or 1, f'invalid Python or UTF-8 ({error})'
            )
            continue
        name = '.'.join(path.relative_to(root).with_suffix('').parts).removesuffix('.__init__')
        yield from iterate_module_documents(tree, name)


def iterate_module_documents(tree: ast.Module, name: str) -> Iterator[str]:
    """Yields the docstring of the module `name`, then a document for each top-level definition."""
    docstring = ast.get_docstring(tree)
    if docstring:
        yield f'{name}\n\n{docstring}'
    for node in tree.body:
        if isinstance(node, _DEFINITIONS):
            text = '\n\n'.join(_describe_definition(node, name))
            if text:
                yield text


def _describe_definition(node: ast.AST, prefix: str) -> Iterator[str]:
    """Yields the signatures and docstrings of a definition and, for a class, of its members."""
    assert isinstance(node, _DEFINITIONS)
    name = f'{prefix}.{node.name}'
    docstring = ast.get_docstring(node)
    if docstring:
        head = f'class {name}' if isinstance(node, ast.ClassDef) else f'{name}({ast.unparse(node.args)})'
        yield f'{head}\n\n{docstring}'
    if isinstance(node, ast.ClassDef):
        for member in node.body:
            if isinstance(member, _DEFINITIONS):
                yield from _describe_definition(member, name)


def _find_modules(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _SKIPPED)
        for file in sorted(files):
            if file.endswith('.py'):
                yield Path(folder) / file
