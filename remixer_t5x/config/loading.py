"""From gin files and `--gin.` flags to Python values; whatever gin can complain about becomes one line (UserError).

gin semantics: gin-config 0.5 with `from __gin__ import dynamic_registration`. Three things differ from plain gin, each
because a user's mistake would otherwise pass silently or end in a page of traceback: a macro that nothing reads is
refused, a flag's value that is not a gin value is a string, and only what the caller reads has to be defined.
"""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import gin
from gin.config_parser import ImportStatement, IncludeStatement

from remixer_t5x.config import checks, errors, files, resolved, scan, t5x_macros, task_names, user_modules
from remixer_t5x.config.bindings import Bindings, macros_read
from remixer_t5x.config.scan import Binding, Place, Statement
from remixer_t5x.errors import UserError, one_line

MODELS = 'models/'
# Values for what a model reads and data, hardware and runs own; read before everything else.
DEFAULTS = 'defaults.gin'
# Macros that hold paths. A Hugging Face data set is a path only if it exists here.
_PATHS = (
    *('MODEL_DIR', 'INITIAL_CHECKPOINT_PATH', 'CHECKPOINT_PATH', 'VOCABULARY_PATH', 'CACHE_DIR', 'DATA_DIR'),
    *('FILES', 'VALIDATION_FILES', 'PAIRS', 'VALIDATION_PAIRS', 'EVAL_PAIRS', 'SUBMISSION_DIR', 'HF_DATASET'),
)
_ALMOST_PYTHON = {'true': 'True', 'false': 'False', 'none': 'None', 'null': 'None'}


@dataclasses.dataclass(frozen=True)
class Given:
    """What a configuration is made of, in the order in which it is read: a later statement overrides an earlier one.

    Attributes:
        defaults: Python values of macros.
        base: shipped files that the command itself reads.
        files: gin files, looked up by `files.find`.
        flags: names of macros or settings, and their values as text.
        objects: Python values of macros.
        search_paths: more folders with gin files.
        model: files to read instead of the first file of models/ that `files` name or include, and of all others.
    """

    files: Sequence[str] = ()
    flags: Sequence[tuple[str, str]] = ()
    search_paths: Sequence[str] = ()
    model: Sequence[str] = ()
    base: Sequence[str] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    objects: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def load(
    given: Given,
    *wanted: str,
    partial: bool = True,
    reader: str = 'the caller',
    suggest: Sequence[str] = (),
    importing: contextlib.AbstractContextManager | None = None,
    only: bool = False,
) -> None:
    """Replaces gin's configuration by `given`.

    Args:
        given: files, flags and values.
        wanted: what the caller reads, and which therefore must be defined: `%MODEL` for a macro, or the full name of a
            class or function to call; none means everything.
        partial: the caller reads only a part of a configuration that was written for training; macros known to the
            shipped configs may then stay unread, and what the caller does not reach may stay undefined.
        reader: who reads macros, for errors.
        suggest: shipped files to name where no file sets up what is called; by default all that do.
        importing: entered once the text has passed the checks that need no library, while gin imports what it names.
        only: leaves out all that `wanted` does not read, imports too, so that `config_text` describes `wanted` alone.

    Raises:
        UserError: anything wrong with files, flags, names or values, on one line.
    """
    statements = _read(given)
    references = [scan.reference(name) for name in wanted]
    caller = Binding('caller', 'reads', references, Place(reader, 0, shipped=True), 'caller') if references else None
    bindings = Bindings([*statements, *([caller] if caller else [])])
    if not partial:
        t5x_macros.check_steps(bindings)
    checks.check(bindings, caller, partial or bool(given.model), suggest)
    gin.clear_config()
    with importing or contextlib.nullcontext():
        for statement in _kept(statements, bindings, caller if only else None):
            _apply(statement, bindings)


def _kept(statements: Sequence[Statement], bindings: Bindings, caller: Binding | None) -> list[Statement]:
    """The statements for gin: those that `caller` reads, or all without the macros that nothing reads, so that gin's
    configuration as text is the configuration of the run.
    """
    if caller:
        reached = {(one.place, one.scope, one.key) for one in bindings.reachable([caller.target])}
        return [one for one in statements if isinstance(one, Binding) and (one.place, one.scope, one.key) in reached]
    callers = {binding.target for binding in bindings.final if not binding.is_macro}
    read = macros_read(bindings.reachable(callers))
    return [one for one in statements if not isinstance(one, Binding) or not one.is_macro or one.selector in read]


def values(given: Given, *macros: str, **options: Any) -> list[Any]:
    """The values of macros, which later configurations do not change; `options` of `load`.

    Raises:
        UserError: anything wrong with files, flags, names or values, on one line.
    """
    load(given, *(f'%{name}' for name in macros), **options)
    return [resolved.macro(name) for name in macros]


def config_text(absolute_paths: bool = True) -> str:
    """The configuration as gin text. With absolute paths, it reproduces the run from any folder."""
    for name in _PATHS if absolute_paths else ():
        try:
            value = gin.query_parameter(f'%{name}')
        except ValueError:
            continue
        if name != 'HF_DATASET' or (isinstance(value, str) and os.path.exists(os.path.expanduser(value))):
            gin.bind_parameter((name, 'gin.macro', 'value'), _absolute(value))
    return gin.config_str()


def _absolute(value: Any) -> Any:
    """The paths in a macro's value, absolute and with `~` expanded; URLs and everything else unchanged."""
    if isinstance(value, str) and value and '://' not in value:
        return os.path.abspath(os.path.expanduser(value))
    if isinstance(value, dict):
        return {name: _absolute(item) for name, item in value.items()}
    return type(value)(map(_absolute, value)) if isinstance(value, list | tuple) else value


def model_files(text: str, search_paths: Sequence[str] = ()) -> list[str]:
    """`--model=remixer+ablations/remixer_no_composition` or `--model=mine.gin` as gin files.

    A name without a folder is one of models/, or a file of the user's in the current folder or in `search_paths`: if
    both exist, `mine.gin` is the user's file and `mine` that of models/. Raises UserError if a name is empty.
    """
    names = [name.strip() for name in text.split('+')]
    if not all(name.removesuffix('.gin') for name in names):
        raise UserError(f'--model={text} has an empty name; type --model=t5_1_1, or --model=remixer+ablations/NAME')
    return [_model_file(name, search_paths) for name in names]


def _model_file(name: str, search_paths: Sequence[str]) -> str:
    file = f'{name.removesuffix(".gin")}.gin'
    is_users = any(pathlib.Path(folder).expanduser().joinpath(file).is_file() for folder in ('', *search_paths))
    prefers_users = name.endswith('.gin') or not (files.shipped_folder() / MODELS / file).is_file()
    return file if '/' in file or (is_users and prefers_users) else f'{MODELS}{file}'


def flag(name: str, text: str, imports: scan.Imports) -> Binding:
    """The statement that `--gin.NAME=text` makes: `/tmp/x` becomes `'/tmp/x'`, `128` stays.

    Raises:
        UserError: `text` is empty, or begins like a gin value (quote, bracket, @, %) and is not one.
    """
    place = Place(f'{scan.COMMAND_LINE}{name}', 0)
    if not text.strip():
        raise UserError(f'{place}= has no value; type {place}=VALUE (for an empty text {place}="\'\'")')
    right = _ALMOST_PYTHON.get(text.strip().lower(), text.strip())
    if right != text.strip():
        raise UserError(
            f'{place}={text} is not a gin value; type {place}={right}, or {place}="\'{text}\'" for the text'
        )
    try:
        (statement,) = scan.scan(f'{name} = {text}\n', str(place), imports=imports)
    except ValueError:  # not one statement, which UserError is too
        if text.lstrip()[0] in '\'"[({@%':
            raise UserError(
                f'{place}={one_line(text)} begins like a gin value but is not one; check quotes and brackets'
            ) from None
        (statement,) = scan.scan(f'{name} = {text!r}\n', str(place), imports=imports)
    return dataclasses.replace(statement, place=place)


def _with_own_imports(binding: Binding, known: Bindings) -> Binding:
    """Lets a flag name what no file imports by its full name, such as `optax.adamw`."""
    names = [reference.selector for reference in binding.references() if reference.kind == '@']
    imports = dict(binding.imports)
    for name in names if binding.is_macro else [*names, binding.selector]:
        module, package = name.rpartition('.')[0], name.partition('.')[0]
        if module and package not in imports and not known.has(name) and _is_installed(package):
            imports[package] = scan.import_of(module, binding.place)
    return dataclasses.replace(binding, imports=imports)


def _is_installed(package: str) -> bool:
    user_modules.allow(package)
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module that Python made itself, such as __main__
        return False


def _read(given: Given) -> list[Statement]:
    """All statements, in order."""
    reader = _FileReader(given.search_paths, given.model)
    found = _macros(given.defaults, Place('defaults', 0, shipped=True))
    for file in (DEFAULTS, *given.base):
        found += reader.read(file, by_us=True)
    for file in given.files:
        found += reader.read(file)
    if given.model and not reader.model_read:
        raise UserError(
            f'--model replaces a file of {MODELS}, and no gin file given names or includes one; '
            f'type --gin_file={given.model[0]}'
        )
    known = Bindings(found)
    found += [_with_own_imports(flag(name, text, known.imports), known) for name, text in given.flags]
    found += _macros(given.objects, Place('the caller', 0))
    module = Bindings(found).macros.get(task_names.MODULE)
    for name in (*reader.user_imports, *([str(module.value)] if module else [])):
        user_modules.allow(name)
    return task_names.resolved(found)


def _macros(values: Mapping[str, Any], place: Place) -> list[Statement]:
    return [Binding(name, '', value, place, f'%{name}') for name, value in values.items()]


class _FileReader:
    """Reads gin files with what they include; `model` are files to read in place of those of models/."""

    def __init__(self, search_paths: Sequence[str], model: Sequence[str]):
        self._search_paths, self._model = search_paths, model
        self.model_read = False
        self.user_imports: list[str] = []
        self._open: list[pathlib.Path] = []

    def read(self, name: str, asked_by: str = '', by_us: bool = False, in_model: bool = False) -> list[Statement]:
        """The statements of a file; `asked_by` names the include statement in errors, `by_us` is of `files.find`."""
        path = files.find(name, self._search_paths, asked_by, by_us)
        file, shipped = files.display_name(path)
        if self._model and shipped and file.startswith(MODELS) and not in_model:
            # Where several files of models/ are named, the model takes the place of the first.
            replacement = () if self.model_read else self._model
            self.model_read = True
            return [statement for file in replacement for statement in self.read(file, '--model: ', in_model=True)]
        if path.resolve() in self._open:
            raise UserError(f'{asked_by}{file} includes itself; remove one of the include lines')
        try:
            text = path.read_text(encoding='utf-8')
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f'{asked_by}gin file {file} cannot be read: {error}') from None
        found: list[Statement] = []
        self._open.append(path.resolve())
        for statement in scan.scan(text, file, shipped):
            if isinstance(statement, IncludeStatement):
                where = f'{file} line {statement.location.line_num}: '
                found += self.read(statement.filename, where, shipped, in_model)
                continue
            found.append(statement)
            if isinstance(statement, ImportStatement) and not shipped:
                self.user_imports.append(statement.module)
        self._open.pop()
        return found


def _apply(statement: Statement, bindings: Bindings) -> None:
    """Hands a statement to gin, and says in one line what gin complains about."""
    if isinstance(statement, Binding):
        text, place, imports = statement.gin_text(), statement.place, statement.imports
    else:
        text, place, imports = statement.format(), Place(statement.location.filename, statement.location.line_num), {}
    try:
        if isinstance(statement, Binding) and statement.is_macro and not any(statement.references()):
            # Also a Python object, which has no text.
            gin.bind_parameter((statement.selector, 'gin.macro', 'value'), statement.value)
        else:
            gin.parse_config(text)
    except Exception as error:
        known = errors.translate(error, place, errors.Known(bindings, imports))
        if known is None:
            raise
        raise known from None
