"""From gin files and `--gin.` flags to a call; whatever gin can complain about becomes one line (UserError).

gin semantics: gin-config 0.5 with `from __gin__ import dynamic_registration`. Three things differ from plain gin, each
because a user's mistake would otherwise pass silently or end in a page of traceback: a macro that nothing reads is
refused, a flag's value that is not a gin value is a string, and only what the command reads has to be defined.
"""

import contextlib
import dataclasses
import importlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gin

from remixer_t5x.config import checks, errors, scan
from remixer_t5x.errors import UserError, one_line

MODELS = 'models/'
# Values for what a model reads and data, hardware and runs own; read before everything else.
DEFAULTS = 'defaults.gin'
MODEL = 'remixer_t5x.model.seq2seq.Seq2Seq'
_COLLECTED = 'remixer_t5x.config.loading.collected'
_COLLECT = """from __gin__ import dynamic_registration
from remixer_t5x.config import loading
loading.collected.values = [{}]
"""
_ALMOST_PYTHON = {'true': 'True', 'false': 'False', 'none': 'None', 'null': 'None'}


@dataclasses.dataclass
class _Segment:
    """Part of a gin file between two includes, with the lines of the other parts blank (line numbers stay true)."""

    file: str
    text: str
    imports: dict


class _Sources:
    """All gin text of a run in the order in which gin must see it, and the scan of it."""

    def __init__(self, search_paths: Sequence[str], model: Sequence[str] = ()):
        self.search_paths = search_paths
        self.model = model
        self.model_exchanged = False
        self.segments: list[_Segment] = []
        self.scan = scan.Scan()
        self._open: list[str] = []
        self._in_models = False

    def add_file(self, name: str, asked_by: str = '', by_us: bool = False) -> None:
        path = scan.find(name, self.search_paths, asked_by, by_us)
        file, shipped = scan.display_name(path)
        if self.model and shipped and file.startswith(MODELS) and not self._in_models:
            self._exchange_model(asked_by)
            return
        if str(path.resolve()) in self._open:
            raise UserError(f'{asked_by}{file} includes itself; remove one of the include lines')
        try:
            text = path.read_text(encoding='utf-8')
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f'{asked_by}gin file {file} cannot be read: {error}') from None
        found, includes = scan.scan(text, file, shipped)
        self._open.append(str(path.resolve()))
        self._add_text(text, file, found, includes, shipped)
        self._open.pop()

    def _exchange_model(self, asked_by: str) -> None:
        """Reads the files of `model` where a file of models/ is named, once, however many are."""
        if not self.model_exchanged:
            self.model_exchanged, self._in_models = True, True
            for file in self.model:
                self.add_file(file, asked_by)
            self._in_models = False

    def _add_text(self, text: str, file: str, found: scan.Scan, includes: list, shipped: bool = False) -> None:
        lines = text.splitlines()
        import_lines = {statement.location.line_num for statement in found.imports.values()}
        start = 1
        for include in [*includes, None]:
            stop = include.location.line_num if include else len(lines) + 1
            kept = [
                line if start <= number < stop or (number in import_lines and number < stop) else ''
                for number, line in enumerate(lines, start=1)
            ]
            self.segments.append(_Segment(file, '\n'.join(kept) + '\n', found.imports))
            self.scan.bindings += [b for b in found.bindings if start <= b.place.line < stop]
            if include:
                self.add_file(include.filename, asked_by=f'{file} line {stop}: ', by_us=shipped)
            start = stop + 1
        for name, statement in found.imports.items():
            self.scan.imports.setdefault(name, statement)

    def add_text(self, text: str, file: str, shipped: bool = False) -> None:
        """Adds statements that are not in a file: a flag, or statements of a command."""
        found = scan.scan(text, file, shipped, self.scan)[0]
        self.segments.append(_Segment(file, text, found.imports))
        place = scan.Place(file, 0, shipped)
        self.scan.bindings += [dataclasses.replace(binding, place=place) for binding in found.bindings]


def model_files(text: str) -> list[str]:
    """`--model=remixer+ablations/remixer_no_composition` as gin files; a name without a folder is one of models/.

    Raises UserError where there is no name.
    """
    names = [name.strip().removesuffix('.gin') for name in text.split('+')]
    if not all(names):
        raise UserError(f'--model={text} has an empty name; type --model=t5_1_1, or --model=remixer+ablations/NAME')
    return [f'{name}.gin' if '/' in name else f'{MODELS}{name}.gin' for name in names]


def flag_value(name: str, text: str) -> str:
    """The value of `--gin.NAME=text` as gin text: `/tmp/x` becomes `'/tmp/x'`, `128` stays.

    Raises:
        UserError: `text` is empty, or begins like a gin value (quote, bracket, @, %) and is not one.
    """
    flag = f'{scan.COMMAND_LINE}{name}'
    if not text.strip():
        raise UserError(f'{flag}= has no value; type {flag}=VALUE (for an empty text {flag}="\'\'")')
    if text.strip().lower() in _ALMOST_PYTHON and text.strip() not in ('True', 'False', 'None'):
        right = _ALMOST_PYTHON[text.strip().lower()]
        raise UserError(f'{flag}={text} is not a gin value; type {flag}={right}, or {flag}="\'{text}\'" for the text')
    try:
        scan.parse_value(text)
        return text
    except SyntaxError:
        if text.lstrip()[0] in '\'"[({@%':
            raise UserError(
                f'{flag}={one_line(text)} begins like a gin value but is not one; check quotes and brackets'
            ) from None
        return repr(text)


def load(
    files: Sequence[str],
    flags: Sequence[tuple[str, str]] = (),
    root: str = '',
    search_paths: Sequence[str] = (),
    partial: bool = False,
    importing: contextlib.AbstractContextManager | None = None,
    base: Sequence[str] = (),
    model: Sequence[str] = (),
    defaults: str = '',
    reads: tuple[str, str] = ('', ''),
    suggest: Sequence[str] = (),
) -> None:
    """Replaces gin's configuration by what `defaults.gin`, `base`, `files` and then `flags` (name, value text) say.

    Args:
        files: gin files, looked up by `scan.find`; later ones win.
        base: shipped files that the command itself reads first.
        root: full name of the function to be called (`remixer_t5x.cli.info.run`): what it reaches must be defined.
        partial: the command reads only a part of a configuration that was written for training; macros known to the
            shipped configs may then stay unread, and what the command does not reach may stay undefined.
        defaults: gin text that all files may override.
        reads: who reads macros, for errors, and gin text that reads them after everything else.
        suggest: shipped files to name where no file sets up `root`; by default all that do.
        model: files to read instead of the file of models/ that `files` name or include; macros of other models may
            then stay unread.
        importing: entered once the text has passed the checks that need no library, while gin imports what it names.

    Raises:
        UserError: anything wrong with files, flags, names or values, on one line.
    """
    sources = _Sources(search_paths, model)
    if defaults:
        sources.add_text(defaults, 'defaults', shipped=True)
    for file in (DEFAULTS, *base):
        sources.add_file(file, by_us=True)
    for file in files:
        sources.add_file(file)
    if model and not sources.model_exchanged:
        raise UserError(
            f'--model replaces a file of {MODELS}, and no gin file given names or includes one; '
            f'type --gin_file={model[0]}'
        )
    for name, value in flags:
        sources.add_text(f'{name} = {flag_value(name, value)}\n', f'{scan.COMMAND_LINE}{name}')
    if reads[0]:
        sources.add_text(reads[1], reads[0], shipped=True)
    checks.check(sources.scan, root, partial, bool(model), suggest)
    gin.clear_config()
    with importing or contextlib.nullcontext():
        for segment in sources.segments:
            _parse(segment, sources)


def _parse(segment: _Segment, sources: _Sources) -> None:
    try:
        _parse_text(segment.text, segment.file)
    except Exception as error:
        if segment.file.startswith(scan.COMMAND_LINE) and _parse_with_imports(segment, sources):
            return
        seen = scan.Scan(sources.scan.bindings, segment.imports)
        known = errors.translate(error, segment.file, seen)
        if known is None:
            raise
        raise known from None


def _parse_with_imports(segment: _Segment, sources: _Sources) -> bool:
    """A flag may also use a name that a file imports but does not mention (`--gin.OPTIMIZER=@optimizer.other()`)."""
    imports = [s.format() for s in sources.scan.imports.values() if not s.module.startswith('__gin__')]
    text = '\n'.join(['from __gin__ import dynamic_registration', *imports, segment.text])
    try:
        _parse_text(text, segment.file)
    except Exception:
        return False
    return True


def _parse_text(text: str, file: str) -> None:
    stream = io.StringIO(text)
    stream.name = file  # gin reads the name for its error locations
    gin.parse_config(stream)


def call(root: Callable[..., Any] | str) -> Any:
    """Calls a function or class, given as an object or by its full name, with the arguments that gin binds to it.

    Raises:
        UserError: what a user did wrong, on one line; also when no gin file binds anything to `root`.
    """
    function = _named(root) if isinstance(root, str) else root
    try:
        configured = gin.get_configurable(function)
    except (KeyError, ValueError):
        raise UserError(f'no gin file given sets up {function.__module__}.{function.__name__}') from None
    try:
        return configured()
    except Exception as error:
        known = errors.translate_call(error)
        if known is None:
            raise
        raise known from error


def build(root: str, files: Sequence[str], flags: Sequence[tuple[str, str]] = (), **options: Any) -> Any:
    """What the class or function `root` makes of gin files and flags; the arguments of `load`, then `call`.

    Settings of other parts of a training configuration may be there too, unread.

    Raises:
        UserError: anything wrong with files, flags, names or values, on one line.
    """
    load(files, flags, root=root, partial=True, **options)
    return call(root)


def _named(root: str) -> Any:
    module, _, name = root.rpartition('.')
    return getattr(importlib.import_module(module), name)


def values(
    macros: Sequence[str],
    files: Sequence[str],
    flags: Sequence[tuple[str, str]] = (),
    defaults: Mapping[str, Any] | None = None,
    reader: str = 'the caller',
    **options: Any,
) -> list[Any]:
    """The values of some macros by gin files and flags; only what these macros reach has to be complete.

    Args:
        macros: their names.
        defaults: Python values of macros that files and flags may override.
        reader: who asks, for errors.
        options: of `load`.

    Raises:
        UserError: anything wrong with files, flags, names or values, on one line.
    """
    text = _COLLECT.format(', '.join(f'%{name}' for name in macros))
    given = ''.join(f'{name} = {value!r}\n' for name, value in (defaults or {}).items())
    return build(_COLLECTED, files, flags, defaults=given, reads=(reader, text), **options)


def collected(values: Sequence[Any]) -> list[Any]:
    """Called with the values of macros by the text that `values` adds."""
    return list(values)


def build_model(
    *files: str,
    macros: Mapping[str, Any] | None = None,
    flags: Sequence[tuple[str, str]] = (),
    search_paths: Sequence[str] = (),
    model: Sequence[str] = (),
) -> Any:
    """The `Seq2Seq` of a model's gin files, such as `build_model('models/remixer.gin', 'sizes/tiny.gin')`.

    Args:
        files: gin files, looked up here, in `search_paths` and among the shipped configs; a later file overrides.
        macros: Python values set after all files, such as `{'NUM_ENCODER_LAYERS': 2}`.
        flags: the same as text of gin, as after `--gin.`: `[('OPTIMIZER', '@optimizer.adamw()')]`.
        search_paths: more folders with gin files.
        model: files read in place of the model that `files` include.

    Raises:
        UserError: anything wrong with files, macros, names or values, on one line.
    """
    values = [(name, repr(value)) for name, value in (macros or {}).items()]
    return build(MODEL, files, [*values, *flags], search_paths=search_paths, model=model)


@contextlib.contextmanager
def bound(setting: str, value: Any) -> Iterator[None]:
    """Within, gin gives `value` to a setting such as 'module.Class.argument', in place of what files bound to it."""
    with gin.unlock_config():
        before = gin.query_parameter(setting)
        gin.bind_parameter(setting, value)
        try:
            yield
        finally:
            gin.bind_parameter(setting, before)


def operative_config() -> str:
    """The whole configuration as one gin text that reproduces the run, without the macros that nothing reads.

    gin's own operative config has only what was called so far, and a model's factories are called while it is traced.
    """
    text = gin.config_str()
    found = scan.scan(text, 'the configuration')[0]
    bindings = found.bindings
    settings = [binding for binding in bindings if not binding.is_macro]
    read = checks.reachable(bindings, {binding.target for binding in settings}, found.abbreviations())
    kept = {binding.place.line for binding in read}
    return _without(text, [binding.place.line for binding in bindings if binding.place.line not in kept])


def _without(text: str, starts: list[int]) -> str:
    """`text` less the statements that begin on these lines; gin indents the lines that continue a statement."""
    kept, dropping = [], False
    for number, line in enumerate(text.splitlines(), start=1):
        dropping = number in starts or (dropping and line.startswith(' '))
        if not dropping:
            kept.append(line)
    return '\n'.join(kept) + '\n'
