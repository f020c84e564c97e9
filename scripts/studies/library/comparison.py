"""How a study that compares something over seeds goes: what it is, what is missing, and what is known of each."""

import argparse
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from library.records import Records, paired, run_missing

Found = dict[str, list[dict[str, Any]]]


def compare(
    args: argparse.Namespace,
    trial: Callable[..., Any],
    over: str,
    names: Sequence[str],
    run: Callable[[Any], Mapping[str, Any]],
) -> Found:
    """Says what this is, runs what is missing (nothing with --show), and returns the results of each name.

    Args:
        args: has `seeds`, `out`, `show`, and a value for each field of a trial but `over` and `seed`.
        trial: a dataclass, all that a result depends on.
        over: the field that `names` are values of.
        run: trial -> its result.
    """
    fields = [field.name for field in dataclasses.fields(trial) if field.name not in (over, 'seed')]  # type: ignore[arg-type]
    settings = {name: getattr(args, name) for name in fields}
    print(f'{jax.devices()[0].device_kind} x {jax.device_count()}; {settings}; results in {args.out}', flush=True)
    records = Records(args.out)
    # Seed by seed, so that a study that is stopped has every name.
    trials = [trial(**{over: name}, seed=seed, **settings) for seed in range(args.seeds) for name in names]
    run_missing(records, [] if args.show else trials, run)
    return {name: [] for name in names} | results_by(records, trials, over)


def results_by(records: Records, trials: Sequence[Any], over: str) -> Found:
    """What is known for each value of the field `over`, a result for each seed."""
    found: Found = {getattr(trial, over): [] for trial in trials}
    for trial in trials:
        if result := records.get(dataclasses.asdict(trial)):
            found[getattr(trial, over)].append(result)
    return found


def difference(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], metric: str) -> str:
    """`records.paired` of the results that both have, seed by seed."""
    pairs = [(one[metric], other[metric]) for one, other in zip(ours, theirs, strict=False) if metric in one]
    return paired(*zip(*pairs, strict=True)) if pairs else ''


def print_table(
    title: str, found: Found, metrics: Sequence[str], cell: Callable[[Sequence[Mapping[str, Any]], str], str]
) -> None:
    """Markdown: for each name its cells, (results, metric) -> text, and how many parameters it has."""
    print(title)
    print('| ' + ' | '.join(['', *metrics, 'parameters']) + ' |')
    print('|---' * (len(metrics) + 2) + '|')
    for name, results in found.items():
        parameters = f'{int(results[0]["parameters"]):,}' if results else ''
        print('| ' + ' | '.join([name, *(cell(results, metric) for metric in metrics), parameters]) + ' |')


def check_names(
    parser: argparse.ArgumentParser, flag: str, names: list[str], known: Collection[str], between: str = ';'
) -> list[str]:
    """The names; ends the program with one line where one is not known."""
    if unknown := [name for name in names if name not in known]:
        parser.error(f'{flag} has {unknown[0]!r}; known are {f"{between} ".join(known)}')
    return names
