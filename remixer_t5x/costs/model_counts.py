"""Counts the parameters and FLOPs of each module from array shapes, without using a device or compiling.

FLOPs are counted for one forward pass of one example. A training step costs as much as three forward passes: one
for the loss and two for the gradients of inputs and weights (Kaplan et al. 2020), without recomputation under remat.

The counts include matrix products, convolutions and Fourier transforms. A multiply-add counts as two operations. As is
usual in benchmarks, a complex transform of length n counts as 5 n log2 n operations, and a real transform as half as
many. Elementwise operations are not counted. The cost of a scan is the cost of its body times its length. The cost of a
`cond` is the cost of the branch for a true predicate, which our models take in usual batches: a masked language model
computes all logits only if a row has unusually many tokens to predict. A `while` loop is counted as one iteration,
because the number of iterations is unknown.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax

from remixer_t5x.data import batch_formats
from remixer_t5x.models import interface
from remixer_t5x.models.interface import Model

Path = tuple[str, ...]
TRAINING_FORWARD_PASSES = 3
# Marks module paths in the name stacks of operations. Names of modules and functions cannot contain this prefix.
_MODULE_MARK = '@module:'


@dataclasses.dataclass(frozen=True)
class ModelCounts:
    """Parameter and FLOP counts of a model.

    `parameters` maps the path of each array to its number of elements; layers stacked by a scan share one entry.
    `forward_flops` maps each module path to FLOPs per example; the path `()` stands for operations outside of modules,
    such as the loss. `tokens` is the number of input tokens of all stacks and texts in one example.
    """

    parameters: Mapping[Path, int]
    forward_flops: Mapping[Path, float]
    tokens: int

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def total_forward_flops(self) -> float:
        return sum(self.forward_flops.values())

    @property
    def training_flops(self) -> float:
        """The FLOPs per example of one training step."""
        return TRAINING_FORWARD_PASSES * self.total_forward_flops


def count_model_costs(model: Model, feature_lengths: Mapping[str, int] | None) -> ModelCounts:
    """Counts the parameters and FLOPs of a model by tracing its initialization and its loss.

    `feature_lengths` maps each feature to its length in tokens; None uses the defaults of the model type.
    """
    return count_row_costs(model, batch_formats.get_abstract_batch(model.model_type, feature_lengths))


def count_row_costs(model: Model, batch: Mapping[str, jax.ShapeDtypeStruct]) -> ModelCounts:
    """Counts the parameters and FLOPs of a model for one row of a batch, treated as one example."""
    row = {
        name: jax.ShapeDtypeStruct((1, *array.shape[1:]), array.dtype)
        for name, array in batch.items()
        if name not in batch_formats.PACKED_ARRAYS
    }
    shapes = {name: array.shape for name, array in row.items()}
    params = nn.unbox(interface.compute_param_shapes(model, shapes))
    return ModelCounts(
        parameters=count_parameters(params),
        forward_flops=count_flops_per_module(model.loss, params, row),
        tokens=batch_formats.count_positions(row),
    )


def count_parameters(params: Any) -> dict[Path, int]:
    """Maps the path of each array in an unboxed parameter tree (of arrays or shapes) to its number of elements."""
    sizes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = tuple(str(getattr(key, 'key', getattr(key, 'name', key))) for key in path)
        sizes[names[1:] if names[:1] == ('params',) else names] = math.prod(leaf.shape)
    return sizes


def count_flops_per_module(function: Callable[..., Any], *abstract_args: Any) -> dict[Path, float]:
    """Maps the path of each Flax module, in order of first use, to its FLOPs in one call of `function`.

    FLOPs are attributed to the innermost module, or to the path `()` for operations outside of modules. Modules
    without counted operations have 0 FLOPs. The arguments are arrays or `jax.ShapeDtypeStruct`s, as for
    `jax.eval_shape`.
    """
    totals: dict[Path, float] = collections.defaultdict(float)

    def mark_module(call: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any], context: Any) -> Any:
        totals[context.module.path] += 0.0
        with jax.named_scope(_MODULE_MARK + '.'.join(context.module.path)):
            return call(*args, **kwargs)

    with nn.intercept_methods(mark_module):
        jaxpr = jax.make_jaxpr(function)(*abstract_args)
    _add_flops(jaxpr.jaxpr, 1.0, (), totals)
    return dict(totals)


def _add_flops(jaxpr: Any, times: float, outer: Path, totals: dict[Path, float]) -> None:
    """Adds the FLOPs of `jaxpr`, executed `times` times inside module `outer`, to `totals`."""
    for eqn in jaxpr.eqns:
        where = _get_module_path(eqn, outer)
        flops = _count_operation_flops(eqn)
        if flops is not None:
            totals[where] += times * flops
        elif eqn.primitive.name == 'cond':
            # The last branch is the one for a true predicate.
            _add_flops(eqn.params['branches'][-1].jaxpr, times, where, totals)
        else:
            for inner in _find_inner_jaxprs(eqn):
                _add_flops(inner, times * _count_repetitions(eqn), where, totals)


def _get_module_path(eqn: Any, outer: Path) -> Path:
    """Returns the module path of an operation, or `outer` if its name stack contains no path."""
    for scope in reversed(eqn.source_info.name_stack.stack):
        if scope.name.startswith(_MODULE_MARK):
            return tuple(part for part in scope.name[len(_MODULE_MARK) :].split('.') if part)
    return outer


def _find_inner_jaxprs(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for item in value if isinstance(value, list | tuple) else (value,):
            item = getattr(item, 'jaxpr', item)
            if hasattr(item, 'eqns'):
                yield item


def _count_repetitions(eqn: Any) -> int:
    if eqn.primitive.name == 'scan':
        return eqn.params['length']
    if eqn.primitive.name == 'pallas_call':
        return math.prod(eqn.params['grid_mapping'].grid)
    return 1


def _count_operation_flops(eqn: Any) -> float | None:
    """Returns the FLOPs of a matrix product, convolution or Fourier transform, or None for other operations."""
    name, shapes = eqn.primitive.name, [variable.aval.shape for variable in eqn.invars]
    if name == 'dot_general':
        (contracting, _), _ = eqn.params['dimension_numbers']
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shapes[0][axis] for axis in contracting)
    if name in ('ragged_dot', 'ragged_dot_general'):
        return 2.0 * math.prod(shapes[0][-2:]) * shapes[1][-1]
    if name == 'conv_general_dilated':
        taps = math.prod(shapes[1]) / shapes[1][eqn.params['dimension_numbers'].rhs_spec[0]]
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * taps
    if name == 'fft':
        kind = jax.lax.FftType(eqn.params['fft_type']).name
        # A real transform returns only half of the spectrum, so read the full length from the real-valued array.
        whole = eqn.outvars[0].aval.shape if 'IRFFT' in kind else shapes[0]
        per_point = (2.5 if 'RFFT' in kind else 5.0) * math.log2(max(math.prod(eqn.params['fft_lengths']), 2))
        return per_point * math.prod(whole)
    return None
