"""Runs a model on windows of texts and writes the predictions in order. Resumes an interrupted run.

The output contains one JSON object per text: `index`, `input`, `prediction`, `score`, lists of `predictions` and
`scores` if the decoder returns several, and `truncated` if the text was truncated. The first line also contains the
`checkpoint` and `lengths` of all predictions and, if the model generates text, the `decoder` and sampling `seed`. The
output of an interrupted run is the beginning of the complete output.
"""

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO

import jax
from etils import epath

from remixer_t5x import ranges, untrusted_files
from remixer_t5x.checkpoints import checkpoint_paths, compatibility, saved_params
from remixer_t5x.data import batch_formats, fingerprint, task_vocabulary
from remixer_t5x.devices import collectives, partition
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import head_predictions, predictions
from remixer_t5x.models import interface
from remixer_t5x.run_folder import model_dir, object_store

# Number of batches in a window. The texts of a window are sorted by length before they are batched.
WINDOW_BATCHES = 16
_OUTPUT_ADVICE = 'use another --output, or remove it'


@dataclasses.dataclass(frozen=True)
class TextCodec:
    """Encodes texts as at most `longest` tokens, including the end token.

    If `refuse_long` is true, a longer text raises UserError instead of being truncated. `ends` states whether the end
    token is appended: False for prompts that the model continues. `begins` states whether the vocabulary's start tokens
    are kept: False for targets that continue a prompt. `model` is None unless `head_predictions` encodes its inputs.
    """

    vocabulary: Any
    longest: int
    refuse_long: bool = False
    ends: bool = True
    model: Any = None
    begins: bool = True

    def encode(self, text: str, index: int) -> tuple[Any, bool]:
        """Returns the encoded text and whether it was truncated. `index` identifies the text in error messages."""
        if self.model is not None:
            encoded: Any = head_predictions.encode_text(self.model, self.vocabulary, text, self.longest)
            count = encoded.num_tokens
        else:
            start = 0 if self.begins else len(self.vocabulary.encode(''))
            ids = [int(token) for token in self.vocabulary.encode(text)[start:]]
            end = task_vocabulary.get_end_ids(self.vocabulary) if self.ends else []
            encoded, count = ids[: self.longest - len(end)] + end, len(ids) + len(end)
        if count > self.longest and self.refuse_long:
            raise UserError(
                f"the input with index {index} must have at most TASK_FEATURE_LENGTHS['inputs'] = {self.longest} "
                f'tokens, got {count:,}; set REFUSE_LONG = False to truncate it, or increase the length'
            )
        return encoded, count > self.longest


@dataclasses.dataclass
class TextCounts:
    """Counts of written and truncated texts. `before` is the number of texts written by earlier, interrupted runs."""

    written: int = 0
    truncated: int = 0
    before: int = 0

    def count_row(self, row: Mapping[str, Any]) -> None:
        self.written += 1
        self.truncated += bool(row.get('truncated'))


class PredictionWriter:
    """Writes predictions to a file or standard output, and continues the file of an interrupted run.

    `origin` contains the `checkpoint` and the settings that affect the predictions. `texts` are the input texts, and
    `source` is their name in error messages; the constructor skips the texts whose predictions the file contains. If
    `writes` is False, as in all processes except the first, predictions are counted but not written. Raises UserError
    if the file contains predictions of other texts or with a different origin, or cannot be read or written.
    """

    def __init__(self, path: str, origin: Mapping[str, Any], texts: Iterator[str], source: str, writes: bool = True):
        self.path, self._origin, self._writes = path, origin, writes
        self.counts = TextCounts()
        self._file: TextIO | None = None
        self._complete_bytes = 0
        if not self.is_stdout:
            self.path = os.path.abspath(os.path.expanduser(path))
            if os.path.exists(self.path):
                self._skip_predicted_texts(texts, source)

    @property
    def is_stdout(self) -> bool:
        return self.path == '-'

    def _skip_predicted_texts(self, texts: Iterator[str], source: str) -> None:
        """Reads the output of an interrupted run. An incomplete last line is removed when writing starts."""
        with untrusted_files.convert_to_user_errors(self.path, _OUTPUT_ADVICE):
            # Accept -inf, the score of an impossible text, although it is not valid JSON.
            for index, line in enumerate(untrusted_files.read_json_lines(self.path, odd_numbers=True)):
                if not line.ended:
                    break
                row = line.value if isinstance(line.value, dict) else {}
                if row.get('index') != index or row.get('input') != next(texts, False):
                    raise UserError(
                        f'{self.path} line {line.number} is not the prediction of text {index} of {source}; use the '
                        'same input, or another --output'
                    )
                for name, value in self._origin.items() if index == 0 else ():
                    if row.get(name) != value:
                        raise UserError(
                            f'{self.path} was written with {name} {row.get(name)}, but this run uses {value}; '
                            f'{_OUTPUT_ADVICE}'
                        )
                self.counts.count_row(row)
                self._complete_bytes += line.size
        self.counts.before = self.counts.written

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Appends rows and flushes the file, so that the rows survive an interruption."""
        text = ''
        for row in rows:
            origin = {} if self.counts.written else self._origin
            text += json.dumps({**row, **origin}, ensure_ascii=False) + '\n'
            self.counts.count_row(row)
        if not self._writes:
            return
        with object_store.wrap_write_errors(model_dir.to_absolute_path(self.path)):
            if self._file is None and not self.is_stdout:
                os.makedirs(os.path.dirname(self.path), exist_ok=True)
                self._file = open(self.path, 'a', encoding='utf-8', newline='\n')  # noqa: SIM115 (closed by `close`)
                self._file.truncate(self._complete_bytes)
            file = self._file or sys.stdout
            file.write(text)
            file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def write_predictions(
    texts: Iterator[str],
    output: PredictionWriter,
    codec: TextCodec,
    predict: Callable[[list[Any], int], Any],
    window: int,
    after_window: Callable[[TextCounts], None] = lambda counts: None,
) -> None:
    """Predicts all remaining texts and appends the predictions to `output`.

    `predict` is called with encoded texts and the index of the first text, and returns one `Prediction` per text. After
    each group of `window` texts, `after_window` is called with the counts of all texts written so far.
    """
    # Create the file even if there are no texts.
    output.write(())
    while chunk := list(itertools.islice(texts, window)):
        first = output.counts.written
        encoded = [codec.encode(text, first + row) for row, text in enumerate(chunk)]
        answers = predict([text for text, _ in encoded], first)
        rows = []
        for row, (text, (_, truncated), prediction) in enumerate(zip(chunk, encoded, answers, strict=True)):
            decoded = prediction.decode_texts(codec.vocabulary)
            record = {'index': first + row, 'input': text, 'prediction': decoded[0], 'score': prediction.scores[0]}
            if len(decoded) > 1:
                record |= {'predictions': decoded, 'scores': prediction.scores}
            rows.append(record | ({'truncated': True} if truncated else {}))
        output.write(rows)
        after_window(output.counts)


@dataclasses.dataclass(frozen=True)
class TextInference:
    """The settings of `remixer-t5x infer`, configured by gin.

    `vocabulary` is the vocabulary used in training. `checkpoint` is a checkpoint, or a MODEL_DIR whose newest
    checkpoint is used. `inputs` iterates over the texts, such as a `remixer_tasks.pair_inputs.TextInputs`. `output` is
    a file, or '-' for standard output. If `refuse_long` is true, a text that is longer than `decoding` allows raises
    UserError instead of being truncated. `ends_inputs` states whether texts get an end token; False for prompts of
    causal language models.
    """

    model: Any
    partitioner: partition.Partitioner
    vocabulary: Any
    checkpoint: str
    decoding: predictions.Decoding
    inputs: Any
    output: ranges.LocalPath = '-'
    refuse_long: bool = False
    ends_inputs: bool = True

    def check_settings(self, embed: bool = False) -> None:
        """Raises UserError if processes cannot share the output, or if the model or vocabulary is unsuitable."""
        if embed:
            interface.require_method(self.model, 'encode', 'infer --embed')
        elif not head_predictions.has_head(self.model):
            interface.require_method(self.model, 'generate', 'infer without --embed')
        is_distributed = collectives.is_distributed()
        if is_distributed and (self.inputs.is_stdin or self.output == '-'):
            raise UserError(
                f'--input and --output must be files that all processes share, got {self.inputs.path} and '
                f'{self.output}; use files, or --process_count=1'
            )
        task_vocabulary.check_vocabulary_size('VOCABULARY', self.vocabulary, self.model.vocab_size)
        if is_distributed:
            input_signature = fingerprint.compute_file_signature(os.path.expanduser(self.inputs.path))
            collectives.check_same_on_processes(
                {
                    'VOCABULARY': task_vocabulary.get_vocabulary_record(self.vocabulary),
                    'the texts of INPUT': input_signature,
                }
            )

    def find_checkpoint_folder(self) -> str:
        """Returns the folder of the checkpoint to use. All processes return the same folder."""
        return collectives.broadcast(str(checkpoint_paths.find_checkpoint(self.checkpoint, 'CHECKPOINT_PATH')))

    def adapt_to_checkpoint(self, folder: str) -> 'TextInference':
        """Returns settings that append the end token as in training and use the saved lengths unless others are set."""
        record = saved_params.read_record(epath.Path(folder))
        lengths = self.decoding.feature_lengths
        trained = compatibility.parse_literal(str(record.get('config') or ''), 'TASK_FEATURE_LENGTHS') or lengths
        if lengths == trained:
            lengths = record.get(saved_params.LENGTHS_KEY, lengths)
        decoding = dataclasses.replace(self.decoding, feature_lengths=lengths)
        return dataclasses.replace(self, decoding=decoding, ends_inputs='inputs' in trained)

    def open_output(self, folder: str, texts: Iterator[str]) -> PredictionWriter:
        """Opens the output for appending, and skips the texts that it contains. Only the first process writes."""
        record = self.decoding.build_record()
        origin = {
            'checkpoint': folder,
            **({'lengths': record['lengths']} if head_predictions.has_head(self.model) else record),
        }
        output = PredictionWriter(self.output, origin, texts, self.inputs.display_name, writes=jax.process_index() == 0)
        # Wait until all processes have read the output before the first process writes to it.
        collectives.barrier()
        return output

    def restore_params(self, folder: str) -> Any:
        """Restores the parameters of the checkpoint `folder`."""
        lengths, size = self.decoding.feature_lengths, self.decoding.batch_size
        shapes = batch_formats.get_batch_shapes(self.model.model_type, lengths, size)
        abstract = saved_params.get_abstract_params(self.model, shapes, self.partitioner)
        return saved_params.restore_params(
            folder, abstract, task_vocabulary.get_vocabulary_record(self.vocabulary), 'CHECKPOINT_PATH'
        )

    def build_codec(self) -> TextCodec:
        """Returns the codec for input texts."""
        longest = batch_formats.get_max_inference_lengths(self.decoding.feature_lengths)['inputs']
        model = self.model if head_predictions.encodes_texts(self.model) else None
        return TextCodec(self.vocabulary, longest, self.refuse_long, self.ends_inputs, model)

    def build_predictor(self) -> predictions.Predictor:
        return predictions.Predictor(self.model, self.partitioner, self.decoding, self.vocabulary)
