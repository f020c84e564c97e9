"""What gin accepts silently and we refuse: unread macros, missing macros, `%gin.REQUIRED` left open, float16.

gin's own finalize hooks would refuse the missing ones too, but for the whole configuration: `remixer-t5x info` on a
training experiment would then ask for MODEL_DIR. Here only what the called function reaches must be complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from remixer_t5x.config.scan import COMMAND_LINE, Binding, Reference, Scan, nearest, scan, shipped_bindings
from remixer_t5x.errors import UserError

_HALF = ('float16', 'fp16', 'f16', 'half')


def check(sources: Scan, final_text: str, root: str, partial: bool, exchanged: bool = False) -> None:
    """Refuses what would be ignored, missing or numerically unsound in a parsed configuration.

    Args:
        sources: every binding the user's files and flags made, in order, with its place.
        final_text: `gin.config_str()`, where the last binding has won.
        root: full name of the function to be called; empty means that every binding counts as reached.
        exchanged: another model stands in for the one that settings were written for; some may be of that one.
    """
    final = scan(final_text, 'the final configuration')[0]
    reached = _reachable(final, root) if root else final.bindings
    needed = reached if partial else final.bindings
    # A name that the user reads in vain is the user's misspelling; one that only we read points at a definition.
    _check_defined(sources, needed, final, shipped=False)
    _check_unread(sources, final, reached, partial or exchanged)
    _check_defined(sources, needed, final, shipped=True)
    _check_required(sources, reached)
    _check_half_precision(sources, final)


def check_before_imports(
    sources: Scan, root: str, partial: bool, exchanged: bool = False, suggest: Sequence[str] = ()
) -> None:
    """The mistakes that can be told from the text alone, before a gin file imports libraries that take seconds."""
    if root and not any(binding.target == root for binding in sources.bindings):
        files = suggest or [file for file, binding in shipped_bindings() if binding.target == root]
        raise UserError(f'no gin file given sets up {root}{_one_of(files)}')
    _check_unread(sources, sources, sources.bindings, partial or exchanged)


def _one_of(files: Iterable[str]) -> str:
    # An experiment is a whole run; adding one to another answers no question.
    parts = [file for file in dict.fromkeys(files) if not file.startswith('experiments/')]
    first, *others = parts[:5] or ['']
    if not first:
        return ''
    return f'; add --gin_file={first}' + (f' (or {", ".join(others)})' if others else '')


def _reachable(final: Scan, root: str) -> list[Binding]:
    """Bindings that a call of `root` can read, following references; scopes are not told apart."""
    by_target: dict[str, list[Binding]] = {}
    for binding in final.bindings:
        by_target.setdefault(binding.target, []).append(binding)
    reached: list[Binding] = []
    seen: set[str] = set()
    open_targets = [root]
    while open_targets:
        target = open_targets.pop()
        if target in seen:
            continue
        seen.add(target)
        for binding in by_target.get(target, ()):
            reached.append(binding)
            open_targets += [_target(reference, final) for reference in binding.references()]
    return reached


def _target(reference: Reference, final: Scan) -> str:
    if reference.kind == 'macro':
        return f'%{reference.name}'
    return final.full_name(reference.selector)


def macros_read(bindings: Iterable[Binding]) -> set[str]:
    """Names of the macros that values of `bindings` refer to."""
    return {ref.name for binding in bindings for ref in binding.references() if ref.kind == 'macro'}


def _check_unread(sources: Scan, final: Scan, reached: list[Binding], partial: bool) -> None:
    """A macro of the user's that nothing reads is a misspelling, or a setting of a part that is not in use."""
    read_anywhere, read_by_root = macros_read(final.bindings), macros_read(reached)
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
    wanted = Reference('macro', macro)
    known = False
    readers: list[str] = []
    for file, binding in shipped_bindings():
        known = known or (binding.is_macro and binding.selector == macro)
        if wanted in binding.references() and file not in readers:
            readers.append(file)
    return readers if known or readers else None


def _check_defined(sources: Scan, needed: Iterable[Binding], final: Scan, shipped: bool) -> None:
    """A macro that is read but never set; `shipped` tells whether to look at reads in our files or in the user's."""
    defined = set(final.macros())
    for name in sorted(macros_read(needed) - defined - {'gin.REQUIRED'}):
        wanted = Reference('macro', name)
        places = [binding.place for binding in reversed(sources.bindings) if wanted in binding.references()]
        if not places or places[0].shipped == shipped:
            place = places[0] if places else 'configuration'
            files = [file for file, binding in shipped_bindings() if binding.is_macro and binding.selector == name]
            advice = nearest(name, defined) if not shipped else ''
            advice = advice or _one_of(files) or f'; give {COMMAND_LINE}{name}=...'
            raise UserError(f'{place}: %{name} is not defined{advice}')


def _place_of_binding(sources: Scan, final: Binding) -> str:
    """Files may spell a selector with more or fewer module names than the final text does; its last name is stable."""
    wanted = (final.selector.rpartition('.')[2], final.arg)
    places = (str(b.place) for b in reversed(sources.bindings) if (b.selector.rpartition('.')[2], b.arg) == wanted)
    return next(places, final.key)


def _check_required(sources: Scan, reached: Iterable[Binding]) -> None:
    for binding in reached:
        if Reference('macro', 'gin.REQUIRED') in binding.references():
            place = _place_of_binding(sources, binding)
            raise UserError(f'{place}: {binding.key} must be given; give {COMMAND_LINE}{binding.key}=...')


def _check_half_precision(sources: Scan, final: Scan) -> None:
    """float16 lacks the range for T5's unscaled attention and its loss; bfloat16 costs the same."""
    for binding in final.bindings:
        if (binding.arg or binding.selector).lower().endswith('dtype') and binding.value in _HALF:
            arg = binding.arg or binding.selector
            place = _place_of_binding(sources, binding)
            raise UserError(f"{place}: {arg} is {binding.value!r}; type 'bfloat16' or 'float32'")
