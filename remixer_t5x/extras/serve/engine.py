"""Runs a model for concurrent requests: queues texts, forms batches, and computes the batches in one thread.

Each text is a row of a batch. Decoding settings are arrays with one value per row, so that requests with different
settings share batches and compiled programs. Before the first request, programs are compiled for two batch sizes,
the smallest one and `batch_size`, and for each input length that `predictions.round_up_length` returns.
"""

import asyncio
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from starlette.exceptions import HTTPException

from remixer_t5x.api.trained_model import TrainedModel
from remixer_t5x.data import task_vocabulary
from remixer_t5x.errors import root_cause_message
from remixer_t5x.evaluate import embeddings, predictions
from remixer_t5x.models import decoding
from remixer_t5x.models.sampling import mask_outside_top_k_and_top_p

# Seconds to wait for more rows before computing a batch that is not full.
BATCH_WAIT_SECONDS = 0.004
# The value of `top_k` for rows that sample from all tokens.
NO_TOP_K = 2**31 - 1
# Maps each per-row decoding setting to its dtype. `number` is folded into the random key, like the index of a text in
# `infer`.
SETTING_DTYPES: dict[str, Any] = dict.fromkeys(('number', 'max_tokens', 'top_k'), np.int32)
SETTING_DTYPES |= dict.fromkeys(('temperature', 'top_p'), np.float32)


def log(message: str) -> None:
    """Prints a line of the server log to standard error."""
    print(message, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PerRequestDecoder(decoding.RowDecoder):
    """Decodes each sequence of a batch with separate settings, which are arrays [batch].

    Temperature 0 selects the most likely token. Up to `max_tokens`, generates the same tokens as `Greedy`, or as
    `Sampling` with the same random key; all later tokens are end tokens. With `top_k`, the samples differ from those of
    `Sampling`, which draws other random numbers and drops tokens that are exactly as likely as the k-th token.
    """

    max_tokens: Any = None
    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    end_id: int = 1

    def build_token_selector(self, rng: jax.Array | None, batch: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Builds a function that selects the next token of each row; `rng` contains a random key for each row."""
        fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
        keys, is_sampled = fold(rng, 0), self.temperature > 0

        def select_tokens(logits: jax.Array, index: jax.Array) -> jax.Array:
            tokens = jnp.argmax(logits, axis=-1)
            draw = jax.lax.cond(jnp.any(is_sampled), self._sample_tokens, lambda *_: tokens, logits, fold(keys, index))
            return jnp.where(index < self.max_tokens, jnp.where(is_sampled, draw, tokens), self.end_id)

        return select_tokens

    def _sample_tokens(self, logits: jax.Array, keys: jax.Array) -> jax.Array:
        """Samples a token for each row, [rows], from logits [rows, vocab]."""
        logits /= jnp.where(self.temperature > 0, self.temperature, 1)[:, None]
        is_restricted = (self.top_k < logits.shape[-1]) | (self.top_p < 1)
        restrict = functools.partial(mask_outside_top_k_and_top_p, top_p=self.top_p[:, None], top_k=self.top_k[:, None])
        logits = jax.lax.cond(jnp.any(is_restricted), restrict, lambda logits: logits, logits)
        return jax.vmap(jax.random.categorical)(keys, logits)


@dataclasses.dataclass(frozen=True, eq=False)
class RequestRow:
    """A tokenized text and the operation to run: 'generate' with `settings`, 'score' with `targets`, or 'encode'."""

    operation: str
    inputs: list[int]
    targets: Sequence[int] = ()
    settings: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Engine:
    """A model with a request queue and a thread that runs the model.

    Public methods must be called from the thread of the event loop.

    Attributes:
        trained: the model.
        max_queue: maximum number of queued rows.
        state: 'starting' while programs are compiled, 'ready', or 'stopping'.
        waiting: queued pairs (row, future for its result) in order of arrival, including the batch being computed.
    """

    def __init__(self, trained: TrainedModel, batch_size: int, max_queue: int):
        self.trained, self.max_queue, self.state = trained, max_queue, 'starting'
        self.eos_id = task_vocabulary.get_end_id(trained.vocabulary)
        self.waiting: list[tuple[RequestRow, asyncio.Future]] = []
        self._rows_arrived = asyncio.Event()
        shards = trained.partitioner.batch_shards
        self._batch_size = -(-batch_size // shards) * shards
        self._predictors = {}
        for size in (shards, self._batch_size):
            settings = predictions.Decoding(size, trained.lengths, PerRequestDecoder(end_id=self.eos_id))
            self._predictors[size] = predictions.Predictor(
                trained.model, trained.partitioner, settings, trained.vocabulary
            )

    async def compute(self, rows: Sequence[RequestRow]) -> list[Any]:
        """Queues rows and returns a `Prediction`, log-likelihood or vector for each row."""
        futures = [asyncio.get_running_loop().create_future() for _ in rows]
        self.waiting += zip(rows, futures, strict=True)
        self._rows_arrived.set()
        return await asyncio.gather(*futures)

    async def run(self) -> None:
        """Compiles all programs, then computes batches until cancelled."""
        loop, start = asyncio.get_running_loop(), time.monotonic()
        with ThreadPoolExecutor(1, 'model') as thread:
            await loop.run_in_executor(thread, self._warm_up)
            self.state = 'ready'
            log(f'ready after {time.monotonic() - start:.1f} s')
            while await self._rows_arrived.wait():
                if len(self.waiting) < self._batch_size:
                    await asyncio.sleep(BATCH_WAIT_SECONDS)
                operation = self.waiting[0][0].operation
                batch = [pair for pair in self.waiting if pair[0].operation == operation][: self._batch_size]
                results = await loop.run_in_executor(thread, self._compute_row_results, [row for row, _ in batch])
                for (_, future), result in zip(batch, results, strict=True):
                    # The future is already done if the request was cancelled.
                    if not future.done():
                        (future.set_exception if isinstance(result, Exception) else future.set_result)(result)
                self.waiting = [pair for pair in self.waiting if pair not in batch]
                if not self.waiting:
                    self._rows_arrived.clear()

    def _compute_row_results(self, rows: Sequence[RequestRow]) -> list[Any]:
        """Returns the result of each row, or an exception for each row if the model fails."""
        try:
            return self._run_model(rows, min(size for size in self._predictors if size >= len(rows)))
        except Exception as error:
            log(f'error: {type(error).__name__}: {root_cause_message(error)}')
            return [HTTPException(500, 'the model failed; see the server log for the reason')] * len(rows)

    def _run_model(self, rows: Sequence[RequestRow], batch_size: int) -> list[Any]:
        predictor, params, inputs = self._predictors[batch_size], self.trained.params, [row.inputs for row in rows]
        if rows[0].operation == 'score':
            return predictor.score(params, inputs, [row.targets for row in rows]).tolist()
        if rows[0].operation == 'encode':
            return list(embeddings.compute_sentence_vectors(self.trained.model, predictor, params, inputs))
        settings = [(name, [row.settings[name] for row in rows], dtype) for name, dtype in SETTING_DTYPES.items()]
        return predictor.predict(params, inputs, arrays={name: np.asarray(*values) for name, *values in settings})

    def _warm_up(self) -> None:
        longest, model = self.trained.lengths['inputs'], self.trained.model
        shortest = self._predictors[self._batch_size].shortest
        lengths = [predictions.round_up_length(1, longest, shortest)]
        while lengths[-1] < longest:
            lengths.append(predictions.round_up_length(lengths[-1] + 1, longest, shortest))
        operations = [name for name in ('generate', 'score', 'encode') if hasattr(model, name)]
        programs = list(itertools.product(lengths, operations, self._predictors))
        for number, (length, operation, size) in enumerate(programs, 1):
            row = RequestRow(operation, [self.eos_id] * length, [self.eos_id], dict.fromkeys(SETTING_DTYPES, 1))
            self._run_model([row], size)
            log(f'compiled {number} of {len(programs)} programs')
