"""Loads gin files and `--gin.` flags; every error of gin becomes one line (UserError).

gin parses and evaluates. This module adds four rules, because a user's mistake would otherwise pass silently or end in
a page of traceback: a macro that nothing reads is an error, the value of a flag that is not a gin value is a string, a
macro that is not set has the default of the argument that takes it, and only what the caller reads has to be set.
"""

import contextlib
import dataclasses
import difflib
import importlib.util
import inspect
import io
import os
import pathlib
import re
import sys
import tokenize
import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import gin
from gin import config_parser

from remixer_t5x.config import files, resolved
from remixer_t5x.config.files import FLAG, MODELS, T5X, Text
from remixer_t5x.errors import UserError, nearest, one_line

# Values for what a model reads and data, hardware and runs own; read before everything else.
DEFAULTS = 'defaults.gin'
TASK, MODULE = 'MIXTURE_OR_TASK_NAME', 'MIXTURE_OR_TASK_MODULE'
# Macros that hold paths. A Hugging Face data set is a path only if it exists here.
_PATHS = (
    *('MODEL_DIR', 'INITIAL_CHECKPOINT_PATH', 'CHECKPOINT_PATH', 'VOCABULARY_PATH', 'CACHE_DIR', 'DATA_DIR'),
    *('FILES', 'VALIDATION_FILES', 'PAIRS', 'VALIDATION_PAIRS', 'EVAL_PAIRS', 'SUBMISSION_DIR', 'HF_DATASET'),
)
_ALMOST_PYTHON = {'true': 'True', 'false': 'False', 'none': 'None', 'null': 'None'}
_IMPORT_ADVICE = '; is the name spelt right, the package installed, or its folder in PYTHONPATH?'
_DYNAMIC = 'from __gin__ import dynamic_registration'


@dataclasses.dataclass(frozen=True)
class Given:
    """The sources of a configuration in the order in which they are read: a later statement overrides an earlier one.

    Attributes:
        defaults: Python values of macros.
        base: shipped files that the command itself reads.
        files: gin files, looked up by `files.find`.
        flags: names of macros or settings, and their values as text.
        objects: Python values of macros.
        search_paths: more folders with gin files.
        model: files, and settings as NAME=VALUE, to read instead of the first file of models/ that `files` name or
            include, and of all others.
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
    *roots: str,
    importing: contextlib.AbstractContextManager | None = None,
    partial: bool = True,
    only: bool = False,
) -> None:
    """Replaces gin's configuration by `given`.

    Args:
        given: files, flags and values.
        roots: what the caller reads, which must be set: `%MODEL` for a macro, or the full name of a class or function
            to call.
        importing: entered while gin imports modules, after the checks that need no library.
        partial: the caller reads a part of a configuration that was written for training; macros that a shipped file
            reads may stay unread. Otherwise `config_text` leaves out what `roots` do not read.
        only: `config_text` contains what `roots` read, without other imports.

    Raises:
        UserError: anything wrong with files, flags, names or values, on one line.
    """
    texts = _read(given)
    # Settings of the model that --model replaces may stay unread.
    may_be_unread = partial or bool(given.model)
    known = {*given.defaults, *(name[1:] for name in roots if name[0] == '%'), MODULE, 'gin.REQUIRED'}
    _check_macros(texts, known, given.objects, may_be_unread)
    gin.clear_config()
    with importing or contextlib.nullcontext():
        _bind(given.defaults)
        for number, text in enumerate(texts):
            _parse(text, texts[:number])
        _bind(given.objects)
        _name_tasks()
    walk = _walk(texts, roots)
    for name, place in _of_user(texts, 'macros_set'):
        is_read = (name, 'gin.macro', 'value') in walk.bindings or name == MODULE
        if not may_be_unread and place.startswith(FLAG) and not is_read:
            raise _unread(name, place, ())
    if only or not partial:
        lines = gin.config_str().splitlines()
        imports = [line for line in lines if line.startswith(('from ', 'import ')) and line != _DYNAMIC and not only]
        gin.clear_config()
        gin.parse_config([_DYNAMIC, *imports])
        for key, value in walk.bindings.items():
            gin.bind_parameter(key, value)
    _bind(walk.defaults)


def values(given: Given, *macros: str, **options: Any) -> list[Any]:
    """Returns the values of macros, which later configurations do not change; takes the options of `load`.

    Raises UserError, with one line, if files, flags, names or values are wrong.
    """
    load(given, *(f'%{name}' for name in macros), **options)
    return [resolved.macro(name) for name in macros]


def config_text(absolute_paths: bool = True) -> str:
    """Returns the configuration as gin text. With absolute paths, it reproduces the run from any folder."""
    for name in _PATHS if absolute_paths else ():
        value = resolved.raw(name)
        if name != 'HF_DATASET' or (isinstance(value, str) and os.path.exists(os.path.expanduser(value))):
            _bind({name: _absolute(value)} if value is not resolved.UNDEFINED else {})
    # As numbers, so that rows of other lengths do not change the shapes of the checkpoint's arrays.
    lengths = [
        name for name in ('MAX_INPUT_LENGTH', 'MAX_TARGET_LENGTH') if resolved.raw(name) is not resolved.UNDEFINED
    ]
    _bind({name: resolved.macro(name) for name in lengths})
    return gin.config_str()


def _absolute(value: Any) -> Any:
    """Makes the paths in a macro's value absolute and expands `~`; URLs and other values are unchanged."""
    if isinstance(value, str) and value and '://' not in value:
        return os.path.abspath(os.path.expanduser(value))
    if isinstance(value, dict):
        return {name: _absolute(item) for name, item in value.items()}
    return type(value)(map(_absolute, value)) if isinstance(value, list | tuple) else value


def _bind(macros: Mapping[str, Any]) -> None:
    for name, value in macros.items():
        gin.bind_parameter((name, 'gin.macro', 'value'), value)


def model_files(text: str, search_paths: Sequence[str] = ()) -> list[str]:
    """`--model=remixer+ablations/feature_mixing_only+TIED=False` or `--model=mine.gin` as gin files and settings.

    A name without a folder is one of models/, or a file of the user's in the current folder or in `search_paths`: if
    both exist, `mine.gin` is the user's file and `mine` that of models/. Raises UserError if a name is empty.
    """
    names = [name.strip() for name in text.split('+')]
    if not all(name.removesuffix('.gin') for name in names):
        raise UserError(f'--model={text} has an empty name; type --model=t5_1_1, or --model=remixer+NAME=VALUE')
    return [name if '=' in name else _model_file(name, search_paths) for name in names]


def _model_file(name: str, search_paths: Sequence[str]) -> str:
    file = f'{name.removesuffix(".gin")}.gin'
    is_users = any(pathlib.Path(folder).expanduser().joinpath(file).is_file() for folder in ('', *search_paths))
    prefers_users = name.endswith('.gin') or f'{MODELS}{file}' not in files.shipped()
    return file if '/' in file or (is_users and prefers_users) else f'{MODELS}{file}'


def _read(given: Given) -> list[Text]:
    """Reads all texts in gin's order. Modules that the user's texts import may be in the current folder."""
    model = [flag(name, value) if value else name for name, _, value in (item.partition('=') for item in given.model)]
    reader = files.Reader(given.search_paths, model)
    texts = [text for file in (DEFAULTS, *given.base) for text in reader.read(file, by_us=True)]
    texts += [text for file in given.files for text in reader.read(file)]
    if given.model and not reader.model_read:
        raise UserError(
            f'--model replaces a file of {MODELS}, and no gin file given names or includes one; '
            f'type --gin_file={given.model[0]}'
        )
    texts += [flag(name, text) for name, text in given.flags]
    for text in texts:
        modules = [line.split()[1] for line in text.imports.values()]
        modules += re.findall(rf"^{MODULE}\s*=\s*['\"]([\w.]+)", text.text, re.M)
        if any(module.partition('.')[0] == 't5x' for module in modules):
            raise UserError(f"{text.name} is for T5X's own scripts; docs/t5x.md has their commands, and the names here")
        files.of_user.update(module.partition('.')[0] for module in modules if not text.shipped)
    return texts


def flag(name: str, value: str) -> Text:
    """Returns the statement of `--gin.NAME=value`: `/tmp/x` becomes `'/tmp/x'`, `128` stays.

    Raises UserError if `value` is empty, or begins like a gin value (quote, bracket, @, %) and is not one.
    """
    place, bare = f'{FLAG}{name}', value.strip()
    if not bare:
        raise UserError(f'{place}= has no value; type {place}=VALUE (for an empty text {place}="\'\'")')
    if (right := _ALMOST_PYTHON.get(bare.lower(), bare)) != bare:
        raise UserError(f'{place}={value} is no gin value; type {place}={right}, or {place}="\'{value}\'" for the text')
    try:
        (_,) = config_parser.ConfigParser(f'{name} = {bare}\n', References())
    except (SyntaxError, ValueError, tokenize.TokenError):
        if bare[0] in '\'"[({@%' and not re.match(r'\{\w+\}', bare):
            raise UserError(f'{place}={one_line(value)} is no gin value; close its quotes and brackets') from None
        return Text(place, f'{name} = {value!r}\n')
    return Text(place, f'{name} = {bare}\n')


class Reference(str):
    """A reference or a macro in a value, as gin text; its repr has no quotes, so the repr of a value is gin text."""

    def __repr__(self) -> str:
        return str(self)


class References(config_parser.ParserDelegate):
    """Lists the references and macros in values, without looking up or importing what they name."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        self.names.append(f'@{scoped_configurable_name}')
        return Reference(f'@{scoped_configurable_name}{"()" if evaluate else ""}')

    def macro(self, macro_name: str) -> Reference:
        self.names.append(f'%{macro_name}')
        return Reference(f'%{macro_name}')


def _of_user(texts: Sequence[Text], kind: str) -> list[tuple[str, str]]:
    """Returns the macros that the user's files and flags set or read, with places."""
    return [item for text in texts if not text.shipped for item in getattr(text, kind).items()]


def _check_macros(texts: Sequence[Text], known: set[str], objects: Collection[str], partial: bool) -> None:
    """Raises UserError for the user's macros that no text reads or sets; from the text alone, before libraries load."""
    read = known.union(*(text.macros_read for text in texts))
    are_set = known.union(objects, *(text.macros_set for text in texts))
    for name, place in [*_of_user(texts, 'macros_set'), *((name, 'the caller') for name in objects)]:
        of_t5x = name in T5X['macros'] and place.startswith(FLAG)
        if name not in read and (of_t5x or not (partial and files.is_known(name))):
            raise _unread(name, place, read)
    ours = {name for text in texts if text.shipped for name in text.macros_read}
    for name, place in _of_user(texts, 'macros_read'):
        if name not in are_set and not (files.readers(name) if partial else name in ours):
            advice = nearest(name, are_set) or f'; give {FLAG}{name}=...'
            raise UserError(f'{place}: %{name} is not set{advice}')


def _unread(name: str, place: str, known: Collection[str]) -> UserError:
    advice = T5X['macros'].get(name, '')
    if not advice and (readers := files.readers(name)):
        advice = f'it is for {", ".join(readers[:3])}'
    advice = f'; {advice}' if advice else nearest(name, known) or '; remove it'
    return UserError(f'{_with_name(place, name)} is set, but nothing reads it{advice}')


def _with_name(place: str, name: str) -> str:
    return place if place.startswith(FLAG) else f'{place}: {name}'


def _walk(texts: Sequence[Text], roots: Sequence[str]) -> resolved.Walk:
    """Follows what the caller reads. Raises UserError for macros that are not set and for values of the wrong type."""
    walk = resolved.Walk()
    for name, place in _of_user(texts, 'macros_set'):
        if isinstance(value := resolved.raw(name), str) and (lines := _references(name)) and name != TASK:
            typed = max(lines, key=lambda line: difflib.SequenceMatcher(None, value.lower(), line.lower()).ratio())
            raise UserError(f'{_with_name(place, name)} must be a reference, got {value!r}; type {lines[typed]}')
    try:
        for name in roots:
            if name[0] == '%':
                walk.maker(walk.macro(name[1:]))
            elif not resolved.arguments_of(resolved.named(name), [], walk):
                short = '.'.join(name.split('.')[-2:])
                raise UserError(f'no gin file given sets up {name}{files.add_one_that_sets(short)}')
    except resolved.Undefined as error:
        name = str(error)
        place = next((text.macros_read[name] + ': ' for text in reversed(texts) if name in text.macros_read), '')
        raise UserError(
            f'{place}%{name} is not set{files.add_one_that_sets(name) or f"; give {FLAG}{name}=..."}'
        ) from None
    return walk


def _references(macro: str) -> dict[str, str]:
    """Maps names of files, classes and functions to what to type, if shipped files set a macro to a reference."""
    lines = {}
    for file, text in files.shipped().items():
        if file.startswith('t5x/'):
            continue
        if re.search(rf"^{macro} = '", text.text, re.M):
            return {}
        for scope, module, call in re.findall(rf'^{macro} = @((?:\w+/)*)(\w+)\.\w+(.*)', text.text, re.M):
            lines[pathlib.PurePath(file).stem] = f'--gin_file={file}'
            module_name = '.'.join(text.imports[module].split()[1::2]) if module in text.imports else __name__
            needs = f'--gin_file=sublayers/{module}.gin ' if f'sublayers/{module}.gin' in files.shipped() else ''
            for name, member in vars(importlib.import_module(module_name)).items():
                if getattr(member, '__module__', '') == module_name and name[0] != '_':
                    quote = "'" if call else ''
                    lines.setdefault(name, f'{needs}{FLAG}{macro}={quote}@{scope}{module}.{name}{call}{quote}')
    return lines


def _name_tasks() -> None:
    """Replaces the name of a task by a call of `remixer_tasks.names`, and imports MIXTURE_OR_TASK_MODULE."""
    lines = []
    options = [name for name in ('VOCABULARY', 'DATA_DIR') if resolved.raw(name) is not resolved.UNDEFINED]
    for macro in (TASK, f'EVAL_{TASK}'):
        names = resolved.raw(macro)
        several = macro != TASK and (isinstance(names, list | tuple) or isinstance(names, str) and ',' in names)
        if several or isinstance(names, str):
            call, argument = ('names.providers', 'names') if several else ('names.provider', 'name')
            call = f'{macro.lower()}/{call}'
            lines += [f'{macro} = @{call}()', f'{call}.{argument} = {names!r}']
            lines += [f'{call}.{name.lower()} = %{name}' for name in options]
    if resolved.raw(TASK) is not resolved.UNDEFINED and 'VOCABULARY' not in options:
        lines += ['VOCABULARY = @names.vocabulary_of()', f'names.vocabulary_of.task = %{TASK}']
    module = resolved.raw(MODULE)
    module = None if module is resolved.UNDEFINED else module
    if module is not None and not (isinstance(module, str) and re.fullmatch(r'\w+(\.\w+)*', module)):
        raise UserError(f'{MODULE} must be the name of a module, as in my_package.tasks, got {module!r}')
    imports = [f'import {module}'] if module else []
    if lines or imports:
        _parse(Text(f'{FLAG}{MODULE}', '\n'.join([_DYNAMIC, *imports, 'from remixer_tasks import names', *lines])), ())


def _parse(text: Text, before: Sequence[Text]) -> None:
    """Parses a text with gin; an error of gin becomes a UserError of one line.

    A text without dynamic registration may name what files before it import, and a flag any module.
    """
    header: list[str] = []
    try:
        try:
            _parse_stream(text.text, text.name)
        except ValueError as error:
            header = [] if _DYNAMIC in text.text else _imports(text, before)
            if not header or not _raised_in_gin(error):
                raise
            _parse_stream('\n'.join([_DYNAMIC, *header, text.text]), text.name)
    except Exception as error:
        if not isinstance(error, ModuleNotFoundError) and not _raised_in_gin(error):
            raise  # A bug in a module that the text imports.
        raise _one_line(error, text, before, 1 + len(header) if header else 0) from None


def _parse_stream(text: str, name: str) -> None:
    stream = io.StringIO(text)
    stream.name = name  # gin's errors show it
    gin.parse_config(stream)


def _imports(text: Text, before: Sequence[Text]) -> list[str]:
    """Returns import statements for the modules that a text names and does not import."""
    known = {name: line for other in reversed(before) for name, line in other.imports.items()}
    lines = []
    for module in re.findall(r'(?:@|^)(?:\w+/)*([\w.]+)\.\w+(?:\.\w+\s*=)?', text.text, re.M):
        first = module.partition('.')[0]
        if first not in known and text.is_flag:
            files.of_user.add(first)
            known |= {first: f'import {module}'} if importlib.util.find_spec(first) else {}
        lines += [known[first]] if first in known else []
    return list(dict.fromkeys(lines))


def _raised_in_gin(error: Exception) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get('__name__', '').partition('.')[0] in ('gin', 'tokenize')


def _one_line(error: Exception, text: Text, before: Sequence[Text], header: int) -> UserError:
    """Returns gin's error about a text as `file line N: problem; advice`."""
    lines, advice = text.text.splitlines(), ''
    if isinstance(error, tokenize.TokenError):
        # gin notices at the end of the file; the statement began at the last line that is not indented.
        number = max((number for number, line in enumerate(lines, 1) if line[:1].isalpha()), default=1)
        problem, advice = 'a bracket or quote opened here is never closed', '; close it'
    elif isinstance(error, SyntaxError):
        number, problem = error.lineno or 1, str(error.msg).splitlines()[-1].strip()
        advice = '; write NAME = value or module.name.setting = value, and texts in quotes'
    else:
        problem, *rest = str(error).strip('"').rstrip('.').splitlines()
        match = re.search(r'line (\d+)', ' '.join(rest))
        number = int(match[1]) - header if match else 1
        is_import = isinstance(error, ModuleNotFoundError)
        advice = _IMPORT_ADVICE if is_import else _advice(''.join(lines[number - 1 : number]), text, before)
    return UserError(f'{text.name if text.is_flag else f"{text.name} line {number}"}: {one_line(problem)}{advice}')


def _advice(line: str, text: Text, before: Sequence[Text]) -> str:
    """Suggests a setting, class or function for the first name in a statement that does not exist."""
    imports = {name: line for other in [*reversed(before), text] for name, line in other.imports.items()}
    names = [name.split('.') for name in re.findall(r'[A-Za-z_][\w.]*\.\w+', line)]
    for name in ('.'.join(parts[:end]) for parts in names for end in range(2, len(parts) + 1)):
        parent, _, last = name.rpartition('.')
        if setting := T5X['settings'].get('.'.join(name.split('.')[-2:])):
            return f'; that is a setting of T5X, and here it is {setting}'
        if f'sublayers/{parent}.gin' in files.shipped() and parent not in imports:
            return f'; add --gin_file=sublayers/{parent}.gin'
        if (members := _members(parent, imports)) and last not in members:
            return nearest(last, members) or f'; it has {", ".join(members)}'
    words = {word for other in before for word in re.findall(r'[A-Za-z_]\w*', other.text) if not word.isupper()}
    unknown = [word for word in re.findall(r'[A-Za-z_]\w*', line) if word not in words]
    return nearest(unknown[0], words) if unknown else ''


def _members(name: str, imports: Mapping[str, str]) -> list[str]:
    """Lists the settings of a class or function, or the public classes and functions of a module."""
    try:
        function = gin.get_configurable(name)
        # gin's stand-in for a class hides the signature of the class behind (*args, **kwargs).
        parameters = inspect.signature(function.__init__ if inspect.isclass(function) else function).parameters
        return [each for each in parameters if each not in ('self', 'parent', 'name')]
    except (ValueError, TypeError):
        module = sys.modules.get('.'.join(imports.get(name, f'import {name}').split()[1::2]))
    members = vars(module) if module else {}
    return sorted(
        name
        for name, member in members.items()
        if callable(member) and getattr(member, '__module__', '') == members['__name__']
    )
