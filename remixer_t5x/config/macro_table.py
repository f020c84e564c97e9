"""Lists all gin macros: default, the file that sets it, the argument that reads it, and its meaning.

The table is read from the shipped gin files and from the source of the code that they configure, without importing it.
"""

import ast
import dataclasses
import functools
import importlib.util
import pathlib
import re
from collections import defaultdict

from gin import config_parser

from remixer_t5x.config import files, loading

# A macro's default is its value in the first of these folders (or files) that sets it, and there in a file of _BASES.
_FOLDERS = (
    *('runs', 'data', 'optimizers', 'schedules', 'hardware', 'models', 'frames', 'sublayers', 'sizes', 'defaults.gin'),
    *('objectives', 'decoders', 't5x', 'experiments', 'ablations'),
)
_BASES = ('runs/_common.gin', 'hardware/_base.gin', 'models/t5_1_1.gin', 'sizes/base.gin')
# Recipes choose values that are not defaults.
_RECIPES = ('experiments/', 'ablations/')
# Their comments say why a value was chosen and not what the macro means.
_NO_MEANINGS = ('ablations/', 'sizes/', 'defaults.gin')
_LONGEST_VALUE = 60


@dataclasses.dataclass(frozen=True)
class Macro:
    """One row of the table.

    Attributes:
        name: as in `--gin.NAME=value`.
        default: gin text of the value in the files, or else of the owner's default; 'required' if there is none,
            'depends on the file' if the files disagree.
        files: the shipped files that set it, the file with the default first; empty if the default is the owner's.
        owners: the arguments, classes or macros that read it, by their full names.
        meaning: one line from the comment in the gin file, or from the docstring of the owner.
    """

    name: str
    default: str
    files: tuple[str, ...]
    owners: tuple[str, ...]
    meaning: str

    @property
    def where(self) -> str:
        """The file with the default, and the number of other files."""
        if len(self.files) <= 2:
            return ', '.join(self.files)
        return f'{self.files[0]} and {len(self.files) - 1} more'

    @property
    def owner(self) -> str:
        """The first argument that reads it, without the name of the package; `info` and `train` read the others."""
        arguments = [owner for owner in self.owners if not owner.startswith('%')]
        return (*arguments, *self.owners, 'command line')[0].removeprefix('remixer_t5x.')


def rows(word: str = '') -> list[Macro]:
    """The macros whose name, owner or meaning contains `word` (in any case), by name."""
    return [row for row in _all_rows() if word.lower() in ' '.join((row.name, *row.owners, row.meaning)).lower()]


@functools.cache
def _all_rows() -> tuple[Macro, ...]:
    values: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)  # macro -> file -> (value, comment)
    owners: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)  # macro -> reader -> (file, comment)
    folder = files.shipped_folder()
    for path in sorted(folder.rglob('*.gin'), key=lambda path: (_rank(str(path.relative_to(folder))), path)):
        name, text = str(path.relative_to(folder)), path.read_text(encoding='utf-8')
        lines = files.Text(name, text).imports
        imports = {module: '.'.join(line.split()[1::2]) for module, line in lines.items()}
        references = loading.References()
        for statement in config_parser.ConfigParser(text, references):
            if not isinstance(statement, config_parser.BindingStatement):
                continue
            comment = _comment_above(text.splitlines(), statement.location.line_num)
            macro = f'{statement.scope}/{statement.selector}'.lstrip('/')
            if not statement.arg_name:
                values[macro].setdefault(name, (_gin_text(statement.value), comment))
            module, _, rest = f'{statement.selector}.{statement.arg_name}'.partition('.')
            owner = f'{imports.get(module, module)}.{rest}' if statement.arg_name else f'%{macro}'
            for reference in references.names:
                if reference[0] == '%':
                    owners[reference[1:]].setdefault(owner, (name, comment))
            references.names.clear()
    rows = {name: _row(name, values[name], owners[name]) for name in sorted({*values, *owners})}
    return tuple(
        row if row.meaning else dataclasses.replace(row, meaning=_meaning_of_readers(row, rows))
        for row in rows.values()
    )


def _row(name: str, values: dict[str, tuple[str, str]], owners: dict[str, tuple[str, str]]) -> Macro:
    home = [file for file in values if not file.startswith(_RECIPES) or all(map(_is_in_recipe, owners.values()))]
    home = [file for file in home if _rank(file) == _rank(home[0])]
    home = [file for file in _BASES if file in home] or home
    defaults = list(dict.fromkeys(values[file][0] for file in home))
    arguments = [_argument(owner) for owner in owners if owner[0] != '%']
    defaults = defaults or list(dict.fromkeys(default for default, _ in arguments if default))[:1]
    default = defaults[0] if len(defaults) == 1 else 'depends on the file' if defaults else 'required'
    comments = [values[file][1] for file in (*home, *values) if not file.startswith(_NO_MEANINGS)]
    meanings = [*comments, *(meaning for _, meaning in arguments), *(comment for _, comment in owners.values())]
    meaning = _first_sentence(next(filter(None, meanings), ''))
    files = dict.fromkeys([*home, *(file for file in values if not file.startswith(_RECIPES))])
    return Macro(name, default, tuple(files), tuple(owners), meaning)


def _is_in_recipe(owner: tuple[str, str]) -> bool:
    return owner[0].startswith(_RECIPES)


def _meaning_of_readers(row: Macro, rows: dict[str, Macro]) -> str:
    """The meaning of the first macro that reads this one."""
    return next((rows[owner[1:]].meaning for owner in row.owners if owner.startswith('%')), '')


def _rank(file: str) -> int:
    return _FOLDERS.index(file.partition('/')[0])


def _gin_text(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f'{text[: _LONGEST_VALUE - 3]}...'


def _comment_above(lines: list[str], line: int) -> str:
    """The comment directly above line number `line`, joined; empty if there is none."""
    start = line - 1
    while start and lines[start - 1].startswith('#'):
        start -= 1
    # A comment at the beginning of a file is about the file.
    return ' '.join(comment.lstrip('# ') for comment in lines[start : line - 1]) if start else ''


def _first_sentence(text: str) -> str:
    sentence = re.split(r"(?<=[\w)\]'`%])(?<! al)\. (?=[A-Z0-9])", text, maxsplit=1)[0].rstrip('.')
    return sentence[:1].upper() + sentence[1:]


def _argument(owner: str) -> tuple[str, str]:
    """The default of an argument, as gin text, and what the docstring of its class or function says of it."""
    *place, argument = owner.split('.')
    for cut in range(len(place) - 1, 0, -1):
        source = _source('.'.join(place[:cut]))
        for node in source.body if source else ():
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == place[cut]:
                return _default(node, argument), _documented_argument(ast.get_docstring(node) or '', argument)
    return '', ''


def _default(node: ast.ClassDef | ast.FunctionDef, argument: str) -> str:
    values: dict[str, ast.expr | None] = {}
    if isinstance(node, ast.ClassDef):
        fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
        values = {field.target.id: field.value for field in fields if isinstance(field.target, ast.Name)}
    else:
        positional = node.args.args
        values = dict(zip([each.arg for each in positional[::-1]], node.args.defaults[::-1], strict=False))
        values |= dict(zip([each.arg for each in node.args.kwonlyargs], node.args.kw_defaults, strict=True))
    value = values.get(argument)
    return '' if value is None else ast.unparse(value)


def _documented_argument(docstring: str, argument: str) -> str:
    match = re.search(rf'^(\s+)(?:\w+, )*{argument}(?:, \w+)*: (.*(?:\n\1\s+.*)*)', docstring, re.MULTILINE)
    return ' '.join(match[2].split()) if match else ''


@functools.cache
def _source(module: str) -> ast.Module | None:
    """The parsed source of a module of this project; None for other modules."""
    if module.partition('.')[0] not in ('remixer_t5x', 'remixer_tasks'):
        return None
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return ast.parse(pathlib.Path(spec.origin).read_text(encoding='utf-8')) if spec and spec.origin else None
