"""A model with its parameters and its vocabulary: generates, scores and encodes texts, and computes losses."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from remixer_t5x.data import frames, task_vocabulary
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import held_out_loss, predictions
from remixer_t5x.evaluate.text_inference import Texts
from remixer_t5x.interop import converted
from remixer_t5x.lazy import seqio
from remixer_t5x.models import interface
from remixer_t5x.models.classifier import Classifier
from remixer_t5x.models.decoding import Decoder, Greedy
from remixer_t5x.models.language_model import behind_prompts
from remixer_t5x.optim import train_step
from remixer_t5x.run_folder import model_dir

Strings = str | Sequence[str]
GREEDY = Greedy()


class Answer(NamedTuple):
    """The answers of a model to one text.

    Attributes:
        texts: the answers of the decoder, best first, or in the order in which they were sampled.
        scores: the decoder's score of each answer; a log-likelihood for greedy decoding.
        cut: whether the input was longer than the model's inputs, so that the model read only its beginning.
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
        hidden: [texts, length, embed] float32, 0 at padding; the end token is the last of each text.
        mask: [texts, length] bool, True at tokens.
        mean: [texts, embed] float32, the mean of `hidden` over the tokens of each text.
        cut: [texts] bool, True for a text whose end the model did not read.
    """

    hidden: np.ndarray
    mask: np.ndarray
    mean: np.ndarray
    cut: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained model, as returned by `load`. Every method takes a list of texts, or one text as a list of one.

    Texts are put into batches by length. A result depends only on its text: other texts and the batch size do not
    change it, except for rounding (and except for FNet, whose output depends on the padded length). Each new shape of a
    batch is compiled once. An empty list gives an empty result.

    Attributes:
        model: a model, whose methods are pure functions of `params`.
        params: parameters, float32 unless `load` was given a dtype.
        vocabulary: a seqio vocabulary: `encode(text)`, `decode(ids)`.
        lengths: maximum tokens of `inputs` and `targets`, including the end token.
        source: the folder of the parameters.
        partitioner: the devices of the parameters.
        batch_size: maximum texts of one batch.
        ends_inputs: whether an input gets the end token; a prompt of a causal language model does not.
    """

    model: interface.Model
    params: interface.Params
    vocabulary: seqio.Vocabulary
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
    ) -> list[Answer]:
        """The model's answers to each text.

        Args:
            texts: the inputs. A text that is too long is cut, and its answer says so.
            max_length: maximum tokens of an answer, including the end token; None is the length of `targets`.
            decoder: `Greedy()`, `Sampling(...)` or `BeamSearch(...)`.
            answers: number of answers to keep for each text; None keeps all answers of the decoder.
            seed: seed of a decoder that samples. The text's place in the list is folded into it.

        Raises:
            UserError: `answers` is more than the decoder gives, or a length is not positive.
        """
        interface.require(self.model, 'generate', 'generate')
        length = self.lengths['targets'] if max_length is None else max_length
        if length < 1:
            raise UserError(f'max_length is {max_length}; it takes 1 token or more')
        coded = [self._codec.encode(text, index) for index, text in enumerate(_as_list(texts))]
        predictor = self._predictor(len(coded), length, decoder, seed)
        made = predictor.predict(self.params, [ids for ids, _ in coded]) if coded else []
        if made and answers is not None and not 1 <= answers <= len(made[0].ids):
            raise UserError(
                f'answers must be from 1 to {len(made[0].ids)}, as many as the decoder gives, got {answers}; type '
                'decoder=BeamSearch(beams=N) or decoder=Sampling(num_samples=N)'
            )
        return [
            Answer([self.vocabulary.decode(ids) for ids in one.ids[:answers]], one.scores[:answers], cut)
            for one, (_, cut) in zip(made, coded, strict=True)
        ]

    def score(self, inputs: Strings, targets: Strings) -> np.ndarray:
        """log p(target | input), summed over the tokens of the target and its end token: [texts] float32.

        Raises:
            UserError: there are more inputs than targets or the reverse, or a text is too long and would have to be
                cut.
        """
        interface.require(self.model, 'score', 'score')
        given, wanted = _as_list(inputs), _as_list(targets)
        if len(given) != len(wanted):
            raise UserError(f'score got {len(given)} inputs and {len(wanted)} targets; give a target for each input')
        if not given:
            return np.zeros(0, np.float32)
        ids = [self._whole(text, index, 'inputs') for index, text in enumerate(given)]
        target_ids = [self._whole(text, index, 'targets') for index, text in enumerate(wanted)]
        length = predictions.bucket(max(map(len, target_ids)), self.lengths['targets'])
        return self._predictor(len(ids), length).score(self.params, ids, target_ids)

    def classify(self, texts: Strings) -> list[Answer]:
        """A classifier's labels for each text, most likely first, with their log-likelihoods; of a regression the
        number, as a text and as a score.
        """
        interface.require(self.model, 'classify', 'classify')
        assert isinstance(self.model, Classifier)
        coded = [self._codec.encode(text, index) for index, text in enumerate(_as_list(texts))]
        ids = [ids for ids, _ in coded]
        predictor = self._predictor(len(ids), self.lengths['targets'])
        found = predictions.class_predictions(predictor, self.params, ids, self.model.labels, None) if ids else []
        return [Answer(list(one.texts or ()), one.scores, cut) for one, (_, cut) in zip(found, coded, strict=True)]

    def encode(self, texts: Strings) -> Encoded:
        """The encoder's output for each text, and its mean over the text. A text that is too long is cut."""
        interface.require(self.model, 'encode', 'encode')
        coded = [self._codec.encode(text, index) for index, text in enumerate(_as_list(texts))]
        rows = [ids for ids, _ in coded]
        width = self.model.module.embed_dim
        hidden = np.zeros((len(rows), max(map(len, rows), default=0), width), np.float32)
        mask = np.zeros(hidden.shape[:2], bool)
        found = self._predictor(len(rows), self.lengths['targets']).encode(self.params, rows) if rows else []
        for row, states in enumerate(found):
            hidden[row, : len(states)], mask[row, : len(states)] = states, True
        mean = hidden.sum(1) / np.maximum(mask.sum(1, keepdims=True), 1)
        return Encoded(hidden, mask, mean.astype(np.float32), np.asarray([cut for _, cut in coded], bool))

    def loss(self, batch: Mapping[str, np.ndarray | jax.Array]) -> dict[str, float]:
        """`loss` and `accuracy` per target token, `perplexity` and `tokens` of one batch of ids, without dropout.

        `batch` has [rows, length] int32 arrays with the names of `make_batch`. Raises UserError if it has no target.
        """
        missing = -len(next(iter(batch.values()))) % self.partitioner.batch_shards
        rows = {name: np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) for name, array in batch.items()}
        return held_out_loss.evaluate(self.params, [rows], self._eval_step, self.partitioner.shard_batch, 'given')

    def make_batch(self, inputs: Strings, targets: Strings) -> dict[str, np.ndarray]:
        """Texts as a batch for `loss` and a train step, each row one example. Raises the same errors as `score`."""
        given, wanted = _as_list(inputs), _as_list(targets)
        if len(given) != len(wanted):
            raise UserError(
                f'make_batch got {len(given)} inputs and {len(wanted)} targets; give a target for each input'
            )
        ids = [self._whole(text, index, 'inputs') for index, text in enumerate(given)]
        target_ids = [self._whole(text, index, 'targets') for index, text in enumerate(wanted)]
        batch = make_batch(ids, target_ids, self.lengths)
        if self.model.frame != frames.DECODER_ONLY:
            return batch
        joined = behind_prompts(batch['encoder_input_tokens'], batch['decoder_target_tokens'])
        return {name: np.asarray(array) for name, array in joined.items()}

    def save(self, folder: str | os.PathLike[str], step: int = 0) -> str:
        """Writes parameters, vocabulary and description into a new or empty MODEL_DIR, and returns its path.

        `load(folder)` and commands with `--checkpoint=folder` read it; INITIAL_CHECKPOINT_PATH starts a run from it.
        Parameters are saved in float32, under the number `step`.

        Raises:
            UserError: `folder` has a checkpoint already or cannot be written, the model's gin text is not known, or the
                vocabulary is a class of the user's.
        """
        text = gin_text(self.model, self.lengths if self.ends_inputs else {'targets': sum(self.lengths.values())})
        target = converted.claim(folder)
        if not task_vocabulary.save(self.vocabulary, target / task_vocabulary.FOLDER):
            kind = type(self.vocabulary).__name__
            raise UserError(f'vocabulary must be one that remixer_tasks.vocabularies makes, got {kind}')
        text = f'{text}\n{task_vocabulary.gin_text(target)}'
        (target / model_dir.CONVERTED).write_text(text)
        params = jax.tree.map(lambda array: np.asarray(array, np.float32), self.params)
        record = converted.record(task_vocabulary.record(self.vocabulary), text, self.source)
        converted.write(target, params, step, record)
        return str(target)

    @functools.cached_property
    def _eval_step(self) -> train_step.Compiled:
        step = jax.jit(train_step.make_eval_step(self.model), out_shardings=self.partitioner.replicated)
        return train_step.Compiled(step, self.partitioner)

    @property
    def _codec(self) -> Texts:
        return Texts(self.vocabulary, self.lengths['inputs'], ends=self.ends_inputs)

    def _whole(self, text: str, index: int, side: str) -> list[int]:
        ends = self.ends_inputs or side == 'targets'
        ids, cut = Texts(self.vocabulary, self.lengths[side], ends=ends).encode(text, index)
        if cut:
            raise UserError(
                f'text {index} of {side} has more than {self.lengths[side]} tokens; '
                f"shorten it, or load the model with lengths={{'{side}': N}}"
            )
        return ids

    def _predictor(
        self, count: int, target_length: int, decoder: Decoder = GREEDY, seed: int = 0
    ) -> predictions.Predictor:
        """Compiled functions for `count` texts, for few batch sizes, because each is compiled."""
        shards = self.partitioner.batch_shards
        size = min(self.batch_size, 1 << max(count - 1, 0).bit_length())
        size = -(-size // shards) * shards
        key = (size, target_length, decoder, seed)
        if key not in self._predictors:
            lengths = {'inputs': self.lengths['inputs'], 'targets': target_length}
            decoding = predictions.Decoding(size, lengths, decoder, seed)
            eos_id = 1 if self.vocabulary.eos_id is None else int(self.vocabulary.eos_id)
            self._predictors[key] = predictions.Predictor(self.model, self.partitioner, decoding, eos_id)
        return self._predictors[key]


def gin_text(model: interface.Model, lengths: Mapping[str, int]) -> str:
    """The gin statements of MODEL and TASK_FEATURE_LENGTHS. Raises UserError if it is not known how MODEL was made."""
    if not model.config:
        raise UserError(
            'model must come from load, or from build_model with values that are numbers, texts, or classes and '
            'functions at the top of an importable module; move the class to a file and import it'
        )
    # A model that depends on the lengths has them in its own text.
    known = re.search(r'^TASK_FEATURE_LENGTHS = ', model.config, re.MULTILINE)
    return model.config if known else f'{model.config}\nTASK_FEATURE_LENGTHS = {dict(lengths)}\n'


def make_batch(
    inputs: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], lengths: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """Lists of token ids as a batch for `model.loss` and a train step.

    Args:
        inputs: ids of each input.
        targets: ids of each target, the same number of lists; the decoder reads them one token later.
        lengths: lengths of `inputs` and `targets`; None takes the longest of each.

    Returns:
        [rows, length] int32 arrays under seqio's names, 0 at padding.

    Raises:
        UserError: there are more inputs than targets or the reverse, or a list is longer than its length.
    """
    if len(inputs) != len(targets):
        raise UserError(f'make_batch got {len(inputs)} inputs and {len(targets)} targets; give a target for each input')
    longest = {'inputs': max(map(len, inputs), default=0), 'targets': max(map(len, targets), default=0)}
    for side, wanted in (lengths or longest).items():
        if longest[side] > wanted:
            raise UserError(f'make_batch got {longest[side]} tokens in {side} and the length {wanted}; cut them first')
    lengths = lengths or longest
    encoder = {'encoder_input_tokens': predictions.padded(inputs, lengths['inputs'])}
    return {**encoder, **predictions.decoder_arrays(targets, lengths['targets'])}


def _as_list(texts: Strings) -> list[str]:
    found = [texts] if isinstance(texts, str) else list(texts)
    for text in found:
        if not isinstance(text, str):
            raise UserError(f'a text is {type(text).__name__} {text!r:.40}; give a str, or a list of str')
    return found
