"""Flags that say which process of a run this is. They are not gin macros: each process has its own, and a run's
configuration is shared by all of them."""

import argparse
import contextlib
import functools

from remixer_t5x.errors import UserError

# Flag, field of `devices.processes.Processes`, what its value is called, what it is.
_FLAGS = (
    ('--coordinator_address', 'address', 'HOST:PORT', 'of process 0'),
    ('--process_count', 'count', 'N', 'how many processes; 1 is this one alone, whatever the cluster says'),
    ('--process_index', 'index', 'N', 'which one this is, from 0'),
    (
        '--initialization_timeout',
        'initialization_timeout',
        'SECONDS',
        'to wait for the others at the start (default 300)',
    ),
    ('--heartbeat_timeout', 'heartbeat_timeout', 'SECONDS', 'of silence after which a process is lost (default 100)'),
)


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags, as a group."""
    group = parser.add_argument_group(
        'several processes', 'found by themselves on TPU, Slurm, Open MPI and Kubernetes; else all of the first three'
    )
    for flag, _, metavar, help in _FLAGS:
        group.add_argument(flag, metavar=metavar, help=help)


def together(args: argparse.Namespace, saves: bool = False) -> contextlib.AbstractContextManager:
    """Joins the processes of the run while its work is done within; `saves`: on SIGTERM the work saves first."""
    from remixer_t5x.devices import processes

    given = processes.Processes(**_given(args))
    return processes.together(given, functools.partial(args.report_error, verbose=args.verbose), saves)


def _given(args: argparse.Namespace) -> dict[str, str]:
    """Fields of `Processes` that flags set."""
    values = {field: getattr(args, flag.removeprefix('--')) for flag, field, *_ in _FLAGS}
    return {field: value for field, value in values.items() if value is not None}


def refuse(args: argparse.Namespace, reason: str) -> None:
    """Raises UserError where one of the flags is given."""
    for flag, field, *_ in _FLAGS:
        if field in _given(args):
            raise UserError(f'{flag} is given, and {reason}; leave it out')
