"""Implements `convert --to_shared` and `--push_to_hub`: writes a self-contained folder with a model card.

The model card (README.md) is generated from the records of the model's run.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from markupsafe import Markup

from remixer_t5x.api import saved_models, trained_model
from remixer_t5x.cli.console import print_labeled_line
from remixer_t5x.cli.conversions import check_params_equal, describe_params, export_transformers_model
from remixer_t5x.config import untrusted_gin
from remixer_t5x.data import batch_formats, task_vocabulary
from remixer_t5x.errors import to_one_line
from remixer_t5x.extras.hub import client
from remixer_t5x.extras.reports import curves, overview, run_records
from remixer_t5x.extras.reports.run_records import FOLDER_MACROS, TRAIN, RecordedRun
from remixer_t5x.interop import converted_checkpoint, shared_folder
from remixer_t5x.interop.huggingface.traced_modules import UnsupportedModelError
from remixer_t5x.models import interface
from remixer_t5x.run_folder import model_dir

CARD_FILE, LOSS_CURVE_FILE, TEMPLATE = 'README.md', 'loss.png', 'model_card.md.jinja'


# Maps each model type to the Hub's `pipeline_tag`.
PIPELINE_TAGS = {
    'encoder_decoder': 'text2text-generation',
    'decoder_only': 'text-generation',
    'encoder_only': 'fill-mask',
    'classifier': 'text-classification',
    'token_labels': 'token-classification',
    'span': 'question-answering',
    'embedding': 'sentence-similarity',
}
_MAX_CELL_LENGTH = 120


@dataclasses.dataclass(frozen=True)
class ModelCard:
    """The content of a model card, except for the settings and metrics of the run.

    Attributes:
        address: the Hub name or folder to pass to `convert --from_hf`.
        auto_class: name of the auto class of transformers that loads the folder; empty if only this package loads it.
        sublayers: maps the name of each stack to the names of the sublayers in its layers.
        versions: versions of packages, from the checkpoint.
        origin: name and commit of the model on the Hub from which the weights were converted, or empty.
        code: names of the modules that model.gin imports from the subfolder `code`.
        missing: names of packages that model.gin imports but the folder does not contain.
    """

    name: str
    address: str
    model_type: str
    parameters: int
    sublayers: Mapping[str, Sequence[str]]
    vocabulary: str
    step: int
    versions: Mapping[str, str]
    auto_class: str = ''
    origin: str = ''
    code: Sequence[str] = ()
    missing: Sequence[str] = ()

    @property
    def needs_trust(self) -> bool:
        """Whether `load` requires trust_gin=True, because model.gin imports modules outside of this package."""
        return bool(self.code or self.missing)


def write_model_card(folder: pathlib.Path, card: ModelCard, run: RecordedRun | None) -> None:
    """Writes README.md, and the loss curve if available, into `folder`; `run` is None for a model without metrics."""
    has_curve = run is not None and bool(run.select_metric_points(TRAIN, 'loss'))
    if run is not None and has_curve:
        curves.plot_loss(f'{run.folder}/{model_dir.METRICS}', folder / LOSS_CURVE_FILE, card.name)
    (folder / CARD_FILE).write_text(
        render_model_card(card, run, LOSS_CURVE_FILE if has_curve else ''), encoding='utf-8'
    )


def render_model_card(card: ModelCard, run: RecordedRun | None, curve: str = '') -> str:
    """Renders README.md; `curve` is the file name of the loss curve, or empty."""
    settings, pipeline = _format_macro_cells(run), PIPELINE_TAGS[card.model_type]
    numbers = overview.summarize_run(run) if run is not None else None
    command = ['remixer-t5x', 'convert', f'--from_hf={card.address}', f'--to=runs/{card.name.rpartition("/")[2]}']
    command += ['--trust_gin'] if card.needs_trust else []
    sublayers = sorted({name.lower() for names in card.sublayers.values() for name in names})
    library = 'transformers' if card.auto_class else 'remixer_t5x'
    metadata = {'library_name': library, 'pipeline_tag': pipeline, 'tags': ['remixer_t5x', *sublayers]}
    return _load_template().render(
        card=card,
        command=Markup(shlex.join(map(to_one_line, command))),
        metadata=metadata,
        code=Markup(_render_example_code(card)),
        numbers=numbers,
        settings=settings,
        results=list(_iterate_metrics(run and run.until(card.step))),
        curve=curve,
        versions=', '.join(f'{name} {version}' for name, version in card.versions.items()),
    )


def _render_example_code(card: ModelCard) -> str:
    # The path of a local folder has no scheme such as `hf://`.
    name = card.address if '://' in card.address or card.address[:1] in '/.~' else f'hf://{card.address}'
    arguments = f'{name!r}{", trust_gin=True" if card.needs_trust else ""}'
    ours = f'import remixer_t5x\n\nmodel = remixer_t5x.load({arguments})'
    if not card.auto_class:
        return ours
    return (
        f'import transformers\n\nmodel = transformers.{card.auto_class}.from_pretrained({card.address!r})\n'
        f'tokenizer = transformers.AutoTokenizer.from_pretrained({card.address!r})\n\n# or\n{ours}'
    )


def _format_macro_cells(run: RecordedRun | None) -> dict[str, str]:
    """Returns the values of the macros as table cells. For privacy, shortens absolute paths to their last component."""
    settings: dict[str, str] = {}
    for name, value in sorted(run.parse_settings().items()) if run is not None else ():
        if (
            re.fullmatch('[A-Z][A-Z0-9_]*', name)
            and name not in FOLDER_MACROS
            and value not in ('None', 'True', 'False')
        ):
            paths = r'(?<![\w/:.])(~|/)[\w.@%+~-]*(/[\w.@%+*?~-]+)+'
            text = re.sub(paths, lambda path: path[0].rpartition('/')[2], value)
            text = to_one_line(text.replace('`', "'").replace('|', '\\|'))
            settings[name] = Markup(text if len(text) <= _MAX_CELL_LENGTH else f'{text[:_MAX_CELL_LENGTH]}...')
    return settings


def _escape_markdown(value: Any) -> str:
    """Escapes a value as one line of plain Markdown text without HTML or links; returns Markup unchanged."""
    if isinstance(value, Markup):
        return value
    return re.sub(r'([\\`*\[\]<>|]|(?<=:)/(?=/))', r'\\\1', to_one_line(str(value)))


def _iterate_metrics(run: RecordedRun | None) -> Iterator[tuple[str, int, str, float]]:
    for kind, record in (run.find_latest_evaluations() if run is not None else {}).items():
        for name, value in record.numbers.items():
            if value is not None:
                yield overview.format_evaluation_name(kind), record.step, name, value


def _load_template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader('remixer_t5x.extras.hub', '.'),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_escape_markdown,
    )
    # JSON is valid YAML.
    environment.filters['json'] = lambda value: Markup(json.dumps(value))
    return environment.get_template(TEMPLATE)


def write_shared_model(args: argparse.Namespace) -> None:
    """Writes the shared folder for `--checkpoint=PATH --to_shared=DIR`."""
    folder = converted_checkpoint.check_folder_is_empty(args.to_shared)
    # Without './', a relative path has the form of a Hub name.
    _write_model_folder(args, folder, folder.name, os.path.join('.', folder))
    print_labeled_line('wrote', f'{folder}, with its model card: {folder / CARD_FILE}')


def push_shared_model(args: argparse.Namespace) -> None:
    """Uploads the model for `--checkpoint=PATH --push_to_hub=NAME`."""
    name = client.check_upload_name(args.push_to_hub)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary, 'model')
        step = _write_model_folder(args, folder, name, name)
        address = client.upload_model(folder, name, bool(args.private), f'Upload the checkpoint of step {step}')
    print_labeled_line('pushed', address)


def _check_end_token_of_inputs(model: Any, lengths: Mapping[str, int]) -> None:
    """Raises UnsupportedModelError if Hugging Face's format would change whether inputs end with the end token.

    Encoder-decoders that are loaded from Hugging Face's format append the end token to their inputs; decoder-only
    models do not append it to prompts.
    """
    ends_inputs = 'inputs' in lengths
    defaults = {batch_formats.ENCODER_DECODER: True, batch_formats.DECODER_ONLY: False}
    if ends_inputs != defaults.get(model.model_type, ends_inputs):
        raise UnsupportedModelError(
            f'its inputs {"end" if ends_inputs else "do not end"} with the end token, unlike in Hugging Face format'
        )


def _write_model_folder(args: argparse.Namespace, folder: pathlib.Path, name: str, address: str) -> int:
    """Writes a checkpoint's weights, configuration, vocabulary and model card to `folder`; returns the step."""
    checkpoint = saved_models.find_checkpoint(args.checkpoint)
    model, vocabulary, lengths = saved_models.read_model(checkpoint)
    gin_text = trained_model.build_gin_text(model, lengths)
    task_vocabulary.check_vocabulary_size('VOCABULARY', vocabulary, model.vocab_size)
    print_labeled_line('reading', checkpoint)
    params, record, step = converted_checkpoint.read_checkpoint(checkpoint)
    auto_class, packages, missing = '', [], []
    try:
        _check_end_token_of_inputs(model, lengths)
        family = export_transformers_model(checkpoint, str(folder), None, model, vocabulary, requires_tokenizer=True)
        auto_class = family.auto_class
    except UnsupportedModelError as refusal:
        print_labeled_line('format', f'remixer_t5x, because {refusal.reason}')
        folder.mkdir(parents=True, exist_ok=True)
        described = {**record, 'vocabulary': task_vocabulary.get_vocabulary_record(vocabulary)}
        shared_folder.write_shared_folder(folder, model, vocabulary, gin_text, params, step, described)
        print_labeled_line('wrote', describe_params(params))
        check_params_equal(params, shared_folder.read_checkpoint(folder)[0], folder)
        if untrusted_gin.find_disallowed_statement(gin_text, checkpoint):
            packages = untrusted_gin.find_imported_packages(gin_text)
            missing = shared_folder.copy_custom_code(folder, packages)
            for package in missing:
                print_labeled_line(
                    'warning', f'{package}, which model.gin imports, is not copied; the model card lists it'
                )
    source = str(record.get('converted_from', ''))
    sublayers = {
        side: list(dict.fromkeys(type(factory()).__name__ for factory in factories))
        for side, factories in interface.list_sublayer_factories(model).items()
    }
    card = ModelCard(
        name=name,
        address=address,
        model_type=model.model_type,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        sublayers=sublayers,
        vocabulary=f'{type(vocabulary).__name__}, {vocabulary.vocab_size:,} ids',
        step=step,
        versions=record.get('versions', {}),
        auto_class=auto_class,
        # For privacy, local folders are not named.
        origin=origin if (origin := client.format_model_name(source)) != source else '',
        code=sorted(set(packages) - set(missing)),
        missing=missing,
    )
    run = saved_models.require_model_dir(checkpoint)
    # Converted models have no metrics.jsonl.
    runs = run_records.read_runs([str(run)]) if (run / model_dir.METRICS).exists() else [None]
    write_model_card(folder, card, runs[0])
    return step
