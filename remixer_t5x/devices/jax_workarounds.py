"""All uses of names outside of JAX's public API, each with the change in JAX that makes it obsolete.

jax 0.10.2 and jax 0.12.0 have all of them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from jax import export


def client() -> Any:
    """JAX's client of the coordination service; None for a single process.

    Unnecessary once JAX offers its key-value store publicly: `multihost_utils` goes through the devices, so it cannot
    reach a process that waits in a collective operation.
    """
    from jax._src import distributed

    return distributed.global_state.client


def cluster_types() -> Sequence[Any]:
    """The kinds of cluster that JAX can find (`ClusterEnv` classes), in the order in which JAX asks them.

    Unnecessary once `jax.distributed.initialize` starts a single process without an error and can assign all devices of
    a machine to one process.
    """
    from jax._src import clusters

    return [kind for kind in clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method]


@contextlib.contextmanager
def cudnn_of_described_gpu(version: int) -> Iterator[None]:
    """Replaces JAX's query of the installed cuDNN by `version` (90800 is 9.8), to compile attention without cuDNN.

    Unnecessary once JAX asks the topology that it compiles for, and not the libraries of this process.
    """
    from jax._src.cudnn import fused_attention_stablehlo as attention

    installed = attention.check_cudnn_version
    attention.check_cudnn_version = lambda: version
    try:
        yield
    finally:
        attention.check_cudnn_version = installed


def stablehlo_for_older_readers(program: export.Exported) -> bytes:
    """The program in StableHLO as it was twelve weeks before this release of JAX, without newer operations.

    Unnecessary once `jax.export` takes the version to serialize for; it writes for readers of four weeks ago, and a
    release of TensorFlow is older.
    """
    from jax.extend.mlir.dialects import stablehlo

    version = stablehlo.get_version_from_compatibility_requirement(stablehlo.StablehloCompatibilityRequirement.WEEK_12)
    text = stablehlo.deserialize_portable_artifact_str(program.mlir_module_serialized)
    return stablehlo.serialize_portable_artifact_str(text, version)
