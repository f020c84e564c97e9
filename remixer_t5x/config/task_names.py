"""A task that is given by its name becomes a call of `remixer_tasks.names`, as if a gin file had said so.

`MIXTURE_OR_TASK_NAME = 'en_mix'` then works in every command, as do T5X's MIXTURE_OR_TASK_MODULE, an import, and
`infer` without a VOCABULARY, which is the task's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from remixer_t5x.config.bindings import Bindings
from remixer_t5x.config.scan import Binding, Statement, scan
from remixer_t5x.errors import UserError

TASK, EVALUATED_TASK, MODULE, VOCABULARY = (
    *('MIXTURE_OR_TASK_NAME', 'EVAL_MIXTURE_OR_TASK_NAME', 'MIXTURE_OR_TASK_MODULE'),
    'VOCABULARY',
)
_IMPORTS = 'from __gin__ import dynamic_registration\n{modules}from remixer_tasks import names\n'
# Settings of the tasks that a file or flag may give.
_SETTINGS = {'vocabulary': VOCABULARY, 'data_dir': 'DATA_DIR'}


def resolved(statements: Sequence[Statement]) -> list[Statement]:
    """The statements, and at their end those that a task by its name stands for. Raises UserError for a module whose
    name is not one.
    """
    macros = Bindings(statements).macros
    kept = [one for one in statements if not (isinstance(one, Binding) and one.is_macro and one.selector == MODULE)]
    lines = []
    for macro in (TASK, EVALUATED_TASK):
        given = macros[macro].value if macro in macros else None
        several = macro == EVALUATED_TASK and _is_several(given)
        if isinstance(given, str) or several:
            function, argument = ('names.providers', 'names') if several else ('names.provider', 'name')
            scope = macro.lower()
            lines += [f'{macro} = @{scope}/{function}()', f'{scope}/{function}.{argument} = {given!r}']
            lines += [f'{scope}/{function}.{arg} = %{name}' for arg, name in _SETTINGS.items() if name in macros]
    if TASK in macros and VOCABULARY not in macros:
        lines += [f'{VOCABULARY} = @names.vocabulary_of()', f'names.vocabulary_of.task = %{TASK}']
    modules = _import(macros[MODULE].value) if MODULE in macros else ''
    if not lines and not modules:
        return kept
    return [
        *kept,
        *scan(_IMPORTS.format(modules=modules) + '\n'.join(lines) + '\n', 'the name of a task', shipped=True),
    ]


def _is_several(given: object) -> bool:
    if isinstance(given, str):
        return ',' in given
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(name, str) for name in given)


def _import(module: object) -> str:
    if not isinstance(module, str) or not re.fullmatch(r'\w+(\.\w+)*', module):
        raise UserError(f'{MODULE} is {module!r}; it takes the name of a module, as in my_package.tasks')
    return f'import {module}\n'
