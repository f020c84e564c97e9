"""From the place at which JAX traced an operation to our module, such as 'encoder/run_0/layer/gated_mlp/wi_0'."""

import re
from typing import NamedTuple

OPTIMIZER, LOSS = 'optimizer, norms', 'loss'
FORWARD, RECOMPUTED, BACKWARD, UPDATE = 'forward', 'recomputed', 'backward', 'update'
# What XLA adds for itself, such as zeros for the arrays that a loop fills.
UNNAMED = 'copies and fills by XLA'

# What JAX and flax add to the names of modules: transformations, control flow, an einsum's letters, and methods such as
# `layer._update`.
_ADDED = re.compile(
    r'.*[(.].*|.*->.*|while|body|cond|branch_\d+_fun|closed_call|checkpoint|rematted_computation|core_call|'
    r'custom_[jv][jv]p_call|custom_vjp_call_jaxpr|pallas_call|shard_map|scan|remat\d?|'
)


class Place(NamedTuple):
    """Where an operation is in the training step.

    Attributes:
        module: path of the flax module by '/'; OPTIMIZER, LOSS or UNNAMED outside of modules.
        phase: FORWARD, RECOMPUTED, BACKWARD or UPDATE; '-' if unknown.
        primitive: JAX's operation, such as 'dot_general'.
    """

    module: str
    phase: str
    primitive: str


def place(op_name: str) -> Place:
    """The place of an operation by its HLO metadata, such as
    `jit(step_fn)/transpose(jvp(EncoderDecoder.encode))/encoder/while/body/checkpoint/run_0/layer/gated_mlp/mul`.
    """
    if not op_name:
        return Place(UNNAMED, '-', '-')
    *scopes, primitive = op_name.split('/')
    if not scopes:
        # A copy of an argument has the argument's name.
        return Place(OPTIMIZER, UPDATE, 'copy')
    modules = '/'.join(scope for scope in scopes if not _ADDED.fullmatch(scope))
    if 'transpose(' in op_name:
        phase = RECOMPUTED if 'rematted_computation' in op_name else BACKWARD
    elif 'jvp(' in op_name:
        phase = FORWARD
    else:
        return Place(modules or OPTIMIZER, UPDATE, primitive)
    return Place(modules or LOSS, phase, primitive)
