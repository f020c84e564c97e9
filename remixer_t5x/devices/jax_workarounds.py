"""Contains all uses of JAX's private API (JAX 0.10.2 and 0.12.0), and describes when each one becomes obsolete."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from jax import export


def get_coordination_state() -> Any:
    """Returns the state of `jax.distributed`: `client` (the coordination service), `process_id`, `num_processes`.

    Obsolete once JAX's key-value store has a public API. `multihost_utils` cannot replace this API: its functions run
    on the devices, so they cannot reach a process that is waiting in a collective operation.
    """
    from jax._src import distributed

    return distributed.global_state


def list_cluster_types() -> Sequence[Any]:
    """Returns the `ClusterEnv` classes of the cluster types that JAX can detect, in order of precedence.

    Obsolete once `jax.distributed.initialize` accepts a single process and can assign all devices of a machine to one
    process.
    """
    from jax._src import clusters

    return [cluster for cluster in clusters.ClusterEnv._cluster_types if not cluster.opt_in_only_method]


@contextlib.contextmanager
def assume_cudnn_version(version: int) -> Iterator[None]:
    """Makes JAX assume cuDNN `version` (90800 is 9.8), for compiling attention on a machine without cuDNN.

    Obsolete once JAX reads the cuDNN version from the topology that it compiles for.
    """
    from jax._src.cudnn import fused_attention_stablehlo as attention

    installed = attention.check_cudnn_version
    attention.check_cudnn_version = lambda: version
    try:
        yield
    finally:
        attention.check_cudnn_version = installed


def serialize_older_stablehlo(program: export.Exported) -> bytes:
    """Serializes a program to a StableHLO version that readers released twelve weeks ago can parse.

    Obsolete once `jax.export` has an argument for the version. By default, `jax.export` supports readers released four
    weeks ago, but TensorFlow's reader is older.
    """
    from jax.extend.mlir.dialects import stablehlo

    version = stablehlo.get_version_from_compatibility_requirement(stablehlo.StablehloCompatibilityRequirement.WEEK_12)
    text = stablehlo.deserialize_portable_artifact_str(program.mlir_module_serialized)
    return stablehlo.serialize_portable_artifact_str(text, version)
