"""`remixer-t5x info`: shows the parameters and FLOPs of each module, and their percentages.

`--compare` compares shipped models with each other, and published sizes with computed sizes. `--sharding` shows how
each parameter is sharded over the device mesh.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from remixer_t5x.api.model_building import build_model
from remixer_t5x.cli import arguments, console
from remixer_t5x.config import gin_files
from remixer_t5x.costs import model_counts
from remixer_t5x.costs.model_counts import TRAINING_FORWARD_PASSES, ModelCounts
from remixer_t5x.data import batch_formats
from remixer_t5x.devices import mesh
from remixer_t5x.devices.hardware_table import Hardware
from remixer_t5x.devices.partition import ShardingRow
from remixer_t5x.models import interface

_FLOAT32_BYTES = 4
# None selects the default lengths of the model type.
LENGTHS_MACRO = {'TASK_FEATURE_LENGTHS': None}
# Names of the files in models/ to compare; ratios are relative to the first model.
MODELS = (
    *('t5_1_1', 'modern_t5', 'remixer', 'mixer_enc', 'mixer_enc_dec', 'hyper_mixer', 'linear_transformer', 'fnet'),
    *('gmlp', 'gmlp_mixer', 'amlp', 'tim'),
)
COUNTED_OPERATIONS = 'matrix products, convolutions and Fourier transforms; a multiply-add counts as two'
# Papers count the parameters of the whole encoder-decoder, or of the encoder and its embedding (BERT, classifiers).
WHOLE_MODEL, ENCODER_PART = 'whole model', 'encoder and embedding'


def print_cost_table(args: argparse.Namespace) -> None:
    """Prints the costs of modules down to level `--depth`, the total costs, and the conventions for counting FLOPs."""
    model, feature_lengths = load_model_macros(args, 'MODEL', *LENGTHS_MACRO)
    lengths = resolve_feature_lengths(model.model_type, feature_lengths)
    count = model_counts.count_model_costs(model, lengths)
    parameters, training = count.total_parameters, count.training_flops
    console.print_with_rich(
        build_cost_table(count, args.depth),
        f'{parameters:,} parameters ({parameters / 1e6:,.1f}M), '
        f'{parameters * _FLOAT32_BYTES / 2**20:,.1f} MiB in float32',
        f'one example: {describe_feature_lengths(model.model_type, lengths)}; forward pass '
        f'{format_quantity(count.total_forward_flops)}FLOPs: {COUNTED_OPERATIONS}',
        f'training step per example: {format_quantity(training)}FLOPs ({TRAINING_FORWARD_PASSES} x forward), '
        f'{format_quantity(training / count.tokens)}FLOPs per token',
        pipe_width=110,
    )


def load_model_macros(args: argparse.Namespace, *macros: str, defaults: Mapping[str, Any] = LENGTHS_MACRO) -> list[Any]:
    """Returns the values of macros. Raises UserError if a flag sets a model setting that the model does not read.

    With --model, settings of the replaced model are allowed, as in training.
    """
    model_macros = {
        name
        for file, text in gin_files.read_shipped_files().items()
        if file.startswith(('models/', 'sizes/', 'sublayers/')) and not args.model
        for name in text.assigned_macros
    }
    return arguments.load_macro_values(args, *macros, defaults=defaults, must_be_read=model_macros)


def resolve_feature_lengths(model_type: str, feature_lengths: Mapping[str, int] | None) -> Mapping[str, int]:
    """Returns the feature lengths, by default those of the model type. Raises UserError for unsupported features."""
    if feature_lengths is None:
        return batch_formats.get_batch_formats(model_type)[0].example
    batch_formats.select_batch_format(model_type, feature_lengths)
    return feature_lengths


def build_cost_table(count: ModelCounts, depth: int) -> Table:
    """Returns a table of the modules in the first `depth` levels; each row includes the costs of submodules."""
    parameters, flops = collections.Counter[tuple[str, ...]](), collections.Counter[tuple[str, ...]]()
    for path, module_flops in count.forward_flops.items():
        flops.update({path[:level]: module_flops for level in range(1, len(path) + 1)})
    for path, size in count.parameters.items():
        parameters.update({path[:level]: size for level in range(1, len(path))})
    table = console.build_table('module', 'parameters', '%', 'forward FLOPs', '%', words=('module',))

    def add_row(name: str, size: float, module_flops: float) -> None:
        size_share = 100 * size / count.total_parameters
        flops_share = 100 * module_flops / count.total_forward_flops
        table.add_row(name, f'{size:,}', f'{size_share:.1f}', format_quantity(module_flops), f'{flops_share:.1f}')

    # Order modules by first use, and each module before its submodules.
    ranks = {path: rank for rank, path in enumerate(dict.fromkeys([*flops, *parameters]))}
    for path in sorted(ranks, key=lambda path: [ranks[path[:level]] for level in range(1, len(path) + 1)]):
        if len(path) <= depth:
            add_row('  ' * (len(path) - 1) + path[-1], parameters[path], flops[path])
    if outside := count.forward_flops.get(()):
        add_row('loss (outside modules)', 0, outside)
    table.add_section()
    add_row('total', count.total_parameters, count.total_forward_flops)
    return table


def describe_feature_lengths(model_type: str, lengths: Mapping[str, int]) -> str:
    """Formats the lengths of the features that the model reads, for example as `512 input and 114 target tokens`."""
    arrays = batch_formats.select_batch_format(model_type, lengths).arrays
    names = sorted({name for features in arrays.values() for name in features})
    return ' and '.join(f'{lengths[name]} {name.removesuffix("s")}' for name in names) + ' tokens'


def format_quantity(number: float) -> str:
    """Formats a number with three digits and a decimal prefix, such as `1.23 G`."""
    for prefix in ('', 'k', 'M', 'G', 'T', 'P'):
        if number < 999.5:
            return f'{number:.3g} {prefix}'
        number /= 1000
    return f'{number:.3g} E'


@dataclasses.dataclass(frozen=True)
class PublishedCosts:
    """The number of parameters that a paper reports for a model; `part` is WHOLE_MODEL or ENCODER_PART.

    `flops` is the reported number of FLOPs of a forward pass over 512 tokens; a multiply and an add count as two.
    """

    model: str
    size: str
    parameters: float
    part: str
    source: str
    flops: float | None = None


PUBLISHED_COSTS = (
    PublishedCosts('t5_1_1', 'base', 248e6, WHOLE_MODEL, 'REMIXERS, table 1'),
    # The table calls this row T5.1.1, but its number of parameters is that of the original T5-large; T5.1.1 has 783M.
    PublishedCosts('t5_1_0', 'large', 738e6, WHOLE_MODEL, 'REMIXERS, table 4 (there T5.1.1)'),
    PublishedCosts('remixer_scaled', 'scaled_base', 224e6, WHOLE_MODEL, 'REMIXERS, table 1'),
    PublishedCosts('remixer', 'base', 324e6, WHOLE_MODEL, 'REMIXERS, table 1 (302M in table 4)'),
    PublishedCosts('mixer_enc', 'base', 212e6, WHOLE_MODEL, 'REMIXERS, table 4'),
    PublishedCosts('mixer_enc_dec', 'base', 212e6, WHOLE_MODEL, 'REMIXERS, table 4'),
    PublishedCosts('t5_1_1', 'hyper_mixer_paper', 11e6, ENCODER_PART, 'HyperMixer, appendix B.2'),
    PublishedCosts('hyper_mixer', 'hyper_mixer_paper', 11e6, ENCODER_PART, 'HyperMixer, appendix B.2'),
    PublishedCosts('gmlp', 'gmlp_paper_base', 130e6, ENCODER_PART, 'gMLP, table 5', 158.0e9),
    PublishedCosts('gmlp', 'gmlp_paper_large', 365e6, ENCODER_PART, 'gMLP, table 5', 430.1e9),
    PublishedCosts('amlp', 'gmlp_paper_base', 109e6, ENCODER_PART, 'gMLP, table 5', 128.9e9),
    PublishedCosts('amlp', 'gmlp_paper_large', 316e6, ENCODER_PART, 'gMLP, table 5', 370.3e9),
)


def print_comparison(args: argparse.Namespace) -> None:
    """Prints a table of models with their costs relative to the first model, and a table of published sizes."""
    (feature_lengths,) = arguments.load_macro_values(args, *LENGTHS_MACRO, defaults=LENGTHS_MACRO)
    sizes, models = arguments.split_names(args.compare or 'tiny,small,base'), args.models or MODELS
    lengths = resolve_feature_lengths(batch_formats.ENCODER_DECODER, feature_lengths)
    # Without lengths, sublayers with a parameter for each position have their default size.
    settings = {} if feature_lengths is None else {'TASK_FEATURE_LENGTHS': lengths}
    words = ('model', 'size')
    table = console.build_table(*words, 'parameters', 'ratio', 'forward FLOPs', 'ratio', words=words)
    for size in sizes:
        rows = {model: _count_shipped_model_costs(model, size, lengths, **settings) for model in models}
        first = rows[models[0]]
        for model, count in rows.items():
            parameters, flops = count.total_parameters, count.total_forward_flops
            ratios = f'{parameters / first.total_parameters:.3f}', f'{flops / first.total_forward_flops:.3f}'
            table.add_row(model, size, f'{parameters:,}', ratios[0], format_quantity(flops), ratios[1])
        table.add_section()
    example = describe_feature_lengths(batch_formats.ENCODER_DECODER, lengths)
    note = f'ratios to {models[0]}; one example of {example}; FLOPs: {COUNTED_OPERATIONS}'
    console.print_with_rich(table, note, _build_published_table())


def _build_published_table() -> Table:
    words = ('model', 'size', 'part', 'source')
    table = console.build_table('model', 'size', 'paper', 'ours', 'ratio', 'part', 'source', words=words)
    for figure in PUBLISHED_COSTS:
        count = _count_shipped_model_costs(figure.model, figure.size)
        parameters, flops = count.total_parameters, count.total_forward_flops
        if figure.part == ENCODER_PART:
            parameters = sum(n for path, n in count.parameters.items() if path[0] in ('encoder', 'token_embedder'))
            flops = sum(flops for path, flops in count.forward_flops.items() if path[:1] == ('encoder',))
        pairs: list[tuple[float, float, str]] = [(figure.parameters, parameters, figure.part)]
        if figure.flops:
            pairs.append((figure.flops, flops, 'forward FLOPs, 512 tokens'))
        for paper, ours, part in pairs:
            numbers = format_quantity(paper), format_quantity(ours), f'{ours / paper:.3f}'
            table.add_row(figure.model, figure.size, *numbers, part, figure.source)
    return table


def _count_shipped_model_costs(
    model: str, size: str, feature_lengths: Mapping[str, int] | None = None, **settings: object
) -> ModelCounts:
    built = build_model(f'models/{model}.gin', f'sizes/{size}.gin', **settings)
    return model_counts.count_model_costs(built, feature_lengths)


def print_sharding(args: argparse.Namespace) -> None:
    """Prints the sharding of each parameter. The devices need not be present."""
    model, partitioner, devices, lengths = load_model_macros(args, 'MODEL', 'PARTITIONER', 'DEVICES', *LENGTHS_MACRO)
    described = dataclasses.replace(
        partitioner, devices=Hardware(devices=args.devices or devices).require_num_devices()
    )
    shapes = batch_formats.get_batch_shapes(model.model_type, resolve_feature_lengths(model.model_type, lengths))
    rows = described.list_sharding_rows(interface.compute_param_shapes(model, shapes))
    local, total = sum(row.bytes_per_device for row in rows), sum(map(_count_total_bytes, rows))
    split = sum(_count_total_bytes(row) for row in rows if row.bytes_per_device < _count_total_bytes(row))
    console.print_with_rich(
        f'{described.mesh.size} devices, {mesh.format_mesh_shape(described.mesh.shape)}',
        build_sharding_table(rows),
        f'parameters in float32: {local / 2**20:,.1f} MiB on each device of {total / 2**20:,.1f} MiB in all; '
        f'{100 * split / total:.1f}% of them are split',
        pipe_width=160,
    )


def build_sharding_table(rows: Sequence[ShardingRow]) -> Table:
    """Returns a table with a row for each parameter, a row for each note about a parameter, and a total."""
    words = ('parameter', 'shape', 'logical axes', 'mesh axes')
    table = console.build_table(*words, 'bytes per device', 'share', words=words)
    for row in rows:
        # Shows an axis that is split over two mesh axes as `data+fsdp`, and an unnamed or unsplit axis as a dash.
        axes = [
            ', '.join('+'.join(axis) if isinstance(axis, tuple) else axis or '-' for axis in names)
            for names in (row.logical_axes, row.mesh_axes)
        ]
        size = f'{row.bytes_per_device:,}', _format_fraction(row.bytes_per_device, _count_total_bytes(row))
        table.add_row(row.name, ' x '.join(map(str, row.shape)), *axes, *size)
        if row.note:
            table.add_row(f'  {row.note}')
    table.add_section()
    local = sum(row.bytes_per_device for row in rows)
    table.add_row('total', '', '', '', f'{local:,}', _format_fraction(local, sum(map(_count_total_bytes, rows))))
    return table


def _count_total_bytes(row: ShardingRow) -> int:
    return math.prod(row.shape) * _FLOAT32_BYTES


def _format_fraction(part: int, whole: int) -> str:
    """Formats a fraction as `1/8`, or as a percentage if it is not the reciprocal of an integer."""
    if whole % part == 0:
        return f'1/{whole // part}' if whole != part else 'all'
    return f'{100 * part / whole:.1f}%'
