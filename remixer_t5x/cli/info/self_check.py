"""`remixer-t5x info --self_check`: compares kernels with plain JAX code, and the measured step time with a forecast."""

import argparse
import contextlib
import platform as python_platform
from collections.abc import Iterator, Mapping

import jax
from flax import linen as nn

from remixer_t5x import lazy_imports
from remixer_t5x.api.model_building import build_model
from remixer_t5x.cli import arguments, console
from remixer_t5x.cli.info.model import resolve_feature_lengths
from remixer_t5x.data import batch_formats
from remixer_t5x.kernels import self_check
from remixer_t5x.kernels.compile_target import compile_for_platform
from remixer_t5x.models import interface
from remixer_t5x.models.interface import Model
from remixer_t5x.run_folder import model_dir

# Together, these models use all kernels, on sequences that fit into one block and on longer sequences.
MODELS_WITH_KERNELS = ('t5_1_1', 'hyper_mixer', 'mixer_enc_dec')


def print_kernel_checks(args: argparse.Namespace) -> None:
    """Checks the model in the gin files, or models that together use all kernels, and prints the results."""
    device = jax.devices()[0]
    versions = {**model_dir.get_package_versions(), 'python': python_platform.python_version()}
    console.print_with_rich(
        f'{jax.device_count()} x {device.device_kind} ({device.client.platform_version.splitlines()[0]})',
        ' · '.join(f'{name} {version}' for name, version in versions.items()),
    )
    table = console.build_table(
        *('kernel', 'run as', 'dtype', 'call', 'difference', 'allowed', 'result'),
        words=('kernel', 'run as', 'dtype', 'call', 'result'),
    )
    checked: set[str] = set()
    for interpreted in (None,) if device.platform in ('tpu', 'gpu') else ('tpu', 'gpu'):
        for model, lengths, pack in _select_models(args):
            for key, check in _collect_kernel_checks(model, lengths, pack, interpreted).items():
                if key in checked:
                    continue
                checked.add(key)
                check_result = self_check.run_kernel_check(check, interpreted)
                difference = '' if check_result.difference is None else f'{check_result.difference:.1e}'
                result = check_result.error or ('failed' if check_result.failure_reason(check) else 'passed')
                run_as = f"{interpreted}'s, interpreted" if interpreted else 'compiled'
                tolerance = f'{check.tolerance:.0e}'
                table.add_row(check.kernel, run_as, check.dtype, check.call, difference, tolerance, result)
    console.print_with_rich(
        table if checked else 'no kernel is used: this model, its dtype or ATTENTION selects plain JAX code'
    )
    if args.gin_file and device.platform != 'cpu' and lazy_imports.has_extra('forecast'):
        lazy_imports.import_extra('forecast.command').print_measured_step(args)


def _select_models(args: argparse.Namespace) -> Iterator[tuple[Model, Mapping[str, int], bool]]:
    """Yields each model to check, with its feature lengths and whether its rows are packed."""
    if args.gin_file:
        defaults = {'TASK_FEATURE_LENGTHS': None, 'PACK': False}
        model, lengths, pack = arguments.load_macro_values(args, 'MODEL', *defaults, defaults=defaults)
        yield model, resolve_feature_lengths(model.model_type, lengths), pack
        return
    for name in MODELS_WITH_KERNELS:
        model = build_model(f'models/{name}.gin', 'sizes/tiny.gin', DTYPE='bfloat16')
        for pack in (False, True):
            yield model, resolve_feature_lengths(model.model_type, None), pack


def _collect_kernel_checks(
    model: Model, lengths: Mapping[str, int], pack: bool, interpreted: str | None
) -> dict[str, self_check.KernelCheck]:
    """Returns checks of the kernels that a train step of the model uses."""
    batch = batch_formats.get_abstract_batch(model.model_type, lengths, self_check.NUM_CHECK_ROWS, pack)
    params = interface.compute_param_shapes(model, {name: array.shape for name, array in batch.items()})
    target = compile_for_platform(interpreted, interpret=True) if interpreted else contextlib.nullcontext()
    with target, self_check.record_checks() as checks:
        jax.eval_shape(model.loss, nn.unbox(params), batch)
    return checks
