"""Meshes, shardings of parameters and optimizer state, shares of the batch, on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from remixer_t5x import axes
from remixer_t5x.errors import UserError
from remixer_t5x.runtime import partition
from remixer_t5x.runtime.partition import Partitioner


def boxed(shape, *names):
    return nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)


@settings(deadline=None)
@given(sizes=st.tuples(*[st.integers(1, 8)] * 3), rest=st.sampled_from([None, 0, 1, 2]))
def test_mesh_shape_fills_in_the_rest(sizes, rest):
    devices = int(np.prod(sizes))
    asked = tuple(-1 if i == rest else size for i, size in enumerate(sizes))
    assert partition.mesh_shape(asked, devices) == sizes


@pytest.mark.parametrize('sizes', [(3, 1, 1), (-1, 3, 1), (-1, -1, 1), (0, 8, 1), (1, 1, 1), (16, 1, 1), (-1, 16, 1)])
def test_a_mesh_that_does_not_fit_the_devices_is_refused(sizes):
    with pytest.raises(UserError, match='Partitioner.data = -1') as error:
        partition.mesh_shape(sizes, 8)
    assert '\n' not in str(error.value)


def test_mesh_is_automatic_on_every_axis():
    mesh = Partitioner().mesh
    assert mesh.axis_names == partition.MESH_AXES and set(mesh.axis_types) == {AxisType.Auto}


def test_every_name_of_the_glossary_has_a_rule():
    names = {value for name, value in vars(axes).items() if name.isupper()}
    assert names <= {name for name, _ in partition.DEFAULT_RULES}


def test_a_rule_for_an_unknown_mesh_axis_is_refused():
    with pytest.raises(UserError, match="'model'"):
        Partitioner(extra_rules=(('mlp', 'model'),))


def test_extra_rules_come_first():
    rows = Partitioner(extra_rules=[('mlp', ['fsdp', 'tensor'])]).sharding_table({'w': boxed((4, 6), 'embed', 'mlp')})
    # fsdp is taken by `mlp`, and no mesh axis is used twice.
    assert rows[0].mesh_axes == (None, ('fsdp', 'tensor'))


def test_parameters_lie_where_their_axes_say():
    params = {
        'embedding': boxed((12, 4), 'vocab', 'embed'),
        'mlp': {'wi': boxed((3, 4, 6), 'layers', 'embed', 'mlp')},
        'gate': boxed((), *()),
        'plain': jax.ShapeDtypeStruct((5,), jnp.float32),
    }
    shardings = Partitioner().param_shardings(params)
    assert shardings['embedding'].spec == PartitionSpec('tensor', 'fsdp')
    assert shardings['mlp']['wi'].spec == PartitionSpec(None, 'fsdp', 'tensor')
    assert shardings['gate'].spec == PartitionSpec()
    assert shardings['plain'].is_fully_replicated


def test_table_names_parameters_and_bytes():
    rows = Partitioner().sharding_table({'mlp': {'wi': boxed((3, 4, 6), 'layers', 'embed', 'odd')}})
    assert rows == [
        partition.ShardingRow(
            'mlp/wi',
            (3, 4, 6),
            ('layers', 'embed', 'odd'),
            (None, 'fsdp', None),
            288,
            'odd has no rule: replicated',
        )
    ]


def test_moments_lie_with_their_parameter_and_the_rest_is_replicated():
    partitioner = Partitioner()
    params = {'a': {'w': np.zeros((4, 6))}, 'b': {'w': np.zeros((6, 4))}}
    boxes = {'a': {'w': boxed((4, 6), 'embed', 'mlp')}, 'b': {'w': boxed((6, 4), 'mlp', 'embed')}}
    shardings = partitioner.param_shardings(boxes)
    v_row = {'a': {'w': np.zeros(4)}, 'b': {'w': np.zeros((4, 6))}}
    state = {'count': np.zeros((), np.int32), 'mu': params, 'v_row': v_row}
    found = partitioner.state_shardings(state, params, shardings)
    assert found['mu'] == shardings
    assert found['count'].spec == PartitionSpec() and found['v_row']['a']['w'].spec == PartitionSpec()
    # Has another parameter's shape: only its own parameter counts.
    assert found['v_row']['b']['w'].spec == PartitionSpec()


def test_logical_constraints_act_inside_activate_only():
    partitioner = Partitioner()
    constrained = jax.jit(lambda x: nn.with_logical_constraint(x, ('batch', 'embed')))
    assert 'sharding' not in str(constrained.trace(jnp.ones((2, 2))).jaxpr)
    with partitioner.activate() as mesh:
        assert mesh is partitioner.mesh
        assert 'sharding_constraint' in str(jax.jit(lambda x: constrained(x)).trace(jnp.ones((2, 2))).jaxpr)


def test_shard_batch_keeps_the_rows():
    rows = {'tokens': np.arange(12, dtype=np.int32).reshape(4, 3)}
    batch = Partitioner().shard_batch(rows)
    np.testing.assert_array_equal(batch['tokens'], rows['tokens'])
    assert batch['tokens'].sharding.spec == PartitionSpec(('data', 'fsdp'))


def test_one_process_reads_everything():
    assert Partitioner().data_shard() == (0, 1)


@pytest.mark.parametrize(
    ('processes', 'expected'),
    [
        ([[0], [0], [1], [1]], {0: (0, 2), 1: (1, 2)}),
        # `tensor` within a process, then across two processes, which read the same rows.
        ([[0, 0], [1, 1]], {0: (0, 2), 1: (1, 2)}),
        ([[0, 1], [2, 3]], {0: (0, 2), 1: (0, 2), 2: (1, 2), 3: (1, 2)}),
        # Physical order of devices need not be the order of processes.
        ([[1], [1], [0], [0]], {0: (1, 2), 1: (0, 2)}),
    ],
)
def test_processes_read_the_rows_their_devices_hold(processes, expected):
    assert {p: partition.process_share(np.array(processes), p) for p in expected} == expected


def test_processes_that_share_some_rows_only_are_refused():
    with pytest.raises(UserError, match='Partitioner.tensor'):
        partition.process_share(np.array([[0, 0], [0, 1], [1, 1]]), 0)


def test_batch_size_must_divide():
    partitioner = Partitioner()
    partitioner.check_batch_size(6, microbatches=3)
    for batch_size, microbatches in ((5, 2), (0, 1), (-4, 2)):
        with pytest.raises(UserError, match='BATCH_SIZE') as error:
            partitioner.check_batch_size(batch_size, microbatches)
        assert '\n' not in str(error.value)
