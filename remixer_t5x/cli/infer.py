"""`remixer-t5x infer`: runs a model on texts, to JSON lines; gin builds the settings (configs/runs/infer.gin)."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from typing import TYPE_CHECKING

from remixer_t5x.cli import arguments, process_flags
from remixer_t5x.cli.command import Command
from remixer_t5x.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress

    from remixer_t5x.evaluate import text_inference
    from remixer_t5x.evaluate.text_inference import TextInference
    from remixer_t5x.evaluate.text_inputs import TextInputs

BASE = ('runs/infer.gin',)
ROOT = 'remixer_t5x.evaluate.text_inference.TextInference'
# For a configuration without labelled rows of one's own, which has no template, and without a vocabulary.
DEFAULTS = {'VOCABULARY': None, 'INPUTS': None, 'DELIMITER': None, 'ENCODING': 'utf-8'}
# Seconds between two lines of progress where there is no terminal.
SAY_EVERY = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin(parser)
    arguments.add_macro(parser, '--checkpoint', arguments.CHECKPOINT, arguments.RUN_HELP, metavar='PATH')
    text = 'a file with a text per line, JSON lines, or rows for the template INPUTS (default: standard input)'
    arguments.add_macro(parser, '--input', 'INPUT', text, metavar='FILE')
    arguments.add_macro(parser, '--field', 'INPUT_FIELD', "the field of JSON lines (default 'text')", metavar='NAME')
    output = 'a file, continued where it ends (default: standard output)'
    arguments.add_macro(parser, '--output', 'OUTPUT', output, metavar='FILE')
    decoder = arguments.add_decoder(parser, 'INFER_BATCH_SIZE')
    arguments.add_macro(parser, '--mesh', 'MESH', arguments.MESH_HELP, metavar='AXES')
    embed = "write the encoder's output to --output, a .npz or .parquet file: one vector a text, or also one a token"
    decoder.add_argument('--embed', choices=('sentences', 'tokens'), nargs='?', const='sentences', help=embed)
    pooling = 'with --embed: a text is the mean over its tokens (default), or its first token'
    parser.add_argument('--pooling', choices=('mean', 'first'), help=pooling)
    process_flags.add(parser)


def run(args: argparse.Namespace) -> None:
    """Writes a prediction for each text, in order, and continues an output that is there already; with --embed the
    texts' features.
    """
    if args.pooling is not None and args.embed is None:
        raise UserError('--pooling is read with --embed only; leave it out')
    if args.embed is not None:
        process_flags.refuse(args, 'embeddings are written by one process')
    arguments.apply_decoder(args)
    load(args)
    with process_flags.together(args):
        settings, template = settings_of(args)
        if args.embed is None:
            _infer(settings, template)
        else:
            _embed(settings, template, args.embed == 'tokens', args.pooling or 'mean')


def load(args: argparse.Namespace) -> None:
    """Reads the gin files and flags."""
    arguments.load(args, ROOT, base=BASE, defaults=DEFAULTS)


def settings_of(args: argparse.Namespace) -> tuple[TextInference, str | None]:
    """The settings that were loaded, and the template INPUTS. A configuration that names a task and no VOCABULARY gets
    the vocabulary of the task's features.
    """
    from remixer_t5x.config import resolved
    from remixer_t5x.data import pipeline, task_vocabulary

    settings: TextInference = resolved.call(ROOT)
    template = resolved.macro('INPUTS', None)
    if settings.vocabulary is None:
        # This loads another configuration.
        (mixture,) = arguments.values(args, 'MIXTURE_OR_TASK_NAME', base=BASE)
        settings = dataclasses.replace(settings, vocabulary=task_vocabulary.of(pipeline.get_task(mixture)))
    return settings, template


def other_template(checkpoint: str, given: str | None) -> str | None:
    """A warning if the run of a checkpoint was trained with a template INPUTS that is not the given one."""
    import ast

    from remixer_t5x import untrusted_files
    from remixer_t5x.checkpoints import changes
    from remixer_t5x.run_folder import model_dir

    folder = model_dir.around(checkpoint)
    if folder is None or not (folder / model_dir.CONFIG).is_file():
        return None
    config = untrusted_files.read_text(folder / model_dir.CONFIG, 'restore it, or remove it')
    try:
        trained = ast.literal_eval(changes.bindings(config).get('INPUTS', 'None'))
    except (ValueError, SyntaxError):
        return None
    if trained is None or trained == given:
        return None
    now = 'the texts are read as they are' if given is None else f'INPUTS is now {given!r}'
    advice = f'give --gin.INPUTS="{trained!r}"'
    return f'warning: {folder} was trained with INPUTS = {trained!r}, and {now}; {advice}'


def _warn_of_template(folder: str, template: str | None) -> None:
    import jax

    warning = other_template(folder, template)
    if warning and not jax.process_index():
        print(warning, file=sys.stderr)


def _infer(settings: TextInference, template: str | None) -> None:
    from remixer_t5x.evaluate import text_inference

    settings.check()
    folder = settings.step_folder()
    _warn_of_template(folder, template)
    out = settings.open_output(folder)
    inputs, decoding = settings.inputs, settings.decoding
    texts = iter(inputs)
    text_inference.skip_done(texts, out, inputs.shown)
    predict = text_inference.predict_with(settings.predictor(), settings.restore(folder), settings.model)
    codec = settings.codec()
    # A person who types texts wants an answer to each.
    window = 1 if inputs.is_stdin and sys.stdin.isatty() else decoding.batch_size * text_inference.WINDOW_BATCHES
    with contextlib.closing(out), _Reporter(inputs, out.counts) as reporter:
        text_inference.run(texts, out, codec, predict, window, reporter.update)
    reporter.say_end(out)


def _embed(settings: TextInference, template: str | None, with_tokens: bool, pooling: str) -> None:
    from remixer_t5x.evaluate import embeddings, text_inference

    settings.check(embed=True)
    embeddings.check_output(settings.output)
    folder = settings.step_folder()
    _warn_of_template(folder, template)
    params, predictor = settings.restore(folder), settings.predictor()
    codec = text_inference.Texts(settings.vocabulary, settings.decoding.feature_lengths['inputs'], settings.refuse_long)
    window = settings.decoding.batch_size * text_inference.WINDOW_BATCHES
    with _Reporter(settings.inputs, text_inference.Counts()) as reporter:
        rows = embeddings.rows(iter(settings.inputs), codec, lambda ids: predictor.encode(params, ids), window)
        counts = embeddings.write(settings.output, rows, with_tokens, pooling, reporter.update)
    cut = f', {counts.cut:,} cut' if counts.cut else ''
    print(f'{counts.written:,} texts in {settings.output}{cut}', file=sys.stderr)


class _Reporter:
    """Progress on standard error: a bar on a terminal, else a line now and then; a closing line in both cases."""

    def __init__(self, inputs: TextInputs, counts: text_inference.Counts):
        self._inputs, self._start, self._said = inputs, time.monotonic(), time.monotonic()
        import jax
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._quiet = jax.process_index() > 0
        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._total = None if inputs.is_stdin else sum(1 for _ in inputs)
        self._bar: Progress | None = None
        if counts.before:
            self._say(f'continuing after {counts.before:,} predictions')
        if self._console.is_terminal and not self._quiet and not (inputs.is_stdin and sys.stdin.isatty()):
            self._bar = Progress(BarColumn(bar_width=20), TextColumn('{task.description}'), console=self._console)
            self._task = self._bar.add_task(self._text(counts), total=self._total, completed=counts.before)

    def __enter__(self) -> _Reporter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, counts: text_inference.Counts) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=counts.written, description=self._text(counts))
        elif time.monotonic() - self._said >= SAY_EVERY:
            self._said = time.monotonic()
            self._say(self._text(counts))

    def say_end(self, output: text_inference.Output) -> None:
        counts = output.counts
        new, seconds = counts.written - counts.before, time.monotonic() - self._start
        from remixer_t5x.train import progress

        cut = f', {counts.cut:,} of all texts cut' if counts.cut else ''
        place = '' if output.is_stdout else f', {counts.written:,} in {output.path}'
        self._say(f'{new:,} predictions in {progress.duration(seconds)}{place}{cut}')

    def _text(self, counts: text_inference.Counts) -> str:
        of = '' if self._total is None else f' of {self._total:,}'
        rate = (counts.written - counts.before) / max(time.monotonic() - self._start, 1e-9)
        return f'{counts.written:,}{of} predictions · {rate:.1f} a second'

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, markup=False)


COMMAND = Command(
    'infer',
    'run a model on texts, to JSON lines; the same command again continues',
    add_arguments,
    run,
    (
        'remixer-t5x infer --gin_file=experiments/finetune_cogs.gin --checkpoint=runs/cogs --input=sentences.txt '
        '--output=forms.jsonl',
        'remixer-t5x infer --checkpoint=runs/mlm --embed --input=texts.txt --output=embeddings.npz',
    ),
    keeps_buffers=True,
    prints_result=True,
)
