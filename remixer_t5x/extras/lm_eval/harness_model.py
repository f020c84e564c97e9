"""Implements `lm_eval.api.model.LM` of lm-evaluation-harness (0.4.13) for a `TrainedModel`.

Each type of model processes a request as follows:

    encoder-decoder    the context is the encoder input; the continuation is the decoder target, as in lm_eval's `hf`
    decoder-only       the context is the prompt, followed by the continuation; without a context, rows start with id 0
    masked LM          pseudo-log-likelihood (Salazar et al. 2020): masks one token of the continuation at a time

Contexts that are too long are truncated at the start, as in lm_eval's `hf`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval import utils
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from remixer_t5x.api import saved_models
from remixer_t5x.data import batch_formats, task_vocabulary
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import predictions
from remixer_t5x.extras.lm_eval import NAME
from remixer_t5x.models import beam_search
from remixer_t5x.models.beam_search import BeamSearch, PowerPenalty
from remixer_t5x.models.decoding import Decoder, Greedy
from remixer_t5x.models.sampling import Sampling

Ids = list[int]
Likelihood = tuple[float, bool]
# The batch size for --batch_size=auto.
DEFAULT_BATCH_SIZE = 32
GREEDY = Greedy()
# The supported keys of `generation_kwargs`.
_SETTINGS = (
    *('until', 'max_gen_toks', 'do_sample', 'temperature', 'top_k', 'top_p', 'num_beams', 'early_stopping'),
    'length_penalty',
)
# Maps values of transformers' `early_stopping` to stopping conditions; the default is False.
_STOPPING_CONDITIONS = {
    False: beam_search.continue_until_unlikely,
    True: beam_search.continue_until_enough_finished,
    'never': beam_search.continue_until_settled,
}


class RemixerLM(LM):
    """The lm_eval model for `--model remixer_t5x --model_args path=runs/mine`.

    Args:
        path: path to load with `remixer_t5x.load`: a MODEL_DIR, a checkpoint, a Hugging Face folder or hf://NAME.
        batch_size: texts per batch; 'auto' means 32.
        max_length: maximum length of each context and each continuation in tokens; None uses the model's lengths.
        trust_gin: whether to load a shared model whose model.gin refers to modules outside this package.
        seed: random seed for sampled answers.
        max_batch_size, device: unused, but lm_eval passes them to every model. JAX selects the device (JAX_PLATFORMS).
    """

    def __init__(
        self,
        path: str,
        batch_size: int | str = DEFAULT_BATCH_SIZE,
        max_length: int | None = None,
        trust_gin: bool = False,
        seed: int = 0,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        size = DEFAULT_BATCH_SIZE if str(batch_size).startswith('auto') else int(batch_size)
        lengths = None if max_length is None else {'inputs': int(max_length), 'targets': int(max_length)}
        self.trained = saved_models.load(str(path), lengths=lengths, trust_gin=trust_gin)
        self.model_type = self.trained.model.model_type
        if self.model_type not in (
            batch_formats.ENCODER_DECODER,
            batch_formats.DECODER_ONLY,
            batch_formats.ENCODER_ONLY,
        ):
            raise UserError(f'lm_eval needs a model that scores texts, got MODEL_TYPE = {self.model_type!r}')
        shards = self.trained.partitioner.batch_shards
        self._size, self._seed = -(-size // shards) * shards, int(seed)
        vocabulary = self.trained.vocabulary
        # Ids that start each row and are not scored, such as BERT's [CLS] and Gemma's <bos>.
        self._begin = [int(token) for token in vocabulary.encode('')]
        self._end = task_vocabulary.get_end_ids(vocabulary)
        # If the vocabulary defines no mask token, the last id is the mask, as in objectives/masked_lm.gin.
        self._mask = int(getattr(vocabulary, 'mask_id', vocabulary.vocab_size - 1))
        self._predictors: dict[Any, predictions.Predictor] = {}

    @property
    def tokenizer_name(self) -> str:
        """The name that lm_eval includes in the keys of its request cache."""
        return f'{NAME}_{self.trained.source}'

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Likelihood]:
        """Returns log p(continuation | context) for each request, and whether the continuation is the greedy output."""
        likelihoods = self._score_pairs([self._tokenize_pair(*request.args) for request in requests], disable_tqdm)
        for request, likelihood in zip(requests, likelihoods, strict=True):
            self.cache_hook.add_partial('loglikelihood', request.args, likelihood)
        return likelihoods

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each text, summed over non-overlapping windows as in lm_eval's `hf`.

        The context of a window is as much of the preceding text as fits. Encoder-decoder models receive the context as
        the encoder input. For a masked language model, returns the pseudo-log-likelihood.
        """
        longest = self._find_longest_continuation()
        windows = [list(self._split_into_windows(request.args[0], longest)) for request in requests]
        pairs = [pair for text in windows for pair in text]
        scores = iter(self._score_pairs(pairs, disable_tqdm))
        totals = [float(sum(next(scores)[0] for _ in text)) for text in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial('loglikelihood_rolling', request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generates an answer to each context, and truncates it before the first stop string in `until`."""
        if self.model_type == batch_formats.ENCODER_ONLY:
            raise UserError('the task needs generated text, but a masked language model cannot generate; omit the task')
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        answers = [''] * len(requests)
        for group in tqdm(groups.values(), disable=disable_tqdm, desc='Settings of generate_until'):
            texts = self._generate([requests[index].args[0] for index in group], requests[group[0]].args[1])
            for index, text in zip(group, texts, strict=True):
                answers[index] = text
                self.cache_hook.add_partial('generate_until', requests[index].args, text)
        return answers

    def _generate(self, contexts: Sequence[str], kwargs: Mapping[str, Any]) -> list[str]:
        until, length, decoder = parse_generation_kwargs(kwargs, self.trained.lengths['targets'])
        lengths = self._compute_feature_lengths(length)
        end = self._end if self.trained.ends_inputs else []
        inputs = [self._build_input_row([*self._tokenize(context), *end], lengths['inputs']) for context in contexts]
        answers = self._build_predictor(lengths, decoder).predict(self.trained.params, inputs)
        texts = [self.trained.vocabulary.decode(answer.ids[0]) for answer in answers]
        for stop in filter(None, until):
            texts = [text.split(stop)[0] for text in texts]
        return texts

    def _score_pairs(self, pairs: Sequence[tuple[Ids, Ids]], disable_tqdm: bool) -> list[Likelihood]:
        """Scores (context, continuation) pairs of ids, with a decoder in batches of similar length."""
        if self.model_type == batch_formats.ENCODER_ONLY:
            return self._score_with_masked_lm(pairs)
        likelihoods: list[Likelihood] = [(0.0, False)] * len(pairs)
        groups: dict[int, list[int]] = {}
        for index, (context, continuation) in enumerate(pairs):
            room = self._find_longest_continuation(continuation)
            if self.model_type == batch_formats.DECODER_ONLY:
                begin = len(self._begin)
                room = max(len(continuation), room + max(begin, 1) - max(begin + len(context), 1))
            groups.setdefault(predictions.round_up_length(len(continuation), room), []).append(index)
        for length, group in tqdm(sorted(groups.items()), disable=disable_tqdm, desc='Lengths of loglikelihood'):
            lengths = self._compute_feature_lengths(length)
            contexts = [self._build_input_row(pairs[index][0], lengths['inputs']) for index in group]
            arrays = predictions.make_decoder_arrays([pairs[index][1] for index in group], length)
            results = self._build_predictor(lengths).score_and_match(self.trained.params, contexts, arrays)
            for index, (score, is_greedy) in zip(group, results, strict=True):
                likelihoods[index] = float(score), bool(is_greedy)
        return likelihoods

    def _build_input_row(self, context: Sequence[int], length: int) -> Ids:
        """Returns the special ids that start each row, and as many of the last ids of `context` as fit in `length`."""
        return [*self._begin, *context[max(0, len(context) + len(self._begin) - length) :]]

    def _score_with_masked_lm(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[Likelihood]:
        """Scores (context, continuation) pairs with a masked language model, using one row per continuation token."""
        rows, positions, tokens, pair_indices = [], [], [], []
        for index, (context, continuation) in enumerate(pairs):
            text = [*context, *continuation][-self._find_longest_continuation(continuation) :]
            for position in range(len(text) - len(continuation), len(text)):
                rows.append([*self._begin, *text[:position], self._mask, *text[position + 1 :], *self._end])
                positions.append(len(self._begin) + position)
                tokens.append(text[position])
                pair_indices.append(index)
        arrays: dict[str, Any] = {'positions': np.asarray(positions, np.int32), 'tokens': np.asarray(tokens, np.int32)}
        results = (
            self._build_predictor(self.trained.lengths).score_and_match(self.trained.params, rows, arrays)
            if rows
            else ()
        )
        scores, greedy = [0.0] * len(pairs), [True] * len(pairs)
        for index, (score, is_greedy) in zip(pair_indices, results, strict=True):
            scores[index] += float(score)
            greedy[index] &= bool(is_greedy)
        return list(zip(scores, greedy, strict=True))

    def _tokenize_pair(self, context: str, continuation: str) -> tuple[Ids, Ids]:
        """Tokenizes a context and its continuation; white space between them belongs to the continuation.

        In encoder-decoders and prefix language models, the context ends with an end token and is tokenized separately.
        """
        stripped = context.rstrip()
        continuation, context = context[len(stripped) :] + continuation, stripped
        if self.model_type == batch_formats.ENCODER_DECODER:
            return [*self._tokenize(context), *self._end], self._tokenize_continuation(continuation)
        if self.model_type == batch_formats.DECODER_ONLY and self.trained.ends_inputs:
            return [*self._tokenize(context), *self._end] if context else [], self._tokenize_continuation(continuation)
        text, prefix = self._tokenize(context + continuation), self._tokenize(context) if context else []
        if len(text) > len(prefix):
            return text[: len(prefix)], text[len(prefix) :]
        # If a token spans the boundary between context and continuation, the continuation is tokenized separately.
        return prefix, self._tokenize_continuation(continuation)

    def _tokenize_continuation(self, continuation: str) -> Ids:
        """Tokenizes a continuation. Raises UserError if there are no tokens, because the probability would be 1."""
        ids = self._tokenize(continuation)
        if not ids:
            raise UserError(
                f'a continuation must have at least one token, got {continuation!r:.60}; correct doc_to_choice or '
                'target_delimiter of the task'
            )
        return ids

    def _tokenize(self, text: str) -> Ids:
        return [int(token) for token in self.trained.vocabulary.encode(text)][len(self._begin) :]

    def _split_into_windows(self, text: str, length: int) -> Iterator[tuple[Ids, Ids]]:
        # The first window has no context, because decoder-only models start each row with id 0. For encoder-decoders,
        # the end token is appended to the text, as in lm_eval's `hf`.
        end = self._end if self.model_type == batch_formats.ENCODER_DECODER else []
        for window in utils.get_rolling_token_windows([*self._tokenize(text), *end], -1, length, 1):
            context, continuation = utils.make_disjoint_window(window)
            yield end if context == [-1] else context, continuation

    def _find_longest_continuation(self, continuation: Sequence[int] = ()) -> int:
        """Returns the maximum length of a continuation. Raises UserError if `continuation` is longer."""
        lengths = self.trained.lengths
        longest = lengths.get('targets', 0)
        if self.model_type == batch_formats.DECODER_ONLY:
            # The special tokens that start each row, or one token, are reserved for the context.
            longest += lengths['inputs'] - max(len(self._begin), 1)
        elif self.model_type == batch_formats.ENCODER_ONLY:
            longest = lengths['inputs'] - len(self._begin) - len(self._end)
        if len(continuation) > longest:
            raise UserError(
                f'a continuation has {len(continuation)} tokens, but the model accepts at most {longest}; '
                'set max_length=N in --model_args'
            )
        return longest

    def _compute_feature_lengths(self, length: int) -> dict[str, int]:
        """Returns input and target lengths for `length` answer tokens; decoder-only prompts use the rest of the row."""
        lengths = self.trained.lengths
        if self.model_type != batch_formats.DECODER_ONLY:
            return {'inputs': lengths['inputs'], 'targets': length}
        row = lengths['inputs'] + lengths['targets']
        if length >= row:
            raise UserError(f'max_gen_toks must be less than {row}, the number of tokens in a row, got {length}')
        return {'inputs': row - length, 'targets': length}

    def _build_predictor(self, lengths: Mapping[str, int], decoder: Decoder = GREEDY) -> predictions.Predictor:
        key = (tuple(sorted(lengths.items())), decoder)
        if key not in self._predictors:
            settings = predictions.Decoding(self._size, dict(lengths), decoder, self._seed)
            trained = self.trained
            self._predictors[key] = predictions.Predictor(
                trained.model, trained.partitioner, settings, trained.vocabulary
            )
        return self._predictors[key]


def parse_generation_kwargs(kwargs: Mapping[str, Any], default_length: int) -> tuple[list[str], int, Decoder]:
    """Parses lm_eval's `gen_kwargs` into stop strings, the maximum length of an answer in tokens, and a decoder.

    Beam search has the same defaults as transformers' `generate`, which lm_eval's `hf` calls. Raises UserError for a
    setting that no decoder supports.
    """
    settings: Any = normalize_gen_kwargs(
        {name: value for name, value in kwargs.items() if value is not None}, default_length
    )
    if unknown := settings.keys() - {*_SETTINGS}:
        raise UserError(
            f'the keys of generation_kwargs must be among {", ".join(_SETTINGS)}, got {", ".join(sorted(unknown))}'
        )
    beams = int(settings.get('num_beams') or 1)
    decoder: Decoder = Greedy()
    if settings['do_sample']:
        if beams > 1:
            raise UserError(
                f'generation_kwargs must not set both do_sample and num_beams, got do_sample and num_beams = {beams}'
            )
        top_k, top_p = settings.get('top_k') or None, float(settings.get('top_p') or 1.0)
        decoder = Sampling(float(settings.get('temperature') or 0.0), top_k, top_p)
    elif beams > 1:
        penalty = PowerPenalty(float(settings.get('length_penalty', 1.0)))
        decoder = BeamSearch(beams, penalty, _STOPPING_CONDITIONS[settings.get('early_stopping', False)])
    return settings['until'], settings['max_gen_toks'], decoder
