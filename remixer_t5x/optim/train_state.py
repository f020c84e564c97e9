"""Plans a train state (step, float32 parameters, optimizer state) from shapes, and creates its sharded arrays."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct

from remixer_t5x.devices.partition import Partitioner, unbox
from remixer_t5x.models.interface import Model, Params
from remixer_t5x.optim.optimizer import Optimizer, as_optimizer


class TrainState(struct.PyTreeNode):
    """Training state, which each train step updates.

    Attributes:
        usual_loss: running mean of the loss per token, for detecting spikes; 0 before the first step.
    """

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    usual_loss: jax.Array


@dataclasses.dataclass(frozen=True)
class TrainStatePlan:
    """Shapes, shardings and initializer of a train state.

    Attributes:
        abstract: TrainState of ShapeDtypeStruct with shardings.
        boxed_params: shapes of the parameters, boxed with their logical axes.
        init: function that maps a PRNG key to the initial state.
    """

    tx: optax.GradientTransformation
    abstract: TrainState
    boxed_params: Params
    init: Callable[[jax.Array], TrainState]

    @property
    def shardings(self) -> TrainState:
        """The sharding of each array of the state, as a TrainState."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract)

    def create(self, rng: jax.Array) -> TrainState:
        """Creates an initial state; each device computes its shards, and the values do not depend on the mesh."""
        return self.jit_init()(rng)

    def jit_init(self) -> jax.stages.Wrapped:
        """Returns `init` as a jitted function."""
        return jax.jit(self.init, out_shardings=self.shardings)

    def init_from_params(self, params: Params, donate: bool = False) -> TrainState:
        """Creates a state at step 0 with a float32 copy of unboxed parameters of the planned model.

        If `donate` is True, `params` must have the shardings of `abstract.params` and cannot be used afterwards.
        """

        def init_from_copy(params):
            # Copy the arrays, because the state would otherwise share buffers with `params`.
            params = jax.tree.map(lambda leaf: jnp.copy(leaf).astype(jnp.float32), params)
            return TrainState(jnp.zeros((), jnp.int32), params, self.tx.init(params), jnp.zeros(()))

        return jax.jit(init_from_copy, out_shardings=self.shardings, donate_argnums=0 if donate else ())(params)


def plan_train_state(
    model: Model,
    optimizer: Optimizer | optax.GradientTransformation,
    batch_shapes: Mapping[str, tuple[int, ...]],
    partitioner: Partitioner,
) -> TrainStatePlan:
    """Plans the train state of `model` on the partitioner's mesh without computing any arrays.

    `batch_shapes` maps the name of each array of a batch to its shape, as for `model.init`.
    """
    optimizer = as_optimizer(optimizer)
    # Cache the trace with jit, because `init_params` is called repeatedly below.
    init_params = jax.jit(lambda rng: model.init(rng, batch_shapes), inline=True)
    boxed = jax.eval_shape(init_params, jax.random.key(0))
    tx = optimizer.make(nn.get_partition_spec(boxed))
    factors = optimizer.initial(boxed) if optimizer.initial else None

    def init(rng):
        # Unbox here, because `nn.unbox` would apply sharding constraints even to axes that do not divide evenly.
        params = unbox(init_params(rng))
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        if factors is not None:
            params = jax.tree.map(jnp.multiply, params, factors)
        return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), jnp.zeros(()))

    shapes = jax.eval_shape(init, jax.random.key(0))
    param_shardings = partitioner.param_shardings(boxed)
    shardings = TrainState(
        partitioner.replicated_sharding,
        param_shardings,
        partitioner.state_shardings(tx.init, shapes.params, param_shardings),
        partitioner.replicated_sharding,
    )
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )
    return TrainStatePlan(tx, abstract, boxed, init)


@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """Returns whether all floating-point arrays of `tree` are finite, as a scalar bool array."""
    floating = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.asarray([jnp.all(jnp.isfinite(leaf)) for leaf in floating], bool))
