"""Meshes, shardings of parameters and optimizer states, and the rows of each process, on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec

from remixer_t5x import axes
from remixer_t5x.devices import partition
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.optim import optimizer


def boxed(shape, *names):
    return nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)


def test_every_logical_axis_has_a_rule():
    names = {value for name, value in vars(axes).items() if name.isupper()}
    assert names <= {name for name, _ in partition.DEFAULT_RULES}


def test_extra_rules_come_first():
    rows = Partitioner(extra_rules=[('mlp', ['fsdp', 'tensor'])]).list_sharding_rows(
        {'w': boxed((4, 6), 'embed', 'mlp')}
    )
    # `mlp` uses fsdp, and a mesh axis is used once per array.
    assert rows[0].mesh_axes == (None, ('fsdp', 'tensor'))


@pytest.mark.parametrize('axes_of_mlp', ['model', ('fsdp', 'model')])
def test_rules_with_unknown_mesh_axes_are_rejected(axes_of_mlp):
    with pytest.raises(UserError, match=r'must map mlp to mesh axes \(data, fsdp, tensor\), got model; write'):
        Partitioner(extra_rules=[('mlp', axes_of_mlp)]).param_shardings(boxed((4, 6), 'embed', 'mlp'))


def test_parameters_are_sharded_along_their_axes():
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


def sharded_state(init, partitioner, boxes):
    params = partition.unbox(boxes)
    return partitioner.state_shardings(init, params, partitioner.param_shardings(boxes))


def test_moments_are_sharded_like_their_parameter():
    partitioner = Partitioner(devices=8, sizes='fsdp=4,tensor=2')
    boxes = {'a': {'w': boxed((4, 6), 'embed', 'mlp')}, 'b': {'w': boxed((6, 4), 'mlp', 'embed')}}

    def init(params):
        # A moment created only from the shape is recognized by its name and shape.
        moments = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), params)
        other = {'a': {'w': jnp.zeros(4)}, 'b': {'w': jnp.zeros((4, 6))}}
        return {'count': jnp.zeros((), jnp.int32), 'mu': moments, 'other': other}

    shardings = sharded_state(init, partitioner, boxes)
    assert shardings['mu'] == partitioner.param_shardings(boxes)
    assert shardings['count'].is_fully_replicated and shardings['other']['a']['w'].is_fully_replicated
    # Its shape differs from that of the parameter with the same name, so it is not a moment of it.
    assert shardings['other']['b']['w'].is_fully_replicated


@pytest.mark.parametrize('width', [256, 128])
def test_factored_moments_keep_the_sharding_of_their_axes(width):
    boxes = {
        'stacked': boxed((3, 256, width), 'layers', 'embed', 'mlp'),
        'one': boxed((256, width), 'embed', 'mlp'),
        'scale': boxed((256,), 'embed'),
        'gate': boxed((3,), 'layers'),
    }
    partitioner = Partitioner(devices=8, sizes='fsdp=4,tensor=2')
    tx = optimizer.adafactor(0.1).make(nn.get_partition_spec(boxes))
    groups = sharded_state(tx.init, partitioner, boxes)[0]
    stacked, single = groups['layers_3'][0], groups['single'][0]
    # v_row is summed over the longer axis, v_col over the shorter; of two equal axes, the last counts as longer.
    axes = ('fsdp', 'tensor') if width >= 256 else ('tensor', 'fsdp')
    assert (stacked.v_row['stacked'].spec, stacked.v_col['stacked'].spec) == tuple(PartitionSpec(None, a) for a in axes)
    assert (single.v_row['one'].spec, single.v_col['one'].spec) == tuple(PartitionSpec(a) for a in axes)
    assert single.v['scale'].spec == PartitionSpec('fsdp')
    assert single.v['one'].is_fully_replicated and single.count.is_fully_replicated
    assert stacked.v['gate'].is_fully_replicated


def test_the_sharding_table_of_an_abstract_mesh_needs_no_devices():
    rows = Partitioner(devices=512, sizes='data=8,fsdp=32,tensor=2').list_sharding_rows(
        {'mlp': {'wi': boxed((3, 64, 6), 'layers', 'embed', 'odd')}, 'odd': boxed((63,), 'embed')}
    )
    assert rows == [
        ('mlp/wi', (3, 64, 6), ('layers', 'embed', 'odd'), (None, 'fsdp', None), 144, 'odd has no rule: replicated'),
        ('odd', (63,), ('embed',), (None,), 252, 'embed=63 is not divisible by 32: replicated'),
    ]


def test_logical_constraints_apply_only_inside_activate():
    partitioner = Partitioner()
    constrained = jax.jit(lambda x: nn.with_logical_constraint(x, ('batch', 'embed')))
    assert 'sharding' not in str(constrained.trace(jnp.ones((2, 2))).jaxpr)
    with partitioner.activate_mesh() as mesh:
        assert mesh is partitioner.mesh
        assert 'sharding_constraint' in str(jax.jit(lambda x: constrained(x)).trace(jnp.ones((2, 2))).jaxpr)


@pytest.mark.parametrize(
    ('processes', 'expected'),
    [
        ([[0], [0], [1], [1]], {0: (0, 2), 1: (1, 2)}),
        # `tensor` spans one process, and then two processes, which load the same rows.
        ([[0, 0], [1, 1]], {0: (0, 2), 1: (1, 2)}),
        ([[0, 1], [2, 3]], {0: (0, 2), 1: (0, 2), 2: (1, 2), 3: (1, 2)}),
        # The order of devices can differ from the order of processes.
        ([[1], [1], [0], [0]], {0: (1, 2), 1: (0, 2)}),
    ],
)
def test_processes_read_the_rows_of_their_devices(processes, expected):
    assert {p: partition.find_process_share(np.array(processes), p) for p in expected} == expected


def test_processes_with_overlapping_rows_are_rejected():
    with pytest.raises(UserError, match='tensor in MESH'):
        partition.find_process_share(np.array([[0, 0], [0, 1], [1, 1]]), 0)


def test_batch_size_must_divide():
    partitioner = Partitioner()
    partitioner.check_batch_size(6, microbatches=3)
    with pytest.raises(UserError, match='BATCH_SIZE must be .* got 5'):
        partitioner.check_batch_size(5, 2)
