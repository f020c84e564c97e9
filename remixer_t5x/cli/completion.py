"""`remixer-t5x completion`: a script by which a shell completes commands, flags and files; made by shtab."""

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from remixer_t5x.cli.command import Command
from remixer_t5x.errors import UserError, reason

Complete = Mapping[str, Any]
SHELLS = ('bash', 'zsh', 'tcsh')
# By what a flag's value is called in the help.
_FILES = {'FILE', 'PATH'}
_FOLDERS = {'DIR', 'DIRS', 'MODEL_DIR'}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('shell', choices=SHELLS, metavar='SHELL', help=', '.join(SHELLS))


def run(args: argparse.Namespace) -> None:
    """Prints the script. Raises UserError where shtab is not installed."""
    try:
        import shtab
    except ImportError as error:
        raise UserError(
            f'completion needs shtab, which cannot be imported ({reason(error)}); '
            "type pip install 'remixer-t5x[completion]'"
        ) from error
    from remixer_t5x.cli.main import COMMANDS

    print(shtab.complete(_nested(COMMANDS, shtab.FILE, shtab.DIR), args.shell))


def _nested(commands: Iterable[Command], file: Complete, folder: Complete) -> argparse.ArgumentParser:
    """A parser in which `data list` is the command `list` of the command `data`, as a shell sees it."""
    top = argparse.ArgumentParser('remixer-t5x', allow_abbrev=False)
    names = top.add_subparsers()
    parsers: dict[str, argparse.ArgumentParser] = {}
    inner: dict[str, argparse._SubParsersAction] = {}
    for command in commands:
        first, _, second = command.name.partition(' ')
        if second and first not in inner:
            inner[first] = parsers[first].add_subparsers()
        parser = (inner[first] if second else names).add_parser(second or first, help=command.help)
        parsers.setdefault(first, parser)
        command.add_arguments(parser)
        for action in parser._actions:
            kind = {**dict.fromkeys(_FILES, file), **dict.fromkeys(_FOLDERS, folder)}.get(str(action.metavar))
            if kind is not None:
                action.complete = kind  # type: ignore[union-attr]
    return top


COMMAND = Command(
    'completion',
    'a script by which your shell completes commands, flags and files',
    add_arguments,
    run,
    (
        'remixer-t5x completion bash > ~/.local/share/bash-completion/completions/remixer-t5x',
        'remixer-t5x completion zsh > ~/.zfunc/_remixer-t5x',
    ),
    prints_result=True,
)
