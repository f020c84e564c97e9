"""`remixer-t5x info --compare`: compares shipped models with each other, and published sizes with computed sizes."""

import argparse
import dataclasses
from collections.abc import Mapping

from rich.table import Table

from remixer_t5x.api.building import build_model
from remixer_t5x.cli import arguments, console
from remixer_t5x.cli.info.model import LENGTHS_MACRO, check_lengths, describe_lengths, format_quantity
from remixer_t5x.costs import counts
from remixer_t5x.costs.counts import ModelCounts
from remixer_t5x.data.batch_formats import ENCODER_DECODER

# Names of the files in models/ to compare; ratios are relative to the first model.
MODELS = (
    *('t5_1_1', 'modern_t5', 'remixer', 'mixer_enc', 'mixer_enc_dec', 'hyper_mixer', 'linear_transformer', 'fnet'),
    *('gmlp', 'gmlp_mixer', 'amlp', 'tim'),
)
# Papers count the parameters of the whole encoder-decoder, or of the encoder and its embedding (BERT, classifiers).
WHOLE_MODEL, ENCODER_PART = 'whole model', 'encoder and embedding'


@dataclasses.dataclass(frozen=True)
class PublishedFigure:
    """The number of parameters that a paper reports for a model; `part` is WHOLE_MODEL or ENCODER_PART.

    `flops` is the reported number of FLOPs of a forward pass over 512 tokens; a multiply and an add count as two.
    """

    model: str
    size: str
    parameters: float
    part: str
    source: str
    flops: float | None = None


PUBLISHED_FIGURES = (
    PublishedFigure('t5_1_1', 'base', 248e6, WHOLE_MODEL, 'REMIXERS, table 1'),
    # The table calls this row T5.1.1, but its number of parameters is that of the original T5-large; T5.1.1 has 783M.
    PublishedFigure('t5_1_0', 'large', 738e6, WHOLE_MODEL, 'REMIXERS, table 4 (there T5.1.1)'),
    PublishedFigure('remixer_scaled', 'scaled_base', 224e6, WHOLE_MODEL, 'REMIXERS, table 1'),
    PublishedFigure('remixer', 'base', 324e6, WHOLE_MODEL, 'REMIXERS, table 1 (302M in table 4)'),
    PublishedFigure('mixer_enc', 'base', 212e6, WHOLE_MODEL, 'REMIXERS, table 4'),
    PublishedFigure('mixer_enc_dec', 'base', 212e6, WHOLE_MODEL, 'REMIXERS, table 4'),
    PublishedFigure('t5_1_1', 'hyper_mixer_paper', 11e6, ENCODER_PART, 'HyperMixer, appendix B.2'),
    PublishedFigure('hyper_mixer', 'hyper_mixer_paper', 11e6, ENCODER_PART, 'HyperMixer, appendix B.2'),
    PublishedFigure('gmlp', 'gmlp_paper_base', 130e6, ENCODER_PART, 'gMLP, table 5', 158.0e9),
    PublishedFigure('gmlp', 'gmlp_paper_large', 365e6, ENCODER_PART, 'gMLP, table 5', 430.1e9),
    PublishedFigure('amlp', 'gmlp_paper_base', 109e6, ENCODER_PART, 'gMLP, table 5', 128.9e9),
    PublishedFigure('amlp', 'gmlp_paper_large', 316e6, ENCODER_PART, 'gMLP, table 5', 370.3e9),
)


def show(args: argparse.Namespace) -> None:
    """Prints a table of models with their costs relative to the first model, and a table of published sizes."""
    (feature_lengths,) = arguments.load_values(args, *LENGTHS_MACRO, defaults=LENGTHS_MACRO)
    sizes, models = arguments.split_names(args.compare or 'tiny,small,base'), args.models or MODELS
    lengths = check_lengths(ENCODER_DECODER, feature_lengths)
    words = ('model', 'size')
    table = console.build_table(*words, 'parameters', 'ratio', 'forward FLOPs', 'ratio', words=words)
    for size in sizes:
        rows = {model: _count_model_costs(model, size, lengths) for model in models}
        first = rows[models[0]]
        for model, count in rows.items():
            parameters, flops = count.total_parameters, count.total_forward_flops
            parameters_ratio = f'{parameters / first.total_parameters:.3f}'
            flops_ratio = f'{flops / first.total_forward_flops:.3f}'
            table.add_row(model, size, f'{parameters:,}', parameters_ratio, format_quantity(flops), flops_ratio)
        table.add_section()
    counted = 'matrix products and Fourier transforms; a multiply and an add count as two'
    note = f'ratios to {models[0]}; one example of {describe_lengths(lengths)}; {counted}'
    console.print_items(table, note, _papers_table(lengths))


def _papers_table(feature_lengths: Mapping[str, int]) -> Table:
    words = ('model', 'size', 'part', 'source')
    table = console.build_table('model', 'size', 'paper', 'ours', 'ratio', 'part', 'source', words=words)
    for figure in PUBLISHED_FIGURES:
        count = _count_model_costs(figure.model, figure.size, {**feature_lengths, 'inputs': 512})
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


def _count_model_costs(model: str, size: str, feature_lengths: Mapping[str, int]) -> ModelCounts:
    return counts.count_model(build_model(f'models/{model}.gin', f'sizes/{size}.gin'), feature_lengths)
