"""The console script `remixer-t5x`: parses the command line, runs one command, and turns mistakes into one line.

gin's flags are T5X's: `--gin_file`, `--gin.NAME=value`, `--gin_search_paths`. Libraries are imported only once a
command is known to run, so `--help` and a wrong flag answer at once.
"""

import argparse
import difflib
import os
import re
import resource
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence

from remixer_t5x import __version__, lazy, startup
from remixer_t5x.cli import (
    arguments,
    completion,
    convert,
    evaluate,
    fill_in,
    infer,
    info,
    quiet,
    score,
    streams,
    train,
)
from remixer_t5x.cli.command import Command, keep_buffers
from remixer_t5x.cli.data import cache, get, preview, show, vocab
from remixer_t5x.cli.data import list as data_list
from remixer_t5x.config import user_modules
from remixer_t5x.devices import compilation_cache
from remixer_t5x.errors import UserError, nearest, one_line


def _extra(extra: str, module: str) -> tuple[Command, ...]:
    """The command of an extra, if the installation has it."""
    return (lazy.extra(f'{extra}.{module}').COMMAND,) if lazy.has_extra(extra) else ()


COMMANDS = (
    *(train.TRAIN, train.FINETUNE, *_extra('reports', 'compare'), evaluate.COMMAND, infer.COMMAND, info.COMMAND),
    *(preview.COMMAND, data_list.COMMAND, get.COMMAND, show.COMMAND, cache.COMMAND, vocab.COMMAND),
    *(score.COMMAND, fill_in.COMMAND, convert.COMMAND, *_extra('export', 'command'), *_extra('reports', 'command')),
    completion.COMMAND,
)

# As many as a small training run has on two cores.
THREADS = 40
# Bytes that TensorFlow, JAX and a tiny model reserve.
ADDRESS_SPACE = 6 << 30


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code.

    0; 1 for a bug; 2 for a user's mistake; 129, 130 and 143 after SIGHUP, Ctrl-C and SIGTERM, also where the run has
    saved its state; 141 if the reader of a command's result has left (`| head`). JAX itself aborts a process of several
    (134) if another is lost or never connects.

    Args:
        argv: arguments without the program's name; None takes them from the process.
    """
    own_process = argv is None
    if own_process:
        streams.protect()
        user_modules.install(os.getcwd())
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            code = _run(given, own_process)
        finally:
            sys.stdout.flush()
    except (UserError, KeyboardInterrupt) as error:
        code = report_error(error, verbose='--verbose' in given)
    except Exception as error:
        code = report_error(error, verbose='--verbose' in given)
    if own_process and startup.compiling():
        # Python would wait for XLA, after a mistake in the data for example, and cannot interrupt it.
        sys.stderr.flush()
        os._exit(code)
    return code


def report_error(error: BaseException, process: str = '', verbose: bool = False) -> int:
    """Says what went wrong on standard error, and in which of several processes; returns the exit code."""
    where = f' ({process})' if process else ''
    if isinstance(error, KeyboardInterrupt):
        print(f'interrupted{where}', file=sys.stderr)
        return 130
    if isinstance(error, SystemExit):
        return int(error.code or 0)
    if verbose:
        traceback.print_exception(error)
    if isinstance(error, MemoryError):
        error = UserError('this process gets no more memory; use a smaller model or batch, or raise ulimit -v')
    text = str(error) if isinstance(error, UserError) else _describe_bug(error)
    print(f'error{where}: {one_line(text)}', file=sys.stderr)
    return 2 if isinstance(error, UserError) else 1


def _describe_bug(error: BaseException) -> str:
    """One line about an error that nobody expected: its notes say what was saved, a file has its traceback."""
    said = one_line(f'{type(error).__name__}: {error}')[:500]
    # JAX adds a note of several lines about its own frames.
    notes = ''.join(f'; {note}' for note in getattr(error, '__notes__', ()) if '\n' not in note)
    try:
        with tempfile.NamedTemporaryFile(
            'w', prefix='remixer_t5x_', suffix='.txt', delete=False, encoding='utf-8', errors='backslashreplace'
        ) as file:
            file.write(f'remixer-t5x {__version__}: {" ".join(sys.argv)}\n')
            traceback.print_exception(error, file=file)
    except OSError:
        return f'{said}: this is a bug{notes}; type --verbose for its traceback'
    return f'{said}: this is a bug{notes}; its traceback is in {file.name}'


def _run(argv: Sequence[str], own_process: bool) -> int:
    rest, gin_flags = arguments.split_gin_flags(argv)
    parser = _parser()
    words = {command.name.partition(' ')[0] for command in COMMANDS}
    if rest and rest[0][0:1] not in ('-', '') and rest[0] not in words:
        raise UserError(f'{rest[0]!a} is not a command{nearest(rest[0], words)}; see {parser.prog} --help')
    args, unknown = parser.parse_known_args(_join_words(rest))
    if unknown:
        raise UserError(_unknown_flag(args, unknown))
    if args.command is None:
        parser.print_help()
        return 0
    command = next(command for command in COMMANDS if command.name == args.command)
    if gin_flags and not hasattr(args, 'gin_file'):
        name = f'{parser.prog} {args.command}'
        raise UserError(f'--gin.{gin_flags[0][0]} is given, and {name} reads no gin files; see {name} --help')
    args.gin_flags = [*gin_flags, *getattr(args, 'macros', ())]
    args.report_error = report_error
    _check_limits()
    compilation_cache.enable()
    os.environ.update({name: value for name, value in command.env.items() if name not in os.environ})
    if command.keeps_buffers and own_process:
        keep_buffers()
    lazy.verbose = args.verbose
    if args.verbose:
        startup.begin()
    else:
        quiet.hush()
    if not command.prints_result:
        streams.continue_without_stdout()
    return command.run(args) or 0


def _join_words(argv: list[str]) -> list[str]:
    """Makes one name of `data list`, as in COMMANDS. Raises UserError for a second word that names no command."""
    alternatives = [c.name.split()[1] for c in COMMANDS if argv and c.name.startswith(f'{argv[0]} ')]
    if not alternatives or len(argv) < 2 or argv[1].startswith('-'):
        return argv
    if argv[1] not in alternatives:
        near = difflib.get_close_matches(argv[1], alternatives, n=1, cutoff=0) or alternatives
        allowed = ', '.join(f'{argv[0]} {word}' for word in alternatives)
        raise UserError(f'{argv[0]} {argv[1]} is not a command, allowed are {allowed}; type {argv[0]} {near[0]}')
    return [' '.join(argv[:2]), *argv[2:]]


def _unknown_flag(args: argparse.Namespace, given: list[str]) -> str:
    """What to say of arguments that the command does not take, and what to type instead of the first."""
    from remixer_t5x.config import files

    message = f'unrecognized arguments: {" ".join(given)}'
    parser = getattr(args, 'own_parser', None) or _parser()
    flag, _, value = given[0].partition('=')
    name = flag.removeprefix('--')
    near = difflib.get_close_matches(flag, re.findall(r'--\w+', parser.format_usage()), n=1)
    if name in files.T5X['flags']:
        message += f'; that is a flag of T5X, and here it is {files.T5X["flags"][name]}'
    elif hasattr(args, 'gin_file') and value and files.readers(name.upper()):
        message += f'; the setting is --gin.{name.upper()}={value}'
    elif near:
        message += f'; did you mean {near[0]}'
    return f'{message}; see {parser.prog} --help'


class _Parser(argparse.ArgumentParser):
    """argparse that answers a wrong flag with one line, as every other mistake is answered."""

    def error(self, message: str):
        # The name COMMAND is padded to the width of the longest one, which aligns the help.
        message = re.sub(r'(?<=COMMAND) +', '', message)
        raise UserError(f'{message}; see {self.prog} --help')


def _parser() -> argparse.ArgumentParser:
    # Commands are indented by two columns more than COMMAND is.
    width = max(len(command.name) for command in COMMANDS) + 2
    parser = _Parser(
        prog='remixer-t5x',
        description='Pretrain, finetune, evaluate and run T5-style encoder-decoders with any token mixer.',
        epilog=f'{arguments.GIN_HELP}\nexamples:\n{_lines(e for c in COMMANDS for e in c.examples)}',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument('--version', action='version', version=f'remixer-t5x {__version__}')
    commands = parser.add_subparsers(dest='command', metavar='{:<{}}'.format('COMMAND', width), title='commands')
    for command in COMMANDS:
        _add_command(commands, command)
    return parser


def _add_command(commands, command: Command) -> None:
    parser = commands.add_parser(
        command.name,
        help=command.help,
        description=f'{command.help[0].upper()}{command.help[1:]}.',
        epilog=f'example:\n{_lines(command.examples)}',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    parser.set_defaults(own_parser=parser)
    parser.add_argument('--verbose', action='store_true', help='show log lines of libraries, and tracebacks')
    # Every script of T5X has it.
    parser.add_argument('--alsologtostderr', dest='verbose', action='store_true', help=argparse.SUPPRESS)


def _lines(examples) -> str:
    return ''.join(f'  {example}\n' for example in examples)


def _check_limits() -> None:
    """Raises UserError if ulimit -v or -u is too low for XLA and TensorFlow, which would abort the process."""
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if addresses != resource.RLIM_INFINITY and addresses < ADDRESS_SPACE:
        raise UserError(
            f'ulimit -v must be at least {ADDRESS_SPACE >> 10}, got {addresses >> 10}; type ulimit -v unlimited'
        )
    end = threading.Event()
    threads: list[threading.Thread] = []
    try:
        while len(threads) < THREADS:
            threads.append(threading.Thread(target=end.wait))
            threads[-1].start()
    except RuntimeError as error:
        raise UserError(
            f'the system allows {len(threads) - 1} more threads, and a command needs {THREADS}; raise ulimit -u '
            "and -v, or the container's limit of processes"
        ) from error
    finally:
        end.set()


if __name__ == '__main__':
    sys.exit(main())
