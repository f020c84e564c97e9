"""The model card of a shared model: README.md, as the Hugging Face Hub shows it, made from what the run recorded."""

import dataclasses
import json
import pathlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from remixer_t5x.errors import one_line
from remixer_t5x.extras.reports import curves, overview
from remixer_t5x.extras.reports.records import PLACES, TRAIN, Run
from remixer_t5x.run_folder import model_dir

FILE, CURVE, TEMPLATE = 'README.md', 'loss.png', 'model_card.md.jinja'
# What the Hub calls the task of a frame.
PIPELINES = {
    'encoder_decoder': 'text2text-generation',
    'decoder_only': 'text-generation',
    'encoder_only': 'fill-mask',
    'classifier': 'text-classification',
}
KINDS = {
    'encoder_decoder': 'An encoder-decoder',
    'decoder_only': 'A decoder alone',
    'encoder_only': 'A masked language model',
    'classifier': 'A classifier',
}
# transformers' class for a frame.
CLASSES = {
    'encoder_decoder': 'AutoModelForSeq2SeqLM',
    'decoder_only': 'AutoModelForCausalLM',
    'encoder_only': 'AutoModelForMaskedLM',
}
# Shown first; all other macros follow.
_FIRST = (
    *('MIXTURE_OR_TASK_NAME', 'TASK', 'FILES', 'TASK_FEATURE_LENGTHS', 'PACK', 'TRAIN_STEPS', 'BATCH_SIZE'),
    *('OPTIMIZER', 'LEARNING_RATE', 'SCHEDULE', 'DROPOUT_RATE', 'LABEL_SMOOTHING', 'DTYPE', 'SEED'),
    *('INITIAL_CHECKPOINT_PATH',),
)
_DATA = ('MIXTURE_OR_TASK_NAME', 'TASK', 'FILES', 'HF_DATASET')
_LONGEST = 120


@dataclasses.dataclass(frozen=True)
class Card:
    """What a card says that is not in the run's metrics.

    Attributes:
        name: of the model.
        address: what `convert --from_hf` takes: the name on the Hub, or a folder.
        library: 'transformers' or 'remixer_t5x', whose files the folder has.
        frame: of the model.
        parameters: their number.
        sublayers: by stack, the names of the sublayers in one layer.
        vocabulary: in words.
        step: of the checkpoint.
        versions: of packages, from the checkpoint.
        origin: where converted weights came from, or empty.
        needs_trust: whether `load` needs trust_gin=True, because model.gin names modules that are not ours.
        code: names of the modules that the folder has in `code`.
        missing: names of the packages that model.gin imports and the folder lacks.
    """

    name: str
    address: str
    library: str
    frame: str
    parameters: int
    sublayers: Mapping[str, Sequence[str]]
    vocabulary: str
    step: int
    versions: Mapping[str, str]
    origin: str = ''
    needs_trust: bool = False
    code: Sequence[str] = ()
    missing: Sequence[str] = ()


def write(folder: pathlib.Path, card: Card, run: Run | None) -> None:
    """Writes README.md, and the curve if the run has one, into `folder`; `run` is None for a model without metrics."""
    has_curve = run is not None and bool(run.series(TRAIN, 'loss'))
    if run is not None and has_curve:
        curves.plot_loss(f'{run.folder}/{model_dir.METRICS}', folder / CURVE, card.name)
    (folder / FILE).write_text(render(card, run, CURVE if has_curve else ''), encoding='utf-8')


def render(card: Card, run: Run | None, curve: str = '') -> str:
    """The text of README.md; `curve` is the name of a picture next to it, or empty."""
    settings = _settings(run)
    first = {name: settings[name] for name in _FIRST if name in settings}
    others = {name: value for name, value in settings.items() if name not in first}
    kind = f'{KINDS[card.frame]} with {card.parameters:,} parameters'
    command = ['remixer-t5x', 'convert', f'--from_hf={card.address}', f'--to=runs/{card.name.rpartition("/")[2]}']
    return _template().render(
        card=card,
        command=Markup(shlex.join(map(one_line, [*command, *(['--trust_gin'] if card.needs_trust else [])]))),
        metadata=_metadata(card),
        summary=f'{kind}, trained with remixer_t5x.',
        code=Markup(_code(card)),
        training=_training(card, run),
        settings=first,
        others=others,
        data=next((Markup(f'`{settings[name]}`') for name in _DATA if name in settings), 'data that it does not name'),
        results=list(_results(run)),
        curve=curve,
        versions=', '.join(f'{name} {version}' for name, version in card.versions.items()),
    )


def _metadata(card: Card) -> dict[str, Any]:
    sublayers = sorted({name for names in card.sublayers.values() for name in names})
    return {
        'library_name': card.library,
        'pipeline_tag': PIPELINES[card.frame],
        'tags': ['remixer_t5x', *(name.lower() for name in sublayers)],
    }


def _code(card: Card) -> str:
    # A local folder has no scheme.
    name = card.address if '://' in card.address or card.address[:1] in '/.~' else f'hf://{card.address}'
    ours = f'import remixer_t5x\n\nmodel = remixer_t5x.load({name!r}{", trust_gin=True" if card.needs_trust else ""})'
    use = {
        'encoder_decoder': "print(model.generate('The cat <extra_id_0> on the mat.')[0].text)",
        'decoder_only': "print(model.generate('The cat')[0].text)",
        'encoder_only': "print(model.encode(['The cat is on the mat.']).mean.shape)",
        'classifier': "print(model.classify('The cat is on the mat.')[0].texts)",
    }[card.frame]
    if _is_own(card):
        return f'{ours}\n{use}'
    theirs = (
        f'import transformers\n\nmodel = transformers.{CLASSES[card.frame]}.from_pretrained({card.address!r})\n'
        f'tokenizer = transformers.AutoTokenizer.from_pretrained({card.address!r})'
    )
    # `load` takes a BERT only once it is converted.
    return theirs if card.frame == 'encoder_only' else f'{theirs}\n\n# or\n{ours}\n{use}'


def _is_own(card: Card) -> bool:
    return card.library == 'remixer_t5x'


def _training(card: Card, run: Run | None) -> str:
    said = [f'This is the checkpoint of step {card.step:,}.']
    if card.origin:
        said.append(f'Its weights were converted from {card.origin}.')
    if run is not None:
        found = overview.overview(run)
        said.append(found.said)
        if found.tokens_per_second:
            said.append(f'Training read {found.tokens_per_second:,.0f} tokens per second (median).')
    return ' '.join(said)


def _settings(run: Run | None) -> dict[str, str]:
    """The run's macros, without the folders of the machine that it ran on."""
    found = run.settings() if run is not None else {}
    return {
        name: _in_a_cell(_public(value))
        for name, value in sorted(found.items())
        if re.fullmatch('[A-Z][A-Z0-9_]*', name) and name not in PLACES and value not in ('None', 'True', 'False')
    }


def _public(value: str) -> str:
    """The text with only the last part of each absolute path, which may name a person or a project."""
    return re.sub(r'(?<![\w/:.])(~|/)[\w.@%+~-]*(/[\w.@%+*?~-]+)+', lambda path: path[0].rpartition('/')[2], value)


def _in_a_cell(text: str) -> Markup:
    """The text for a code span in a table."""
    text = one_line(text.replace('`', "'").replace('|', '\\|'))
    return Markup(text if len(text) <= _LONGEST else f'{text[:_LONGEST]}...')


def _escaped(value: Any) -> str:
    """The value as plain text in Markdown: on one line, without markup, HTML or links; Markup stays as it is."""
    if isinstance(value, Markup):
        return value
    return re.sub(r'([\\`*\[\]<>|]|(?<=:)/(?=/))', r'\\\1', one_line(str(value)))


def _results(run: Run | None) -> Iterator[tuple[str, int, str, float]]:
    for kind, record in (run.latest() if run is not None else {}).items():
        shown = overview.task_metrics(record) or {
            name: value for name, value in record.numbers.items() if name in overview.OF_LOSS and value is not None
        }
        for name, value in shown.items():
            yield overview.readable(kind), record.step, name, value


def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader('remixer_t5x.extras.hub', '.'),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_escaped,
    )
    # Every JSON value is YAML.
    environment.filters['json'] = lambda value: Markup(json.dumps(value))
    return environment.get_template(TEMPLATE)
