"""Functions as StableHLO, through `jax.export`: any number of rows, for CPUs, GPUs and TPUs.

A file has the program without weights, which all functions of a model share. Every JAX of the next six months or more
can read it (JAX's promise of compatibility), without the code that made it.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from remixer_t5x.extras.export.functions import Function

PLATFORMS = ('cpu', 'cuda', 'tpu')
ROWS = 'rows'


def exported(
    function: Function, weights: Mapping[str, np.ndarray], platforms: Sequence[str] = PLATFORMS
) -> export.Exported:
    """The program of `function` for weights of these shapes."""
    (rows,) = export.symbolic_shape(ROWS)
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in weights.items()}
    inputs = [jax.ShapeDtypeStruct((rows, *shape), jnp.int32) for shape in function.inputs.values()]
    return export.export(jax.jit(function.call), platforms=tuple(platforms))(shapes, *inputs)
