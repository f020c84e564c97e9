"""Loads gin files and `--gin.` flags.

gin parses the configuration. This module adds four rules. Setting a macro that nothing reads is an error. A flag value
that is not valid gin is treated as a string. An unset macro defaults to the default value of the argument that uses
it. Only macros that the caller reads must be set.

gin errors are converted to one-line UserErrors with the location, the problem, and advice.
"""

import dataclasses
import graphlib
import importlib.util
import inspect
import os
import pathlib
import re
import sys
import tokenize
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import gin
from gin import config_parser
from gin.config import ConfigurableReference

from remixer_t5x import lazy_imports
from remixer_t5x.config import gin_files, reference_resolver, user_modules
from remixer_t5x.config.gin_files import FLAG, MODELS_FOLDER, T5X_NAMES, GinText, ReferenceCollector
from remixer_t5x.errors import UserError, suggest_similar_name, to_one_line

# Default values of macros that models read but other files (for data, hardware or runs) set. This file is loaded first.
DEFAULTS = 'defaults.gin'
TASK, MODULE = 'MIXTURE_OR_TASK_NAME', 'MIXTURE_OR_TASK_MODULE'
# Macros whose values are paths. HF_DATASET is treated as a path only if the path exists.
_PATH_MACROS = (
    *('MODEL_DIR', 'INITIAL_CHECKPOINT_PATH', 'CHECKPOINT_PATH', 'VOCABULARY_PATH', 'CACHE_DIR', 'DATA_DIR'),
    *('FILES', 'VALIDATION_FILES', 'PAIRS', 'VALIDATION_PAIRS', 'EVAL_PAIRS', 'SUBMISSION_DIR', 'HF_DATASET'),
)
# Macros whose values are created by a call, with an example; their readers have no annotations that can be checked.
_OBJECT_MACROS = {'MODEL': '@seq2seq.Seq2Seq()', 'VOCABULARY': '@remixer_tasks.vocabularies.byte()'}
_PYTHON_LITERALS = {'true': 'True', 'false': 'False', 'none': 'None', 'null': 'None'}
DYNAMIC_REGISTRATION = 'from __gin__ import dynamic_registration'


@dataclasses.dataclass(frozen=True)
class ConfigSources:
    """The sources of a gin configuration.

    In the order `defaults`, `base`, `files`, `flags`, `objects`, each source overrides the previous ones.

    Attributes:
        files: gin files in the current folder, in `search_paths`, or among the shipped configs.
        flags: (name, value) pairs of strings; the name is a macro or a setting.
        search_paths: additional folders to search for gin files.
        model: gin files that replace all files in models/, and settings of the form NAME=VALUE, which override `files`.
        base: shipped gin files that a command reads by default.
        defaults: Python values of macros, which all other sources override.
        objects: Python values of macros, which override all other sources.
    """

    files: Sequence[str] = ()
    flags: Sequence[tuple[str, str]] = ()
    search_paths: Sequence[str] = ()
    model: Sequence[str] = ()
    base: Sequence[str] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    objects: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def load_gin_config(
    sources: ConfigSources,
    *roots: str,
    partial: bool = True,
    must_be_read: Collection[str] = (),
    only_roots: bool = False,
) -> None:
    """Replaces gin's configuration with `sources`. Raises a one-line UserError for any error in the sources.

    Args:
        sources: the files, flags and Python values to load.
        roots: macros (such as `%MODEL`), and full names of classes or functions, that `sources` must configure.
        partial: whether the caller reads only some settings of a training configuration. If True, macros of other
            shipped files may be set but unread. If False, `get_config_text` contains only settings that `roots` read.
        must_be_read: macros that raise an error if flags set them but `roots` do not read them, also if `partial` is
            True.
        only_roots: whether `get_config_text` contains only settings that `roots` read, and no further imports.
    """
    texts = _read_gin_texts(sources)
    # If --model replaces a model, macros of the replaced model may be set but unread.
    may_be_unread = partial or bool(sources.model)
    _check_macros(texts, sources, {name[1:] for name in roots if name[0] == '%'}, may_be_unread)
    gin.clear_config()
    with lazy_imports.discard_stderr():
        _bind_macros(sources.defaults)
        for number, text in enumerate(texts):
            parse_gin_text(text, texts[:number])
        _bind_macros(sources.objects)
        _replace_task_names()
    macros_set = {
        name: location for text in texts if not text.shipped for name, location in text.assigned_macros.items()
    }
    for name, example in _OBJECT_MACROS.items():
        value = reference_resolver.get_unevaluated_macro(name)
        if isinstance(value, str) or isinstance(value, ConfigurableReference) and not value.evaluate:
            raise UserError(f'{name} must be an object, got {value}; for example, set {name} = {example}')
    resolver = reference_resolver.ReferenceResolver()
    for root in roots:
        if root[0] == '%':
            resolver.create_value_builder(resolver.get_macro(root[1:]))
        else:
            resolver.resolve_root_arguments(root)
    in_model = {item.partition('=')[0] for item in sources.model if '=' in item}
    for name, location in macros_set.items():
        is_read = (name, 'gin.macro', 'value') in resolver.bindings or name == MODULE
        is_checked = not partial and (name in in_model or location.startswith(FLAG) and not sources.model)
        if not is_read and (is_checked or name in must_be_read and location.startswith(FLAG)):
            raise _build_unread_macro_error(name, f'--model: {name}' if name in in_model else location, (), texts)
    if only_roots or not partial:
        lines = [] if only_roots else gin.config_str().splitlines()
        imports = [line for line in lines if line.startswith(('from ', 'import ')) and line != DYNAMIC_REGISTRATION]
        gin.clear_config()
        gin.parse_config([DYNAMIC_REGISTRATION, *imports])
        for key, value in resolver.bindings.items():
            gin.bind_parameter(key, value)
    _bind_macros(resolver.defaults)


def load_macro_values(sources: ConfigSources, *macros: str, **options: Any) -> list[Any]:
    """Loads `sources` with the `options` of `load_gin_config`, and returns the values of `macros`.

    Later calls of `load_gin_config` do not change the returned values.
    """
    load_gin_config(sources, *(f'%{name}' for name in macros), **options)
    return [reference_resolver.evaluate_macro(name) for name in macros]


def get_config_text(absolute_paths: bool = True) -> str:
    """Returns the configuration as gin text. With `absolute_paths`, paths in the text do not depend on the folder."""
    paths = _get_set_macros(*_PATH_MACROS) if absolute_paths else {}
    if not isinstance(path := paths.get('HF_DATASET'), str) or not os.path.exists(os.path.expanduser(path)):
        paths.pop('HF_DATASET', None)
    _bind_macros({name: _make_paths_absolute(value) for name, value in paths.items()})
    # Write the lengths as numbers, so that loading the model with other data does not change parameter shapes.
    lengths = _get_set_macros('MAX_INPUT_LENGTH', 'MAX_TARGET_LENGTH')
    _bind_macros({name: reference_resolver.evaluate_macro(name) for name in lengths})
    return gin.config_str()


def _get_set_macros(*names: str) -> dict[str, Any]:
    """Returns the unevaluated values of the macros in `names` that are set."""
    values = {name: reference_resolver.get_unevaluated_macro(name) for name in names}
    return {name: value for name, value in values.items() if value is not reference_resolver.UNDEFINED}


def _make_paths_absolute(value: Any) -> Any:
    """Converts paths in the value of a macro to absolute paths, and expands `~`. Other values are unchanged."""
    if isinstance(value, str) and value and '://' not in value:
        return os.path.abspath(os.path.expanduser(value))
    if isinstance(value, dict):
        return {name: _make_paths_absolute(item) for name, item in value.items()}
    return type(value)(map(_make_paths_absolute, value)) if isinstance(value, list | tuple) else value


def _bind_macros(macros: Mapping[str, Any]) -> None:
    for name, value in macros.items():
        gin.bind_parameter((name, 'gin.macro', 'value'), value)


def _read_gin_texts(sources: ConfigSources) -> list[GinText]:
    """Reads all gin texts in loading order, and lets custom gin files import modules from the current folder."""
    model_files = [item for item in sources.model if '=' not in item]
    reader = gin_files.GinReader(sources.search_paths, model_files)
    texts = [text for file in (DEFAULTS, *sources.base) for text in reader.read(file, prefer_shipped=True)]
    texts += [text for file in sources.files for text in reader.read(file)]
    if sources.model and not reader.model_read:
        raise UserError(
            f'--model replaces a file in {MODELS_FOLDER}, but no gin file includes one; '
            f'pass --gin_file={sources.model[0]}'
        )
    # The settings of --model also override the gin files that are read after the model, such as one that sets its size.
    model_settings = [tuple(item.split('=', 1)) for item in sources.model if '=' in item]
    texts += [parse_gin_flag(name, text) for name, text in (*model_settings, *sources.flags)]
    for text in texts:
        modules = [statement.module for statement in text.imports.values()]
        modules += [str(text.bindings[MODULE][0].value)] if MODULE in text.bindings else []
        if any(module.partition('.')[0] == 't5x' for module in modules):
            raise UserError(
                f"{text.name} configures T5X's scripts; docs/t5x.md lists the equivalent commands of remixer-t5x"
            )
        user_modules.importable_modules.update(module.partition('.')[0] for module in modules if not text.shipped)
    return texts


def parse_gin_flag(name: str, value: str) -> GinText:
    """Returns the gin statement for a flag `--gin.NAME=value`. A value that is not valid gin becomes a string.

    Raises UserError if `value` is empty or a literal such as `true`, which gin spells differently. Also raises
    UserError if `value` starts like a gin value (quote, bracket, @, %) but is neither valid gin nor a template with a
    column name in braces, such as `{question}`.
    """
    flag, bare = f'{FLAG}{name}', value.strip()
    if not bare:
        raise UserError(f'{flag} has no value; pass {flag}=VALUE (for an empty string {flag}="\'\'")')
    if (literal := _PYTHON_LITERALS.get(bare.lower(), bare)) != bare:
        raise UserError(
            f'{flag} must be a gin value, got {value}; pass {flag}={literal}, or {flag}="\'{value}\'" for the string'
        )
    try:
        (_,) = config_parser.ConfigParser(f'{name} = {bare}\n', ReferenceCollector())
    except (SyntaxError, ValueError, tokenize.TokenError):
        if bare[0] in '\'"[({@%' and not re.search(r'\{\w+\}', bare):
            raise UserError(
                f'{flag} must be a gin value, got {to_one_line(value)}; close its quotes and brackets, or quote a '
                f'text twice, as in {flag}="\'...\'"'
            ) from None
        return GinText(flag, f'{name} = {value!r}\n')
    return GinText(flag, f'{name} = {bare}\n')


def _check_macros(
    texts: Sequence[GinText], sources: ConfigSources, roots: Collection[str], may_be_unread: bool
) -> None:
    """Raises UserError for macros that are set by the user but not read, read but not set, or defined by a cycle.

    If `may_be_unread` is True, macros that only other shipped files read may be set.
    """
    values = {name: names for text in texts for name, (binding, names) in text.bindings.items() if not binding.arg_name}
    try:
        graphlib.TopologicalSorter({f'%{name}': names for name, names in values.items()}).prepare()
    except graphlib.CycleError as error:
        cycle = ' = '.join(error.args[1])
        raise UserError(f'a macro must not refer to itself, got {cycle}; change one of them') from None
    known = {*sources.defaults, *roots, MODULE, 'gin.REQUIRED'}
    macros_read = known.union(*(text.referenced_macros for text in texts))
    macros_set = known.union(sources.objects, *(text.assigned_macros for text in texts))
    users = [text for text in texts if not text.shipped]
    locations = {name: location for text in users for name, location in text.assigned_macros.items()}
    for name, location in [*locations.items(), *((name, name) for name in sources.objects)]:
        if name not in macros_read and not (may_be_unread and gin_files.is_known_macro(name)):
            raise _build_unread_macro_error(name, location, macros_read, texts)
    shipped_reads = {name for text in texts if text.shipped for name in text.referenced_macros}
    for name, location in (item for text in users for item in text.referenced_macros.items()):
        if name in macros_set:
            continue
        files = gin_files.find_files_with_macro(name)
        if not (files if may_be_unread else name in shipped_reads):
            suggestion = '' if files else suggest_similar_name(name, macros_set)
            raise UserError(f'{location} is not set{suggestion or f"; pass {FLAG}{name}=VALUE"}')


def _build_unread_macro_error(name: str, location: str, known: Collection[str], texts: Sequence[GinText]) -> UserError:
    advice = T5X_NAMES['macros'].get(name, '')
    settings = [target for text in texts for target, (_, names) in text.bindings.items() if f'%{name}' in names]
    if not advice and settings:
        shown = ', '.join(list(dict.fromkeys(settings))[:3])
        advice = f'it is the value of {shown}, which this configuration does not use'
    elif not advice and (readers := gin_files.find_files_with_macro(name)):
        advice = f'it is a setting of {", ".join(readers[:3])}'
    advice = f'; {advice}' if advice else suggest_similar_name(name, known) or '; remove it'
    return UserError(f'{location} is set, but nothing reads it{advice}')


def _replace_task_names() -> None:
    """Replaces task names with calls of functions in `remixer_tasks.names`, and imports MIXTURE_OR_TASK_MODULE."""
    options = _get_set_macros('VOCABULARY', 'DATA_DIR')
    tasks = _get_set_macros(TASK, f'EVAL_{TASK}')
    lines = []
    for macro, names in tasks.items():
        if macro != TASK and (isinstance(names, list | tuple) or isinstance(names, str) and ',' in names):
            function, argument = 'names.find_providers', 'names'
        elif isinstance(names, str):
            function, argument = 'names.find_provider', 'name'
        else:
            continue
        call = f'{macro.lower()}/{function}'
        lines += [f'{macro} = @{call}()', f'{call}.{argument} = {names!r}']
        lines += [f'{call}.{name.lower()} = %{name}' for name in options]
    if TASK in tasks and 'VOCABULARY' not in options:
        lines += ['VOCABULARY = @names.vocabulary_of()', f'names.vocabulary_of.task = %{TASK}']
    if (module := reference_resolver.evaluate_macro(MODULE, None)) is not None:
        if not (isinstance(module, str) and re.fullmatch(r'\w+(\.\w+)*', module)):
            raise UserError(f'{MODULE} must be the name of a module, such as my_package.tasks, got {module!r}')
        lines.insert(0, f'import {module}')
    if lines:
        parse_gin_text(
            GinText(f'{FLAG}{MODULE}', '\n'.join([DYNAMIC_REGISTRATION, 'from remixer_tasks import names', *lines])), ()
        )


def parse_gin_text(text: GinText, before: Sequence[GinText]) -> None:
    """Parses a gin text. Raises a one-line UserError if gin reports an error.

    A text that does not enable dynamic registration can use the imports of the texts in `before`. A flag can refer to
    any module.
    """
    header: list[str] = []
    try:
        try:
            gin.parse_config(text.text)
        except ValueError as error:
            header = [] if DYNAMIC_REGISTRATION in text.text else _find_missing_imports(text, before)
            if not header or not _is_raised_in_gin(error):
                raise
            gin.parse_config([DYNAMIC_REGISTRATION, *header, text.text])
    except Exception as error:
        missing = _find_missing_module(error)
        is_in_module = user_modules.find_user_frames(error) and missing not in lazy_imports.TASK_LIBRARIES
        if is_in_module or not (missing or _is_raised_in_gin(error)):
            raise  # The error is in an imported module.
        raise _convert_gin_error(error, text, before, 1 + len(header) if header else 0) from None


def _find_missing_imports(text: GinText, before: Sequence[GinText]) -> list[str]:
    """Returns import statements for the modules that a gin text uses without importing them."""
    texts = [*reversed(before), text]
    known = {name: statement.format() for other in texts for name, statement in other.imports.items()}
    used = [name[1:] for _, names in text.statements for name in names if name[0] == '@']
    used += [target.rpartition('.')[0] for target in text.bindings]
    lines = []
    for module in filter(None, (name.rpartition('/')[2].rpartition('.')[0] for name in used)):
        name = module.partition('.')[0]
        if name not in known and text.is_flag:
            user_modules.importable_modules.add(name)
            known |= {name: f'import {module}'} if importlib.util.find_spec(name) else {}
        lines += [known[name]] if name in known else []
    return list(dict.fromkeys(lines))


def _is_raised_in_gin(error: Exception) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get('__name__', '').partition('.')[0] in ('gin', 'tokenize')


def _find_missing_module(error: Exception) -> str:
    """Returns the name of the missing module if the error is a ModuleNotFoundError, or '' for other errors."""
    # gin raises a copy of the error, whose attribute `name` is None.
    original = error.__context__ if isinstance(error.__context__, ModuleNotFoundError) else error
    return (original.name or '') if isinstance(original, ModuleNotFoundError) else ''


def _convert_gin_error(error: Exception, text: GinText, before: Sequence[GinText], header: int) -> UserError:
    """Converts gin's error to a UserError with the message `file line N: problem; advice`."""
    lines, (problem, *rest) = text.text.splitlines(), str(error).strip('"').splitlines()
    problem = problem.rstrip('.')
    match = re.search(r'line (\d+)', ' '.join(rest))
    number = int(match[1]) - header if match else 1
    if missing := _find_missing_module(error):
        is_task_library = missing in lazy_imports.TASK_LIBRARIES
        advice = f'; run {lazy_imports.INSTALL_COMMAND}' if is_task_library else _suggest_module(missing, ())
    elif unknown := re.search(r"<module '([\w.]+)'.* has no attribute (\w+)", problem):
        problem = f'{unknown[1]} has no attribute {unknown[2]}'
        advice = suggest_similar_name(unknown[2], vars(sys.modules[unknown[1]]))
    elif parameter := re.search(r"'(.+)' doesn't have a parameter named '(\w+)'", problem):
        function = ConfigurableReference(parameter[1], evaluate=False).configurable.wrapped
        advice = suggest_similar_name(parameter[2], inspect.signature(function).parameters)
    elif statements := [
        other.imports[name].format()
        for other in before
        for name in other.imports
        if problem.startswith(f"'{name}' was")
    ]:
        advice = f'; add `{statements[-1]}` to this file'
    else:
        advice = _suggest_name(''.join(lines[number - 1 : number]), text, before)
    return UserError(f'{text.locate(number)}{to_one_line(problem)}{advice}')


def _suggest_name(line: str, text: GinText, before: Sequence[GinText]) -> str:
    """Suggests a replacement, or a file or module to add, for the first name in `line` that cannot be resolved."""
    imports = {name for other in [*before, text] for name in other.imports}
    for name in re.findall(r'[A-Za-z_][\w.]*\.\w+', line):
        first, *rest = name.split('.')
        for pair in zip([first, *rest], rest, strict=False):
            if setting := T5X_NAMES['settings'].get('.'.join(pair)):
                return f'; it is a setting of T5X; use its counterpart {setting}'
        if first not in imports:
            shipped = gin_files.read_shipped_files()
            if f'sublayers/{first}.gin' in shipped:
                return f'; add --gin_file=sublayers/{first}.gin'
            if f'models/{first}.gin' in shipped:
                models = [name for name, other in shipped.items() if first in other.imports]
                return f'; use a model that configures it: {", ".join(models)}'
            return _suggest_module(first, imports)
    return ''


def _suggest_module(name: str, imports: Iterable[str]) -> str:
    """Suggests the imported module or the module in the current folder whose name is most similar to `name`."""
    near = suggest_similar_name(name, [*imports, *(path.stem for path in pathlib.Path().glob('*.py'))])
    return near or '; check its spelling, that the package is installed, and PYTHONPATH'
