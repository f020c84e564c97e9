"""The console script `remixer-t5x`: reads flags, lets `config.loading` build, calls, and turns mistakes into one line.

Flags are T5X's: `--gin_file`, `--gin.NAME=value`, `--gin_search_paths`. Libraries are imported only once a command is
known to run, so `--help` and a wrong flag answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence

from remixer_t5x import __version__, startup
from remixer_t5x.cli import process_flags, quiet
from remixer_t5x.cli.commands import COMMANDS, Command, Flag
from remixer_t5x.devices import compilation_cache
from remixer_t5x.errors import UserError, one_line

_GIN_HELP = """\
gin flags:
  --gin_file=FILE        a gin file, repeatable, later ones win; looked up in the current folder, then in
                         --gin_search_paths, then among the configs shipped with the package
  --gin.NAME=VALUE       sets a macro (--gin.TRAIN_STEPS=1000) or a setting (--gin.adafactor.decay_rate=0.8) after all
                         files; a VALUE that is no gin value is taken as text: --gin.MODEL_DIR=/tmp/x needs no quotes
"""
_MODEL_HELP = (
    'NAME of models/NAME.gin, in place of the model file that a gin file includes; +ablations/NAME adds a file to it'
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code.

    0; 2 for a user's mistake; 130 after Ctrl-C and 143 after SIGTERM, also where the run has saved its state; 75 where
    another process of the run was lost.

    Args:
        argv: arguments without the program's name; None takes them from the process.
    """
    own_process = argv is None
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments, own_process)
        sys.stdout.flush()
        return code
    except (UserError, KeyboardInterrupt) as error:
        return _tell(error, verbose='--verbose' in arguments)
    except BrokenPipeError:
        # The reader (`| head`) has left; without this Python complains again while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _tell(error: BaseException, process: str = '', verbose: bool = False) -> int:
    """Says what went wrong on standard error, and in which of several processes; returns the exit code."""
    where = f' ({process})' if process else ''
    if isinstance(error, KeyboardInterrupt):
        print(f'interrupted{where}', file=sys.stderr)
        return 130
    if verbose or not isinstance(error, UserError):
        traceback.print_exception(error)
    text = str(error) if isinstance(error, UserError) else f'{type(error).__name__}: {error}'
    print(f'error{where}: {one_line(text)}', file=sys.stderr)
    return getattr(error, 'exit_code', 2) if isinstance(error, UserError) else 1


def _run(argv: list[str], own_process: bool) -> int:
    rest, gin_flags = split_gin_flags(argv)
    parser = _parser()
    args = parser.parse_args(_join_words(rest))
    if args.command is None:
        parser.print_help()
        return 0
    command = next(c for c in COMMANDS if c.name == args.command)
    compilation_cache.enable()
    _set_env(command.env, may_restart=own_process)
    if args.verbose:
        startup.begin()
    else:
        quiet.hush()
    if command.repeats:
        return importlib.import_module(command.module).run(args, gin_flags)
    module, base = command.module, command.base
    given = [flag for flag in command.flags if getattr(args, flag.macro) is not None]
    _check_together(given)
    for flag in given:
        value = getattr(args, flag.macro)
        gin_flags.append((flag.macro, repr(tuple(value)) if flag.many else value))
        module, base = flag.module or module, flag.base or base
    from remixer_t5x.config import loading

    loading.load(
        args.gin_file,
        gin_flags,
        base=base,
        root=f'{module}.run',
        search_paths=[path for given in args.gin_search_paths for path in given.split(',') if path],
        partial=command.partial,
        model=loading.model_files(args.model) if args.model else (),
        importing=None if args.verbose else quiet.imports(command.tensorflow),
    )
    function = importlib.import_module(module).run
    startup.done('imports')
    if not command.several or module != command.module:
        if command.several:
            process_flags.refuse(args, 'this is done by one process')
        return _exit_code(loading.call(function))
    from remixer_t5x.devices import processes as distributed

    processes = distributed.Processes(**process_flags.given(args))
    with distributed.together(processes, functools.partial(_tell, verbose=args.verbose), command.saves):
        result = loading.call(function)
    return _exit_code(result)


def _exit_code(result: object) -> int:
    """0, or that of the signal by which a run was stopped: whoever supervises it must see that it is not finished."""
    stopped = getattr(result, 'stopped', None)
    return 128 + signal.Signals[stopped] if stopped else 0


def _check_together(given: Sequence[Flag]) -> None:
    """Refuses two flags that ask for different functions, and a flag without the one that reads it."""
    asking = [flag.name for flag in given if flag.module]
    if len(asking) > 1:
        raise UserError(f'{asking[0]} and {asking[1]} ask for different things; give one of them')
    for flag in given:
        if flag.only_with and not set(flag.only_with) & set(asking):
            readers = ' or '.join(flag.only_with)
            raise UserError(f'{flag.name} is read with {readers} only; add it, or leave {flag.name} out')


def split_gin_flags(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Takes `--gin.NAME=value` and `--gin.NAME value` out of `argv`.

    Returns:
        The other arguments, and (name, value) pairs in order.

    Raises:
        UserError: a gin flag without a value.
    """
    rest: list[str] = []
    pairs: list[tuple[str, str]] = []
    arguments = iter(argv)
    for argument in arguments:
        if not argument.startswith('--gin.'):
            rest.append(argument)
            continue
        name, equals, value = argument.removeprefix('--gin.').partition('=')
        if not equals:
            value = next(arguments, '--')
            if value.startswith('--'):
                raise UserError(f'{argument} has no value; type {argument}=VALUE')
        if not name:
            raise UserError(f'{argument} names no macro or setting; type --gin.NAME=VALUE')
        pairs.append((name.strip(), value))
    return rest, pairs


def _join_words(argv: list[str]) -> list[str]:
    """`data list` as the one name that it is in COMMANDS. Raises UserError for a second word that is none."""
    alternatives = [c.name.split()[1] for c in COMMANDS if argv and c.name.startswith(f'{argv[0]} ')]
    if not alternatives or len(argv) < 2 or argv[1].startswith('-'):
        return argv
    if argv[1] not in alternatives:
        near = difflib.get_close_matches(argv[1], alternatives, n=1, cutoff=0) or alternatives
        allowed = ', '.join(f'{argv[0]} {word}' for word in alternatives)
        raise UserError(f'{argv[0]} {argv[1]} is no command, allowed are {allowed}; type {argv[0]} {near[0]}')
    return [' '.join(argv[:2]), *argv[2:]]


class _Parser(argparse.ArgumentParser):
    """argparse that answers a wrong flag with one line, as every other mistake is answered."""

    def error(self, message: str):
        # The name COMMAND is padded to the width of the longest one, which aligns the help.
        message = re.sub(r'(?<=COMMAND) +', '', message)
        raise UserError(f'{message}; see {self.prog} --help')


def _parser() -> argparse.ArgumentParser:
    # Commands are indented by two columns more than COMMAND is.
    width = max(len(command.name) for command in COMMANDS) + 2
    examples = '\n'.join(f'  {example}' for command in COMMANDS for example in command.examples)
    parser = _Parser(
        prog='remixer-t5x',
        description='Pretrain, finetune, evaluate and run T5-style encoder-decoders with any token mixer.',
        epilog=f'{_GIN_HELP}\nexamples:\n{examples}\n',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument('--version', action='version', version=f'remixer-t5x {__version__}')
    commands = parser.add_subparsers(dest='command', metavar='{:<{}}'.format('COMMAND', width), title='commands')
    for command in COMMANDS:
        _add_command(commands, command)
    return parser


def _add_command(commands, command: Command) -> None:
    examples = '\n'.join(f'  {example}' for example in command.examples)
    parser = commands.add_parser(
        command.name,
        help=command.help,
        description=f'{command.help[0].upper()}{command.help[1:]}.',
        epilog=f'{_GIN_HELP}\nexample:\n{examples}\n',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument('--gin_file', action='append', default=[], metavar='FILE', help='a gin file, repeatable')
    if not command.repeats:
        parser.add_argument('--model', help=_MODEL_HELP)
    parser.add_argument(
        '--gin_search_paths', action='append', default=[], metavar='DIRS', help='more folders with gin files, by comma'
    )
    parser.add_argument('--verbose', action='store_true', help='show log lines of libraries, and tracebacks')
    for flag in command.flags:
        alone = {} if flag.alone is None else {'nargs': '?', 'const': flag.alone}
        if flag.name.startswith('-'):
            parser.add_argument(flag.name, dest=flag.macro, help=flag.help, **alone)
        else:
            parser.add_argument(flag.macro, metavar=flag.name, help=flag.help, nargs='+' if flag.many else None)
    if command.several:
        process_flags.add(parser)


def _set_env(env: Sequence[tuple[str, str]], may_restart: bool) -> None:
    """Sets what libraries read on import; malloc reads its own before Python starts, so that needs a fresh start."""
    missing = {name: value for name, value in env if name not in os.environ}
    os.environ.update(missing)
    needs_restart = any(name.startswith('MALLOC_') for name in missing)
    if needs_restart and may_restart and sys.platform == 'linux' and len(sys.orig_argv) > 1:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == '__main__':
    sys.exit(main())
