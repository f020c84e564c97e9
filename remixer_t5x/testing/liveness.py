"""The liveness law of a model: at initialisation every kind of sublayer moves the output of its stack.

A sublayer whose updates are small next to the residual stream, or next to another sublayer's, has hardly a gradient and
hardly an effect, and in bfloat16 the addition rounds its updates away. No test of shapes, gradients or losses shows it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from remixer_t5x.context import SequenceContext
from remixer_t5x.models.architecture.layer import Layer
from remixer_t5x.models.architecture.stack import traced_once
from remixer_t5x.models.interface import Model
from remixer_t5x.testing.subject import fast_key

# What setting a kind of sublayer to zero changes at least, as a part of the output's norm. Rounding in bfloat16 changes
# a stack's output by 0.01.
MINIMUM = 0.05

Kind = tuple[str, str]


def movements(model: Model, inputs: np.ndarray, targets: np.ndarray, seed: int = 0) -> dict[Kind, float]:
    """How much each kind of sublayer moves its stack's output: `norm(y - y without it) / norm(y)` over the tokens.

    "Without it" sets its output to zero in every layer of the stack; the decoder reads the whole encoder's output.

    Args:
        model: an encoder-decoder, or an encoder or a decoder alone, which is initialised at random.
        inputs: the encoder's ids [batch, length] int32 with 0 for padding.
        targets: the decoder's ids [batch, length] int32 with 0 for padding.
        seed: of the parameters.

    Returns:
        {('encoder' or 'decoder', name of the sublayer's parameters): movement}.
    """
    kinds, found = _outputs(model, inputs, targets, seed)
    outputs = {stack: np.asarray(y, np.float64) for stack, y in found.items()}
    moved = {}
    for index, (stack, name) in enumerate(kinds, 1):
        is_token = (inputs if stack == 'encoder' else targets) > 0
        whole, without = outputs[stack][0][is_token], outputs[stack][index][is_token]
        moved[stack, name] = float(np.linalg.norm(whole - without) / np.linalg.norm(whole))
    return moved


def too_still(moved: dict[Kind, float], minimum: float = MINIMUM) -> Sequence[Kind]:
    """The kinds whose movement is below the minimum or not a number."""
    return [kind for kind, movement in moved.items() if not movement >= minimum]


def _outputs(model: Model, inputs: Any, targets: Any, seed: int) -> tuple[list[Kind], dict[str, Any]]:
    """The kinds; and the outputs of the encoder and the decoder, [1 + kinds, batch, length, embed]: whole, then without
    each kind.
    """
    kinds: list[Kind] = []

    def multiplied(stack: str, keep: jax.Array) -> Any:
        def multiply(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            y, kind = call(*args, **kwargs), _kind(args, context)
            return y * keep[kinds.index(kind)].astype(y.dtype) if kind is not None and kind[0] == stack else y

        return nn.intercept_methods(multiply)

    @jax.jit
    def run(key: jax.Array) -> dict[str, jax.Array]:
        params = nn.unbox(_init(model, kinds, key, inputs, targets))
        stacks = {stack for stack, _ in kinds}

        def apply(stack: str, method: str, *args: Any) -> jax.Array:
            def without(keep: jax.Array) -> jax.Array:
                with multiplied(stack, keep):
                    return model.module.apply({'params': params}, *args, enable_dropout=False, method=method)

            return jax.vmap(without)(jnp.concatenate([jnp.ones((1, len(kinds))), 1 - jnp.eye(len(kinds))]))

        found = {'encoder': apply('encoder', 'encode', inputs)} if 'encoder' in stacks else {}
        if 'decoder' in stacks:
            memory = (found['encoder'][0], inputs) if found else ()
            found['decoder'] = apply('decoder', 'decode_hidden', *memory, targets)
        return {stack: y.astype(jnp.float32) for stack, y in found.items()}

    with traced_once():
        found = jax.device_get(run(fast_key(seed)))
    return kinds, found


def _init(model: Model, kinds: list[Kind], key: jax.Array, inputs: Any, targets: Any) -> Any:
    """The parameters; appends the kinds, in the order in which they are called."""

    def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        kind = _kind(args, context)
        if kind is not None and kind not in kinds:
            kinds.append(kind)
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        return model.init(key, {'encoder_input_tokens': inputs.shape, 'decoder_target_tokens': targets.shape})


def _kind(args: Any, context: Any) -> Kind | None:
    """The stack and name of the sublayer that is called; None where something else is, as the norm of a layer."""
    called = context.module
    is_sublayer = isinstance(called.parent, Layer) and len(args) == 2 and isinstance(args[1], SequenceContext)
    return (called.path[0], called.name) if is_sublayer and context.method_name == '__call__' else None
