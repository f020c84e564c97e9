"""lm-evaluation-harness (0.4.13) with any of our models: `lm_eval.api.model.LM` on top of `TrainedModel`.

What a request means for each frame:

    encoder-decoder    the context is the encoder's input, the continuation the decoder's, as with lm_eval's `hf`
    decoder alone      the context is a prompt, the continuation follows it; an empty context is id 0
    masked LM          pseudo-log-likelihood (Salazar et al. 2020): each token of the continuation masked in turn
    classifier         the continuation is a label

A context that is too long loses its beginning, as with lm_eval's `hf`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval import utils
from lm_eval.api.model import LM
from tqdm import tqdm

from remixer_t5x.api import saved_models
from remixer_t5x.api.trained_model import TrainedModel
from remixer_t5x.data import frames
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import predictions
from remixer_t5x.extras.lm_eval import generation
from remixer_t5x.models.classifier import Classifier
from remixer_t5x.models.decoding import Decoder, Greedy

Ids = list[int]
NAME = 'remixer_t5x'
# Rows of a batch with --batch_size=auto.
AUTO = 32
GREEDY = Greedy()


# What lm_eval's command line gives to every model where nobody says --device.
DEFAULT_DEVICE = 'cuda:0'


class RemixerLM(LM):
    """A model for lm_eval: `--model remixer_t5x --model_args path=runs/mine`.

    Args:
        path: what `remixer_t5x.load` takes: a MODEL_DIR, a checkpoint, a Hugging Face folder, hf://NAME.
        batch_size: texts of one batch; 'auto' is 32.
        max_length: the most tokens of a context, and of a continuation; None is the model's lengths.
        trust_gin: as for `load`.
        seed: of answers that are sampled.
        max_batch_size: not used; lm_eval gives it to every model.
        device: not used, since JAX chooses (JAX_PLATFORMS); None, or what lm_eval's command line gives by default.
    """

    def __init__(
        self,
        path: str,
        batch_size: int | str = AUTO,
        max_length: int | None = None,
        trust_gin: bool = False,
        seed: int = 0,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        if device not in (None, DEFAULT_DEVICE):
            raise UserError(
                f'--device {device} is given, and JAX chooses the device; leave it out, or set JAX_PLATFORMS'
            )
        lengths = None if max_length is None else {'inputs': int(max_length), 'targets': int(max_length)}
        self.trained = saved_models.load(str(path), lengths=lengths, trust_gin=trust_gin)
        self.frame = self.trained.model.frame
        self._size = _batch_size(batch_size, self.trained)
        self._seed = int(seed)
        # [CLS] of a BERT, which begins each row and is not scored.
        self._begin = [int(token) for token in self.trained.vocabulary.encode('')]
        self._predictors: dict[Any, predictions.Predictor] = {}

    @property
    def tokenizer_name(self) -> str:
        """The name by which lm_eval tells caches of requests apart."""
        return f'{NAME}_{self.trained.source}'

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log p(continuation | context), whether greedy decoding gives the continuation) of each request."""
        pairs = [request.args for request in requests]
        if self.frame == frames.CLASSIFIER:
            found = self._labels(pairs)
        elif self.frame == frames.ENCODER_ONLY:
            found = self._pseudo([self._split(*pair) for pair in pairs])
        else:
            found = self._judged([self._encoded(*pair) for pair in pairs], self._lengths(), disable_tqdm)
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial('loglikelihood', request.args, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of each whole text, in windows of the model's length, each token once, as lm_eval's `hf`.

        A window begins with as much of the text before it as fits, which an encoder-decoder reads in the encoder. For a
        masked language model it is the text's pseudo-log-likelihood.
        """
        if self.frame == frames.CLASSIFIER:
            raise UserError(
                'a task asks for loglikelihood_rolling, and a classifier knows its labels alone; leave the task out'
            )
        windows: list[tuple[Ids, Ids]] = []
        owners: list[int] = []
        lengths = self._lengths()
        special = len(self._begin) + len(self._end())
        longest = lengths['inputs'] - special if self.frame == frames.ENCODER_ONLY else lengths['targets']
        for index, request in enumerate(requests):
            for window in self._windows(request.args[0], longest):
                windows.append(window)
                owners.append(index)
        if self.frame == frames.ENCODER_ONLY:
            parts = self._pseudo(windows)
        else:
            parts = self._judged(windows, lengths, disable_tqdm)
        totals = np.zeros(len(requests))
        for index, (score, _) in zip(owners, parts, strict=True):
            totals[index] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial('loglikelihood_rolling', request.args, float(total))
        return [float(total) for total in totals]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each context, up to the first of the texts in `until`."""
        if self.frame in (frames.ENCODER_ONLY, frames.CLASSIFIER):
            raise UserError(f'a task asks for generated text, and FRAME = {self.frame!r} generates none; leave it out')
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        found = [''] * len(requests)
        for group in tqdm(groups.values(), disable=disable_tqdm, desc='Settings of generate_until'):
            texts = self._generated([requests[index].args[0] for index in group], requests[group[0]].args[1])
            for index, text in zip(group, texts, strict=True):
                found[index] = text
                self.cache_hook.add_partial('generate_until', requests[index].args, text)
        return found

    def _generated(self, contexts: Sequence[str], given: Mapping[str, Any]) -> list[str]:
        until, length, decoder = generation.settings(given, self.trained.lengths['targets'])
        lengths = self._fitting(length)
        inputs = [self._context(context, lengths['inputs']) for context in contexts]
        made = self._predictor(lengths, decoder).predict(self.trained.params, inputs)
        return [generation.before(until, self.trained.vocabulary.decode(one.ids[0])) for one in made]

    def _judged(self, pairs: Sequence[tuple[Ids, Ids]], longest: Mapping[str, int], quiet: bool):
        """(score, is greedy) of each (context, continuation) in ids."""
        found: list[Any] = [None] * len(pairs)
        groups: dict[int, list[int]] = {}
        for index, (context, continuation) in enumerate(pairs):
            if len(continuation) > longest['targets']:
                raise UserError(
                    f'a continuation has {len(continuation)} tokens, and the model takes {longest["targets"]}; give '
                    'max_length=N in --model_args'
                )
            groups.setdefault(self._bucket(len(context), len(continuation)), []).append(index)
        for length, group in tqdm(sorted(groups.items()), disable=quiet, desc='Lengths of loglikelihood'):
            lengths = self._fitting(length)
            contexts = [pairs[index][0][-lengths['inputs'] :] for index in group]
            arrays = predictions.decoder_arrays([pairs[index][1] for index in group], length)
            judged = self._predictor(lengths).judge(self.trained.params, contexts, arrays)
            for index, (score, is_greedy) in zip(group, judged, strict=True):
                found[index] = float(score), bool(is_greedy)
        return found

    def _pseudo(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[tuple[float, bool]]:
        # As objectives/masked_lm.gin: a vocabulary without a mask gives its last id.
        mask = int(getattr(self.trained.vocabulary, 'mask_id', self.trained.vocabulary.vocab_size - 1))
        begin, end = self._begin, self._end()
        rows, places, tokens, owners = [], [], [], []
        longest = self.trained.lengths['inputs']
        for index, (context, continuation) in enumerate(pairs):
            text = [*context, *continuation][-(longest - len(begin) - len(end)) :]
            first = len(text) - len(continuation)
            if first < 0:
                raise UserError(f'a continuation has {len(continuation)} tokens, and the model reads {longest}')
            for place in range(first, len(text)):
                rows.append([*begin, *text[:place], mask, *text[place + 1 :], *end])
                places.append(len(begin) + place)
                tokens.append(text[place])
                owners.append(index)
        arrays: dict[str, Any] = {'places': np.asarray(places, np.int32), 'tokens': np.asarray(tokens, np.int32)}
        judged = self._predictor(self.trained.lengths).judge(self.trained.params, rows, arrays) if rows else ()
        scores, greedy = [0.0] * len(pairs), [True] * len(pairs)
        for index, (score, is_best) in zip(owners, judged, strict=True):
            scores[index] += float(score)
            greedy[index] &= bool(is_best)
        return list(zip(scores, greedy, strict=True))

    def _labels(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        assert isinstance(self.trained.model, Classifier)
        known = self.trained.model.labels
        for _, continuation in pairs:
            if not known or continuation.strip() not in known:
                allowed = ', '.join(known or ()) or 'none: it gives a number'
                raise UserError(f'a continuation is {continuation!r}, and the labels of the model are {allowed}')
        answers = self.trained.classify([context for context, _ in pairs])
        return [
            (answer.scores[answer.texts.index(label.strip())], answer.text == label.strip())
            for answer, (_, label) in zip(answers, pairs, strict=True)
        ]

    def _encoded(self, context: str, continuation: str) -> tuple[Ids, Ids]:
        if self.frame == frames.ENCODER_DECODER:
            # The two are texts of their own: only white space moves.
            kept = context.rstrip()
            continuation, context = context[len(kept) :] + continuation, kept
            return [*self._ids(context), *self._end()], self._scored(continuation)
        return self._split(context, continuation)

    def _split(self, context: str, continuation: str) -> tuple[Ids, Ids]:
        """One text, cut behind the context; a prefix language model's prompt has an end token."""
        kept = context.rstrip()
        continuation, context = context[len(kept) :] + continuation, kept
        if self.frame == frames.DECODER_ONLY and self.trained.ends_inputs:
            return [*self._ids(context), *self._end()] if context else [], self._scored(continuation)
        whole, before = self._ids(context + continuation), self._ids(context) if context else []
        if len(whole) > len(before):
            return whole[: len(before)], whole[len(before) :]
        # One piece holds the end of the context and the continuation: score the continuation's own pieces.
        return before, self._scored(continuation)

    def _scored(self, continuation: str) -> Ids:
        """The ids of a continuation. Raises UserError if it has none, because its probability would be 1."""
        ids = self._ids(continuation)
        if not ids:
            raise UserError(
                f'a continuation is {continuation!r:.60}, which has no tokens in the vocabulary of the model; correct '
                'doc_to_choice or target_delimiter of the task'
            )
        return ids

    def _windows(self, text: str, length: int) -> Iterator[tuple[Ids, Ids]]:
        # A decoder begins each row with id 0 by itself, so the first window has no context. A text of an
        # encoder-decoder has its end token, as lm_eval's `hf` has it there.
        start = self._end() if self.frame == frames.ENCODER_DECODER else []
        ids = [*self._ids(text), *start]
        for window in utils.get_rolling_token_windows(ids, -1, length, 1):
            context, continuation = utils.make_disjoint_window(window)
            yield start if context == [-1] else context, continuation

    def _lengths(self) -> dict[str, int]:
        """The most tokens of a context, and of a continuation, which may leave a decoder's context one token."""
        given = self.trained.lengths
        if self.frame != frames.DECODER_ONLY:
            return dict(given)
        row = given['inputs'] + given['targets']
        return {'inputs': row, 'targets': row - 1}

    def _bucket(self, context: int, continuation: int) -> int:
        """The length to which a continuation is padded: one of few, and in a decoder alone what the context leaves."""
        longest = self._lengths()['targets']
        if self.frame == frames.DECODER_ONLY:
            longest = max(continuation, longest + 1 - max(context, 1))
        return predictions.bucket(continuation, longest)

    def _fitting(self, length: int) -> dict[str, int]:
        """Lengths for answers of `length` tokens: a decoder alone gives all the rest of its row to the prompt."""
        given = self.trained.lengths
        if self.frame != frames.DECODER_ONLY:
            return {'inputs': given['inputs'], 'targets': length}
        row = given['inputs'] + given['targets']
        if length >= row:
            raise UserError(f'a task asks for {length} tokens, and a row of the model has {row}; give max_gen_toks')
        return {'inputs': row - length, 'targets': length}

    def _context(self, text: str, longest: int) -> Ids:
        ends = self._end() if self.trained.ends_inputs else []
        return [*self._ids(text), *ends][-longest:]

    def _ids(self, text: str) -> Ids:
        return [int(token) for token in self.trained.vocabulary.encode(text)][len(self._begin) :]

    def _end(self) -> Ids:
        end = self.trained.vocabulary.eos_id
        return [] if end is None else [int(end)]

    def _predictor(self, lengths: Mapping[str, int], decoder: Decoder = GREEDY) -> predictions.Predictor:
        key = (tuple(sorted(lengths.items())), decoder)
        if key not in self._predictors:
            settings = predictions.Decoding(self._size, dict(lengths), decoder, self._seed)
            trained = self.trained
            end = (self._end() or [1])[0]
            self._predictors[key] = predictions.Predictor(trained.model, trained.partitioner, settings, end)
        return self._predictors[key]


def _batch_size(given: int | str, trained: TrainedModel) -> int:
    text = str(given)
    if not text.isdecimal() and not text.startswith('auto'):
        raise UserError(f'--batch_size {text} is not a number of texts; give one, or auto for {AUTO}')
    size = int(text) if text.isdecimal() else AUTO
    shards = trained.partitioner.batch_shards
    return -(-max(size, 1) // shards) * shards
