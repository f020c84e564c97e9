"""Selects XLA options for individual programs.

Options are passed directly to the compiler instead of through the environment variables XLA_FLAGS or LIBTPU_INIT_ARGS.
An unknown flag in these variables would abort the process when JAX starts. Programs that are compiled for absent
hardware also need the options.
"""

from collections.abc import Mapping
from typing import Any

import jax

from remixer_t5x.devices import hardware_table
from remixer_t5x.errors import UserError

# Prevent XLA:GPU from merging matmuls with a common input, such as query, key and value, because it would copy their
# kernels in every decoding step.
_GPU_DECODING_OPTIONS = {'xla_gpu_dot_merger_threshold_mb': 0}
# Maps a platform to its XLA options.
OptionsByPlatform = Mapping[str, Mapping[str, Any]]


def get_decoding_options() -> dict[str, Any] | None:
    """Returns the `compiler_options` to pass to `jax.jit` for a program that generates tokens."""
    return _GPU_DECODING_OPTIONS if jax.default_backend() == 'gpu' else None


def get_training_options(options: OptionsByPlatform | None, device: jax.Device) -> dict[str, Any]:
    """Returns the XLA options for compiling a train step on `device`. Raises UserError for an unknown platform."""
    for platform in options or {}:
        if platform not in hardware_table.PLATFORMS:
            raise UserError(
                f'XLA_OPTIONS must map platforms ({", ".join(hardware_table.PLATFORMS)}) to options, got {platform!r}; '
                "write, for example, {'gpu': {'xla_gpu_enable_latency_hiding_scheduler': True}}"
            )
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
