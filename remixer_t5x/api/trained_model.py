"""TrainedModel: a model with parameters and vocabulary that generates, scores, classifies and encodes texts."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from remixer_t5x.base_vocabulary import Vocabulary
from remixer_t5x.data import batch_formats, task_vocabulary
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import embeddings, held_out_loss, predictions
from remixer_t5x.evaluate.text_inference import TextCodec
from remixer_t5x.interop import converted
from remixer_t5x.models import interface
from remixer_t5x.models.decoding import Decoder, Greedy
from remixer_t5x.models.language_model import join_prompts
from remixer_t5x.optim import train_step
from remixer_t5x.run_folder import model_dir

Strings = str | Sequence[str]
GREEDY = Greedy()


class Answer(NamedTuple):
    """The answers of a model to one text.

    Attributes:
        texts: the answers of the decoder, best first, or in the order in which they were sampled.
        scores: the decoder's score of each answer; a log-likelihood for greedy decoding.
        cut: whether the input was truncated.
    """

    texts: list[str]
    scores: list[float]
    cut: bool

    @property
    def text(self) -> str:
        """The first answer."""
        return self.texts[0]


class Encoded(NamedTuple):
    """The encoder's output for texts.

    Attributes:
        hidden: [texts, length, embed] float32, 0 at padding; includes the end token of each text.
        mask: [texts, length] bool, True at tokens.
        mean: [texts, embed] float32, the mean of `hidden` over the tokens of each text.
        cut: [texts] bool, whether each text was truncated.
        sentence: [texts, outputs] float32, the normalized projection of `mean` if the model has one, otherwise `mean`.
    """

    hidden: np.ndarray
    mask: np.ndarray
    mean: np.ndarray
    cut: np.ndarray
    sentence: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained model, as returned by `load`. Methods accept a list of texts or a single text.

    Texts are batched by length, and each new batch shape is compiled once. The result for a text does not depend on the
    other texts or the batch size, except for rounding and for FNet, whose output depends on the padded length.

    Attributes:
        model: a model, whose methods are pure functions of `params`.
        params: parameters, float32 unless `load` was called with a dtype.
        vocabulary: converts between texts and ids: `encode(text)`, `decode(ids)`.
        lengths: maximum tokens of `inputs` and `targets`, including the end token.
        source: the folder of the parameters.
        partitioner: the devices of the parameters.
        batch_size: maximum number of texts in a batch.
        ends_inputs: whether to append the end token to inputs; False for prompts of causal language models.
    """

    model: interface.Model
    params: interface.Params
    vocabulary: Vocabulary
    lengths: Mapping[str, int]
    source: str = ''
    partitioner: Partitioner = dataclasses.field(default_factory=Partitioner)
    batch_size: int = 32
    ends_inputs: bool = True
    _predictors: dict = dataclasses.field(default_factory=dict, repr=False)

    def generate(
        self,
        texts: Strings,
        max_length: int | None = None,
        decoder: Decoder = GREEDY,
        answers: int | None = None,
        seed: int = 0,
        stop_strings: Strings = (),
    ) -> list[Answer]:
        """Generates answers to each text.

        Args:
            texts: the inputs. Long texts are truncated, with `Answer.cut` True.
            max_length: maximum tokens of an answer, including the end token; None for the length of `targets`.
            decoder: `Greedy()`, `Sampling(...)` or `BeamSearch(...)`.
            answers: number of answers to return for each text; None for all answers of the decoder.
            seed: seed for sampling; the index of the text is folded in.
            stop_strings: texts after which an answer ends.

        Raises:
            UserError: `answers` exceeds the decoder's number of answers, or a length is not positive.
        """
        rows, cuts = self._encode_inputs(texts)
        predictor = self._generation_predictor(len(rows), max_length, decoder, seed, stop_strings)
        decoded = predictor.predict(self.params, rows) if rows else []
        if decoded and answers is not None and not 1 <= answers <= len(decoded[0].ids):
            raise UserError(
                f'answers must be from 1 to {len(decoded[0].ids)}, the number of outputs of the decoder, '
                f'got {answers}; type decoder=BeamSearch(beams=N) or decoder=Sampling(num_samples=N)'
            )
        return [
            Answer([self.vocabulary.decode(ids) for ids in row.ids[:answers]], row.scores[:answers], cut)
            for row, cut in zip(decoded, cuts, strict=True)
        ]

    def stream(
        self,
        text: str,
        max_length: int | None = None,
        decoder: Decoder = GREEDY,
        seed: int = 0,
        stop_strings: Strings = (),
    ) -> Iterator[str]:
        """Yields the answer to a text in pieces while it is generated.

        The concatenated pieces are the first answer of `generate` with the same arguments. Raises UserError unless the
        decoder is `Greedy(...)` or `Sampling(...)`.
        """
        (ids,), _ = self._encode_inputs(text)
        predictor, answer, printed = self._generation_predictor(1, max_length, decoder, seed, stop_strings), '', ''
        for answer_ids in predictor.stream(self.params, ids):
            answer = self.vocabulary.decode(answer_ids)
            # An incomplete UTF-8 character is decoded as U+FFFD.
            complete = answer.rstrip('\ufffd')
            if len(complete) > len(printed):
                yield complete[len(printed) :]
                printed = complete
        if answer != printed:
            yield answer[len(printed) :]

    def score(self, inputs: Strings, targets: Strings) -> np.ndarray:
        """Computes log p(target | input), summed over the tokens of the target and its end token: [texts] float32.

        Raises UserError if the numbers of inputs and targets differ, or if a text is too long.
        """
        interface.require_method(self.model, 'score', 'score')
        ids, target_ids = self._encode_pairs(inputs, targets)
        if not ids:
            return np.zeros(0, np.float32)
        length = predictions.bucket_length(max(map(len, target_ids)), self.lengths['targets'])
        return self._predictor(len(ids), length).score(self.params, ids, target_ids)

    def classify(self, texts: Strings) -> list[Answer]:
        """Returns a classifier's labels for each text, most likely first, with their log-likelihoods.

        A regression returns the number, as a text and as a score.
        """
        interface.require_method(self.model, 'classify', 'classify')
        ids, cuts = self._encode_inputs(texts)
        predictor = self._predictor(len(ids), self.lengths['targets'])
        rows = predictor.predict_labels(self.params, ids) if ids else []
        return [Answer(list(row.texts or ()), row.scores, cut) for row, cut in zip(rows, cuts, strict=True)]

    def encode(self, texts: Strings) -> Encoded:
        """Computes the encoder's output for each text and its mean over tokens. Long texts are truncated."""
        interface.require_method(self.model, 'encode', 'encode')
        rows, cuts = self._encode_inputs(texts)
        width = self.model.module.embed_dim
        hidden = np.zeros((len(rows), max(map(len, rows), default=0), width), np.float32)
        mask = np.zeros(hidden.shape[:2], bool)
        encoded = self._predictor(len(rows), self.lengths['targets']).encode(self.params, rows) if rows else []
        for row, states in enumerate(encoded):
            hidden[row, : len(states)], mask[row, : len(states)] = states, True
        mean = (hidden.sum(1) / np.maximum(mask.sum(1, keepdims=True), 1)).astype(np.float32)
        sentence = embeddings.sentence_vectors(self.model, self.params, mean)
        return Encoded(hidden, mask, mean, np.asarray(cuts, bool), sentence)

    def loss(self, batch: Mapping[str, np.ndarray | jax.Array]) -> dict[str, float]:
        """Computes `loss` and `accuracy` per target token, `perplexity` and `tokens` of a batch, without dropout.

        `batch` is from `make_batch`. Raises UserError if it has no target token.
        """
        missing = -len(next(iter(batch.values()))) % self.partitioner.batch_shards
        rows = {name: np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) for name, array in batch.items()}
        return held_out_loss.evaluate(self.params, [rows], self._eval_step, self.partitioner.shard_batch, 'given')

    def make_batch(self, inputs: Strings, targets: Strings) -> dict[str, np.ndarray]:
        """Converts texts to a batch for `loss` or a train step, one row per text. Raises the same errors as `score`."""
        batch = make_batch(*self._encode_pairs(inputs, targets), self.lengths)
        if self.model.model_type != batch_formats.DECODER_ONLY:
            return batch
        joined = join_prompts(batch['encoder_input_tokens'], batch['decoder_target_tokens'])
        return {name: np.asarray(array) for name, array in joined.items()}

    def save(self, folder: str | os.PathLike[str], step: int = 0) -> str:
        """Saves parameters (in float32), vocabulary and gin text to a new or empty MODEL_DIR, and returns its path.

        The folder can be passed to `load`, to `--checkpoint` of commands, and to INITIAL_CHECKPOINT_PATH. `step` is the
        number of the checkpoint.

        Raises:
            UserError: `folder` already has a checkpoint or cannot be written, the model's gin text is unknown, or the
                vocabulary is a custom class.
        """
        text = gin_text(self.model, self.lengths if self.ends_inputs else {'targets': sum(self.lengths.values())})
        target = converted.claim_model_dir(folder)
        if not task_vocabulary.save_vocabulary(self.vocabulary, target / task_vocabulary.FOLDER):
            kind = type(self.vocabulary).__name__
            raise UserError(f'vocabulary must come from remixer_tasks.vocabularies to be saved, got {kind}')
        text = f'{text}\n{task_vocabulary.gin_statements(target)}'
        (target / model_dir.CONVERTED).write_text(text)
        params = jax.tree.map(lambda array: np.asarray(array, np.float32), self.params)
        record = converted.build_record(task_vocabulary.vocabulary_record(self.vocabulary), text, self.source)
        converted.write_checkpoint(target, params, step, record)
        return str(target)

    @functools.cached_property
    def _eval_step(self) -> train_step.CompiledStep:
        step = jax.jit(train_step.make_eval_step(self.model), out_shardings=self.partitioner.replicated)
        return train_step.CompiledStep(step, self.partitioner)

    def _encode_inputs(self, texts: Strings) -> tuple[list[list[int]], list[bool]]:
        """Returns the ids of each text, and whether the text was truncated."""
        codec = TextCodec(self.vocabulary, self.lengths['inputs'], ends=self.ends_inputs)
        pairs = [codec.encode(text, index) for index, text in enumerate(_as_list(texts))]
        return [ids for ids, _ in pairs], [cut for _, cut in pairs]

    def _encode_pairs(self, inputs: Strings, targets: Strings) -> tuple[list[list[int]], list[list[int]]]:
        """Returns the ids of inputs and targets. Raises UserError if their numbers differ or a text is too long."""
        input_texts, target_texts = _as_list(inputs), _as_list(targets)
        _check_pairs(input_texts, target_texts)
        return self._encode_whole(input_texts, 'inputs'), self._encode_whole(target_texts, 'targets')

    def _encode_whole(self, texts: Sequence[str], side: str) -> list[list[int]]:
        codec = TextCodec(self.vocabulary, self.lengths[side], ends=self.ends_inputs or side == 'targets')
        rows = []
        for index, text in enumerate(texts):
            ids, cut = codec.encode(text, index)
            if cut:
                raise UserError(
                    f'text {index} of {side} has more than {self.lengths[side]} tokens; '
                    f"shorten it, or load the model with lengths={{'{side}': N}}"
                )
            rows.append(ids)
        return rows

    def _generation_predictor(
        self, count: int, max_length: int | None, decoder: Decoder, seed: int, stop_strings: Strings
    ) -> predictions.Predictor:
        interface.require_method(self.model, 'generate', 'generate')
        length = self.lengths['targets'] if max_length is None else max_length
        if length < 1:
            raise UserError(f'max_length must be 1 or more, got {max_length}')
        return self._predictor(count, length, decoder, seed, stop_strings)

    def _predictor(
        self, count: int, target_length: int, decoder: Decoder = GREEDY, seed: int = 0, stop_strings: Strings = ()
    ) -> predictions.Predictor:
        """Returns the predictor for `count` texts. Batch sizes are powers of two, because each is compiled."""
        shards = self.partitioner.batch_shards
        size = min(self.batch_size, 1 << max(count - 1, 0).bit_length())
        size = -(-size // shards) * shards
        stop_strings = tuple(_as_list(stop_strings))
        key = (size, target_length, decoder, seed, stop_strings)
        if key not in self._predictors:
            lengths = {'inputs': self.lengths['inputs'], 'targets': target_length}
            decoding = predictions.Decoding(size, lengths, decoder, seed, stop_strings)
            self._predictors[key] = predictions.Predictor(self.model, self.partitioner, decoding, self.vocabulary)
        return self._predictors[key]


def gin_text(model: interface.Model, lengths: Mapping[str, int]) -> str:
    """Returns the gin statements of MODEL and TASK_FEATURE_LENGTHS. Raises UserError if MODEL has none."""
    if not model.config:
        raise UserError(
            'model must come from load, or from build_model with values that are numbers, texts, or classes and '
            'functions at the top of an importable module; move the class to a file and import it'
        )
    # The configuration sets TASK_FEATURE_LENGTHS only if the model depends on the lengths.
    known = re.search(r'^TASK_FEATURE_LENGTHS = ', model.config, re.MULTILINE)
    return model.config if known else f'{model.config}\nTASK_FEATURE_LENGTHS = {dict(lengths)}\n'


def make_batch(
    inputs: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], lengths: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """Converts lists of token ids to a batch for `model.loss` or a train step.

    Args:
        inputs: the ids of each input.
        targets: the ids of each target. The decoder's inputs are the targets shifted by one token.
        lengths: lengths of the arrays of `inputs` and `targets`; None for the longest of each.

    Returns:
        [rows, length] int32 arrays with seqio's names, 0 at padding.
    """
    _check_pairs(inputs, targets)
    longest = {'inputs': max(map(len, inputs), default=0), 'targets': max(map(len, targets), default=0)}
    for side, length in (lengths or longest).items():
        if longest[side] > length:
            raise UserError(f'{side} must have at most {length} tokens, got {longest[side]}; truncate them first')
    lengths = lengths or longest
    encoder = {'encoder_input_tokens': predictions.pad_ids(inputs, lengths['inputs'])}
    return {**encoder, **predictions.decoder_arrays(targets, lengths['targets'])}


def _check_pairs(inputs: Sequence[object], targets: Sequence[object]) -> None:
    if len(inputs) != len(targets):
        raise UserError(f'there must be a target for each input, got {len(inputs)} inputs and {len(targets)} targets')


def _as_list(texts: Strings) -> list[str]:
    items = [texts] if isinstance(texts, str) else list(texts)
    for text in items:
        if not isinstance(text, str):
            raise UserError(
                f'a text must be a str, got {type(text).__name__} {text!r:.40}; type a str or a list of str'
            )
    return items
