"""XLA options of single programs, for which XLA's defaults do not suit.

They are passed to the compiler with the program, and not in XLA_FLAGS or LIBTPU_INIT_ARGS: an option that a version of
XLA does not have is an error of that program, while a wrong variable ends the process when JAX starts; and they also
apply to a program that is compiled for a described machine.
"""

from collections.abc import Mapping
from typing import Any

import jax

from remixer_t5x.errors import UserError

# XLA:GPU merges small matmuls of one input (query, key and value) into one, for which it joins their kernels: at every
# step of decoding it would read and write them once more. The option is the size in MiB up to which it merges.
_DECODING_ON_A_GPU = {'xla_gpu_dot_merger_threshold_mb': 0}
# By platform: options of XLA by name.
ByPlatform = Mapping[str, Mapping[str, Any]]


def for_decoding() -> dict[str, Any] | None:
    """`compiler_options` for `jax.jit` of a program that generates."""
    return _DECODING_ON_A_GPU if jax.default_backend() == 'gpu' else None


def for_training(options: ByPlatform | None, device: jax.Device) -> dict[str, Any]:
    """The options of a hardware file for a train step on devices of this kind; none on any other platform."""
    return dict((options or {}).get(device.platform, {}))


def compiled(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> jax.stages.Compiled:
    """Compiles a program with options.

    Raises:
        UserError: XLA does not have one of the options, or the option does not take its value.
    """
    try:
        return lowered.compile(dict(options) or None)
    except jax.errors.JaxRuntimeError as error:
        if 'No such compile option' in str(error) or 'While setting option' in str(error):
            reason = str(error).removeprefix('INVALID_ARGUMENT: ')
            raise UserError(
                f'XLA_OPTIONS: {reason}; take it out of the hardware file, or type --gin.XLA_OPTIONS=None'
            ) from error
        raise
