"""`remixer-t5x info --settings`: lists gin macros with their defaults, meanings, files and configured arguments."""

import argparse
import functools
import importlib
import inspect
import re
from collections import defaultdict
from typing import NamedTuple

from remixer_t5x.cli import console
from remixer_t5x.config import gin_files
from remixer_t5x.errors import UserError, format_count, suggest_similar_name

# The default value of a macro is read from the first of these files that sets the macro.
_FILE_ORDER = (
    *('runs/_common', 'runs', 'data', 'optimizers', 'hardware/gpu', 'hardware'),
    *('models/t5_1_1', 'models', 'model_types'),
    *('sublayers', 'sizes/base.gin', 'sizes', 'defaults', 'objectives', 't5x', 'experiments'),
)
# Folders of files to exclude, because the values that these files set are not defaults.
_RECIPES = ('experiments/',)
# Files whose comments explain why a value was chosen, but do not describe the macro.
_FILES_WITHOUT_MEANINGS = ('sizes/', 'defaults')
# Matches comment lines, the name of a macro or setting, and its value, including continuation lines.
_STATEMENT = re.compile(r'^((?:#.*\n)*)([\w/.]+) = (.*(?:\n[ )}\]].*)*)', re.M)
_LONGEST_VALUE = 60


class GinMacro(NamedTuple):
    """A gin macro; `default` is 'required' if there is no default, or 'depends on the file' if the defaults differ."""

    name: str
    default: str
    files: tuple[str, ...]
    reader: str
    meaning: str

    @property
    def files_summary(self) -> str:
        """The files that set the macro, or the first file and the number of other files if there are more than two."""
        return ', '.join(self.files) if len(self.files) <= 2 else f'{self.files[0]} and {len(self.files) - 1} more'


def print_macro_table(args: argparse.Namespace) -> None:
    """Prints the macros whose name, meaning or argument contains the value of `--settings`."""
    macros = find_macros(args.settings)
    if not macros:
        suggestion = suggest_similar_name(args.settings, (row.name for row in find_macros()))
        raise UserError(
            f'no macro contains {args.settings!r} in its name, meaning or argument'
            f'{suggestion or "; run remixer-t5x info --settings for all"}'
        )
    table = console.build_table('macro', 'default', 'set by', 'read by', 'meaning', wraps=True)
    for row in macros:
        # rich would interpret brackets in a cell as styles.
        cells = (row.name, row.default, row.files_summary, row.reader, row.meaning)
        table.add_row(*(cell.replace('[', r'\[') for cell in cells))
    count = format_count(len(macros), 'macro')
    console.print_with_rich(table, f'{count}; set one with --gin.NAME=VALUE', pipe_width=200)


def find_macros(word: str = '') -> list[GinMacro]:
    """Returns the macros whose name, meaning or `reader` contains `word` (ignoring case), sorted by name."""
    return [row for row in _read_all_macros() if word.lower() in ' '.join((row.name, row.reader, row.meaning)).lower()]


@functools.cache
def _read_all_macros() -> list[GinMacro]:
    values: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)  # macro -> file -> (value, comment)
    readers: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)  # macro -> argument or macro -> (file, comment)
    folder = gin_files.find_shipped_folder()
    # Skip t5x/defaults.gin, which repeats the default values of arguments for use by T5X.
    names = [
        str(path.relative_to(folder))
        for path in folder.rglob('*.gin')
        if path.name != 'defaults.gin' or path.parent == folder
    ]
    for file in sorted(names, key=lambda name: (_rank_file(name), name)):
        text = gin_files.GinText(file, (folder / file).read_text(encoding='utf-8'))
        modules = {name: statement.module for name, statement in text.imports.items()}
        for match in _STATEMENT.finditer(text.text):
            target, value = match[2], ' '.join(match[3].split())
            # A comment at the beginning of a file describes the file.
            comment = ' '.join(line.lstrip('# ') for line in match[1].splitlines()) if match.start() else ''
            first, _, rest = target.rpartition('/')[2].partition('.')
            for macro in re.findall(r'%([A-Z_0-9]+)', re.sub(r"'.*?'", '', value)):
                readers[macro].setdefault(
                    f'{modules.get(first, first)}.{rest}' if rest else f'%{first}', (file, comment)
                )
            if not rest:
                short = value if len(value) <= _LONGEST_VALUE else f'{value[: _LONGEST_VALUE - 3]}...'
                values[first].setdefault(file, (short, comment))
    rows = {name: _describe_macro(name, values[name], readers[name]) for name in sorted({*values, *readers})}
    for name, row in rows.items():
        if not row.meaning:
            reader = next((reader[1:] for reader in readers[name] if reader[0] == '%'), name)
            rows[name] = row._replace(meaning=rows[reader].meaning)
    return list(rows.values())


def _rank_file(file: str) -> int:
    return next(rank for rank, prefix in enumerate(_FILE_ORDER) if file.startswith(prefix))


def _describe_macro(name: str, values: dict[str, tuple[str, str]], readers: dict[str, tuple[str, str]]) -> GinMacro:
    if not all(file.startswith(_RECIPES) for file, _ in readers.values()):
        values = {file: value for file, value in values.items() if not file.startswith(_RECIPES)}
    arguments = [reader for reader, (file, _) in readers.items() if reader[0] != '%' and not file.startswith('t5x/')]
    documented = [_read_default_and_meaning(argument) for argument in arguments]
    first = [file for file in values if _rank_file(file) == _rank_file(next(iter(values)))]
    defaults = dict.fromkeys([values[file][0] for file in first] or [default for default, _ in documented if default])
    default, *others = defaults or ['required']
    meanings = [comment for file, (_, comment) in values.items() if not file.startswith(_FILES_WITHOUT_MEANINGS)]
    meanings += [*(meaning for _, meaning in documented), *(comment for _, comment in readers.values())]
    sentence = re.split(r"(?<=[\w)\]'`%])(?<! al)\. (?=[A-Z0-9])", next(filter(None, meanings), ''), maxsplit=1)[0]
    reader = (*arguments, *readers, 'command line')[0].removeprefix('remixer_t5x.')
    default = 'depends on the file' if others and first else default
    return GinMacro(name, default, tuple(values), reader, sentence[:1].upper() + sentence[1:].rstrip('.'))


def _read_default_and_meaning(argument: str) -> tuple[str, str]:
    """Returns the default of an argument as gin text, and its description in the docstring of the class or function."""
    module, owner, name = argument.rsplit('.', 2)
    function = getattr(importlib.import_module(module), owner, None)
    if function is None:
        return '', ''
    parameter = inspect.signature(function).parameters.get(name, inspect.Parameter.empty)
    default = getattr(parameter, 'default', inspect.Parameter.empty)
    text = '' if default is inspect.Parameter.empty else getattr(default, '__name__', repr(default))
    # The docstring of a base class describes inherited fields.
    for kind in inspect.getmro(function) if inspect.isclass(function) else [function]:
        pattern = rf'^(\s+)(?:\w+, )*{name}(?:, \w+)*: (.*(?:\n\1\s+.*)*)'
        if match := re.search(pattern, inspect.getdoc(kind) or '', re.M):
            return text, ' '.join(match[2].split())
    return text, ''
