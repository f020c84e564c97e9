"""Defines the base classes of all models and of generative models, and checks whether a model supports a command.

The arrays in a batch of each model type are defined in `data.batch_formats`.
"""

import dataclasses
import itertools
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x.errors import UserError
from remixer_t5x.kernels import self_check
from remixer_t5x.models import decoding, losses
from remixer_t5x.models.architecture import layer, stack
from remixer_t5x.models.decoding import StopStrings
from remixer_t5x.models.lora import LoraConfig

Params = Any
Batch = Mapping[str, jax.Array]
MetricSums = losses.MetricSums
_GREEDY = decoding.Greedy()


@dataclasses.dataclass(frozen=True)
class Model:
    """Base class of all models: a Flax module and a loss.

    Models do not store parameters; pass them to each method. The docstring of each subclass lists the arrays of a
    batch, which have the feature names of seqio's feature converters.

    Attributes:
        lora: settings of LoRA adapters that `init` adds to the parameters, or None.
        config: the gin configuration that `TrainedModel.save` writes; empty if the model was built without gin.
        fresh_parameters: top-level names of the parameters that are not loaded from another model's checkpoint.
    """

    module: Any
    lora: LoraConfig | None = dataclasses.field(default=None, kw_only=True)
    config: str = dataclasses.field(default='', kw_only=True, compare=False, repr=False)

    model_type: ClassVar[str]
    fresh_parameters: ClassVar[tuple[str, ...]] = ()

    @property
    def vocab_size(self) -> int:
        """Returns the number of token embeddings."""
        return self.module.vocab_size

    def init(self, rng: jax.Array, batch_shapes: Mapping[str, tuple[int, ...]]) -> Params:
        """Returns random float32 parameters, boxed with their logical axes (`nn.LogicallyPartitioned`).

        Args:
            batch_shapes: shapes of a batch's token arrays, and of its segment ids if rows are packed. Some sublayers
                raise UserError for long or packed rows.

        Raises:
            UserError: a module requires other attributes or inputs than the module that contains it passes.
        """
        method, inputs = self._init_method_and_inputs(
            {name: jnp.ones(shape, jnp.int32) for name, shape in batch_shapes.items()}
        )

        def init() -> Params:
            return self.module.init(rng, **inputs, enable_dropout=False, method=method)['params']

        try:
            return init() if self.lora is None else self.lora.init(init, rng)
        except TypeError as error:
            if not _is_raised_by_call_of_ours(error):
                raise
            raise UserError(
                f'a module does not fit its setting: {str(error).splitlines()[0]}; set its attributes, '
                'CLASS.ATTRIBUTE = VALUE, name the scope in which a file sets them, as in '
                '@encoder/remixer.Remixer, or use another class'
            ) from error

    def loss(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, MetricSums]:
        """Returns the loss summed over all predictions, and float32 sums of metrics.

        To compute means, add up the sums of all microbatches and divide by the sum named 'weights'. Training and
        evaluation log the mean of each sum, including custom sums.

        Args:
            batch: the arrays listed in the docstring of the model class.
            dropout_rng: a PRNG key, or None to disable dropout.
        """
        raise NotImplementedError

    def without_label_smoothing(self) -> Self:
        """Returns this model without label smoothing, which would distort perplexities."""
        return self

    def _init_method_and_inputs(self, batch: Batch) -> tuple[str, dict[str, Any]]:
        """Returns the name of a module method that uses all parameters, and the arguments to call it with."""
        raise NotImplementedError

    def _apply_module(
        self, method: str, params: Params, *args: Any, rng: jax.Array | None = None, **kwargs: Any
    ) -> jax.Array:
        """Calls a method of the module; dropout is enabled if `rng` is not None."""
        return self.module.apply(
            {'params': params},
            *args,
            **kwargs,
            enable_dropout=rng is not None,
            rngs=None if rng is None else {'dropout': rng},
            method=method,
        )


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
        return getattr(self.module, 'logit_softcap', None)

    def without_label_smoothing(self) -> Self:
        return dataclasses.replace(self, loss_function=dataclasses.replace(self.loss_function, label_smoothing=0.0))

    def _compute_hidden(self, params: Params, batch: Batch, rng: jax.Array | None = None) -> jax.Array:
        """Returns the input of the output projection, [batch, length, embed], with dropout if `rng` is a key."""
        raise NotImplementedError

    def _encode_for_generation(
        self, params: Params, inputs: jax.Array, max_length: int, eos_id: int = 1
    ) -> decoding.GenerationInputs:
        """Encodes the inputs and returns the model's decoding functions for them."""
        raise NotImplementedError

    def loss(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, MetricSums]:
        """Returns the loss summed over target tokens with nonzero weights, and sums of metrics."""
        hidden = self._compute_hidden(params, batch, dropout_rng)
        loss, sums = self.loss_function(
            hidden,
            self.module.get_output_kernel(params),
            *get_targets_and_weights(batch, 'decoder'),
            self.logit_softcap,
        )
        return loss, {**sums, 'sequences': count_sequences(batch, 'decoder_target_tokens')}

    def score(self, params: Params, batch: Batch) -> jax.Array:
        """Returns the log-likelihood of each row's targets, [batch] float32, without z-loss or label smoothing."""
        return self.score_and_match_targets(params, batch)[0]

    def score_and_match_targets(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns the log-likelihood of each row's targets, and whether greedy decoding would generate them."""
        hidden, (targets, weights) = self._compute_hidden(params, batch), get_targets_and_weights(batch, 'decoder')
        kernel = self.module.get_output_kernel(params)
        return losses.score_and_match_targets(
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

        def score_next_token(carry, tokens):
            previous, cache = carry
            logits, cache = generation.step(previous, cache)
            return (tokens, cache), jnp.where(tokens > 0, decoding.compute_log_probability(logits, tokens), 0.0)

        by_position = jnp.moveaxis(choices.reshape(batch * count, length), 1, 0)
        start = (generation.make_first_tokens(count), generation.allocate(count))
        _, scores = jax.lax.scan(score_next_token, start, by_position)
        return jnp.sum(scores, axis=0).reshape(batch, count)

    def generate(
        self,
        params: Params,
        batch: Batch,
        max_decode_length: int,
        eos_id: int = 1,
        decoder: decoding.Decoder = _GREEDY,
        rng: jax.Array | None = None,
        stop_strings: StopStrings | None = None,
    ) -> decoding.DecodingResult:
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
        self,
        params: Params,
        batch: Batch,
        max_length: int,
        eos_id: int = 1,
        stop_strings: StopStrings | None = None,
    ) -> decoding.GenerationInputs:
        """Encodes the inputs and returns the decoder's inputs; see `generate` for the arguments."""
        generation = self._encode_for_generation(params, batch[self.input_array], max_length, eos_id)
        return dataclasses.replace(generation, stop_strings=stop_strings)

    def _prepare_decoding_params(self, params: Params) -> Params:
        """Unstacks the decoder layers and casts kernels to the dtype of activations, once before decoding."""
        params = {**params, 'decoder': stack.unstack_layers(params['decoder'])}
        # Without the barrier, XLA:GPU would move the casts into the decoding loop.
        return jax.lax.optimization_barrier(decoding.cast_kernels(jnp.dtype(self.module.dtype), params))

    def _compute_next_logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Computes the logits of the next token, [rows, vocab] float32, from the decoder's output [rows, 1, embed]."""
        return losses.compute_token_logits(hidden[:, 0], self.module.get_output_kernel(params), self.logit_softcap)


def _is_raised_by_call_of_ours(error: TypeError) -> bool:
    """Returns whether a module of this package, not of the user, has called an object with the wrong arguments.

    An array instead of a number, such as the length that a position bias expects, is an abstract tracer.
    """
    names = [frame.f_globals.get('__name__', '') for frame, _ in traceback.walk_tb(error.__traceback__)]
    caller = next(name for name in reversed(names) if not name.startswith(('flax.', 'jax.')))
    problems = r'\(\) (missing|got|takes) |not callable|Abstract tracer'
    return caller.startswith('remixer_t5x.') and bool(re.search(problems, str(error)))


def select_batch_arrays(batch: Batch, *names: str) -> dict[str, jax.Array]:
    """Selects arrays of `batch` by name; skips names that are not in the batch."""
    return {name: batch[name] for name in names if name in batch}


def get_targets_and_weights(batch: Batch, side: str) -> tuple[jax.Array, jax.Array]:
    """Returns the targets and float32 loss weights of the 'encoder' or 'decoder', both [batch, length]."""
    targets, weights = batch[f'{side}_target_tokens'], batch.get(f'{side}_loss_weights')
    return targets, (targets > 0 if weights is None else weights).astype(jnp.float32)


def count_sequences(batch: Batch, tokens: str) -> jax.Array:
    """Counts the examples of a batch that have tokens in the array named `tokens`; rows may be packed."""
    segments = batch.get(f'{tokens.partition("_")[0]}_segment_ids')
    if segments is None:
        return jnp.sum(jnp.any(batch[tokens] > 0, axis=-1).astype(jnp.float32))
    return jnp.sum(jnp.max(segments, axis=-1).astype(jnp.float32))


def list_sublayer_factories(model: Model) -> dict[str, list[Callable[..., nn.Module]]]:
    """Returns the sublayer factories of the encoder and decoder stacks, in layer order."""
    stacks = {side: getattr(model.module, f'{side}_stack', None) for side in ('encoder', 'decoder')}
    return {
        side: [
            sublayer
            for layer, _ in stack_factory().runs
            # A custom layer without the attribute `sublayers` counts as one sublayer.
            for sublayer in getattr(layer(), 'sublayers', (layer,))
        ]
        for side, stack_factory in stacks.items()
        if stack_factory is not None
    }


def requires_fixed_length(model: Model) -> bool:
    """Returns whether a sublayer's output depends on the padded length (class attribute `fixed_length`)."""
    factories = itertools.chain(*list_sublayer_factories(model).values())
    return any(getattr(layer.unwrap_partial(factory), 'fixed_length', False) for factory in factories)


def compute_param_shapes(model: Model, batch_shapes: Mapping[str, tuple[int, ...]]) -> Params:
    """Returns the result of `model.init` with `jax.ShapeDtypeStruct` leaves, without computing arrays."""
    # Shapes do not depend on which kernels are used, so the kernels' self-checks are skipped.
    with stack.trace_layers_once(), self_check.record_checks():
        return jax.eval_shape(lambda: model.init(jax.random.key(0), batch_shapes))


# Maps each optional method of models to its description in error messages and the model types that implement it.
OPTIONAL_MODEL_METHODS = {
    'generate': ('generates text', ('encoder_decoder', 'decoder_only')),
    'score': ('scores one text given another', ('encoder_decoder', 'decoder_only')),
    'score_choices': ('ranks choices', ('encoder_decoder', 'decoder_only')),
    'encode': ('encodes text', ('encoder_decoder', 'encoder_only', 'classifier', 'token_labels', 'span', 'embedding')),
    'classify': ('classifies text', ('classifier',)),
}


def require_method(model: Model, method: str, caller: str) -> None:
    """Raises UserError if the model does not implement `method`, which the command or function `caller` requires."""
    if not callable(getattr(model, method, None)):
        description, model_types = OPTIONAL_MODEL_METHODS[method]
        raise UserError(
            f'MODEL_TYPE must be {" or ".join(model_types)} for {caller}, got {model.model_type!r}; '
            f'use a model that {description}'
        )


def require_model_type(model: Model, model_type: str, caller: str) -> None:
    """Raises UserError unless the model has the type required by the command or flag `caller`."""
    if model.model_type != model_type:
        raise UserError(f'MODEL_TYPE must be {model_type} for {caller}, got {model.model_type!r}')
