"""`check_sublayer`: every law of `laws` on one sublayer, as a table and one line for what is broken."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from remixer_t5x.errors import UserError, one_line
from remixer_t5x.models import interface
from remixer_t5x.models.architecture import layer
from remixer_t5x.testing import laws
from remixer_t5x.testing.laws import BrokenLaw
from remixer_t5x.testing.subject import DECODER, ENCODER, LENGTH, MEMORY, ROWS, Subject

Law = Callable[[Subject], None]
HOLDS, BROKEN, REFUSED, LEFT_OUT = 'holds', 'BROKEN', 'refused', 'left out'
# In the order in which a bug in one explains the next.
LAWS: dict[str, Law] = {
    'dropout': laws.dropout,
    'parameters': laws.parameters,
    'padding': laws.padding,
    'packing': laws.packing,
    'causality': laws.causality,
    'prefix': laws.prefix,
    'decode': laws.decode,
    'prompt': laws.prompt,
    'beams': laws.beams,
    'bfloat16': laws.bfloat16,
    'gradients': laws.gradients,
    'remat': laws.remat,
    'layouts': laws.layouts,
}
OF_DECODERS = ('causality', 'prefix', 'decode', 'prompt', 'beams')


class Row(NamedTuple):
    """What came of a law: `holds`, `BROKEN`, `refused` (the sublayer raised UserError) or `left out`, and why."""

    law: str
    side: str
    result: str
    why: str = ''


@dataclasses.dataclass(frozen=True)
class Report:
    """The rows of a check; `str(report)` is a table."""

    name: str
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        lines = [f'{self.name}: {len(self.rows)} checks']
        lines += [f'  {row.law:<10}  {row.side:<7}  {row.result:<8}  {row.why}'.rstrip() for row in self.rows]
        return '\n'.join(lines)


def check_sublayer(
    sublayer: nn.Module | Callable[..., nn.Module],
    *,
    sides: Sequence[str] = (ENCODER, DECODER),
    without: Sequence[str] = (),
    companions: Sequence[Callable[..., nn.Module]] = (),
    layout: Callable[..., layer.Layer] = layer.PreNorm,
    norm: Callable[..., nn.Module] | None = None,
    position_bias: Callable[..., nn.Module] | None = None,
    embed_dim: int = 16,
    show: bool = True,
) -> Report:
    """Puts a sublayer under the laws that hold for every shipped one (`remixer_t5x.testing.laws` lists them).

    `check_sublayer(MyMixer)` or `check_sublayer(MyMixer(width=3))`; a `functools.partial` of a class will do too. It
    makes two layers of the sublayer, in an encoder and in a decoder, for rows of 12 tokens of `embed_dim` features, and
    compiles about ten small programs on each side. A sublayer may refuse what it cannot do by raising `UserError` when
    it is traced; the table says so.

    Args:
        sublayer: a Flax module `(x, ctx) -> y` that is not bound, its class, or another factory that takes `name`.
        sides: where it is used, of 'encoder' and 'decoder'.
        without: names of laws that are not meant for it, as `('padding', 'packing')` for a mixer of whole rows.
        companions: factories of sublayers after it in each layer, where it does not work alone.
        layout: of the layers.
        norm: factory of their norm; None is the layout's own.
        position_bias: factory of the stack's position bias, for a sublayer that reads `ctx.position_bias`.
        embed_dim: features of a token; a multiple of what the sublayer's heads need.
        show: whether the table is printed.

    Returns:
        The table's rows.

    Raises:
        BrokenLaw: an AssertionError of one line, for the first broken law: which, on which side, and how.
        UserError: a name in `sides` or `without` is not known, or the sublayer refuses every side.
    """
    _check_names('sides', sides, (ENCODER, DECODER))
    _check_names('without', without, LAWS)
    factory = _factory(sublayer)
    rows: list[Row] = []
    for side in sides:
        made = Subject((factory, *companions), side, layout, norm, position_bias, embed=embed_dim)
        rows += _check_side(made, without)
    report = Report(_name(factory), tuple(rows))
    if show:
        sys.stdout.write(f'{report}\n')
    broken = [row for row in rows if row.result == BROKEN]
    if broken:
        others = ', '.join(f'{row.law} in the {row.side}' for row in broken[1:])
        raise BrokenLaw(f'{report.name} breaks {broken[0].why}' + (f' (also broken: {others})' if others else ''))
    if not any(row.result == HOLDS for row in rows):
        raise UserError(f'{report.name} was not checked: {rows[0].why}')
    return report


def check_users_sublayers(model: interface.Model) -> list[str]:
    """Checks the sublayers of a model that are not part of this package, in seconds: no token of a decoder may read a
    later one, and padding should change nothing.

    Returns a line about each sublayer. Raises UserError if a decoder reads later tokens.
    """
    lines = []
    for side, factories in interface.sublayers(model).items():
        bias = getattr(model.module, f'{side}_stack')().position_bias
        for name, factory in {_name(factory): factory for factory in factories if _is_users(factory)}.items():
            subject = Subject((factory,), side, position_bias=bias, embed=model.module.embed_dim)
            lines.append(f'{name} in the {side}: {_causality_and_padding(name, subject)}')
    return lines


def _is_users(factory: Any) -> bool:
    while isinstance(factory, functools.partial):
        factory = factory.func
    return not factory.__module__.startswith('remixer_t5x.')


def _causality_and_padding(name: str, subject: Subject) -> str:
    """What is known of a user's sublayer. Raises UserError if it reads later tokens in a decoder."""
    advice = f'remixer_t5x.testing.check_sublayer({name})'
    later: Any = []
    try:
        if subject.is_decoder:
            later = np.argwhere(np.triu(subject.influence((LENGTH,)), 1))
        if not len(later):
            laws.padding(subject)
    except BrokenLaw as error:
        return f'warning: {error}; read ctx.is_token, and test it with {advice}'
    except Exception as error:
        # A fault that stops the model stops the run too, with its own message.
        return f'could not be checked ({one_line(str(error)):.100}); test it with {advice}'
    if len(later):
        raise UserError(
            f'{name} must not read later tokens in a decoder, got token {later[0][0]} reading token {later[0][1]}; '
            f'read ctx.causal, and test it with {advice}'
        )
    return 'no token reads a later one or padding' if subject.is_decoder else 'no token reads padding'


def _check_side(subject: Subject, without: Sequence[str]) -> list[Row]:
    try:
        jax.eval_shape(subject.stack().init, jax.random.key(0), subject.features(0), subject.context([[LENGTH]] * ROWS))
    except UserError as error:
        return [Row('all', subject.side, REFUSED, one_line(str(error)))]
    rows = []
    for name, law in LAWS.items():
        if name in OF_DECODERS and not subject.is_decoder:
            continue
        if name in without:
            rows.append(Row(name, subject.side, LEFT_OUT))
        elif name != 'beams' or _reads_memory(subject):
            rows.append(_outcome(name, law, subject))
            if rows[-1].result == BROKEN and name == 'dropout' and 'asks for a key' in rows[-1].why:
                # Nothing can be evaluated.
                break
    return rows


def _outcome(name: str, law: Law, subject: Subject) -> Row:
    try:
        law(subject)
    except BrokenLaw as error:
        return Row(name, subject.side, BROKEN, str(error))
    except UserError as error:
        return Row(name, subject.side, REFUSED, one_line(str(error)))
    except Exception as error:
        # An error of the sublayer itself; the first line says which.
        first = one_line((str(error).splitlines() or [''])[0])
        return Row(name, subject.side, BROKEN, f'{name} in the {subject.side}: {type(error).__name__}: {first:.200}')
    return Row(name, subject.side, HOLDS)


def _reads_memory(subject: Subject) -> bool:
    x, rows = subject.features(16), [[LENGTH]] * ROWS
    one, other = (subject.trace(x, subject.context(rows, subject.features(seed, MEMORY))).outputs for seed in (17, 18))
    return not np.array_equal(one, other)


def _factory(sublayer: Any) -> Callable[..., nn.Module]:
    if not isinstance(sublayer, nn.Module):
        return sublayer
    fields = {field.name: getattr(sublayer, field.name) for field in dataclasses.fields(sublayer) if field.init}
    kind: Any = type(sublayer)
    return functools.partial(kind, **{k: v for k, v in fields.items() if k not in ('name', 'parent')})


def _name(factory: Any) -> str:
    while isinstance(factory, functools.partial):
        factory = factory.func
    return getattr(factory, '__name__', type(factory).__name__)


def _check_names(option: str, given: Sequence[str], known: Any) -> None:
    unknown = [name for name in given if name not in known]
    if unknown or isinstance(given, str):
        raise UserError(f'{option} is {given!r}; it takes a tuple of names, of {", ".join(known)}')
