"""Base class of models that generate text: encoder-decoders and decoder-only language models."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from remixer_t5x.models import decoding, losses
from remixer_t5x.models.architecture.stack import unstack_layers
from remixer_t5x.models.decoding import StopStrings
from remixer_t5x.models.interface import Batch, MetricSums, Model, Params, count_sequences, targets_and_weights

_GREEDY = decoding.Greedy()


@dataclasses.dataclass(frozen=True)
class GenerativeModel(Model):
    """Base class of models with a decoder that predicts `decoder_target_tokens`.

    Attributes:
        input_array: name of the batch array that contains the inputs or prompts, [batch, length] int32.
    """

    loss_function: losses.CrossEntropy = losses.CrossEntropy()

    input_array: ClassVar[str]

    @property
    def logit_softcap(self) -> float | None:
        return None

    def _compute_hidden(self, params: Params, batch: Batch, rng: jax.Array | None = None) -> jax.Array:
        """Returns the input of the output projection, [batch, length, embed], with dropout if `rng` is a key."""
        raise NotImplementedError

    def _encode_for_generation(
        self, params: Params, inputs: jax.Array, max_length: int, eos_id: int = 1
    ) -> decoding.Generation:
        """Encodes the inputs and returns the model's decoding functions for them."""
        raise NotImplementedError

    def loss(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, MetricSums]:
        """Returns the loss summed over target tokens with nonzero weights, and sums of metrics."""
        hidden = self._compute_hidden(params, batch, dropout_rng)
        loss, sums = self.loss_function(
            hidden, self.module.output_kernel(params), *targets_and_weights(batch, 'decoder'), self.logit_softcap
        )
        return loss, {**sums, 'sequences': count_sequences(batch, 'decoder_target_tokens')}

    def score(self, params: Params, batch: Batch) -> jax.Array:
        """Returns the log-likelihood of each row's targets, [batch] float32, without z-loss or label smoothing."""
        return self.score_and_match(params, batch)[0]

    def score_and_match(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns the log-likelihood of each row's targets, and whether greedy decoding would generate them."""
        hidden, (targets, weights) = self._compute_hidden(params, batch), targets_and_weights(batch, 'decoder')
        kernel = self.module.output_kernel(params)
        return losses.score_and_match_rows(
            hidden, kernel, targets, weights, self.loss_function.chunk_length, self.logit_softcap
        )

    def score_choices(self, params: Params, inputs: jax.Array, choices: jax.Array) -> jax.Array:
        """Returns log p(choice | inputs) of each choice, [batch, choices] float32; inputs are encoded once.

        Args:
            inputs: token ids [batch, input_length] int32.
            choices: token ids [batch, choices, length] int32. Each choice ends with its end token and is padded with
                0; a choice that contains only padding has the score 0.
        """
        batch, count, length = choices.shape
        generation = self._encode_for_generation(params, inputs, length)

        def body(carry, tokens):
            previous, cache = carry
            logits, cache = generation.step(previous, cache)
            return (tokens, cache), jnp.where(tokens > 0, decoding.log_probability(logits, tokens), 0.0)

        by_position = jnp.moveaxis(choices.reshape(batch * count, length), 1, 0)
        start = (generation.first_tokens(count), generation.allocate(count))
        _, scores = jax.lax.scan(body, start, by_position)
        return jnp.sum(scores, axis=0).reshape(batch, count)

    def predict(
        self,
        params: Params,
        batch: Batch,
        max_decode_length: int,
        eos_id: int = 1,
        decoder: decoding.Decoder = _GREEDY,
        rng: jax.Array | None = None,
    ) -> jax.Array:
        """Generates a sequence for each row, [batch, max_decode_length] int32: the first sequence of `generate`."""
        return self.generate(params, batch, max_decode_length, eos_id, decoder, rng).tokens[:, 0]

    def generate(
        self,
        params: Params,
        batch: Batch,
        max_decode_length: int,
        eos_id: int = 1,
        decoder: decoding.Decoder = _GREEDY,
        rng: jax.Array | None = None,
        stop_strings: StopStrings | None = None,
    ) -> decoding.Decoded:
        """Generates n sequences per row: tokens [batch, n, max_decode_length] and scores [batch, n].

        Args:
            batch: a batch with the model's `input_array`, one example per row, padded with 0; a row may be empty.
            max_decode_length: maximum number of tokens to generate, including the end token.
            eos_id: id of the token that ends a sequence; tokens after it are 0.
            decoder: `decoding.Greedy()`, `sampling.Sampling(...)` or `beam_search.BeamSearch(...)`, which sets n.
            rng: PRNG key for sampling decoders, or an array of [batch] keys.
        """
        return decoder(self.prepare_generation(params, batch, max_decode_length, eos_id, stop_strings), rng)

    def prepare_generation(
        self, params: Params, batch: Batch, max_length: int, eos_id: int = 1, stop_strings: StopStrings | None = None
    ) -> decoding.Generation:
        """Encodes the inputs and returns the decoder's inputs; see `generate` for the arguments."""
        generation = self._encode_for_generation(params, batch[self.input_array], max_length, eos_id)
        return dataclasses.replace(generation, stop_strings=stop_strings)

    def _decoding_params(self, params: Params) -> Params:
        """Unstacks the decoder layers and casts kernels to the dtype of activations, once before decoding."""
        params = {**params, 'decoder': unstack_layers(params['decoder'])}
        # Without the barrier, XLA:GPU would move the casts into the decoding loop.
        return jax.lax.optimization_barrier(decoding.cast_kernels(jnp.dtype(self.module.dtype), params))

    def _next_logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Computes the logits of the next token, [rows, vocab] float32, from the decoder's output [rows, 1, embed]."""
        return losses.token_logits(hidden[:, 0], self.module.output_kernel(params), self.logit_softcap)
