"""Plans and creates a train state on one device (see test_meshes for eight devices)."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.optim import optimizer, train_state

SHAPES = {'tokens': (4, 3)}


class TwoLayers:
    """A minimal model: three stacked layers, and a scale in bfloat16."""

    def init(self, rng, batch_shapes):
        assert batch_shapes == SHAPES
        return {
            'kernel': nn.LogicallyPartitioned(jax.random.normal(rng, (3, 4, 6)), ('layers', 'embed', 'mlp')),
            'scale': nn.LogicallyPartitioned(jnp.ones(4, jnp.bfloat16), ('embed',)),
        }


def test_created_state_matches_the_plan_and_the_model_parameters():
    plan = train_state.plan_train_state(TwoLayers(), optimizer.adamw_rms(0.01), SHAPES, Partitioner())
    state = plan.create(jax.random.key(7))
    shape = lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding)  # noqa: E731
    assert jax.tree.map(shape, state) == jax.tree.map(shape, plan.abstract)
    assert state.step.dtype == np.int32 and state.step == 0
    assert state.params['scale'].dtype == np.float32
    expected = TwoLayers().init(jax.random.key(7), SHAPES)['kernel'].value
    np.testing.assert_allclose(state.params['kernel'], expected, rtol=1e-6)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == (3, 4, 6)]
    assert moments and all(not leaf.any() for leaf in moments)
    assert {leaf.sharding.spec for leaf in moments} == {plan.shardings.params['kernel'].spec}
