"""`remixer-t5x infer`: a model on texts, to JSON lines; gin builds the arguments (configs/runs/infer.gin)."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from remixer_t5x.checkpoints import saved_params, watch
from remixer_t5x.data import pipeline
from remixer_t5x.devices import collectives, partition
from remixer_t5x.errors import UserError
from remixer_t5x.evaluation import predictions
from remixer_t5x.inference import text_outputs
from remixer_t5x.inference.text_inputs import TextInputs
from remixer_t5x.training import progress

# Seconds between two lines of progress where there is no terminal.
SAY_EVERY = 10.0


def run(
    model: Any,
    partitioner: partition.Partitioner,
    vocabulary: Any,
    checkpoint: str,
    decoding: predictions.Decoding,
    inputs: TextInputs,
    output: str = '-',
    refuse_long: bool = False,
) -> None:
    """Writes a prediction for each text, in order; an output that is there already is continued.

    Args:
        model: the model that was trained.
        partitioner: where parameters go.
        vocabulary: the seqio vocabulary it was trained with.
        checkpoint: one checkpoint, or a MODEL_DIR (its newest).
        decoding: how predictions are made.
        inputs: the texts.
        output: a file, or '-' for standard output.
        refuse_long: stop at a text that is longer than `decoding` allows, instead of cutting it.
    """
    if jax.process_count() > 1 and (inputs.is_stdin or output == '-'):
        raise UserError('with several hosts, --input and --output must be files that all of them see')
    pipeline.check_ids('VOCABULARY', vocabulary, model.vocab_size)
    # The newest one, where it is a MODEL_DIR: the same on every host.
    folder = collectives.broadcast(str(saved_params.find_step(checkpoint, watch.SETTING)))
    out = text_outputs.Output(output, {'checkpoint': folder, 'decoder': text_outputs.name_of(decoding.decoder)})
    # All have read the output before the first one goes on to write it.
    collectives.barrier()
    texts = iter(inputs)
    text_outputs.skip_done(texts, out, inputs.shown)
    params = _restore(model, partitioner, vocabulary, folder, decoding)
    eos_id = 1 if vocabulary.eos_id is None else int(vocabulary.eos_id)
    predictor = predictions.Predictor(model, partitioner, decoding, eos_id)
    codec = text_outputs.Texts(vocabulary, decoding.feature_lengths['inputs'], refuse_long)
    # Whoever types texts wants an answer to each.
    window = 1 if inputs.is_stdin and sys.stdin.isatty() else decoding.batch_size * text_outputs.WINDOW_BATCHES
    if jax.process_index():
        out = _Silent(out)
    with contextlib.closing(out), _Reporter(inputs, out.counts) as reporter:
        text_outputs.run(texts, out, codec, text_outputs.predict_with(predictor, params), window, reporter.update)
    reporter.say_end(out)


def _restore(model: Any, partitioner: partition.Partitioner, vocabulary: Any, folder: str, decoding) -> Any:
    lengths, size = decoding.feature_lengths, decoding.batch_size
    shapes = {'encoder_input_tokens': (size, lengths['inputs']), 'decoder_target_tokens': (size, lengths['targets'])}
    abstract = saved_params.abstract_params(model, shapes, partitioner)
    record = pipeline.vocabulary_record(vocabulary)
    return saved_params.restore_params(folder, abstract, record, watch.SETTING)


class _Silent(text_outputs.Output):
    """The output of the other hosts: they compute with the first one and write nothing."""

    def __init__(self, output: text_outputs.Output):
        self.path, self.hashes, self.counts = output.path, output.hashes, output.counts

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        self.counts.written += sum(1 for _ in rows)

    def close(self) -> None:
        pass


class _Reporter:
    """Progress on standard error: a bar on a terminal, else a line now and then; a closing line in both cases."""

    def __init__(self, inputs: TextInputs, counts: text_outputs.Counts):
        self._inputs, self._start, self._said = inputs, time.monotonic(), time.monotonic()
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

    def update(self, counts: text_outputs.Counts) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=counts.written, description=self._text(counts))
        elif time.monotonic() - self._said >= SAY_EVERY:
            self._said = time.monotonic()
            self._say(self._text(counts))

    def say_end(self, output: text_outputs.Output) -> None:
        counts = output.counts
        new, seconds = counts.written - counts.before, time.monotonic() - self._start
        cut = f', {counts.cut:,} of all texts cut' if counts.cut else ''
        place = '' if output.is_stdout else f', {counts.written:,} in {output.path}'
        self._say(f'{new:,} predictions in {progress.duration(seconds)}{place}{cut}')

    def _text(self, counts: text_outputs.Counts) -> str:
        of = '' if self._total is None else f' of {self._total:,}'
        rate = (counts.written - counts.before) / max(time.monotonic() - self._start, 1e-9)
        return f'{counts.written:,}{of} predictions · {rate:.1f} a second'

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, markup=False)
