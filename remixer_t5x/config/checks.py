"""What gin accepts silently and we refuse: unread macros, missing macros, `%gin.REQUIRED` left open, float16.

gin's own finalize hooks would refuse the missing ones too, but for the whole configuration: `remixer-t5x info` on a
training experiment would then ask for MODEL_DIR. Here only what the called function reaches must be complete.
"""

from collections.abc import Iterable, Mapping, Sequence

from remixer_t5x.config.scan import COMMAND_LINE, Binding, Scan, nearest, shipped_bindings
from remixer_t5x.errors import UserError

_HALF = ('float16', 'fp16', 'f16', 'half')


def check(sources: Scan, root: str, partial: bool, exchanged: bool = False, suggest: Sequence[str] = ()) -> None:
    """Refuses what would be ignored, missing or numerically unsound; from the text alone, before libraries load.

    Args:
        sources: every binding the user's files and flags make, in order, with its place.
        root: full name of the function to be called; empty means that every binding counts as reached.
        partial: `root` is only a part of what the files describe.
        exchanged: another model replaces the model that settings were written for; these settings may stay unread.
        suggest: shipped files to name where none sets up `root`; by default all that do.
    """
    if root and not any(binding.target == root for binding in sources.bindings):
        files = suggest or [file for file, binding in shipped_bindings() if binding.target == root]
        raise UserError(f'no gin file given sets up {root}{_one_of(files)}')
    final = sources.final()
    reached = reachable(final, [root], sources.abbreviations()) if root else final
    needed = reached if partial else final
    # A name that the user reads in vain is the user's misspelling; one that only we read points at a definition.
    _check_defined(sources, needed, final, shipped=False)
    _check_unread(sources, final, reached, partial or exchanged)
    _check_defined(sources, needed, final, shipped=True)
    for binding in reached:
        if any(reference.name == 'gin.REQUIRED' for reference in binding.references()):
            raise UserError(f'{binding.place}: {binding.key} must be given; give {COMMAND_LINE}{binding.key}=...')
    for binding in final:
        # float16 lacks the range for T5's unscaled attention and its loss; bfloat16 costs the same.
        name = binding.arg or binding.selector
        if name.lower().endswith('dtype') and binding.value in _HALF:
            raise UserError(f"{binding.place}: {name} is {binding.value!r}; type 'bfloat16' or 'float32'")


def _one_of(files: Iterable[str]) -> str:
    # An experiment is a whole run; adding one to another answers no question.
    parts = [file for file in dict.fromkeys(files) if not file.startswith('experiments/')]
    first, *others = parts[:5] or ['']
    if not first:
        return ''
    return f'; add --gin_file={first}' + (f' (or {", ".join(others)})' if others else '')


def reachable(final: Iterable[Binding], roots: Iterable[str], full: Mapping[str, str]) -> list[Binding]:
    """Bindings that calls of `roots` can read, following references; scopes are not told apart.

    `full` has the full names of targets that references shorten (`Scan.abbreviations`).
    """
    by_target: dict[str, list[Binding]] = {}
    for binding in final:
        by_target.setdefault(binding.target, []).append(binding)
    reached: list[Binding] = []
    seen: set[str] = set()
    open_targets = list(roots)
    while open_targets:
        target = open_targets.pop()
        target = full.get(target, target)
        if target not in seen:
            seen.add(target)
            reached += by_target.get(target, ())
            open_targets += [ref.target for binding in by_target.get(target, ()) for ref in binding.references()]
    return reached


def macros_read(bindings: Iterable[Binding]) -> set[str]:
    """Names of the macros that values of `bindings` refer to."""
    return {ref.name for binding in bindings for ref in binding.references() if ref.kind == 'macro'}


def _check_unread(sources: Scan, final: list[Binding], reached: list[Binding], partial: bool) -> None:
    """A macro of the user's that nothing reads is a misspelling, or a setting of a part that is not in use."""
    read_anywhere, read_by_root = macros_read(final), macros_read(reached)
    for name, binding in sources.macros().items():
        place = binding.place
        read = read_by_root if place.on_command_line and not partial else read_anywhere
        if place.shipped or name in read:
            continue
        readers = _shipped_readers(name)
        if partial and readers is not None:
            continue
        if readers:
            advice = f'; it is for {", ".join(readers[:3])}'
        else:
            advice = nearest(name, read_anywhere | set(sources.macros()) - {name}) or '; remove it'
        where = f'{place}' if place.on_command_line else f'{place}: {name}'
        raise UserError(f'{where} is set, but nothing reads it{advice}')


def _shipped_readers(macro: str) -> list[str] | None:
    """Shipped files that read a macro; None when no shipped file knows it."""
    known = False
    readers: list[str] = []
    for file, binding in shipped_bindings():
        known = known or (binding.is_macro and binding.selector == macro)
        if macro in macros_read([binding]) and file not in readers:
            readers.append(file)
    return readers if known or readers else None


def _check_defined(sources: Scan, needed: Iterable[Binding], final: list[Binding], shipped: bool) -> None:
    """A macro that is read but never set; `shipped` tells whether to look at reads in our files or in the user's."""
    defined = {binding.selector for binding in final if binding.is_macro}
    for name in sorted(macros_read(needed) - defined - {'gin.REQUIRED'}):
        places = [binding.place for binding in reversed(sources.bindings) if name in macros_read([binding])]
        if not places or places[0].shipped == shipped:
            place = places[0] if places else 'configuration'
            files = [file for file, binding in shipped_bindings() if binding.is_macro and binding.selector == name]
            advice = nearest(name, defined) if not shipped else ''
            advice = advice or _one_of(files) or f'; give {COMMAND_LINE}{name}=...'
            raise UserError(f'{place}: %{name} is not defined{advice}')
