"""`remixer-t5x info`: shows the parameters and FLOPs of each module, and their percentages."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping

from rich.table import Table

from remixer_t5x.cli import arguments, console
from remixer_t5x.costs import counts
from remixer_t5x.costs.counts import TRAINING_FORWARD_PASSES, ModelCounts
from remixer_t5x.data import batch_formats

_FLOAT32_BYTES = 4
# None selects the default lengths of the model type.
LENGTHS_MACRO = {'TASK_FEATURE_LENGTHS': None}


def show(args: argparse.Namespace) -> None:
    """Prints the costs of modules down to level `--depth`, the total costs, and the conventions for counting FLOPs."""
    model, feature_lengths = arguments.load_values(args, 'MODEL', *LENGTHS_MACRO, defaults=LENGTHS_MACRO)
    lengths = check_lengths(model.model_type, feature_lengths)
    count = counts.count_model(model, lengths)
    parameters, training = count.total_parameters, count.training_flops
    console.print_items(
        cost_table(count, args.depth),
        f'{parameters:,} parameters ({parameters / 1e6:,.1f}M), '
        f'{parameters * _FLOAT32_BYTES / 2**20:,.1f} MiB in float32',
        f'one example: {describe_lengths(lengths)}; forward pass {format_quantity(count.total_forward_flops)}FLOPs, '
        'matrix products only, an add and a multiply count as two',
        f'training step per example: {format_quantity(training)}FLOPs ({TRAINING_FORWARD_PASSES} x forward), '
        f'{format_quantity(training / count.tokens)}FLOPs per token',
        pipe_width=110,
    )


def check_lengths(model_type: str, feature_lengths: Mapping[str, int] | None) -> Mapping[str, int]:
    """Returns the feature lengths, by default those of the model type. Raises UserError for any other features."""
    if feature_lengths is None:
        return batch_formats.get_formats(model_type)[0].example
    batch_formats.select_format(model_type, feature_lengths)
    return feature_lengths


@dataclasses.dataclass
class ModuleNode:
    """A module of the model, with the parameters and FLOPs of the module and its submodules."""

    name: str
    parameters: int = 0
    flops: float = 0.0
    children: dict[str, ModuleNode] = dataclasses.field(default_factory=dict)


def module_tree(count: ModelCounts) -> ModuleNode:
    """Returns the tree of modules in order of first use. If a module has a single child, merges the child into it."""
    root = ModuleNode('')
    for path, flops in count.forward_flops.items():
        for node in _path_nodes(root, path):
            node.flops += flops
    for path, parameters in count.parameters.items():
        for node in _path_nodes(root, path[:-1]):
            node.parameters += parameters
    root.children = {name: _merge_only_children(child) for name, child in root.children.items()}
    return root


def _path_nodes(root: ModuleNode, path: tuple[str, ...]) -> Iterator[ModuleNode]:
    node = root
    yield node
    for name in path:
        node = node.children.setdefault(name, ModuleNode(name))
        yield node


def _merge_only_children(node: ModuleNode) -> ModuleNode:
    children = [_merge_only_children(child) for child in node.children.values()]
    node.children = {child.name: child for child in children}
    if len(children) == 1 and (node.parameters, node.flops) == (children[0].parameters, children[0].flops):
        return dataclasses.replace(children[0], name=f'{node.name}/{children[0].name}')
    return node


def cost_table(count: ModelCounts, depth: int) -> Table:
    """Returns a table of the modules in the first `depth` levels; each row includes the costs of submodules."""
    root = module_tree(count)
    table = console.build_table('module', 'parameters', '%', 'forward FLOPs', '%', words=('module',))

    def add_rows(node: ModuleNode, level: int) -> None:
        shares = [
            f'{100 * part / whole:.1f}' if whole else '-'
            for part, whole in ((node.parameters, root.parameters), (node.flops, root.flops))
        ]
        table.add_row(
            '  ' * level + node.name, f'{node.parameters:,}', shares[0], format_quantity(node.flops), shares[1]
        )
        for child in node.children.values() if level + 1 < depth else ():
            add_rows(child, level + 1)

    for node in root.children.values():
        add_rows(node, 0)
    if outside := count.forward_flops.get(()):
        add_rows(ModuleNode('loss (outside modules)', 0, outside), 0)
    table.add_section()
    add_rows(ModuleNode('total', root.parameters, root.flops), 0)
    return table


def describe_lengths(feature_lengths: Mapping[str, int]) -> str:
    """Formats feature lengths, for example as `512 input and 114 target tokens`."""
    parts = (f'{length} {name.removesuffix("s")}' for name, length in sorted(feature_lengths.items()))
    return ' and '.join(parts) + ' tokens'


def format_quantity(number: float) -> str:
    """Formats a number with three digits and a decimal prefix, such as `1.23 G`."""
    for prefix in ('', 'k', 'M', 'G', 'T', 'P'):
        if number < 999.5:
            return f'{number:.3g} {prefix}'
        number /= 1000
    return f'{number:.3g} E'
