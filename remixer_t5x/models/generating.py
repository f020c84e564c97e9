"""What every model that generates text does with the steps of its decoder."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from remixer_t5x.models import decoding

Params = Any
Batch = Mapping[str, jax.Array]

_GREEDY = decoding.Greedy()


class Generating:
    """A model that continues inputs: an encoder's, or a prompt. It has no parameters.

    Attributes:
        given: the name, in a batch, of the array that it continues, [batch, length] int32.
    """

    given: ClassVar[str]

    def _generation(self, params: Params, given: jax.Array, max_length: int, eos_id: int = 1) -> decoding.Generation:
        """Reads what is given and prepares the steps of a decoder."""
        raise NotImplementedError

    def score_choices(self, params: Params, inputs: jax.Array, choices: jax.Array) -> jax.Array:
        """log p(choice | inputs) of each choice, [batch, choices] float32; the inputs are read once for all of them.

        Args:
            params: unboxed parameters.
            inputs: [batch, input_length] int32.
            choices: [batch, choices, length] int32, each with its end token and 0 after it; a choice of only padding
                has the score 0.
        """
        return decoding.score_choices(self._generation(params, inputs, choices.shape[2]), choices)

    def predict(
        self,
        params: Params,
        batch: Batch,
        max_decode_length: int,
        eos_id: int = 1,
        decoder: decoding.Decoder = _GREEDY,
        rng: jax.Array | None = None,
    ) -> jax.Array:
        """The first prediction of each sequence, [batch, max_decode_length] int32; see `generate`."""
        return self.generate(params, batch, max_decode_length, eos_id, decoder, rng).tokens[:, 0]

    def generate(
        self,
        params: Params,
        batch: Batch,
        max_decode_length: int,
        eos_id: int = 1,
        decoder: decoding.Decoder = _GREEDY,
        rng: jax.Array | None = None,
    ) -> decoding.Decoded:
        """Predictions for the array `given`: tokens [batch, n, max_decode_length] and scores [batch, n].

        Args:
            params: unboxed parameters.
            batch: has `given`, one example per row, 0 behind its end; tokens and scores of a row of only padding are 0.
            max_decode_length: maximum number of tokens to generate, including the end token.
            eos_id: the token that ends a sequence; tokens after it are 0.
            decoder: `decoding.Greedy()`, `sampling.Sampling(...)` or `beam_search.BeamSearch(...)`; it sets n.
            rng: one key or [batch] keys, for decoders that sample.
        """
        return decoder(self._generation(params, batch[self.given], max_decode_length, eos_id), rng)
