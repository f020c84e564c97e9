"""LanguageModel: the loss, scores and continuations of a decoder alone as functions of its parameters."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from remixer_t5x.context import token_counts
from remixer_t5x.errors import UserError
from remixer_t5x.models import decoding, losses
from remixer_t5x.models.architecture.decoder_only import DecoderOnly
from remixer_t5x.models.architecture.stack import layers_apart
from remixer_t5x.models.generating import Generating

Params = Any
Batch = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class LanguageModel(Generating):
    """A module and its loss. It has no parameters, so that every method is a pure function of them.

    A batch is a mapping of [batch, length] int32 arrays with the names of seqio's LMFeatureConverter:
    decoder_input_tokens, decoder_target_tokens, decoder_loss_weights, and for packed rows decoder_segment_ids and
    decoder_positions; or of its PrefixLMFeatureConverter, which adds decoder_causal_attention.

    Attributes:
        module: the decoder.
        loss_function: of the tokens with a weight.
        prefix: whether the tokens that decoder_causal_attention marks, and prompts, are read in both directions. If
            False they are read from left to right, as all others.
    """

    module: DecoderOnly
    loss_function: losses.CrossEntropy = losses.CrossEntropy()
    prefix: bool = False

    given = 'prompt_tokens'

    @property
    def frame(self) -> str:
        return 'decoder_only'

    @property
    def vocab_size(self) -> int:
        return self.module.vocab_size

    def init(self, rng: jax.Array, batch_shapes: Mapping[str, tuple[int, ...]]) -> Params:
        """Random parameters, float32, each boxed with its logical axes.

        Args:
            rng: a key.
            batch_shapes: shapes of at least decoder_target_tokens, and of decoder_segment_ids if rows are packed. The
                parameters do not depend on them, but a sublayer may refuse a length, packing, or a prefix.
        """
        tokens = jnp.ones(batch_shapes['decoder_target_tokens'], jnp.int32)
        segments = tokens if 'decoder_segment_ids' in batch_shapes else None
        prefix = tokens > 0 if self.prefix else None
        variables = self.module.init(rng, tokens, decoder_segment_ids=segments, prefix=prefix, enable_dropout=False)
        return variables['params']

    def loss(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, losses.Sums]:
        """Loss summed over the tokens with a weight, and the sums to report; divide by sums['weights'] once.

        Args:
            params: unboxed parameters.
            batch: see the class.
            dropout_rng: a key; None switches dropout off.
        """
        hidden = self._hidden(params, batch, dropout_rng)
        kernel, weights = self.module.output_kernel(params), _weights(batch)
        loss, sums = self.loss_function(hidden, kernel, batch['decoder_target_tokens'], weights)
        return loss, {**sums, 'sequences': losses.count_sequences(batch)}

    def score(self, params: Params, batch: Batch) -> jax.Array:
        """The log-likelihood of each row's tokens with a weight, [batch] float32, without z-loss and label smoothing.

        With `prompt_tokens` [batch, prompt_length] in the batch, the other arrays are of the texts that follow, and the
        result is log p(text | prompt).
        """
        return self.judge(params, batch)[0]

    def judge(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """`score`, and whether greedy decoding gives the tokens of each row, [batch] bool."""
        if 'prompt_tokens' in batch:
            batch = behind_prompts(batch['prompt_tokens'], batch['decoder_target_tokens'])
        hidden = self._hidden(params, batch, None)
        kernel, chunk = self.module.output_kernel(params), self.loss_function.chunk_length
        return losses.judge_rows(hidden, kernel, batch['decoder_target_tokens'], _weights(batch), chunk)

    def _generation(self, params: Params, prompts: jax.Array, max_length: int, eos_id: int = 1) -> decoding.Generation:
        """Reads the prompts and prepares the steps of a decoder."""
        params = {**params, 'decoder': layers_apart(params['decoder'])}
        # A GPU would otherwise read float32 kernels and cast them at every step.
        params = jax.lax.optimization_barrier(decoding.kernels_in(jnp.dtype(self.module.dtype), params))
        slots = prompts.shape[1] + max_length
        # Id 0 begins a sequence, as in training.
        tokens, count = jnp.pad(prompts, ((0, 0), (1, 0))), token_counts(prompts)
        is_token = jnp.arange(tokens.shape[1]) <= count[:, None]

        def apply(method: str, *args: Any, **cache: Any) -> tuple[jax.Array, decoding.Cache]:
            hidden, variables = self.module.apply({'params': params, **cache}, *args, mutable=['cache'], method=method)
            return hidden, variables['cache']

        def allocate(rows_per_sequence: int) -> decoding.Cache:
            cache = apply('read_prompt', tokens, is_token, slots, self.prefix)[1]
            return jax.tree.map(lambda leaf: jnp.repeat(leaf, rows_per_sequence, axis=0), cache)

        def step(tokens: jax.Array, cache: decoding.Cache) -> tuple[jax.Array, decoding.Cache]:
            hidden, cache = apply('next_hidden', tokens[:, None], slots, cache=cache)
            return losses.token_logits(hidden[:, 0], self.module.output_kernel(params)), cache

        last = jnp.take_along_axis(tokens, count[:, None], axis=1)[:, 0]
        return decoding.Generation(allocate, step, count > 0, max_length, eos_id, last)

    def _hidden(self, params: Params, batch: Batch, dropout_rng: jax.Array | None) -> jax.Array:
        return self.module.apply(
            {'params': params},
            batch['decoder_input_tokens'],
            decoder_segment_ids=batch.get('decoder_segment_ids'),
            decoder_positions=batch.get('decoder_positions'),
            prefix=self._prefix(batch),
            enable_dropout=dropout_rng is not None,
            rngs=None if dropout_rng is None else {'dropout': dropout_rng},
            method='decode_hidden',
        )

    def _prefix(self, batch: Batch) -> jax.Array | None:
        if not self.prefix:
            return None
        if 'decoder_causal_attention' not in batch:
            raise UserError(
                'PREFIX_LM is True and the task has targets alone; give PREFIX_LM = False, or a task with inputs and '
                "their length too, as in TASK_FEATURE_LENGTHS = {'inputs': 512, 'targets': 114}"
            )
        return batch['decoder_causal_attention'] > 0


def behind_prompts(prompts: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
    """A batch of prompts [batch, prompt_length], each directly followed by its targets [batch, target_length], which
    have all the weight.
    """
    count = token_counts(prompts)[:, None]
    both = jnp.concatenate([prompts, targets], axis=1)
    place = jnp.arange(both.shape[1])
    # What follows the targets in `both` is beyond its end.
    source = jnp.where(place < count, place, place - count + prompts.shape[1])
    tokens = jnp.take_along_axis(jnp.pad(both, ((0, 0), (0, 1))), jnp.minimum(source, both.shape[1]), axis=1)
    return {
        'decoder_target_tokens': tokens,
        'decoder_input_tokens': jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1],
        'decoder_loss_weights': ((place >= count) & (tokens > 0)).astype(jnp.int32),
        'decoder_causal_attention': (place <= count).astype(jnp.int32),
    }


def _weights(batch: Batch) -> jax.Array:
    weights = batch.get('decoder_loss_weights')
    return (batch['decoder_target_tokens'] > 0 if weights is None else weights).astype(jnp.float32)
