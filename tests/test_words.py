"""Plain words in pages, docstrings, comments and messages: the phrases that read like a translation must not return."""

import io
import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# Phrase -> what to write instead.
PHRASES = {
    r'(?<![Tt]here )\b(?:is|are|was|were) no (?!longer|more|less|fewer|slower|faster|larger)[a-z]+': 'is not a ...',
    r'(?<![Tt]here )\b(?:is|are|was|were) none\b': 'name the thing: "does not exist", "has no ..."',
    r'\b(?:is|are|was|were) told\b(?! apart)': 'say who does what: "the run prints ...", "reports ..."',
    r'\b(?:goes|go|going|went) on\b': 'continues, resumes',
    r'\b(?:lies|lie) (?:in|on|at|below|within|elsewhere|there|behind)\b': 'is in, is on',
    r'\bstands? (?:in|on|at|there|here|between|below)\b': 'is in, is written in',
    r'\bof itself\b': 'on its own, automatically',
    r'\b[Ww]hoever\b': 'name the actor: the caller, the user, the supervisor',
    r'\bthe ones? (?:that|which|before|of)\b': 'repeat the noun',
    r'\b(?:that|those) of (?:the|a|an|its|their|one|each|every|all|another)\b': 'repeat the noun',
    r'\bso many\b': 'that many, or the number',
    r'\bbeside\b(?!_)': 'next to, in addition to',
    r'\banew\b': 'again',
}

ANY = re.compile('|'.join(f'(?:{phrase})' for phrase in PHRASES))

PAGES = ('README.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'docs/**/*.md')
CODE = ('remixer_t5x/**/*.py', 'tasks/**/*.py', 'scripts/**/*.py', 'configs/**/*.gin')
# Of these only comments and docstrings count: other strings are data, or match messages of libraries.
TESTS = ('tests/**/*.py',)


def files(patterns):
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def prose(path):
    """(line number, text) of a page without its fenced blocks, or of the comments and strings of code."""
    text = path.read_text(encoding='utf-8')
    if path.suffix == '.md':
        fenced = False
        for number, line in enumerate(text.splitlines(), 1):
            if line.lstrip().startswith('```'):
                fenced = not fenced
            elif not fenced:
                yield number, line
        return
    begins_statement = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_read = begins_statement or not path.is_relative_to(ROOT / 'tests')
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and is_read):
            for extra, line in enumerate(token.string.splitlines()):
                yield token.start[0] + extra, line
        begins_statement = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT) or (
            begins_statement and token.type in (tokenize.COMMENT, tokenize.NL)
        )


def findings(path):
    """One line for each phrase: place, phrase, and what to write instead."""
    # Few files have one anywhere, and Python's tokenizer takes longer than this search.
    if not ANY.search(path.read_text(encoding='utf-8')):
        return
    for number, line in prose(path):
        for phrase, instead in PHRASES.items():
            for found in re.finditer(phrase, line):
                yield f'{path.relative_to(ROOT)}:{number}: "{found[0]}"; write instead: {instead}'


@pytest.mark.parametrize('patterns', [PAGES, CODE, TESTS], ids=['pages', 'code', 'tests'])
def test_words_are_plain(patterns):
    paths = files(patterns)
    assert len(paths) > 20
    found = [line for path in paths for line in findings(path)]
    assert not found, '\n' + '\n'.join(found)


def test_the_phrases_are_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), 'ROOT', tmp_path)
    (tmp_path / 'page.md').write_text('It is no page.\n```\nis no page\n```\nThere is no page.\n')
    (tmp_path / 'code.py').write_text('x = 1  # whoever\n"""One.\n\nTwo is told.\n"""\nis_none = None\n')
    assert [line.split(';')[0] for line in findings(tmp_path / 'page.md')] == ['page.md:1: "is no page"']
    assert [line.split(';')[0] for line in findings(tmp_path / 'code.py')] == [
        'code.py:1: "whoever"',
        'code.py:4: "is told"',
    ]
