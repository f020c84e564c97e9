"""The running token MLP token by token: its formula, and the fastest way on a CPU, where a row's sum A stays in cache.

A is stored at the start of every block of about `hidden` tokens, which takes length x width numbers. The backward pass
restores A_{t-1} from A_t by subtracting what token t added, and restarts the sum where an example or a block ends, so
that rounding errors do not accumulate.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from remixer_t5x.kernels.attention.formula import ATTENTION_OUTPUT

Activation = Callable[[jax.Array], jax.Array]


def add_token(hidden: jax.Array, w_in: jax.Array, value: jax.Array) -> jax.Array:
    """A and the outer product of one token's w_in [..., heads, hidden] and value [..., heads, features]."""
    return hidden + w_in.astype(jnp.float32)[..., None] * value.astype(jnp.float32)[..., None, :]


def read_token(activation: Activation, w_out: jax.Array, hidden: jax.Array, scale: jax.Array | None) -> jax.Array:
    """`w_out . f(scale A)` of one token, [batch, heads, features]; scale is [batch], and None is 1."""
    units = activation(hidden if scale is None else hidden * _per_row(scale)).astype(w_out.dtype)
    return jnp.einsum('bhk,bhkf->bhf', w_out, units)


def mix_by_tokens(
    packed: bool,
    activation: Activation,
    w_in: jax.Array,
    value: jax.Array,
    w_out: jax.Array,
    examples: jax.Array,
    before: jax.Array,
    scale: jax.Array | None,
) -> jax.Array:
    """`api.mix_through_running_hidden` of arguments that are zero at padding.

    Args:
        packed: whether a row may hold several examples.
        activation: elementwise function of the hidden units.
        w_in, value, w_out, scale: as in `api.mix_through_running_hidden`.
        examples, before: [batch, length] int32, the example of each token and of the token before it.
    """
    batch, length, _, hidden = w_in.shape
    scale = jnp.ones((batch, length), jnp.float32) if scale is None else jax.lax.stop_gradient(scale)
    block = -(-length // -(-length // hidden))

    def split(array: jax.Array) -> jax.Array:
        """[batch, length, ...] -> [blocks, block, batch, ...], padded with zeros."""
        padded = jnp.pad(array, ((0, 0), (0, -length % block), *((0, 0),) * (array.ndim - 2)))
        return jnp.moveaxis(padded, 1, 0).reshape(-1, block, batch, *array.shape[2:])

    mixed = _mix_blocks(activation, packed, *map(split, (w_in, value, w_out, examples, before, scale)))
    return jnp.moveaxis(mixed.reshape(-1, *mixed.shape[2:])[:length], 0, 1).astype(value.dtype)


def _per_row(array: jax.Array) -> jax.Array:
    return array[:, None, None, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mix_blocks(activation, packed, *arguments):
    """`mix_by_tokens` for arguments of shape [blocks, block, batch, ...]."""
    return _forward_rule(activation, packed, *arguments)[0]


def _forward_rule(activation, packed, *arguments):
    def mix_token(hidden, token):
        w_in, value, w_out, examples, before, scale = token
        if packed:
            hidden = hidden * _per_row((examples == before).astype(jnp.float32))
        hidden = add_token(hidden, w_in, value)
        return hidden, read_token(activation, w_out, hidden, scale)

    def mix_block(hidden, tokens):
        end, mixed = jax.lax.scan(mix_token, hidden, tokens)
        return end, (mixed, hidden)

    w_in, value, *_ = arguments
    zeros = jnp.zeros((*w_in.shape[2:], value.shape[-1]), jnp.float32)
    _, (mixed, starts) = jax.lax.scan(mix_block, zeros, arguments)
    # Named, so that a remat policy keeps them. The backward pass would otherwise compute all of this again.
    mixed, starts = (checkpoint_name(array, ATTENTION_OUTPUT) for array in (mixed, starts))
    return mixed, (starts, *arguments)


def _backward_rule(activation, packed, residuals, gradient):
    def block_gradients(later, tokens):
        start, *tokens, gradient = tokens
        return _block_gradients(activation, packed, start, tokens, gradient, later)

    later = jnp.zeros_like(residuals[0][0])
    _, gradients = jax.lax.scan(block_gradients, later, (*residuals, gradient), reverse=True)
    return *gradients, None, None, None


_mix_blocks.defvjp(_forward_rule, _backward_rule)


def _block_gradients(activation, packed, start, tokens, gradient, later):
    """Gradients of a block's w_in, value and w_out, from its last token to its first.

    `start` is A before the block. `later` is dLoss/dA at the token after the block, as far as its example reaches back.
    """
    dtypes = [array.dtype for array in tokens[:3]]
    w_in, value, w_out, gradient = (array.astype(jnp.float32) for array in (*tokens[:3], gradient))
    examples, before, scale = tokens[3:]
    index = jnp.arange(examples.shape[0])

    def sum_up_to(at):
        """A at token `at`, from the start of its example or of the block, whichever is later."""
        is_added = (examples == examples[at]) & (index <= at)[:, None]
        total = jnp.einsum('tbhk,tbhf->bhkf', jnp.where(is_added[..., None, None], w_in, 0), value)
        return total + start * _per_row((examples[at] == before[0]).astype(jnp.float32))

    def token_gradients(carry, token):
        hidden, later = carry
        at, w_in, value, w_out, examples, before, scale, gradient, (next_w_in, next_value, next_examples) = token
        hidden = add_token(hidden, -next_w_in, next_value)
        if packed:
            hidden = jax.lax.cond(jnp.any(examples != next_examples), lambda: sum_up_to(at), lambda: hidden)
        units, pull_back = jax.vjp(lambda hidden: activation(hidden * _per_row(scale)), hidden)
        of_w_out = jnp.einsum('bhkf,bhf->bhk', units, gradient)
        later = later + pull_back(w_out[..., None] * gradient[..., None, :])[0]
        of_w_in = jnp.einsum('bhkf,bhf->bhk', later, value)
        of_value = jnp.einsum('bhkf,bhk->bhf', later, w_in)
        if packed:
            later = later * _per_row((examples == before).astype(jnp.float32))
        return (hidden, later), (of_w_in, of_value, of_w_out)

    # The first step, of the last token, subtracts nothing.
    following = [jnp.concatenate([array[1:], jnp.zeros_like(array[:1])]) for array in (w_in, value)]
    following.append(jnp.concatenate([examples[1:], examples[-1:]]))
    tokens = (index, w_in, value, w_out, examples, before, scale, gradient, tuple(following))
    (_, later), gradients = jax.lax.scan(token_gradients, (sum_up_to(index[-1]), later), tokens, reverse=True)
    return later, [array.astype(dtype) for array, dtype in zip(gradients, dtypes, strict=True)]
