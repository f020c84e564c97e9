"""The state of a training run: step, float32 parameters, optimizer state; planned from shapes, created into
its shardings."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct

from remixer_t5x.devices.partition import Partitioner, unbox


class TrainState(struct.PyTreeNode):
    """Everything a train step changes.

    Attributes:
      step: int32 scalar, updates done so far.
      params: float32 parameters, unboxed.
      opt_state: state of the optax transformation.
      usual_loss: float32 scalar, running mean of the loss per token, by which a spike is known; 0 before the first.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    usual_loss: Any = None


@dataclasses.dataclass(frozen=True)
class StatePlan:
    """What is known about a state before it exists on any device.

    Attributes:
      tx: the optimizer, made for these parameters.
      abstract: TrainState of ShapeDtypeStruct with shardings, which is what a checkpoint restores into.
      boxed_params: shapes of the parameters in boxes with their logical axes (for tables and counts).
      init: from a PRNG key to the state, to be called under jit; `create` does.
    """

    tx: optax.GradientTransformation
    abstract: TrainState
    boxed_params: Any
    init: Callable[[jax.Array], TrainState]

    @property
    def shardings(self) -> TrainState:
        """TrainState of NamedSharding."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract)

    def create(self, rng: jax.Array) -> TrainState:
        """A fresh state; every device computes only its own part, and the values do not depend on the
        mesh."""
        return jax.jit(self.init, out_shardings=self.shardings)(rng)

    def init_from_params(self, params: Any) -> TrainState:
        """Step 0 with `params`, which must lie as `abstract.params` says and are given away to the state."""

        def fresh(params):
            return TrainState(jnp.zeros((), jnp.int32), params, self.tx.init(params), jnp.zeros(()))

        return jax.jit(fresh, out_shardings=self.shardings, donate_argnums=0)(params)


def plan(
    model: Any,
    optimizer: Callable[[Any], optax.GradientTransformation],
    batch_shapes: Any,
    partitioner: Partitioner,
) -> StatePlan:
    """Plans the state of `model` under `optimizer` (see `optimization.optimizer`) on the partitioner's mesh.

    `batch_shapes` is handed to `model.init`. Computes nothing: shapes come from `jax.eval_shape`.
    """
    boxed = jax.eval_shape(lambda rng: model.init(rng, batch_shapes), jax.random.key(0))
    tx = optimizer(nn.get_partition_spec(boxed))

    def init(rng):
        # Not under `partitioner.activate()`: there flax would constrain parameters whose axes do not divide.
        params = unbox(model.init(rng, batch_shapes))
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), jnp.zeros(()))

    shapes = jax.eval_shape(init, jax.random.key(0))
    param_shardings = partitioner.param_shardings(boxed)
    shardings = TrainState(
        partitioner.replicated,
        param_shardings,
        partitioner.state_shardings(tx.init, shapes.params, param_shardings),
        partitioner.replicated,
    )
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )
    return StatePlan(tx, abstract, boxed, init)
