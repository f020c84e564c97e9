"""Runs a model on texts, window by window. Writes results in the order of the input, and continues an interrupted
output.

The output has one JSON object per text: `index`, `input`, `prediction`, `score`, all `predictions` and `scores` where
the decoder gives several, and `cut` if the text was too long. The first line also has the `checkpoint` and `decoder`
that all of them come from. Lines are written whole, so an interrupted output is a prefix of the complete output, except
perhaps for a torn last line.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import classes
from remixer_t5x.evaluate.predictions import Predictor
from remixer_t5x.run_folder import metrics, model_dir

# Texts are sorted by length within a window of this many batches.
WINDOW_BATCHES = 16


@dataclasses.dataclass(frozen=True)
class Texts:
    """Maps text to ids and back, with a vocabulary and the maximum number of tokens of an input, including its end
    token.

    `refuse_long` raises UserError for a longer text instead of cutting it. `ends` adds the end token, which a prompt
    that is to be continued does not have.
    """

    vocabulary: Any
    longest: int
    refuse_long: bool = False
    ends: bool = True

    def encode(self, text: str, index: int) -> tuple[list[int], bool]:
        """Ids with the end token, and whether the text was cut. `index` counts from 0."""
        ids = [int(token) for token in self.vocabulary.encode(text)]
        end = [] if self.vocabulary.eos_id is None or not self.ends else [int(self.vocabulary.eos_id)]
        room = self.longest - len(end)
        if len(ids) > room and self.refuse_long:
            raise UserError(
                f'input {index + 1} has {len(ids) + len(end):,} tokens, more than the {self.longest} of '
                "TASK_FEATURE_LENGTHS['inputs']; give REFUSE_LONG = False to cut it, or a larger length"
            )
        return ids[:room] + end, len(ids) > room


@dataclasses.dataclass
class Counts:
    """Texts written by this run and the runs that it continues, and how many of them were cut; `before` is the number
    of earlier texts.
    """

    written: int = 0
    cut: int = 0
    before: int = 0


class Output:
    """The file (or standard output) that predictions go to.

    `whose` is the `checkpoint` and `decoder` of the predictions. Raises UserError if the file has predictions of
    another source, or cannot be read or written.
    """

    def __init__(self, path: str, whose: dict[str, str]):
        self.path, self._whose = path, whose
        self.hashes: list[str] = []
        self.counts = Counts()
        self._file: TextIO | None = None
        if not self.is_stdout:
            self.path = os.path.abspath(os.path.expanduser(path))
            self._read()

    @property
    def is_stdout(self) -> bool:
        return self.path == '-'

    def _read(self) -> None:
        """What an interrupted run has written. A torn last line is removed when writing starts."""
        self._whole = 0
        if not os.path.exists(self.path):
            return
        advice = 'give another --output, or remove it'
        with untrusted_files.user_errors(self.path, advice):
            # The score of an impossible text is -inf, which JSON lacks.
            for line in untrusted_files.json_lines(self.path, odd_numbers=True):
                if not line.ended:
                    break
                if line.error or not isinstance(line.value, dict):
                    raise UserError(f'{self.path} line {line.number} is not a prediction of ours; {advice}')
                self._check(line.value, line.number - 1)
                self._whole += line.size
        self.counts.before = self.counts.written

    def _check(self, row: dict[str, Any], number: int) -> None:
        try:
            known = {name: row[name] for name in self._whose} if number == 0 else self._whose
            index, digest = row['index'], hash_of(row['input'])
        except (KeyError, AttributeError) as error:
            raise UserError(
                f'{self.path} line {number + 1} is not a prediction of ours; give another --output, or remove it'
            ) from error
        for name, value in self._whose.items():
            if known[name] != value:
                raise UserError(
                    f'{self.path} was made with {name} {known[name]}, and this run has {value}; give another --output'
                )
        if index != number:
            raise UserError(f'{self.path} line {number + 1} is prediction {index}, not {number}; remove the file')
        self.hashes.append(digest)
        self.counts.written += 1
        self.counts.cut += bool(row.get('cut'))

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Appends the rows and flushes, so that they survive an interruption."""
        text = ''
        for row in rows:
            whose = {} if self.counts.written else self._whose
            text += json.dumps({**row, **whose}, ensure_ascii=False) + '\n'
            self.counts.written += 1
            self.counts.cut += bool(row.get('cut'))
        with metrics.writing(model_dir.absolute(self.path)):
            file = self._opened()
            file.write(text)
            file.flush()

    def _opened(self) -> TextIO:
        if self.is_stdout:
            return sys.stdout
        if self._file is None:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            self._file = open(self.path, 'a', encoding='utf-8', newline='\n')  # noqa: SIM115 (closed by `close`)
            self._file.truncate(self._whole)
        return self._file

    def close(self) -> None:
        """Closes the file; the counts remain available."""
        if self._file is not None:
            self._file.close()


def hash_of(text: str) -> str:
    """A hash of a text, 16 hex digits."""
    return hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]


def name_of(decoder: Any) -> str:
    """The decoder and its settings, the same in every process."""
    return re.sub(r'<function (\S+) at 0x[0-9a-f]+>', r'\1', repr(decoder))


def skip_done(texts: Iterator[str], output: Output, shown: str) -> None:
    """Skips the texts that the output already has. Raises UserError, with the name `shown`, if the texts differ."""
    for index, digest in enumerate(output.hashes):
        text = next(texts, None)
        if text is None:
            raise UserError(
                f'{output.path} has {len(output.hashes):,} predictions and {shown} only {index:,} texts; '
                'give the same input, or another --output'
            )
        if hash_of(text) != digest:
            raise UserError(
                f'{output.path} line {index + 1} belongs to another text than line {index + 1} of {shown}; '
                'give the same input, or another --output'
            )


def run(
    texts: Iterator[str],
    output: Output,
    codec: Texts,
    predict: Callable[[list[list[int]], int], Any],
    window: int,
    after_window: Callable[[Counts], None] = lambda counts: None,
) -> None:
    """Predicts for all of `texts`, which follow the texts that `output` already has, and writes the predictions.

    Args:
        texts: the remaining texts.
        output: where predictions are written.
        codec: maps text to ids and back.
        predict: (ids of each text, index of the first) -> `predictions.Prediction` of each.
        window: number of texts at a time.
        after_window: called with the counts after each window.
    """
    while chunk := list(itertools.islice(texts, window)):
        first = output.counts.written
        encoded = [codec.encode(text, first + row) for row, text in enumerate(chunk)]
        found = predict([ids for ids, _ in encoded], first)
        rows = []
        for row, (text, (_, cut), prediction) in enumerate(zip(chunk, encoded, found, strict=True)):
            decoded = prediction.decoded(codec.vocabulary)
            record = {'index': first + row, 'input': text, 'prediction': decoded[0], 'score': prediction.scores[0]}
            if len(decoded) > 1:
                record |= {'predictions': decoded, 'scores': prediction.scores}
            rows.append(record | ({'cut': True} if cut else {}))
        output.write(rows)
        after_window(output.counts)


def predict_with(predictor: Predictor, params: Any, model: Any) -> Callable[[list[list[int]], int], Any]:
    """The `predict` argument of `run`: answers that the model generates, or a classifier's labels, the best first."""
    if classes.is_classifier(model):
        return lambda inputs, first: classes.answers(predictor, params, inputs, model.labels, None)
    return lambda inputs, first: predictor.predict(params, inputs, first)
