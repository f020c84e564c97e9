"""Defines TrainedModel, which generates, scores, classifies and encodes texts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from remixer_t5x import ranges
from remixer_t5x.api import token_batches
from remixer_t5x.base_vocabulary import Vocabulary
from remixer_t5x.checkpoints import saved_params
from remixer_t5x.data import batch_formats, task_vocabulary
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import embeddings, head_predictions, held_out_loss, predictions
from remixer_t5x.evaluate.text_inference import TextCodec
from remixer_t5x.interop import converted_checkpoint
from remixer_t5x.models import interface
from remixer_t5x.models.decoding import Decoder, Greedy
from remixer_t5x.models.language_model import join_prompts_and_targets
from remixer_t5x.optim import train_step
from remixer_t5x.run_folder import model_dir

Strings = str | Sequence[str]
GREEDY = Greedy()


class Answer(NamedTuple):
    """The answers that a model generated for a single input text.

    Attributes:
        texts: the generated answers, best first or, for sampling, in the order in which they were sampled.
        scores: the decoder's score of each answer; a log-likelihood for greedy decoding.
        truncated: whether the input was truncated.
    """

    texts: list[str]
    scores: list[float]
    truncated: bool

    @property
    def text(self) -> str:
        """The first generated answer."""
        return self.texts[0]


class EncodedTexts(NamedTuple):
    """The encoder's output for a list of texts.

    Attributes:
        hidden: the encoder's output at each token, including the end token, and 0 at padding. [texts, length, embed]
            float32.
        mask: True at each token and False at padding. [texts, length] bool.
        mean: mean of `hidden` over the tokens of each text. [texts, embed] float32.
        truncated: whether each text was truncated. [texts] bool.
        sentence: the embedding of each text: the output of a text embedding model, the normalized projection of `mean`
            if the model has a sentence projection, or otherwise `mean`. [texts, outputs] float32.
    """

    hidden: np.ndarray
    mask: np.ndarray
    mean: np.ndarray
    truncated: np.ndarray
    sentence: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained model, as returned by `load`. Its methods accept a list of texts or a single text.

    Texts are batched by length, and the model is compiled once for each batch shape. The output for a text does not
    depend on the other texts or the batch size, except for rounding.

    Attributes:
        model: the model, whose methods are pure functions of `params`.
        params: the parameters; float32 unless `load` was called with a dtype.
        vocabulary: converts texts to token ids with `encode(text)`, and token ids to texts with `decode(ids)`.
        lengths: maximum number of tokens of `inputs` and of `targets`, including the end token.
        source: the folder from which the parameters were loaded.
        partitioner: shards arrays across devices.
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
        """Generates one or more answers for each text.

        Args:
            texts: the inputs. Texts that are too long are truncated, and their `Answer.truncated` is True.
            max_length: maximum number of tokens of an answer, including the end token; None uses
                `lengths['targets']`.
            decoder: `Greedy()`, `Sampling(...)` or `BeamSearch(...)`.
            answers: number of answers to return for each text; None returns all answers that the decoder computes.
            seed: seed for sampling; the sampling key also depends on the index of the text.
            stop_strings: strings that end an answer when they are generated.

        Raises:
            UserError: `answers` is not between 1 and the decoder's number of answers, or another argument is invalid.
        """
        ranges.check_setting('answers', answers, ranges.Count | None)
        rows, truncated = self._encode_inputs(texts)
        predictor = self._build_generation_predictor(len(rows), max_length, decoder, stop_strings)
        decoded = predictor.predict(self.params, rows, seed=seed) if rows else []
        if decoded and answers is not None and answers > len(decoded[0].ids):
            raise UserError(
                f'answers must be between 1 and {len(decoded[0].ids)}, the number of outputs of the decoder, '
                f'got {answers}; pass decoder=BeamSearch(beams=N) or decoder=Sampling(num_samples=N)'
            )
        return [
            Answer([self.vocabulary.decode(ids) for ids in row.ids[:answers]], row.scores[:answers], is_truncated)
            for row, is_truncated in zip(decoded, truncated, strict=True)
        ]

    def stream(
        self,
        text: str,
        max_length: int | None = None,
        decoder: Decoder = GREEDY,
        seed: int = 0,
        stop_strings: Strings = (),
    ) -> Iterator[str]:
        """Yields the answer to a text in pieces while the answer is being generated.

        The concatenated pieces are the first answer of `generate` with the same arguments. Raises UserError unless the
        decoder is `Greedy(...)` or `Sampling(...)`.
        """
        if not isinstance(text, str):
            raise UserError(f'text must be a str, got {text!r:.60}; call generate for several texts')
        (ids,), _ = self._encode_inputs(text)
        predictor, answer, yielded = self._build_generation_predictor(1, max_length, decoder, stop_strings), '', ''
        for answer_ids in predictor.stream_predictions(self.params, ids, seed):
            answer = self.vocabulary.decode(answer_ids)
            # An incomplete UTF-8 character is decoded as U+FFFD.
            complete = answer.rstrip('\ufffd')
            if len(complete) > len(yielded):
                yield complete[len(yielded) :]
                yielded = complete
        if answer != yielded:
            yield answer[len(yielded) :]

    def score(self, inputs: Strings, targets: Strings) -> np.ndarray:
        """Computes log p(target | input) of each pair of texts, summed over the target's tokens and its end token.

        Returns a [texts] float32 array. Raises UserError if the number of inputs differs from the number of targets, or
        if a text is too long.
        """
        interface.require_method(self.model, 'score', 'score')
        return self.score_ids(*self._encode_pairs(inputs, targets))

    def score_ids(self, inputs: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> np.ndarray:
        """Computes the scores of `score` for pairs of lists of token ids, [texts] float32.

        Raises UserError if a list is too long, or if an id is outside the vocabulary.
        """
        interface.require_method(self.model, 'score', 'score')
        token_batches.check_same_length(inputs, targets)
        token_batches.check_longest(inputs, targets, self.lengths)
        ids = [*itertools.chain(*inputs, *targets)]
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < self.model.vocab_size:
                raise UserError(f'a token id must be from 0 to {self.model.vocab_size - 1}, got {token}')
        if not len(inputs):
            return np.zeros(0, np.float32)
        length = predictions.round_up_length(max(map(len, targets)), self.lengths['targets'])
        return self._get_predictor(len(inputs), length).score(self.params, inputs, targets)

    def classify(self, texts: Strings) -> list[Answer]:
        """Returns a classifier's labels for each text, most likely first, with their log-likelihoods.

        For a regression model, returns the predicted number both as text and as the score.
        """
        interface.require_method(self.model, 'classify', 'classify')
        ids, truncated = self._encode_inputs(texts)
        predictor = self._get_predictor(len(ids), self.lengths['targets'])
        rows = head_predictions.predict_texts(predictor, self.params, self.model, ids) if ids else []
        pairs = zip(rows, truncated, strict=True)
        return [Answer(list(row.texts or ()), row.scores, is_truncated) for row, is_truncated in pairs]

    def encode(self, texts: Strings) -> EncodedTexts:
        """Computes the encoder's output for each text, and the mean of the output over tokens. Truncates long texts."""
        interface.require_method(self.model, 'encode', 'encode')
        rows, truncated = self._encode_inputs(texts)
        width = self.model.module.embed_dim
        hidden = np.zeros((len(rows), max(map(len, rows), default=0), width), np.float32)
        mask = np.zeros(hidden.shape[:2], bool)
        predictor = self._get_predictor(len(rows), self.lengths['targets'])
        encoded = predictor.encode(self.params, rows) if rows else []
        for row, states in enumerate(encoded):
            hidden[row, : len(states)], mask[row, : len(states)] = states, True
        mean = (hidden.sum(1) / np.maximum(mask.sum(1, keepdims=True), 1)).astype(np.float32)
        sentence = embeddings.compute_sentence_vectors(self.model, predictor, self.params, rows, mean)
        return EncodedTexts(hidden, mask, mean, np.asarray(truncated, bool), sentence)

    def loss(self, batch: Mapping[str, np.ndarray | jax.Array]) -> dict[str, float]:
        """Computes the `loss` and `accuracy` per target token, the `perplexity` and the number of `tokens` of a batch.

        `make_batch` creates a batch. Dropout is disabled. Raises UserError if the batch has no target tokens.
        """
        count = len(next(iter(batch.values()), ()))
        if not count:
            raise UserError('batch must have at least 1 row, got 0; use make_batch')
        missing = -count % self.partitioner.batch_shards
        rows = {name: np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) for name, array in batch.items()}
        return held_out_loss.evaluate_loss(self.params, [rows], self._eval_step, self.partitioner.shard_batch, 'given')

    def make_batch(self, inputs: Strings, targets: Strings) -> dict[str, np.ndarray]:
        """Converts pairs of texts to a batch for `loss` or a train step, with one row per pair.

        Raises UserError if the number of inputs differs from the number of targets, if a text is too long, or if the
        model is not an encoder-decoder or a decoder-only model.
        """
        interface.require_method(self.model, 'score', 'make_batch')
        batch = token_batches.make_batch(*self._encode_pairs(inputs, targets), self.lengths)
        if self.model.model_type != batch_formats.DECODER_ONLY:
            return batch
        joined = join_prompts_and_targets(batch['encoder_input_tokens'], batch['decoder_target_tokens'])
        return {name: np.asarray(array) for name, array in joined.items()}

    def save(self, folder: str | os.PathLike[str], step: int = 0) -> str:
        """Saves the float32 parameters, the vocabulary and the gin text to a new or empty folder. Returns its path.

        The path can be passed to `load`, to the flag `--checkpoint` of commands, and as INITIAL_CHECKPOINT_PATH. `step`
        is the step number of the checkpoint.

        Raises:
            UserError: `step` is negative, `folder` already contains a checkpoint or cannot be written, the model's gin
                text is unknown, or the vocabulary is a custom class.
        """
        ranges.check_setting('step', step, ranges.NonNegativeInt)
        text = build_gin_text(self.model, self.lengths if self.ends_inputs else {'targets': sum(self.lengths.values())})
        target = converted_checkpoint.create_model_dir(folder)
        if not task_vocabulary.save_vocabulary(self.vocabulary, target / task_vocabulary.VOCABULARY_FOLDER):
            class_name = type(self.vocabulary).__name__
            raise UserError(f'to save a model, vocabulary must come from remixer_tasks.vocabularies, got {class_name}')
        text = f'{text}\n{task_vocabulary.build_vocabulary_statements(target)}'
        (target / model_dir.CONVERTED).write_text(text)
        params = jax.tree.map(lambda array: np.asarray(array, np.float32), self.params)
        record = converted_checkpoint.build_checkpoint_record(
            task_vocabulary.get_vocabulary_record(self.vocabulary), text, self.source
        )
        converted_checkpoint.write_checkpoint(
            target, params, step, {**record, saved_params.LENGTHS_KEY: dict(self.lengths)}
        )
        return str(target)

    def build_codec(self, side: str) -> TextCodec:
        """Returns the codec of `inputs` or `targets`. A target that continues a prompt has no start token."""
        ends, begins = self.ends_inputs or side == 'targets', self.ends_inputs or side == 'inputs'
        return TextCodec(self.vocabulary, self.lengths[side], ends=ends, begins=begins)

    @functools.cached_property
    def _eval_step(self) -> train_step.CompiledStep:
        step = jax.jit(train_step.make_eval_step(self.model), out_shardings=self.partitioner.replicated_sharding)
        return train_step.CompiledStep(step, self.partitioner)

    def _encode_inputs(self, texts: Strings) -> tuple[list[list[int]], list[bool]]:
        """Returns the token ids of each text, and whether each text was truncated."""
        codec = self.build_codec('inputs')
        pairs = [codec.encode(text, index) for index, text in enumerate(_as_list(texts))]
        return [ids for ids, _ in pairs], [is_truncated for _, is_truncated in pairs]

    def _encode_pairs(self, inputs: Strings, targets: Strings) -> tuple[list[list[int]], list[list[int]]]:
        """Tokenizes pairs of texts. Raises UserError if a text is too long."""
        return self._encode_untruncated(inputs, 'inputs'), self._encode_untruncated(targets, 'targets')

    def _encode_untruncated(self, texts: Strings, side: str) -> list[list[int]]:
        codec, rows = self.build_codec(side), []
        for index, text in enumerate(_as_list(texts)):
            ids, is_truncated = codec.encode(text, index)
            if is_truncated:
                raise UserError(
                    f'{side}[{index}] has more than {self.lengths[side]} tokens; '
                    f"shorten it, or load the model with lengths={{'{side}': N}}"
                )
            rows.append(ids)
        return rows

    def _build_generation_predictor(
        self, count: int, max_length: int | None, decoder: Decoder, stop_strings: Strings
    ) -> predictions.Predictor:
        interface.require_method(self.model, 'generate', 'generate')
        ranges.check_setting('max_length', max_length, ranges.Count | None)
        if isinstance(decoder, type) or not callable(decoder):
            raise UserError(f'decoder must be Greedy(), Sampling(...) or BeamSearch(...), got {decoder!r:.60}')
        length = self.lengths['targets'] if max_length is None else max_length
        return self._get_predictor(count, length, decoder, stop_strings)

    def _get_predictor(
        self, count: int, target_length: int, decoder: Decoder = GREEDY, stop_strings: Strings = ()
    ) -> predictions.Predictor:
        """Returns a predictor for `count` texts. Batch sizes are rounded up to powers of two to limit compilations."""
        shards = self.partitioner.batch_shards
        size = min(self.batch_size, 1 << max(count - 1, 0).bit_length())
        size = -(-size // shards) * shards
        stop_strings = tuple(_as_list(stop_strings))
        lengths = {'inputs': self.lengths['inputs'], 'targets': target_length}
        # `dataclasses.replace` shares the predictors, so that other parameters need no compilation. A predictor refers
        # to its model and partitioner, so their ids are not reused.
        key = (id(self.model), id(self.partitioner), size, *lengths.values(), decoder, stop_strings)
        if key not in self._predictors:
            decoding = predictions.Decoding(size, lengths, decoder, stop_strings=stop_strings)
            self._predictors[key] = predictions.Predictor(self.model, self.partitioner, decoding, self.vocabulary)
        return self._predictors[key]


def build_gin_text(model: interface.Model, lengths: Mapping[str, int]) -> str:
    """Returns gin statements that set MODEL and TASK_FEATURE_LENGTHS.

    Raises UserError if the model has a setting that gin cannot express, such as a lambda.
    """
    if not model.config:
        raise UserError(
            'this model cannot be saved, because build_model received values other than numbers, strings, and '
            'top-level classes and functions of an importable module; define your classes in a file and import it'
        )
    # The configuration contains TASK_FEATURE_LENGTHS only if the model depends on the lengths. The value is None if the
    # lengths are not set, as in `build_model`.
    config = re.sub(r'^TASK_FEATURE_LENGTHS = None$', '', model.config, flags=re.MULTILINE)
    known = re.search(r'^TASK_FEATURE_LENGTHS = ', config, re.MULTILINE)
    return config if known else f'{config}\nTASK_FEATURE_LENGTHS = {dict(lengths)}\n'


def _as_list(texts: Strings) -> list[str]:
    items = [texts] if isinstance(texts, str) or not isinstance(texts, Iterable) else list(texts)
    for text in items:
        if not isinstance(text, str):
            raise UserError(
                f'a text must be a str, got {type(text).__name__} {text!r:.40}; pass a str or a list of str'
            )
    return items
