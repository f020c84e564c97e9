"""Attention, computed by one of these implementations:

auto        the device's kernel if it supports the call; otherwise logs the reason and uses `formula`
formula     the plain-JAX implementation, which stores the logits in the device's memory
tpu_kernel  Pallas kernels for TPUs (`attention_tpu.py`)
cudnn       cuDNN's fused attention for NVIDIA GPUs (`attention_cudnn.py`)
"""

import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from remixer_t5x.errors import UserError
from remixer_t5x.kernels import attention_cudnn, attention_tpu, self_check
from remixer_t5x.kernels.attention_formula import Bias, Visibility, dot_product_attention, expand_bias
from remixer_t5x.kernels.compile_target import get_target_platform

# Maps each platform to the name of its kernel (a value of the setting ATTENTION) and the kernel's module.
KERNELS = {'tpu': ('tpu_kernel', attention_tpu), 'gpu': ('cudnn', attention_cudnn)}
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
    """Computes unscaled dot-product attention, softmax(query key^T + bias) value.

    Args:
        query: [batch, q, heads, kv].
        key, value: [batch, k, kv_heads, kv]; kv_heads must be a divisor of heads.
        visibility: compact description of the attention mask.
        bias: [1, heads, q, k] float32, a `DistanceBias`, or None.
        implementation: one of `IMPLEMENTATIONS`.
        softcap: bound c of the logits, `c tanh(logits / c)`, or None. Kernels do not support a softcap.

    Returns:
        [batch, q, heads, kv] in value's dtype; the logits and the softmax are computed in float32.

    Raises:
        UserError: if the implementation is unknown or does not support this call on this device.
    """
    if implementation not in IMPLEMENTATIONS:
        raise UserError(f'ATTENTION must be one of {", ".join(IMPLEMENTATIONS)}, got {implementation!r}')
    shape: tuple[int, ...] = () if bias is None else jax.eval_shape(expand_bias, bias).shape
    if bias is not None and (len(shape) != 4 or shape[:2] != (1, query.shape[2])):
        raise UserError(
            f'a position bias must be [1, heads, q, k] with {query.shape[2]} heads, got {[*shape]}; use '
            '@positions.RelativePositionBias with the num_heads of the attention'
        )
    platform = get_target_platform()
    name, kernel = KERNELS.get(platform, (None, None))
    if kernel is not None and implementation in ('auto', name):
        unsupported_reason = 'does not support a bidirectional prefix'
        if softcap is not None:
            unsupported_reason = 'does not support a softcap on the logits'
        elif visibility.key_prefix is None:
            unsupported_reason = kernel.unsupported_reason(query, key, value, visibility, bias)
        if unsupported_reason is None:
            unsupported_reason = self_check.failure_reason(
                _build_kernel_check(name, kernel, query, key, visibility, bias)
            )
        if unsupported_reason is None:
            return kernel.attend(query, key, value, visibility, bias)
        if implementation == 'auto':
            self_check.log_fallback('attention', name, unsupported_reason)
    else:
        unsupported_reason = f'does not run on a {platform}'
    if implementation not in ('auto', 'formula'):
        raise UserError(f"ATTENTION is {implementation!r}, which {unsupported_reason}; set ATTENTION = 'auto'")
    return _attend_by_formula(query, key, value, visibility, bias, softcap)


def _attend_by_formula(query, key, value, visibility: Visibility, bias: Bias, softcap: float | None = None):
    return dot_product_attention(query, key, value, visibility.build_mask(), expand_bias(bias), softcap)


def _build_kernel_check(
    name: str, kernel: ModuleType, query: jax.Array, key: jax.Array, visibility: Visibility, bias: Bias
) -> self_check.KernelCheck:
    _, queries, heads, width = query.shape
    packed = visibility.query_segments is not None
    call = f'{queries} x {key.shape[1]} tokens, {heads} heads of {width}'
    call += ', causal' * visibility.causal + ', packed' * packed + ', with bias' * (bias is not None)
    run, formula = kernel.attend, _attend_by_formula
    if visibility.window is not None:
        call += f', a window of {visibility.window}'
        run, formula = (functools.partial(_mask_queries_without_keys, attend) for attend in (run, formula))
    operands = (
        *self_check.get_operand_shapes((query, key, key, visibility), self_check.NUM_CHECK_ROWS),
        self_check.get_operand_shapes(bias),
    )
    return self_check.KernelCheck(name, call, run, formula, operands)


def _mask_queries_without_keys(attend, query, key, value, visibility, bias):
    """Calls `attend` and zeroes the outputs of queries without visible keys, which kernels leave undefined."""
    has_key = jnp.any(visibility.build_mask(), axis=-1)[:, 0, :, None, None]
    return jnp.where(has_key, attend(query, key, value, visibility, bias), 0)
