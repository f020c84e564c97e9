"""`remixer-t5x info`: shows the parameters, FLOPs and sharding of a model, and the memory and time of a step."""

import argparse
import os

from remixer_t5x import lazy_imports
from remixer_t5x.cli import arguments
from remixer_t5x.cli.arguments import ON_CPU, Command
from remixer_t5x.errors import UserError

# The modes that read each flag.
_FLAG_MODES = {
    'models': ('compare',),
    'devices': ('sharding', 'memory', 'speed'),
    'device_memory': ('memory', 'speed'),
    'compiler': ('memory',),
    'price': ('speed', 'self_check'),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin_flags(parser)
    kinds = parser.add_mutually_exclusive_group()
    sharding = 'how each parameter is sharded over the mesh of a hardware file'
    kinds.add_argument('--sharding', action='store_true', help=sharding)
    kinds.add_argument('--memory', action='store_true', help='memory of a training step per device')
    kinds.add_argument(
        '--speed', action='store_true',
        help='minimum time of a training step on the machine of a hardware file, and its bottlenecks',
    )  # fmt: skip
    kinds.add_argument(
        '--self_check', action='store_true',
        help='compare kernels with plain JAX code (on a CPU, interprets the kernels for TPUs and GPUs); on an '
        'accelerator, also compare the time of a step with its forecast',
    )  # fmt: skip
    kinds.add_argument(
        '--settings', nargs='?', const='', metavar='WORD',
        help='list all gin macros, or only those whose name, meaning or argument contains WORD',
    )  # fmt: skip
    parser.add_argument(
        '--compare', nargs='?', const='', metavar='SIZES',
        help='compare all models at these sizes (default tiny,small,base) with each other and with the papers; with '
        '--speed, compare their forecasts (default small)',
    )  # fmt: skip
    depth = 'number of levels of modules to show (default 4)'
    parser.add_argument('--depth', metavar='N', type=arguments.make_whole_number_type(1), default=4, help=depth)
    models = 'with --compare: models, separated by commas (default: all)'
    parser.add_argument('--models', metavar='NAMES', type=arguments.split_names, help=models)
    arguments.add_macro_flag(parser, '--mesh', 'MESH', f'with --sharding, --memory or --speed: {arguments.MESH_HELP}')
    number = 'with --sharding, --memory or --speed: number of devices; overrides the hardware file'
    parser.add_argument('--devices', metavar='N', type=arguments.make_whole_number_type(1), help=number)
    parser.add_argument(
        '--device_memory', metavar='GIB', type=float, help='with --memory or --speed: memory of one device, in GiB'
    )
    parser.add_argument('--compiler', choices=('cpu',), help='with --memory: use XLA:CPU')
    parser.add_argument('--price', metavar='DOLLARS', type=float, help='with --speed: dollars per chip-hour')


def run(args: argparse.Namespace) -> None:
    """Prints the table that the flags select."""
    _check_flags(args)
    if args.self_check:
        from remixer_t5x.cli.info import self_check

        self_check.print_kernel_checks(args)
        return
    os.environ.update({**ON_CPU, **os.environ})
    if args.settings is not None:
        from remixer_t5x.cli.info import settings

        settings.print_macro_table(args)
        return
    if args.memory:
        from remixer_t5x.cli.info import memory

        memory.print_memory_tables(args)
        return
    from remixer_t5x.cli.info import model

    if args.speed:
        speed = lazy_imports.import_extra('forecast.command')
        if args.compare is None:
            speed.print_forecast(args)
        else:
            speed.print_comparison(args, args.models or model.MODELS, arguments.split_names(args.compare or 'small'))
    elif args.compare is not None:
        model.print_comparison(args)
    elif args.sharding:
        model.print_sharding(args)
    else:
        model.print_cost_table(args)


def _check_flags(args: argparse.Namespace) -> None:
    """Raises UserError for a flag that the selected table would ignore."""

    def is_set(flag: str) -> bool:
        value = getattr(args, flag)
        return value is not None and value is not False

    for mode in ('sharding', 'memory', 'settings', 'self_check'):
        if is_set('compare') and is_set(mode):
            raise UserError(f'--compare cannot be combined with --{mode}; omit one of them')
    for flag, modes in _FLAG_MODES.items():
        if is_set(flag) and not any(map(is_set, modes)):
            raise UserError(f'--{flag} requires {" or ".join(f"--{mode}" for mode in modes)}; add it, or omit --{flag}')
    if is_set('compare') and not is_set('speed'):
        ignored = [f'--gin_file={file}' for file in args.gin_file]
        ignored += [f'--gin.{name}' for name, _ in args.gin_flags if name != 'TASK_FEATURE_LENGTHS']
        if ignored:
            raise UserError(
                f'--compare without --speed reads only --gin.TASK_FEATURE_LENGTHS, got {ignored[0]}; omit it'
            )


COMMAND = Command(
    'info',
    'show the parameters and FLOPs of each module of a model, without a device',
    add_arguments,
    run,
    (
        'remixer-t5x info --gin_file=models/remixer.gin --gin_file=sizes/base.gin',
        'remixer-t5x info --compare small',
        'remixer-t5x info --settings learning_rate',
        'remixer-t5x info --sharding --gin_file=models/remixer.gin --gin_file=sizes/base.gin '
        '--gin_file=hardware/tpu.gin --gin.TOPOLOGY=v3:4x4',
        'remixer-t5x info --memory --gin_file=experiments/t5_1_1_base_c4.gin --gin_file=hardware/gpu.gin '
        '--gin.TOPOLOGY=h100:8',
        'remixer-t5x info --speed --gin_file=experiments/t5_1_1_base_c4.gin --gin_file=hardware/tpu.gin '
        '--gin.TOPOLOGY=v5e:2x4',
        'remixer-t5x info --self_check',
    ),
    prints_result=True,
)
