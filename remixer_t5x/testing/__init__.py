"""Contract tests for a custom sublayer: `check_sublayer(MyMixer)`.

Runs all checks of `sublayer_contract` on a sublayer, prints a table of the results, and raises the first violation.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from remixer_t5x.errors import UserError, to_one_line
from remixer_t5x.models import interface
from remixer_t5x.models.architecture import layer
from remixer_t5x.testing import sublayer_contract
from remixer_t5x.testing.sublayer_contract import ContractViolation
from remixer_t5x.testing.sublayer_fixture import DECODER, ENCODER, LENGTH, ROWS, SublayerFixture

__all__ = ['ContractViolation', 'CheckReport', 'check_sublayer']

PASSED, FAILED, REFUSED, SKIPPED = 'passed', 'FAILED', 'refused', 'skipped'
# The order matters: a bug that one check detects often explains the failures of later checks.
CHECKS: dict[str, Callable[..., None]] = {
    'dropout': sublayer_contract.check_dropout,
    'parameters': sublayer_contract.check_parameters,
    'rows': sublayer_contract.check_rows,
    'padding': sublayer_contract.check_padding,
    'packing': sublayer_contract.check_packing,
    'causality': sublayer_contract.check_causality,
    'prefix': sublayer_contract.check_prefix,
    'decode': sublayer_contract.check_decode,
    'prompt': sublayer_contract.check_prompt,
    'prefix_lm': functools.partial(sublayer_contract.check_prompt, bidirectional=True),
    'beams': sublayer_contract.check_beams,
    'bfloat16': sublayer_contract.check_bfloat16,
    'gradients': sublayer_contract.check_gradients,
    'remat': sublayer_contract.check_remat,
}
DECODER_CHECKS = ('causality', 'prefix', 'decode', 'prompt', 'prefix_lm', 'beams')


class CheckResult(NamedTuple):
    """Result of a check: `passed`, `FAILED`, `refused` (the sublayer raised UserError) or `skipped`, with a reason.

    If the sublayer raised another exception, the check failed, and `error` is that exception.
    """

    check: str
    side: str
    result: str
    reason: str = ''
    error: BaseException | None = None


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """The results of all checks, which `str(report)` formats as a table."""

    name: str
    rows: tuple[CheckResult, ...]

    def __str__(self) -> str:
        lines = [f'{self.name}: {len(self.rows)} checks']
        lines += [f'  {row.check:<10}  {row.side:<7}  {row.result:<7}  {row.reason}'.rstrip() for row in self.rows]
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
) -> CheckReport:
    """Checks that a sublayer fulfils the contract of all shipped sublayers (see `testing.sublayer_contract`).

    Builds two layers with the sublayer, in an encoder and in a decoder, for rows of 12 tokens with `embed_dim`
    features. A sublayer may raise `UserError` at tracing time for unsupported features; the table marks the
    corresponding checks as `refused`.

    Args:
        sublayer: an unbound Flax module `(x, ctx) -> y`, its class, or another factory that accepts `name`.
        sides: which stacks to check: 'encoder', 'decoder' or both.
        without: names of checks to skip, such as `('padding', 'packing')` for a mixer that mixes complete rows.
        companions: factories of additional sublayers in each layer, if the sublayer requires them.
        norm: factory of the norm in each layer; None uses the default of `layout`.
        position_bias: factory of the stack's position bias, for a sublayer that reads `ctx.position_bias`.
        embed_dim: number of features of a token, which must be a multiple of the sublayer's number of heads.

    Returns:
        The results of all checks.

    Raises:
        ContractViolation: an AssertionError with one line about the first failed check.
        UserError: a name in `sides` or `without` is unknown, or no check passed because the sublayer raises UserError.
    """
    for option, names, known in (('sides', sides, (ENCODER, DECODER)), ('without', without, tuple(CHECKS))):
        if isinstance(names, str) or not set(names) <= set(known):
            raise UserError(f'{option} must be a tuple of names from {", ".join(known)}, got {names!r}')
    factory: Any = sublayer
    if isinstance(sublayer, nn.Module):
        fields = {field.name: getattr(sublayer, field.name) for field in dataclasses.fields(sublayer) if field.init}
        kind: Any = type(sublayer)
        factory = functools.partial(kind, **{k: v for k, v in fields.items() if k not in ('name', 'parent')})
    rows: list[CheckResult] = []
    for side in sides:
        fixture = SublayerFixture((factory, *companions), side, layout, norm, position_bias, embed=embed_dim)
        rows += _check_stack(fixture, without)
    kind = layer.unwrap_partial(factory)
    report = CheckReport(getattr(kind, '__name__', repr(kind)), tuple(rows))
    if show:
        sys.stdout.write(f'{report}\n')
    failed = [row for row in rows if row.result == FAILED]
    if failed:
        names = [f'{row.check} in the {row.side}' for row in failed]
        others = f' (also failed: {", ".join(names[1:])})' if names[1:] else ''
        raise ContractViolation(f'{report.name} fails {names[0]}: {failed[0].reason}{others}') from failed[0].error
    if not any(row.result == PASSED for row in rows):
        raise UserError(f'{report.name} was not checked: {rows[0].reason}')
    return report


def check_custom_sublayers(model: interface.Model, packed: bool = False) -> list[str]:
    """Runs a quick check that a model's custom sublayers ignore padding and, in a decoder, later tokens.

    Also checks that they ignore other rows of the batch, and other examples of a row if `packed` is set; that their
    only variables are parameters with logical axes; and that they read prefixes in both directions if `model` is a
    prefix language model.

    Returns one line for each class and its attributes; raises UserError if a sublayer of a decoder reads later tokens.
    """
    lines, prefix = [], getattr(model, 'prefix', False)
    for side, factories in interface.list_sublayer_factories(model).items():
        bias = getattr(model.module, f'{side}_stack')().position_bias
        # Factories of the same class can have different attributes, which their `repr` contains.
        for factory in {repr(factory): factory for factory in factories}.values():
            kind = layer.unwrap_partial(factory)
            if not kind.__module__.startswith('remixer_t5x.'):
                fixture = SublayerFixture((factory,), side, position_bias=bias, embed=model.module.embed_dim)
                description = _describe_read_tokens(kind.__name__, fixture, packed, prefix)
                lines.append(f'{kind.__name__} in the {side}: {description}')
    return lines


def _describe_read_tokens(name: str, fixture: SublayerFixture, packed: bool, prefix: bool) -> str:
    """Describes which tokens a custom sublayer reads; raises UserError if a decoder's sublayer reads later tokens."""
    test = f'test it with remixer_t5x.testing.check_sublayer({name})'
    leaks: Any = []
    advice = ''
    try:
        if fixture.is_decoder:
            leaks = np.argwhere(np.triu(fixture.compute_position_influence((LENGTH,)), 1))
        if not len(leaks):
            sublayer_contract.check_rows(fixture)
            advice = f'read {"ctx.segment_ids" if packed else "ctx.is_token"}, and '
            if packed:
                sublayer_contract.check_packing(fixture)
            sublayer_contract.check_padding(fixture)
            advice = ''
            if prefix:
                sublayer_contract.check_prefix(fixture)
            sublayer_contract.check_collections(fixture)
            sublayer_contract.check_parameters(fixture)
    except ContractViolation as error:
        return f'warning: {error}; {advice}{test}'
    except Exception as error:
        # Do not raise other errors here: if they affect the model, the run itself raises them.
        return f'could not be checked ({to_one_line(str(error)):.100}); {test}'
    if len(leaks):
        raise UserError(
            f'{name} must not read later tokens in a decoder, but token {leaks[0][0]} reads token {leaks[0][1]}; '
            f'mask later tokens if ctx.causal is True, and {test}'
        )
    later, other = 'a later token or ' * fixture.is_decoder, ' or another example of a packed row' * packed
    return f'no token reads {later}padding{other}'


def _check_stack(fixture: SublayerFixture, without: Sequence[str]) -> list[CheckResult]:
    side = fixture.side
    built = CheckResult('all', side, *_run_check(_trace_stack, fixture))
    if built.result != PASSED:
        return [built]
    rows = []
    for name, check in CHECKS.items():
        if name in DECODER_CHECKS and not fixture.is_decoder:
            continue
        if name in without:
            rows.append(CheckResult(name, side, SKIPPED, 'named by without'))
        else:
            rows.append(CheckResult(name, side, *_run_check(check, fixture)))
    return rows


def _trace_stack(fixture: SublayerFixture) -> None:
    sublayer_contract.check_collections(fixture)
    ctx = fixture.make_context([[LENGTH]] * ROWS)
    jax.eval_shape(fixture.build_stack().init, jax.random.key(0), fixture.make_random_features(0), ctx)


def _run_check(
    check: Callable[[SublayerFixture], None], fixture: SublayerFixture
) -> tuple[str, str, BaseException | None]:
    """Returns the result of a check, the reason, and the exception of the sublayer, if it is not a `UserError`."""
    try:
        check(fixture)
    except ContractViolation as error:
        return FAILED, str(error), error.__cause__
    except UserError as error:
        return REFUSED, to_one_line(str(error)), None
    except Exception as error:
        # The sublayer raised this error; its first line describes the cause.
        first = to_one_line((str(error).splitlines() or [''])[0])
        return FAILED, f'{type(error).__name__}: {first:.200}', error
    return PASSED, '', None
