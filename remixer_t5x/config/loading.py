"""Loads gin files and `--gin.` flags.

gin parses the configuration. This module adds four rules: a macro that is never read is an error, flag values that are
not gin values are strings, an unset macro has the default of the argument that it is bound to, and only macros that the
caller reads must be set.
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
from remixer_t5x.config.files import FLAG, MODELS, T5X, GinText
from remixer_t5x.config.parsing import DYNAMIC
from remixer_t5x.errors import UserError, nearest, one_line

# Default values, loaded first, of macros that models read but that data, hardware or run files set.
DEFAULTS = 'defaults.gin'
TASK, MODULE = 'MIXTURE_OR_TASK_NAME', 'MIXTURE_OR_TASK_MODULE'
# Macros that contain paths. HF_DATASET is only treated as a path if the path exists.
_PATHS = (
    *('MODEL_DIR', 'INITIAL_CHECKPOINT_PATH', 'CHECKPOINT_PATH', 'VOCABULARY_PATH', 'CACHE_DIR', 'DATA_DIR'),
    *('FILES', 'VALIDATION_FILES', 'PAIRS', 'VALIDATION_PAIRS', 'EVAL_PAIRS', 'SUBMISSION_DIR', 'HF_DATASET'),
)
_ALMOST_PYTHON = {'true': 'True', 'false': 'False', 'none': 'None', 'null': 'None'}


@dataclasses.dataclass(frozen=True)
class ConfigSources:
    """The sources of a configuration; later ones override earlier ones.

    The order is `defaults`, `base`, `files`, `flags`, `objects`.

    Attributes:
        files: gin files, resolved by `files.find_file`.
        flags: pairs of a macro or setting and its value as text.
        search_paths: additional folders with gin files.
        model: files, and settings as NAME=VALUE, that replace all files of models/.
        base: shipped files that the command reads by default.
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
    sources: ConfigSources,
    *roots: str,
    importing: contextlib.AbstractContextManager | None = None,
    partial: bool = True,
    only: bool = False,
) -> None:
    """Replaces gin's configuration by `sources`. Raises UserError, on one line, for any mistake in them.

    Args:
        sources: files, flags and values.
        roots: what the caller reads and must therefore be set: a macro, as in `%MODEL`, or the full name of a class or
            function.
        importing: context in which gin imports modules, after all checks that require no library.
        partial: whether the caller reads only a part of a configuration for training, so that macros of other shipped
            files may be unread. Otherwise `config_text` contains only what `roots` read.
        only: whether `config_text` contains only what `roots` read, without other imports.
    """
    texts = _read(sources)
    # Macros for the model that --model replaces may be unused.
    may_be_unread = partial or bool(sources.model)
    _check_macros(texts, sources, {name[1:] for name in roots if name[0] == '%'}, may_be_unread)
    gin.clear_config()
    with importing or contextlib.nullcontext():
        _bind(sources.defaults)
        for number, text in enumerate(texts):
            parsing.parse(text, texts[:number])
        _bind(sources.objects)
        _replace_task_names()
    macros_set = {name: place for text in texts if not text.shipped for name, place in text.macros_set.items()}
    for name, place in macros_set.items():
        _check_reference(name, place)
    resolver = resolved.ReferenceResolver()
    for root in roots:
        if root[0] == '%':
            resolver.maker(resolver.macro(root[1:]))
        else:
            resolver.root(root)
    for name, place in macros_set.items():
        is_read = (name, 'gin.macro', 'value') in resolver.bindings or name == MODULE
        if place.startswith(FLAG) and not is_read and not may_be_unread:
            raise _unread_macro_error(name, place, ())
    if only or not partial:
        lines = gin.config_str().splitlines()
        imports = [line for line in lines if line.startswith(('from ', 'import ')) and line != DYNAMIC and not only]
        gin.clear_config()
        gin.parse_config([DYNAMIC, *imports])
        for key, value in resolver.bindings.items():
            gin.bind_parameter(key, value)
    _bind(resolver.defaults)


def values(sources: ConfigSources, *macros: str, **options: Any) -> list[Any]:
    """Loads `sources` with the options of `load`, and returns the values of macros, which later loads do not change."""
    load(sources, *(f'%{name}' for name in macros), **options)
    return [resolved.macro(name) for name in macros]


def config_text(absolute_paths: bool = True) -> str:
    """Returns the configuration as gin text; with absolute paths, it can be loaded from any folder."""
    paths = {name: resolved.raw_macro(name) for name in _PATHS if absolute_paths}
    if not isinstance(path := paths.get('HF_DATASET'), str) or not os.path.exists(os.path.expanduser(path)):
        paths.pop('HF_DATASET', None)
    _bind({name: _make_absolute(value) for name, value in paths.items() if value is not resolved.UNDEFINED})
    # Writes the lengths as numbers, so later data with other lengths does not change the shapes of parameters.
    lengths = ('MAX_INPUT_LENGTH', 'MAX_TARGET_LENGTH')
    _bind({name: resolved.macro(name) for name in lengths if resolved.raw_macro(name) is not resolved.UNDEFINED})
    return gin.config_str()


def _make_absolute(value: Any) -> Any:
    """Converts paths in the value of a macro to absolute paths and expands `~`; other values are unchanged."""
    if isinstance(value, str) and value and '://' not in value:
        return os.path.abspath(os.path.expanduser(value))
    if isinstance(value, dict):
        return {name: _make_absolute(item) for name, item in value.items()}
    return type(value)(map(_make_absolute, value)) if isinstance(value, list | tuple) else value


def _bind(macros: Mapping[str, Any]) -> None:
    for name, value in macros.items():
        gin.bind_parameter((name, 'gin.macro', 'value'), value)


def model_files(text: str, search_paths: Sequence[str] = ()) -> list[str]:
    """Returns the gin files and settings of `--model=bert+sublayers/fnet+ENCODER_MIXER=@fnet.FNet`.

    A name without a folder refers to models/, the current folder or `search_paths`. If both exist, `mine.gin` is the
    user's file and `mine` the file of models/. Raises UserError if a name is empty.
    """
    parts = []
    for name in map(str.strip, text.split('+')):
        file = f'{name.removesuffix(".gin")}.gin'
        if file == '.gin':
            raise UserError(
                f'--model must be names joined by +, got {text!r}; type --model=t5_1_1, or --model=remixer+NAME=VALUE'
            )
        is_users = any(pathlib.Path(folder).expanduser().joinpath(file).is_file() for folder in ('', *search_paths))
        is_shipped = not is_users or (name != file and f'{MODELS}{file}' in files.shipped())
        parts.append(name if '=' in name else f'{MODELS}{file}' if is_shipped and '/' not in file else file)
    return parts


def _read(sources: ConfigSources) -> list[GinText]:
    """Reads all gin texts in order, and allows custom gin files to import modules from the current folder."""
    model = [
        flag_text(name, value) if value else name for name, _, value in (item.partition('=') for item in sources.model)
    ]
    reader = files.GinReader(sources.search_paths, model)
    texts = [text for file in (DEFAULTS, *sources.base) for text in reader.read(file, prefer_shipped=True)]
    texts += [text for file in sources.files for text in reader.read(file)]
    if sources.model and not reader.model_read:
        raise UserError(
            f'--model replaces a file of {MODELS}, but no gin file includes one; type --gin_file={sources.model[0]}'
        )
    texts += [flag_text(name, text) for name, text in sources.flags]
    for text in texts:
        modules = [line.split()[1] for line in text.imports.values()]
        modules += re.findall(rf"^{MODULE}\s*=\s*['\"]([\w.]+)", text.text, re.M)
        if any(module.partition('.')[0] == 't5x' for module in modules):
            raise UserError(
                f"{text.name} is for T5X's scripts; docs/t5x.md has their commands, and the counterparts here"
            )
        user_modules.allowed.update(module.partition('.')[0] for module in modules if not text.shipped)
    return texts


def flag_text(name: str, value: str) -> GinText:
    """Returns the gin statement of `--gin.NAME=value`; values that are not gin values become strings.

    Raises UserError if `value` is empty, or starts like a gin value (quote, bracket, @, %) but is invalid.
    """
    flag, bare = f'{FLAG}{name}', value.strip()
    if not bare:
        raise UserError(f'{flag} has no value; type {flag}=VALUE (for an empty string {flag}="\'\'")')
    if (right := _ALMOST_PYTHON.get(bare.lower(), bare)) != bare:
        raise UserError(
            f'{flag} must be a gin value, got {value}; type {flag}={right}, or {flag}="\'{value}\'" for the string'
        )
    try:
        (_,) = config_parser.ConfigParser(f'{name} = {bare}\n', References())
    except (SyntaxError, ValueError, tokenize.TokenError):
        if bare[0] in '\'"[({@%' and not re.match(r'\{\w+\}', bare):
            raise UserError(
                f'{flag} must be a gin value, got {one_line(value)}; close its quotes and brackets'
            ) from None
        return GinText(flag, f'{name} = {value!r}\n')
    return GinText(flag, f'{name} = {bare}\n')


class References(config_parser.ParserDelegate):
    """Collects the references and macros in parsed values, without importing anything."""

    class Reference(str):
        """A reference or macro as gin text. Its repr has no quotes, so the repr of any value is gin text."""

        __repr__ = str.__str__

    def __init__(self) -> None:
        self.names: list[str] = []

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        self.names.append(f'@{scoped_configurable_name}')
        return self.Reference(f'@{scoped_configurable_name}{"()" if evaluate else ""}')

    def macro(self, macro_name: str) -> Reference:
        self.names.append(f'%{macro_name}')
        return self.Reference(f'%{macro_name}')


def _check_macros(texts: Sequence[GinText], sources: ConfigSources, roots: Collection[str], partial: bool) -> None:
    """Raises UserError for macros that the user sets but no text reads, or that are read but not set."""
    known = {*sources.defaults, *roots, MODULE, 'gin.REQUIRED'}
    macros_read = known.union(*(text.macros_read for text in texts))
    macros_set = known.union(sources.objects, *(text.macros_set for text in texts))
    users = [text for text in texts if not text.shipped]
    places = {name: place for text in users for name, place in text.macros_set.items()}
    for name, place in [*places.items(), *((name, name) for name in sources.objects)]:
        if name not in macros_read and not (partial and files.is_known(name)):
            raise _unread_macro_error(name, place, macros_read)
    shipped_reads = {name for text in texts if text.shipped for name in text.macros_read}
    for name, place in (item for text in users for item in text.macros_read.items()):
        if name not in macros_set and not (files.find_files_with_macro(name) if partial else name in shipped_reads):
            misspelt = '' if files.find_files_with_macro(name) else nearest(name, macros_set)
            raise UserError(f'{place} is not set{misspelt or f"; type {FLAG}{name}=VALUE"}')


def _unread_macro_error(name: str, place: str, known: Collection[str]) -> UserError:
    advice = T5X['macros'].get(name, '')
    if not advice and (readers := files.find_files_with_macro(name)):
        advice = f'it is for {", ".join(readers[:3])}'
    advice = f'; {advice}' if advice else nearest(name, known) or '; remove it'
    return UserError(f'{place} is set, but nothing reads it{advice}')


def _check_reference(macro: str, place: str) -> None:
    """Raises UserError if the user sets a macro to a string, but shipped files only set it to references."""
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


def _replace_task_names() -> None:
    """Replaces task names with calls of `remixer_tasks.names`, and imports MIXTURE_OR_TASK_MODULE."""
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
        parsing.parse(GinText(f'{FLAG}{MODULE}', '\n'.join([DYNAMIC, 'from remixer_tasks import names', *lines])), ())
