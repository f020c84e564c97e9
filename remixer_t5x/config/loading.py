"""Loads gin files and `--gin.` flags.

gin parses and evaluates. This module adds four rules, because a user's mistake would otherwise pass silently or end in
a page of traceback: a macro that nothing reads is an error, the value of a flag that is not a gin value is a string, a
macro that is not set has the default of the argument that takes it, and only what the caller reads has to be set.
"""

import contextlib
import dataclasses
import difflib
import os
import pathlib
import re
import shlex
import tokenize
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import gin
from gin import config_parser

from remixer_t5x.config import files, parsing, resolved, user_modules
from remixer_t5x.config.files import FLAG, MODELS, T5X, Text
from remixer_t5x.config.parsing import DYNAMIC
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


@dataclasses.dataclass(frozen=True)
class ConfigSources:
    """The sources of a configuration. A later statement overrides an earlier one, in this order: `defaults`, `base`,
    `files`, `flags`, `objects`.

    Attributes:
        files: gin files, looked up by `files.find`.
        flags: names of macros or settings, and their values as text.
        search_paths: more folders with gin files.
        model: files, and settings as NAME=VALUE, to read in place of all files of models/.
        base: shipped files that the command itself reads.
        defaults: Python values of macros.
        objects: Python values of macros.
    """

    files: Sequence[str] = ()
    flags: Sequence[tuple[str, str]] = ()
    search_paths: Sequence[str] = ()
    model: Sequence[str] = ()
    base: Sequence[str] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    objects: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def load(
    given: ConfigSources,
    *roots: str,
    importing: contextlib.AbstractContextManager | None = None,
    partial: bool = True,
    only: bool = False,
) -> None:
    """Replaces gin's configuration by `given`. Raises UserError, on one line, for anything wrong in it.

    Args:
        given: files, flags and values.
        roots: what the caller reads, which must be set: `%MODEL` for a macro, or the full name of a class or function
            to call.
        importing: entered while gin imports modules, after the checks that need no library.
        partial: the caller reads a part of a configuration that was written for training; macros that a shipped file
            reads may stay unread. Otherwise `config_text` leaves out what `roots` do not read.
        only: `config_text` contains what `roots` read, without other imports.
    """
    texts = _read(given)
    # Settings of the model that --model replaces may stay unread.
    may_be_unread = partial or bool(given.model)
    _check_macros(texts, given, {name[1:] for name in roots if name[0] == '%'}, may_be_unread)
    gin.clear_config()
    with importing or contextlib.nullcontext():
        _bind(given.defaults)
        for number, text in enumerate(texts):
            parsing.parse(text, texts[:number])
        _bind(given.objects)
        _name_tasks()
    macros_set = {name: place for text in texts if not text.shipped for name, place in text.macros_set.items()}
    for name, place in macros_set.items():
        _check_reference(name, place)
    walk = resolved.Walk()
    for root in roots:
        if root[0] == '%':
            walk.maker(walk.macro(root[1:]))
        else:
            walk.root(root)
    for name, place in macros_set.items():
        is_read = (name, 'gin.macro', 'value') in walk.bindings or name == MODULE
        if place.startswith(FLAG) and not is_read and not may_be_unread:
            raise _unread_macro_error(name, place, ())
    if only or not partial:
        lines = gin.config_str().splitlines()
        imports = [line for line in lines if line.startswith(('from ', 'import ')) and line != DYNAMIC and not only]
        gin.clear_config()
        gin.parse_config([DYNAMIC, *imports])
        for key, value in walk.bindings.items():
            gin.bind_parameter(key, value)
    _bind(walk.defaults)


def values(given: ConfigSources, *macros: str, **options: Any) -> list[Any]:
    """Returns the values of macros, which later configurations do not change; takes the options of `load`."""
    load(given, *(f'%{name}' for name in macros), **options)
    return [resolved.macro(name) for name in macros]


def config_text(absolute_paths: bool = True) -> str:
    """Returns the configuration as gin text. With absolute paths, it reproduces the run from any folder."""
    paths = {name: resolved.raw_macro(name) for name in _PATHS if absolute_paths}
    if not isinstance(path := paths.get('HF_DATASET'), str) or not os.path.exists(os.path.expanduser(path)):
        paths.pop('HF_DATASET', None)
    _bind({name: _absolute(value) for name, value in paths.items() if value is not resolved.UNDEFINED})
    # As numbers, so that rows of other lengths do not change the shapes of the checkpoint's arrays.
    lengths = ('MAX_INPUT_LENGTH', 'MAX_TARGET_LENGTH')
    _bind({name: resolved.macro(name) for name in lengths if resolved.raw_macro(name) is not resolved.UNDEFINED})
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
    """Returns the gin files and settings of `--model=remixer+ablations/token_mixing_only+TIED=False`.

    A name without a folder is one of models/, or a file of the user's in the current folder or in `search_paths`: if
    both exist, `mine.gin` is the user's file and `mine` that of models/. Raises UserError if a name is empty.
    """
    parts = []
    for name in map(str.strip, text.split('+')):
        file = f'{name.removesuffix(".gin")}.gin'
        if file == '.gin':
            raise UserError(f'--model={text} has an empty name; type --model=t5_1_1, or --model=remixer+NAME=VALUE')
        is_users = any(pathlib.Path(folder).expanduser().joinpath(file).is_file() for folder in ('', *search_paths))
        is_shipped = not is_users or (name != file and f'{MODELS}{file}' in files.shipped())
        parts.append(name if '=' in name else f'{MODELS}{file}' if is_shipped and '/' not in file else file)
    return parts


def _read(given: ConfigSources) -> list[Text]:
    """Reads all texts in gin's order. The user's texts may import modules from the current folder."""
    model = [
        flag_text(name, value) if value else name for name, _, value in (item.partition('=') for item in given.model)
    ]
    reader = files.Reader(given.search_paths, model)
    texts = [text for file in (DEFAULTS, *given.base) for text in reader.read(file, by_us=True)]
    texts += [text for file in given.files for text in reader.read(file)]
    if given.model and not reader.model_read:
        raise UserError(
            f'--model replaces a file of {MODELS}, and no gin file given names or includes one; '
            f'type --gin_file={given.model[0]}'
        )
    texts += [flag_text(name, text) for name, text in given.flags]
    for text in texts:
        modules = [line.split()[1] for line in text.imports.values()]
        modules += re.findall(rf"^{MODULE}\s*=\s*['\"]([\w.]+)", text.text, re.M)
        if any(module.partition('.')[0] == 't5x' for module in modules):
            raise UserError(f"{text.name} is for T5X's own scripts; docs/t5x.md has their commands, and the names here")
        user_modules.allowed.update(module.partition('.')[0] for module in modules if not text.shipped)
    return texts


def flag_text(name: str, value: str) -> Text:
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


class References(config_parser.ParserDelegate):
    """Lists the references and macros in values, without looking up or importing what they name."""

    class Reference(str):
        """A reference or a macro as gin text; its repr has no quotes, so the repr of a value is gin text."""

        __repr__ = str.__str__

    def __init__(self) -> None:
        self.names: list[str] = []

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        self.names.append(f'@{scoped_configurable_name}')
        return self.Reference(f'@{scoped_configurable_name}{"()" if evaluate else ""}')

    def macro(self, macro_name: str) -> Reference:
        self.names.append(f'%{macro_name}')
        return self.Reference(f'%{macro_name}')


def _check_macros(texts: Sequence[Text], given: ConfigSources, roots: Collection[str], partial: bool) -> None:
    """Raises UserError for the user's macros that no text reads or sets; from the text alone, before libraries load."""
    known = {*given.defaults, *roots, MODULE, 'gin.REQUIRED'}
    macros_read = known.union(*(text.macros_read for text in texts))
    macros_set = known.union(given.objects, *(text.macros_set for text in texts))
    users = [text for text in texts if not text.shipped]
    places = {name: place for text in users for name, place in text.macros_set.items()}
    for name, place in [*places.items(), *((name, name) for name in given.objects)]:
        if name not in macros_read and not (partial and files.is_known(name)):
            raise _unread_macro_error(name, place, macros_read)
    read_by_us = {name for text in texts if text.shipped for name in text.macros_read}
    for name, place in (item for text in users for item in text.macros_read.items()):
        if name not in macros_set and not (files.readers(name) if partial else name in read_by_us):
            misspelt = '' if files.readers(name) else nearest(name, macros_set)
            raise UserError(f'{place} is not set{misspelt or f"; type {FLAG}{name}=VALUE"}')


def _unread_macro_error(name: str, place: str, known: Collection[str]) -> UserError:
    advice = T5X['macros'].get(name, '')
    if not advice and (readers := files.readers(name)):
        advice = f'it is for {", ".join(readers[:3])}'
    advice = f'; {advice}' if advice else nearest(name, known) or '; remove it'
    return UserError(f'{place} is set, but nothing reads it{advice}')


def _check_reference(macro: str, place: str) -> None:
    """Raises UserError if a macro is a text, and the shipped files set it to references alone."""
    if not isinstance(value := resolved.raw_macro(macro), str):
        return
    text = '\n'.join(text.text for text in files.shipped().values())
    references = re.findall(rf"\b{macro} ?= ?'?(@[^\s',]+)", text)
    if references and not re.search(rf"^{macro} = '", text, re.M):
        near = difflib.get_close_matches(value, references, n=1, cutoff=0)[0]
        example = f'{FLAG}{macro}={shlex.quote(near)}'
        raise UserError(
            f'{place} must be a reference to a class or function, got {value!r}; type, for example, {example}'
        )


def _name_tasks() -> None:
    """Replaces the names of tasks by calls of `remixer_tasks.names`, and imports MIXTURE_OR_TASK_MODULE."""
    options = [name for name in ('VOCABULARY', 'DATA_DIR') if resolved.raw_macro(name) is not resolved.UNDEFINED]
    lines = []
    for macro in (TASK, f'EVAL_{TASK}'):
        names, call, argument = resolved.raw_macro(macro), f'{macro.lower()}/names.provider', 'name'
        if macro != TASK and (isinstance(names, list | tuple) or isinstance(names, str) and ',' in names):
            call, argument = f'{call}s', 'names'
        elif not isinstance(names, str):
            continue
        lines += [f'{macro} = @{call}()', f'{call}.{argument} = {names!r}']
        lines += [f'{call}.{name.lower()} = %{name}' for name in options]
    if resolved.raw_macro(TASK) is not resolved.UNDEFINED and 'VOCABULARY' not in options:
        lines += ['VOCABULARY = @names.vocabulary_of()', f'names.vocabulary_of.task = %{TASK}']
    if (module := resolved.macro(MODULE, None)) is not None:
        if not (isinstance(module, str) and re.fullmatch(r'\w+(\.\w+)*', module)):
            raise UserError(f'{MODULE} must be the name of a module, as in my_package.tasks, got {module!r}')
        lines.insert(0, f'import {module}')
    if lines:
        parsing.parse(Text(f'{FLAG}{MODULE}', '\n'.join([DYNAMIC, 'from remixer_tasks import names', *lines])), ())
