"""XLA options of single programs.

They are passed to the compiler and not in XLA_FLAGS or LIBTPU_INIT_ARGS, because an unknown variable ends the process
when JAX starts, and because programs for described hardware need them too.
"""

from collections.abc import Mapping
from typing import Any

import jax

from remixer_t5x.errors import UserError

# XLA:GPU merges matmuls of one input (query, key and value) up to this size in MiB, and copies their kernels for that
# at every step of decoding.
_DECODING_ON_A_GPU = {'xla_gpu_dot_merger_threshold_mb': 0}
# By platform: XLA options by name.
ByPlatform = Mapping[str, Mapping[str, Any]]


def for_decoding() -> dict[str, Any] | None:
    """Returns `compiler_options` for `jax.jit` of a program that generates."""
    return _DECODING_ON_A_GPU if jax.default_backend() == 'gpu' else None


def for_training(options: ByPlatform | None, device: jax.Device) -> dict[str, Any]:
    """Returns the options of a hardware file for a train step on `device`."""
    return dict((options or {}).get(device.platform, {}))


def compile_with_options(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> jax.stages.Compiled:
    """Compiles a program. Raises UserError for an unknown option or a wrong value."""
    try:
        return lowered.compile(dict(options) or None)
    except jax.errors.JaxRuntimeError as error:
        if 'No such compile option' in str(error) or 'While setting option' in str(error):
            reason = str(error).removeprefix('INVALID_ARGUMENT: ')
            raise UserError(
                f'XLA_OPTIONS: {reason}; take it out of the hardware file, or type --gin.XLA_OPTIONS=None'
            ) from error
        raise
