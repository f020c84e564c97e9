"""The table of macros against the text of the shipped gin files."""

import ast
import re

from remixer_t5x.cli.info import settings
from tests.support.paths import ROOT

TABLE = {row.name: row for row in settings.find_macros()}
GIN = {str(path.relative_to(ROOT / 'configs')): path.read_text() for path in (ROOT / 'configs').rglob('*.gin')}


def test_the_table_has_every_macro_of_the_gin_files():
    statements = '\n'.join(re.sub(r'(#.*)|(".*?")|(\'.*?\')', '', text) for text in GIN.values())
    named = {
        *re.findall(r'^([A-Z][A-Z_0-9]+) =', statements, re.MULTILINE),
        *re.findall(r'%([A-Z][A-Z_0-9]+)', statements),
    }
    assert len(named) > 100 and {*TABLE} == named


def test_every_macro_has_a_meaning_and_the_default_of_its_file():
    assert [name for name, row in TABLE.items() if not row.meaning] == []
    for name, row in TABLE.items():
        assert all(re.search(rf'^{name} =', GIN[file], re.MULTILINE) for file in row.files), name
        if row.files and row.default.replace('.', '').isdecimal():
            (text,) = re.findall(rf'^{name} = (.*)', GIN[row.files[0]], re.MULTILINE)
            assert float(text) == float(row.default)


def test_the_defaults_for_t5x_equal_those_of_the_arguments():
    """t5x/defaults.gin sets all macros that no other file sets, except required ones."""
    lines = re.findall(r'^([A-Z_]+) = (.*)$', GIN['t5x/defaults.gin'], re.MULTILINE)
    defaults = {name: ast.literal_eval(row.default) for name, row in TABLE.items() if name in dict(lines)}
    assert {name: ast.literal_eval(value) for name, value in lines} == defaults
    read = {
        name
        for file, text in GIN.items()
        if file.startswith(('data/', 'models/', 'sizes/', 'sublayers/'))
        for name in re.findall(r'%([A-Z][A-Z_0-9]+)', re.sub('#.*', '', text))
    }
    unset = {name for name in read if not TABLE[name].files and TABLE[name].default != 'required'}
    assert unset - {*defaults} == set(), 'add these macros and their defaults to configs/t5x/defaults.gin'
