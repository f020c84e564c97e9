"""`remixer-t5x infer`: runs a model on texts and writes JSON lines; configured by configs/runs/infer.gin."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Any

from remixer_t5x.cli import arguments, process_flags
from remixer_t5x.cli.arguments import Command
from remixer_t5x.errors import UserError, format_count

if TYPE_CHECKING:
    from remixer_t5x.evaluate import text_inference
    from remixer_t5x.evaluate.text_inference import TextInference

BASE = ('runs/infer.gin',)
ROOT = 'remixer_t5x.evaluate.text_inference.TextInference'
DEFAULTS = {'VOCABULARY': None, 'INPUTS': None, 'DELIMITER': None, 'ENCODING': 'utf-8'}
SECONDS_BETWEEN_LINES = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin_flags(parser)
    arguments.add_macro_flag(parser, '--checkpoint', arguments.CHECKPOINT_MACRO, arguments.RUN_HELP, metavar='PATH')
    text = 'file with one text per line, JSON lines, or rows for the template INPUTS (default: standard input)'
    arguments.add_macro_flag(parser, '--input', 'INPUT', text, metavar='FILE')
    arguments.add_macro_flag(
        parser, '--field', 'INPUT_FIELD', "field of JSON lines to read (default 'text')", metavar='NAME'
    )
    output = 'file of JSON lines, which is continued if it exists, or of embeddings (default: standard output)'
    arguments.add_macro_flag(parser, '--output', 'OUTPUT', output, metavar='FILE')
    decoder = arguments.add_decoder_flags(parser, 'INFER_BATCH_SIZE')
    arguments.add_macro_flag(parser, '--mesh', 'MESH', arguments.MESH_HELP, metavar='AXES')
    embed = "write the encoder's output to --output, an .npz file: one vector per text, or one per token too"
    decoder.add_argument('--embed', choices=('sentences', 'tokens'), nargs='?', const='sentences', help=embed)
    pooling = 'with --embed: mean of the tokens, or the first (default: the embedding of the model, if any, or mean)'
    parser.add_argument('--pooling', choices=('mean', 'first'), help=pooling)
    process_flags.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Writes a prediction (or an embedding with --embed) for each text, in order; resumes an existing output file."""
    if args.pooling is not None and args.embed is None:
        raise UserError('--pooling requires --embed; add --embed, or omit --pooling')
    if args.embed is not None:
        process_flags.require_single_process(args, '--embed')
    arguments.apply_decoder_flags(args)
    load_config(args)
    with process_flags.connect_processes(args):
        settings, template = load_settings(args)
        settings.check_settings(args.embed is not None)
        folder = settings.find_checkpoint_folder()
        settings = settings.adapt_to_checkpoint(folder)
        _print_on_first_process(find_template_mismatch(folder, template))
        if args.embed is None:
            _predict_texts(settings, folder)
        else:
            _embed_texts(settings, folder, args)


def load_config(args: argparse.Namespace) -> None:
    """Loads the gin files and flags of the `infer` command."""
    arguments.load_config(args, ROOT, base=BASE, defaults=DEFAULTS)


def load_settings(args: argparse.Namespace) -> tuple[TextInference, str | None]:
    """Returns the inference settings and the INPUTS template. If VOCABULARY is unset, uses the task's vocabulary."""
    from remixer_t5x.config import reference_resolver
    from remixer_t5x.data import pipeline, task_vocabulary

    settings: TextInference = reference_resolver.call_configured(ROOT)
    template = reference_resolver.evaluate_macro('INPUTS', None)
    if settings.vocabulary is None:
        # This call replaces the loaded gin configuration.
        (mixture,) = arguments.load_macro_values(args, 'MIXTURE_OR_TASK_NAME', base=BASE)
        settings = dataclasses.replace(settings, vocabulary=task_vocabulary.get_vocabulary(pipeline.get_task(mixture)))
    return settings, template


def find_template_mismatch(checkpoint: str, template: str | None) -> str | None:
    """Returns a warning if the checkpoint was trained with a different INPUTS template."""
    import json
    import shlex

    from remixer_t5x import untrusted_files
    from remixer_t5x.checkpoints import compatibility
    from remixer_t5x.run_folder import model_dir

    folder = model_dir.find_model_dir(checkpoint)
    if folder is None or not (folder / model_dir.CONFIG).is_file():
        return None
    config = untrusted_files.read_text(folder / model_dir.CONFIG, 'restore or remove the file')
    trained = compatibility.parse_literal(config, 'INPUTS')
    if trained is None or trained == template:
        return None
    now = 'the texts are read as they are' if template is None else f'INPUTS is now {template!r}'
    flag = f'--gin.INPUTS={shlex.quote(json.dumps(trained, ensure_ascii=False))}'
    return f'warning: {folder} was trained with INPUTS = {trained!r}, but {now}; pass {flag}'


def _predict_texts(settings: TextInference, folder: str) -> None:
    from remixer_t5x.evaluate import head_predictions, text_inference

    inputs, decoding, model = settings.inputs, settings.decoding, settings.model
    texts = iter(inputs)
    out = settings.open_output(folder, texts)
    predictor, params = settings.build_predictor(), settings.restore_params(folder)

    def predict(encoded: list[Any], first: int) -> Any:
        if head_predictions.has_head(model):
            return head_predictions.predict_texts(predictor, params, model, encoded)
        return predictor.predict(params, encoded, first)

    codec = settings.build_codec()
    window = decoding.batch_size * text_inference.WINDOW_BATCHES
    if inputs.is_stdin and sys.stdin.isatty():
        print('type a text and press Enter; Ctrl-D ends', file=sys.stderr)
        window = 1  # Print the answer to each line before reading the next line.
    reporter = _ProgressReporter(out.counts)
    with contextlib.closing(out):
        text_inference.write_predictions(texts, out, codec, predict, window, reporter.update)
    reporter.print_summary(out)


def _embed_texts(settings: TextInference, folder: str, args: argparse.Namespace) -> None:
    from remixer_t5x.evaluate import embeddings, text_inference

    embeddings.check_output_path(settings.output)
    params, predictor = settings.restore_params(folder), settings.build_predictor()
    codec = dataclasses.replace(settings.build_codec(), model=None)
    window = settings.decoding.batch_size * text_inference.WINDOW_BATCHES
    records, counts = [], text_inference.TextCounts()
    reporter = _ProgressReporter(counts)
    for record in embeddings.embed_texts(
        iter(settings.inputs), codec, settings.model, predictor, params, window, args.embed == 'tokens', args.pooling
    ):
        records.append(record)
        counts.count_row(record)
        reporter.update(counts)
    embeddings.write_embeddings(settings.output, records)
    truncated = f', {counts.truncated:,} truncated' if counts.truncated else ''
    print(f'{format_count(counts.written, "text")} in {settings.output}{truncated}', file=sys.stderr)


class _ProgressReporter:
    """Prints the number of predictions to standard error during inference, and a summary at the end."""

    def __init__(self, counts: text_inference.TextCounts):
        self._start, self._last_time = time.monotonic(), time.monotonic()
        if counts.before:
            _print_on_first_process(f'continuing after {format_count(counts.before, "prediction")}')

    def update(self, counts: text_inference.TextCounts) -> None:
        if (now := time.monotonic()) - self._last_time >= SECONDS_BETWEEN_LINES:
            self._last_time = now
            rate = (counts.written - counts.before) / max(now - self._start, 1e-9)
            _print_on_first_process(f'{counts.written:,} predictions · {rate:.1f} per second')

    def print_summary(self, output: text_inference.PredictionWriter) -> None:
        from remixer_t5x.train import progress

        counts, seconds = output.counts, time.monotonic() - self._start
        truncated = f', {counts.truncated:,} of {counts.written:,} texts truncated' if counts.truncated else ''
        location = '' if output.is_stdout else f', {counts.written:,} in {output.path}'
        new = format_count(counts.written - counts.before, 'prediction')
        _print_on_first_process(f'{new} in {progress.format_duration(seconds)}{location}{truncated}')


def _print_on_first_process(text: str | None) -> None:
    import jax

    if text and jax.process_index() == 0:
        print(text, file=sys.stderr)


COMMAND = Command(
    'infer',
    'run a model on texts and write JSON lines; run the same command again to continue',
    add_arguments,
    run,
    (
        'remixer-t5x infer --gin_file=experiments/cogs_cpu.gin --checkpoint=runs/cogs --input=sentences.txt '
        '--output=forms.jsonl',
        'remixer-t5x infer --checkpoint=runs/mlm --embed --input=texts.txt --output=embeddings.npz',
    ),
    keeps_buffers=True,
    prints_result=True,
)
