"""A causal MLP along the tokens of an example: `y_t = w_out[t] . f(c_t A_t)`, `A_t = sum_{j <= t} w_in[j] (x) v[j]`.

The running sum A [heads, hidden, features] is all that a token needs from the tokens before it. Storing A for every
token would take length x hidden x features numbers. For the backward pass, A is stored only at the start of every block
of about `hidden` tokens, which takes length x width numbers, and recomputed from there, in one of these ways:

* Token by token on a CPU, where a row's A stays in cache: the backward pass restores A_{t-1} from A_t by subtracting
  what token t added, and restarts the sum where an example or a block ends, so that rounding errors do not accumulate.
* With a kernel that keeps A on the chip, on a TPU and on a GPU (`blocks`).
* Chunk by chunk on an accelerator whose kernel cannot compute the call: the sums of a few tokens are one masked matmul,
  and autodiff computes the gradients.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from remixer_t5x.kernels import compile_target, self_check
from remixer_t5x.kernels.attention.formula import ATTENTION_OUTPUT
from remixer_t5x.kernels.compile_target import on_cpu, target_platform
from remixer_t5x.kernels.running_token_mlp import tpu, triton
from remixer_t5x.kernels.running_token_mlp.blocks import mix_by_kernel

Activation = Callable[[jax.Array], jax.Array]

_KERNELS = {'tpu': tpu, 'gpu': triton}

# Number of tokens in a chunk: the matmul costs 2 * CHUNK operations for each number of A, the activation about 20.
CHUNK = 16


def mix_through_running_hidden(
    w_in: jax.Array,
    value: jax.Array,
    w_out: jax.Array,
    ids: jax.Array,
    *,
    packed: bool,
    hidden_scale: jax.Array | None = None,
    activation: Activation = jax.nn.gelu,
) -> jax.Array:
    """Mixes each token with the tokens before it in its example, through hidden units.

    Args:
        w_in: [batch, length, heads, hidden] weights of the tokens as they are read; weights at padding do not matter.
        value: [batch, length, heads, features], the values that are read.
        w_out: [batch, length, heads, hidden] weights of the tokens as they are written.
        ids: [batch, length] int32, 1.. names the example of a token, 0 is padding.
        packed: False means at most one example in a row.
        hidden_scale: [batch, length] float32, c_t, without a gradient; None is 1.
        activation: elementwise function of the hidden units, by default GELU in its tanh form.

    Returns:
        [batch, length, heads, features] in value's dtype; A is float32.
    """
    is_token = (ids > 0)[..., None, None]
    operands = jnp.where(is_token, w_in, 0), jnp.where(is_token, value, 0), w_out, ids, hidden_scale
    platform = target_platform()
    if kernel := _KERNELS.get(platform):
        refusal = kernel.refusal(w_in, value)
        if refusal is None:
            refusal = self_check.failure(_check(platform, packed, activation, w_in, value, hidden_scale))
        if refusal is None:
            return _by_kernel(platform, packed, activation, *operands)
        self_check.warn_of_formula('the running token MLP', f'the {platform} kernel', refusal)
    return _by_formula(packed, activation, *operands)


def _check(
    platform: str, packed: bool, activation: Activation, w_in: jax.Array, value: jax.Array, scale: jax.Array | None
) -> self_check.Check:
    """The check of a kernel for one device's part of the heads."""
    (batch, length, heads, hidden), features, rows = w_in.shape, value.shape[-1], self_check.ROWS
    heads = compile_target.heads_of_device(batch, heads)
    of_hidden = jax.ShapeDtypeStruct((rows, length, heads, hidden), w_in.dtype)
    of_value = jax.ShapeDtypeStruct((rows, length, heads, features), value.dtype)
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    of_scale = None if scale is None else jax.ShapeDtypeStruct((rows, length), scale.dtype)
    call = f'{length} tokens, {heads} heads of {hidden} units and {features} features{", packed" * packed}'
    return self_check.Check(
        f'running_token_mlp_{platform}',
        call,
        functools.partial(_by_kernel, platform, packed, activation),
        functools.partial(_by_formula, packed, activation),
        (of_hidden, of_value, of_hidden, ids, of_scale),
        packed,
    )


def _neighbours(packed: bool, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The example of each token, and that of the token before it."""
    examples = ids if packed else jnp.zeros_like(ids)
    # With one example in a row, A continues past its end, so the id before the first token may have any value.
    return examples, jnp.roll(examples, 1, axis=1).at[:, 0].set(examples[:, 0])


def _by_kernel(platform, packed, activation, w_in, value, w_out, ids, scale):
    examples, before = _neighbours(packed, ids)
    keep = (examples == before).astype(jnp.float32) if packed else None
    return mix_by_kernel(_KERNELS[platform], activation, w_in, value, w_out, keep, scale)


def _by_formula(packed, activation, w_in, value, w_out, ids, scale):
    batch, length, _, hidden = w_in.shape
    examples, before = _neighbours(packed, ids)
    scale = jnp.ones((batch, length), jnp.float32) if scale is None else jax.lax.stop_gradient(scale)
    by_token = on_cpu()  # with one small step for each token, an accelerator would mostly wait
    blocks = -(-length // hidden)
    block = -(-length // blocks) if by_token else -(-length // (blocks * CHUNK)) * CHUNK

    def split(array: jax.Array) -> jax.Array:
        """[batch, length, ...] -> [blocks, block, batch, ...], filled up with zeros."""
        rest = ((0, 0),) * (array.ndim - 2)
        padded = jnp.pad(array, ((0, 0), (0, -length % block), *rest))
        return jnp.moveaxis(padded, 1, 0).reshape(-1, block, batch, *array.shape[2:])

    arguments = [split(array) for array in (w_in, value, w_out, examples, before, scale)]
    mix = functools.partial(_by_tokens, activation, packed) if by_token else functools.partial(_by_chunks, activation)
    mixed = mix(*arguments)
    return jnp.moveaxis(mixed.reshape(-1, *mixed.shape[2:])[:length], 0, 1).astype(value.dtype)


def add_token(hidden: jax.Array, w_in: jax.Array, value: jax.Array) -> jax.Array:
    """A and the outer product of one token's w_in [..., heads, hidden] and value [..., heads, features]."""
    return hidden + w_in.astype(jnp.float32)[..., None] * value.astype(jnp.float32)[..., None, :]


def read_token(activation: Activation, w_out: jax.Array, hidden: jax.Array, scale: jax.Array | None) -> jax.Array:
    """`w_out . f(scale A)` of one token, [batch, heads, features]; scale is [batch], and None is 1."""
    units = activation(hidden if scale is None else hidden * _per_row(scale)).astype(w_out.dtype)
    return jnp.einsum('bhk,bhkf->bhf', w_out, units)


def _per_row(array: jax.Array) -> jax.Array:
    return array[:, None, None, None]


def _no_sum(w_in: jax.Array, value: jax.Array) -> jax.Array:
    """A of no tokens, [batch, heads, hidden, features], for arguments [blocks, block, batch, heads, ...]."""
    return jnp.zeros((*w_in.shape[2:], value.shape[-1]), jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_tokens(activation, packed, w_in, value, w_out, ids, before, scale):
    """All arguments [blocks, block, batch, ...]; `before` is the example of the token before."""
    return _by_tokens_and_keep(activation, packed, w_in, value, w_out, ids, before, scale)[0]


def _by_tokens_and_keep(activation, packed, *arguments):
    def token(hidden, token):
        w_in, value, w_out, ids, before, scale = token
        if packed:
            hidden = hidden * _per_row((ids == before).astype(jnp.float32))
        hidden = add_token(hidden, w_in, value)
        return hidden, read_token(activation, w_out, hidden, scale)

    def block(hidden, tokens):
        end, mixed = jax.lax.scan(token, hidden, tokens)
        return end, (mixed, hidden)

    _, (mixed, starts) = jax.lax.scan(block, _no_sum(arguments[0], arguments[1]), arguments)
    # Named, so that a remat policy keeps them. The backward pass would otherwise compute all of this again.
    mixed, starts = (checkpoint_name(array, ATTENTION_OUTPUT) for array in (mixed, starts))
    return mixed, (starts, *arguments)


def _by_tokens_backward(activation, packed, residuals, gradient):
    def block(later, tokens):
        start, *tokens, gradient = tokens
        return _block_backward(activation, packed, start, tokens, gradient, later)

    later = jnp.zeros_like(residuals[0][0])
    _, gradients = jax.lax.scan(block, later, (*residuals, gradient), reverse=True)
    return *gradients, None, None, None


_by_tokens.defvjp(_by_tokens_and_keep, _by_tokens_backward)


def _block_backward(activation, packed, start, tokens, gradient, later):
    """Gradients of a block's w_in, value and w_out, from its last token to its first.

    `start` is A before the block. `later` is dLoss/dA at the token after, as far as its example reaches back.
    """
    dtypes = [array.dtype for array in tokens[:3]]
    w_in, value, w_out, gradient = (array.astype(jnp.float32) for array in (*tokens[:3], gradient))
    ids, before, scale = tokens[3:]
    index = jnp.arange(ids.shape[0])

    def sum_up_to(at):
        """A at token `at`, from the start of its example or of the block, whichever is later."""
        is_added = (ids == ids[at]) & (index <= at)[:, None]
        total = jnp.einsum('tbhk,tbhf->bhkf', jnp.where(is_added[..., None, None], w_in, 0), value)
        return total + start * _per_row((ids[at] == before[0]).astype(jnp.float32))

    def token(carry, token):
        hidden, later = carry
        at, w_in, value, w_out, ids, before, scale, gradient, (next_w_in, next_value, next_ids) = token
        hidden = add_token(hidden, -next_w_in, next_value)
        if packed:
            hidden = jax.lax.cond(jnp.any(ids != next_ids), lambda: sum_up_to(at), lambda: hidden)
        units, pull_back = jax.vjp(lambda hidden: activation(hidden * _per_row(scale)), hidden)
        w_out_gradient = jnp.einsum('bhkf,bhf->bhk', units, gradient)
        later = later + pull_back(w_out[..., None] * gradient[..., None, :])[0]
        w_in_gradient = jnp.einsum('bhkf,bhf->bhk', later, value)
        value_gradient = jnp.einsum('bhkf,bhk->bhf', later, w_in)
        if packed:
            later = later * _per_row((ids == before).astype(jnp.float32))
        return (hidden, later), (w_in_gradient, value_gradient, w_out_gradient)

    # The first step, of the last token, has nothing to take back.
    nothing_added = (jnp.zeros_like(array[:1]) for array in (w_in, value))
    following = [jnp.concatenate([array[1:], last]) for array, last in zip((w_in, value), nothing_added, strict=True)]
    following.append(jnp.concatenate([ids[1:], ids[-1:]]))
    tokens = (index, w_in, value, w_out, ids, before, scale, gradient, tuple(following))
    (_, later), gradients = jax.lax.scan(token, (sum_up_to(index[-1]), later), tokens, reverse=True)
    return later, [array.astype(dtype) for array, dtype in zip(gradients, dtypes, strict=True)]


def _by_chunks(activation, *arguments):
    """All arguments [blocks, block, batch, ...]; `before` is the example of the token before."""

    @jax.checkpoint
    def chunk(hidden, tokens):
        w_in, value, w_out, ids, before, scale = tokens
        is_added = (ids[:, None] == ids) & jnp.tri(CHUNK, dtype=bool)[..., None]  # [t, j, batch]
        weights = jnp.where(is_added[..., None, None], w_in, 0)
        hidden = hidden[:, None] * jnp.moveaxis(ids == before[0], 0, 1)[..., None, None, None].astype(jnp.float32)
        hidden += jnp.einsum('tjbhk,jbhf->bthkf', weights, value, preferred_element_type=jnp.float32)
        units = activation(hidden * jnp.moveaxis(scale, 0, 1)[..., None, None, None]).astype(w_out.dtype)
        return hidden[:, -1], jnp.einsum('tbhk,bthkf->tbhf', w_out, units)

    @jax.checkpoint
    def block(hidden, chunks):
        return jax.lax.scan(chunk, hidden, chunks)

    split = [array.reshape(array.shape[0], -1, CHUNK, *array.shape[2:]) for array in arguments]
    _, mixed = jax.lax.scan(block, _no_sum(arguments[0], arguments[1]), split)
    return checkpoint_name(mixed.reshape(*arguments[0].shape[:2], *mixed.shape[3:]), ATTENTION_OUTPUT)
