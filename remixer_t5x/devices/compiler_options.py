"""Selects XLA options for individual programs.

Options are passed to the compiler instead of through XLA_FLAGS or LIBTPU_INIT_ARGS, because an unknown flag in these
variables aborts the process when JAX starts, and because programs compiled for absent hardware also need the options.
"""

from collections.abc import Mapping
from typing import Any

import jax

from remixer_t5x.errors import UserError

# Disable merging of matmuls with a common input (query, key, value) in XLA:GPU, which would copy their kernels in every
# decoding step.
_GPU_DECODING_OPTIONS = {'xla_gpu_dot_merger_threshold_mb': 0}
# Maps a platform to its XLA options.
OptionsByPlatform = Mapping[str, Mapping[str, Any]]


def decoding_options() -> dict[str, Any] | None:
    """Returns the argument `compiler_options` of `jax.jit` for a program that generates tokens."""
    return _GPU_DECODING_OPTIONS if jax.default_backend() == 'gpu' else None


def training_options(options: OptionsByPlatform | None, device: jax.Device) -> dict[str, Any]:
    """Returns the XLA options for compiling a train step on `device`."""
    return dict((options or {}).get(device.platform, {}))


def compile_with_options(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> jax.stages.Compiled:
    """Compiles a lowered program. Raises UserError for an unknown option or an invalid value."""
    try:
        return lowered.compile(dict(options) or None)
    except jax.errors.JaxRuntimeError as error:
        if 'No such compile option' in str(error) or 'While setting option' in str(error):
            reason = str(error).removeprefix('INVALID_ARGUMENT: ')
            raise UserError(
                f'XLA_OPTIONS must be supported by the installed XLA ({reason}); correct them, or pass '
                '--gin.XLA_OPTIONS=None'
            ) from error
        raise
