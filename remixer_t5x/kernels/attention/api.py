"""Attention, computed by XLA from the formula or by a kernel of the device that equals it.

auto        the device's kernel if it supports the call; otherwise the formula, with a line that says why
formula     XLA compiles softmax(query key^T + bias) value, with the logits in the device's memory
tpu_kernel  the Pallas kernel of `tpu.py`
cudnn       NVIDIA's fused attention (`cudnn.py`)
"""

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from remixer_t5x.errors import UserError
from remixer_t5x.kernels import compile_target, self_check
from remixer_t5x.kernels.attention import cudnn, tpu
from remixer_t5x.kernels.attention.formula import Bias, DistanceBias, Visibility, dot_product_attention, full_bias
from remixer_t5x.kernels.compile_target import target_platform

# The kernel of a platform by its name in ATTENTION: a module with `refusal` and `attend`.
KERNELS = {'tpu': ('tpu_kernel', tpu), 'gpu': ('cudnn', cudnn)}
IMPLEMENTATIONS = ('auto', 'formula', *(name for name, _ in KERNELS.values()))


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visibility: Visibility,
    bias: Bias = None,
    implementation: str = 'auto',
    softcap: float | None = None,
) -> jax.Array:
    """softmax(query key^T + bias) value, without a scale on the logits.

    Args:
        query: [batch, q, heads, kv].
        key, value: [batch, k, kv_heads, kv], with kv_heads a divisor of heads.
        visibility: which keys each query sees.
        bias: [1, heads, q, k] float32, a `DistanceBias`, or None.
        implementation: one of `IMPLEMENTATIONS`.
        softcap: see `formula.dot_product_attention`; only the formula supports it.

    Returns:
        [batch, q, heads, kv] in value's dtype; logits and softmax are float32.

    Raises:
        UserError: the implementation does not exist, or does not support this call on this device.
    """
    if implementation not in IMPLEMENTATIONS:
        raise UserError(f'ATTENTION must be one of {", ".join(IMPLEMENTATIONS)}, got {implementation!r}')
    platform = target_platform()
    name, kernel = KERNELS.get(platform, (None, None))
    if kernel is not None and implementation in ('auto', name):
        refusal = 'does not support a prefix that is visible in both directions'
        if softcap is not None:
            refusal = 'does not support a softcap on the logits'
        elif visibility.key_prefix is None:
            refusal = kernel.refusal(query, key, value, visibility, bias)
        if refusal is None:
            refusal = self_check.failure(_check(name, kernel, query, key, visibility, bias))
        if refusal is None:
            return kernel.attend(query, key, value, visibility, bias)
        if implementation == 'auto':
            self_check.warn_of_formula('attention', name, refusal)
    else:
        refusal = f'does not run on a {platform}'
    if implementation not in ('auto', 'formula'):
        raise UserError(f'ATTENTION is {implementation!r}, which {refusal}; type --gin.ATTENTION=auto')
    return _formula(query, key, value, visibility, bias, softcap)


def _formula(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visibility: Visibility,
    bias: Bias,
    softcap: float | None = None,
) -> jax.Array:
    return dot_product_attention(query, key, value, visibility.mask(), full_bias(bias), softcap)


def _check(
    name: str, kernel: ModuleType, query: jax.Array, key: jax.Array, visibility: Visibility, bias: Bias
) -> self_check.Check:
    """The self-check of a kernel for the heads of one device."""
    (batch, queries, heads, width), keys, rows = query.shape, key.shape[1], self_check.ROWS
    heads, kv_heads = (compile_target.heads_of_device(batch, count) for count in (heads, key.shape[2]))
    shape = jax.ShapeDtypeStruct
    of_query, of_key = (shape((rows, *size, width), query.dtype) for size in ((queries, heads), (keys, kv_heads)))
    packed = visibility.query_segments is not None
    segments = [shape((rows, length), jnp.int32) for length in (queries, keys)]
    of_bias: Any = None
    if isinstance(bias, DistanceBias):
        of_bias = DistanceBias(shape((heads, bias.by_distance.shape[1]), bias.by_distance.dtype))
    elif bias is not None:
        of_bias = shape((1, heads, queries, keys), bias.dtype)
    flags = ('causal', visibility.causal), ('packed', packed), ('with bias', bias is not None)
    words = [f'{queries} x {keys} tokens', f'{heads} heads of {width}', *(flag for flag, is_on in flags if is_on)]
    words += [f'{kv_heads} key heads'] * (kv_heads != heads)
    run, formula = kernel.attend, _formula
    if visibility.window is not None:
        words.append(f'a window of {visibility.window}')
        run, formula = (functools.partial(_only_queries_with_keys, attend) for attend in (run, formula))
    seen = Visibility(segments[0] if packed else None, segments[1], visibility.causal, window=visibility.window)
    operands = of_query, of_key, of_key, seen, of_bias
    return self_check.Check(name, ', '.join(words), run, formula, operands, packed)


def _only_queries_with_keys(attend, query, key, value, visibility, bias):
    """Zeroes the results of padding that sees no token in its window, which kernels leave undefined."""
    sees = jnp.any(visibility.mask(), axis=-1)[:, 0, :, None, None]
    return jnp.where(sees, attend(query, key, value, visibility, bias), 0)
