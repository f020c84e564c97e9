"""Chooses how attention is computed: by XLA from the formula, or by a kernel of the device that equals it.

auto        the device's kernel if it can compute the call; otherwise the formula, with a line that says why
formula     XLA compiles softmax(query key^T + bias) value, with the logits in the device's memory
tpu_kernel  the Pallas kernel of `tpu.py`
cudnn       NVIDIA's fused attention (`cudnn.py`)
"""

import functools
import logging

import jax

from remixer_t5x.errors import UserError
from remixer_t5x.models.layers.attention import cudnn, tpu
from remixer_t5x.models.layers.attention.bias import Bias, full_bias
from remixer_t5x.models.layers.attention.formula import dot_product_attention
from remixer_t5x.models.layers.attention.visibility import Visibility
from remixer_t5x.models.layers.compile_target import target_platform

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
) -> jax.Array:
    """softmax(query key^T + bias) value, without a scale on the logits.

    Args:
        query: [batch, q, heads, kv].
        key, value: [batch, k, heads, kv].
        visibility: which keys each query sees.
        bias: [1, heads, q, k] float32, a `DistanceBias`, or None.
        implementation: one of `IMPLEMENTATIONS`.

    Returns:
        [batch, q, heads, kv] in value's dtype; logits and softmax are float32.

    Raises:
        UserError: the implementation does not exist, or cannot compute this call on this device.
    """
    if implementation not in IMPLEMENTATIONS:
        raise UserError(f'ATTENTION is {implementation!r}; type one of {", ".join(IMPLEMENTATIONS)}')
    platform = target_platform()
    name, kernel = KERNELS.get(platform, (None, None))
    if kernel is not None and implementation in ('auto', name):
        refusal = 'does not read a prefix in both directions'
        if visibility.key_prefix is None:
            refusal = kernel.refusal(query, key, value, visibility, bias)
        if refusal is None:
            return kernel.attend(query, key, value, visibility, bias)
        if implementation == 'auto':
            _warn_of_formula(name, refusal)
    else:
        refusal = f'runs on another kind of device than {platform}'
    if implementation not in ('auto', 'formula'):
        raise UserError(f'ATTENTION is {implementation!r}, which {refusal}; type --gin.ATTENTION=auto')
    return dot_product_attention(query, key, value, visibility.mask(), full_bias(bias))


@functools.cache
def _warn_of_formula(kernel: str, refusal: str) -> None:
    """Logs one line for each reason."""
    logging.getLogger('remixer_t5x').warning('attention is computed by its formula: %s %s', kernel, refusal)
