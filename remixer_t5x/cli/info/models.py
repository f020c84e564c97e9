"""`remixer-t5x info --compare`: all shipped models side by side, and the papers' figures next to ours."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from remixer_t5x.api.building import build_model
from remixer_t5x.cli import console
from remixer_t5x.cli.info import hyper_mixing
from remixer_t5x.cli.info.model import checked_lengths
from remixer_t5x.costs import counts, papers
from remixer_t5x.costs.counts import Counts
from remixer_t5x.costs.table import described_lengths, quantity
from remixer_t5x.data.frames import ENCODER_DECODER

# Files of models/ that are shown; the first is what the others are compared to.
MODELS = (
    *('t5_1_1', 'remixer', 'mixer_enc', 'mixer_enc_dec', 'hyper_mixer', 'linear_transformer', 'fnet'),
    *('gmlp', 'gmlp_mixer', 'amlp', 'tim'),
)


def show(sizes: Sequence[str], models: Sequence[str], feature_lengths: Mapping[str, int] | None) -> None:
    """Prints two tables.

    Args:
        sizes: names of files in sizes/.
        models: names of files in models/; the first is what the others are compared to.
        feature_lengths: `inputs` and `targets` in tokens.

    Raises:
        UserError: there is no such size or model, or a length is missing.
    """
    lengths = checked_lengths(ENCODER_DECODER, feature_lengths)
    table = console.table(*('model', 'size', 'parameters', 'ratio', 'forward FLOPs', 'ratio'), words=('model', 'size'))
    for size in sizes:
        baseline = None
        for model in models:
            counted = _count(model, size, lengths)
            baseline = baseline or counted
            table.add_row(
                model,
                size,
                f'{counted.total_parameters:,}',
                _ratio(counted.total_parameters, baseline.total_parameters),
                quantity(counted.total_forward_flops),
                _ratio(counted.total_forward_flops, baseline.total_forward_flops),
                end_section=model == models[-1],
            )
    line = 'matrix products and Fourier transforms, a multiply and an add being two'
    line = f'ratios to {models[0]}; one example of {described_lengths(lengths)}; {line}'
    console.show(table, line, _papers_table(lengths), _appendix_d(512, 256, 512))


def _papers_table(feature_lengths: Mapping[str, int]) -> Table:
    table = console.table(
        *('model', 'size', 'paper', 'ours', 'ratio', 'of', 'source'), words=('model', 'size', 'of', 'source')
    )
    for figure in papers.FIGURES:
        counted = _count(figure.model, figure.size, {**feature_lengths, 'inputs': 512})
        ours, flops = _part(counted, figure.part)
        table.add_row(
            figure.model,
            figure.size,
            quantity(figure.parameters),
            quantity(ours),
            f'{ours / figure.parameters:.3f}',
            figure.part,
            figure.source,
        )
        if figure.flops:
            cells = (
                quantity(figure.flops),
                quantity(flops),
                f'{flops / figure.flops:.3f}',
                'forward FLOPs, 512 tokens',
            )
            table.add_row(figure.model, figure.size, *cells, figure.source)
    return table


def _appendix_d(length: int, embed: int, hidden: int) -> str:
    paper = hyper_mixing.paper_operations(length, embed, hidden)
    ours = hyper_mixing.xla_operations(length, embed, hidden)
    sizes = f"{length} tokens, d {embed}, d' {hidden}"
    return (
        f'one tied HyperMixing layer, {sizes}: {paper:,} operations by the formula of its appendix D, '
        f'{ours:,.0f} as XLA counts ours ({ours / paper:.3f})'
    )


def _part(counted: Counts, part: str) -> tuple[int, float]:
    """Parameters and forward FLOPs of what a paper counted."""
    if part == papers.WHOLE:
        return counted.total_parameters, counted.total_forward_flops
    inside = ('encoder', 'token_embedder')
    parameters = sum(count for path, count in counted.parameters.items() if path[0] in inside)
    return parameters, sum(flops for path, flops in counted.forward_flops.items() if path[:1] == ('encoder',))


def _count(model: str, size: str, feature_lengths: Mapping[str, int]) -> Counts:
    return counts.count(build_model(f'models/{model}.gin', f'sizes/{size}.gin'), feature_lengths)


def _ratio(ours: float, baseline: float) -> str:
    return f'{ours / baseline:.3f}'
