"""The console script `remixer-t5x`: parses the command line, runs one command, and prints user errors on one line.

The gin flags are named as in T5X: `--gin_file`, `--gin.NAME=value` and `--gin_search_paths`. Libraries are imported
only after the flags are parsed, so `--help` and flag errors appear at once.
"""

import argparse
import contextlib
import ctypes
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from remixer_t5x import __version__, lazy_imports
from remixer_t5x.cli import arguments, console, convert, data, evaluate, fill_in, infer, info, score, train
from remixer_t5x.cli.arguments import Command
from remixer_t5x.config import user_modules
from remixer_t5x.devices import compilation_cache
from remixer_t5x.errors import UserError, suggest_similar_name, to_one_line


def _load_extra_command(module: str) -> tuple[Command, ...]:
    """Returns a tuple with the command of an optional extra, or an empty tuple if the extra is not installed."""
    return (lazy_imports.import_extra(module).COMMAND,) if lazy_imports.has_extra(module.partition('.')[0]) else ()


COMMANDS = (
    *(train.TRAIN, train.FINETUNE, *_load_extra_command('reports.compare'), *_load_extra_command('reproduce')),
    *(evaluate.COMMAND, infer.COMMAND, info.COMMAND),
    *(data.PREVIEW, data.LIST, data.GET, data.SHOW, data.CACHE, data.VOCABULARY),
    *(score.COMMAND, fill_in.COMMAND, convert.COMMAND, *_load_extra_command('export')),
    *(*_load_extra_command('reports'), *_load_extra_command('serve')),
)

# Options of mallopt(3).
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code.

    The exit code is 0 on success, 1 for a bug and 2 for a user error. After SIGHUP, Ctrl-C or SIGTERM, the exit code is
    129, 130 or 143, even if the run saved its state. If the program that reads the output, such as `head`, closed the
    pipe, the exit code is 141. JAX aborts a process with 134 if another process of the run dies or never connects.

    Args:
        argv: arguments without the program name; None uses the arguments of this process.
    """
    own_process = argv is None
    if own_process:
        console.protect_standard_streams()
        user_modules.install_module_finder(os.getcwd())
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            code = _run_command(arguments_given, own_process)
        finally:
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        code = report_error(error, verbose='--verbose' in arguments_given)
    if own_process and compilation_cache.is_compiling():
        # Exits immediately, for example after an error in the data, because Python would otherwise wait for XLA.
        sys.stderr.flush()
        os._exit(code)
    return code


def report_error(error: BaseException, process: str = '', verbose: bool = False) -> int:
    """Prints an error message, with `process` unless it is empty, to standard error; returns the exit code."""
    where = f' ({process})' if process else ''
    if isinstance(error, KeyboardInterrupt):
        print(f'interrupted{where}', file=sys.stderr)
        return 130
    if isinstance(error, SystemExit):
        return int(error.code or 0)
    if isinstance(error, MemoryError):
        error = UserError('this process is out of memory; use a smaller model or batch, or raise ulimit -v')
    frames, text = user_modules.find_user_frames(error), str(error)
    is_bug = not isinstance(error, UserError) and not frames
    if is_bug or verbose:
        traceback.print_exception(error)
    else:
        print(*frames.format(), sep='', end='', file=sys.stderr)
    if not isinstance(error, UserError):
        # Removes the long note that JAX adds about its internal frames.
        notes = [note for note in getattr(error, '__notes__', ()) if '\n' not in note]
        text = '; '.join([f'{type(error).__name__}: {error}'[:500], *notes])
        text = f'this is a bug: {text}' if is_bug else f'{frames[-1].filename} line {frames[-1].lineno}: {text}'
    print(f'error{where}: {to_one_line(text)}', file=sys.stderr)
    return 1 if is_bug else 2


def _run_command(argv: Sequence[str], own_process: bool) -> int:
    rest, gin_flags = arguments.split_gin_flags(argv)
    parser = _build_parser()
    words = {command.name.partition(' ')[0] for command in COMMANDS}
    if rest and rest[0][0:1] not in ('-', '') and rest[0] not in words:
        raise UserError(f'{rest[0]!a} is not a command{suggest_similar_name(rest[0], words)}; see {parser.prog} --help')
    # Some command names consist of two words, such as `data list`.
    if (name := ' '.join(rest[:2])) in {command.name for command in COMMANDS}:
        rest = [name, *rest[2:]]
    args, unknown = parser.parse_known_args(rest)
    if unknown:
        raise UserError(_describe_unknown_flags(args, unknown))
    if args.command is None:
        parser.print_help()
        return 0
    command = next(command for command in COMMANDS if command.name == args.command)
    if gin_flags and not hasattr(args, 'gin_file'):
        prog = args.own_parser.prog
        raise UserError(f'--gin.{gin_flags[0][0]} is set, but {prog} reads no gin files; see {prog} --help')
    args.gin_flags = [*gin_flags, *getattr(args, 'macros', ())]
    args.report_error = report_error
    compilation_cache.enable_compilation_cache()
    os.environ.update({name: value for name, value in command.env.items() if name not in os.environ})
    if command.keeps_buffers and own_process:
        keep_freed_buffers()
    lazy_imports.verbose = args.verbose
    if not args.verbose:
        console.silence_library_logs()
    if not command.prints_result:
        console.ignore_stdout_errors()
    return command.run(args) or 0


def _describe_unknown_flags(args: argparse.Namespace, unknown: list[str]) -> str:
    """Returns the error message for unknown arguments, and suggests the equivalent of the first argument if known."""
    from remixer_t5x.config import gin_files

    message = f'unrecognized arguments: {" ".join(unknown)}'
    parser = getattr(args, 'own_parser', None) or _build_parser()
    flag, _, value = unknown[0].partition('=')
    name = flag.removeprefix('--')
    macro = 'INITIAL_CHECKPOINT_PATH' if name == 'checkpoint' else name.upper()
    is_run = not flag.startswith('-') or (name == 'checkpoint' and args.command not in ('train', 'finetune'))
    if name in gin_files.T5X_NAMES['flags']:
        message += f'; the equivalent of this T5X flag is {gin_files.T5X_NAMES["flags"][name]}'
    elif hasattr(args, 'gin_file') and value and not is_run and gin_files.find_files_with_macro(macro):
        message += f'; the setting is --gin.{macro}={value}'
    elif near := suggest_similar_name(f'{args.command} {flag}', (command.name for command in COMMANDS)):
        message += near
    elif hasattr(args, 'gin_file') and is_run:
        run = '--checkpoint=MODEL_DIR' if '--checkpoint' in parser.format_usage() else '--gin_file=MODEL_DIR/config.gin'
        message += f'; pass a gin file as --gin_file=FILE, and a run as {run}'
    return f'{message}; see {parser.prog} --help'


class _CommandParser(argparse.ArgumentParser):
    """Argument parser that raises UserError for invalid flags."""

    def error(self, message: str):
        # Remove the spaces after COMMAND, which align the columns of the help.
        message = re.sub(r'(?<=COMMAND) +', '', message)
        raise UserError(f'{message}; see {self.prog} --help')


def _build_parser() -> argparse.ArgumentParser:
    # argparse indents the names of commands by two more columns than the heading COMMAND.
    width = max(len(command.name) for command in COMMANDS) + 2
    options: dict[str, Any] = {'formatter_class': argparse.RawDescriptionHelpFormatter, 'allow_abbrev': False}
    parser = _CommandParser(
        prog='remixer-t5x',
        description='Pretrain, finetune, evaluate and run T5-style encoder-decoders with any token mixer.',
        epilog=f'{arguments.GIN_HELP}\nexamples:\n{_format_examples(e for c in COMMANDS for e in c.examples)}',
        **options,
    )
    parser.add_argument('--version', action='version', version=f'remixer-t5x {__version__}')
    commands = parser.add_subparsers(dest='command', metavar='{:<{}}'.format('COMMAND', width), title='commands')
    for command in COMMANDS:
        description = f'{command.help[0].upper()}{command.help[1:]}.'
        epilog = f'example:\n{_format_examples(command.examples)}'
        of_command = commands.add_parser(
            command.name, help=command.help, description=description, epilog=epilog, **options
        )
        command.add_arguments(of_command)
        of_command.set_defaults(own_parser=of_command)
        of_command.add_argument('--verbose', action='store_true', help='show log lines of libraries, and tracebacks')
        # All scripts of T5X accept this flag.
        of_command.add_argument('--alsologtostderr', dest='verbose', action='store_true', help=argparse.SUPPRESS)
    return parser


def _format_examples(examples) -> str:
    return ''.join(f'  {example}\n' for example in examples)


def keep_freed_buffers() -> None:
    """Prevents glibc from returning large buffers to the operating system after every step, to avoid page faults."""
    # C libraries other than glibc do not provide mallopt.
    with contextlib.suppress(AttributeError):
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 256 << 20)):
            ctypes.CDLL(None).mallopt(option, value)


if __name__ == '__main__':
    sys.exit(main())
