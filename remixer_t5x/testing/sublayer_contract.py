"""The contract of a sublayer. Each check is a function `check_NAME(SublayerFixture)` that raises `ContractViolation`.

| check | requirement |
|---|---|
| rows | the output of a row does not depend on the other rows of the batch |
| padding | neither the content nor the length of padding changes the outputs at tokens |
| packing | packing an example with others does not change its outputs |
| causality | no token of a decoder depends on a later token |
| decode | decoding one token at a time with a cache equals computing all tokens at once |
| prefix | attention is bidirectional within a prefix and causal after it, or the sublayer raises `UserError` |
| prompt | filling the caches with prompts of any length in one call equals computing all tokens at once |
| prefix_lm | the same for prompts with bidirectional attention, or the sublayer raises `UserError` |
| beams | beams that share one encoder output decode like separate sequences with copies of it |
| bfloat16 | for bfloat16 inputs, outputs are bfloat16 and close to the float32 outputs |
| dropout | `deterministic` disables dropout; otherwise the PRNG key determines the dropout masks |
| parameters | parameters are float32, have logical axes, and are initialized separately for each layer |
| gradients | gradients are finite, and nonzero for every parameter |
| remat | rematerialization and unrolling do not change the gradients |
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors
from flax import linen as nn

from remixer_t5x import axes
from remixer_t5x.errors import UserError
from remixer_t5x.models.architecture import layer, stack
from remixer_t5x.testing.sublayer_fixture import (
    LENGTH,
    MEMORY,
    ROWS,
    Segments,
    SublayerFixture,
    make_fast_prng_key,
    make_segment_arrays,
)

# Maximum difference relative to the largest output. Rounding errors are far smaller, and the effects of bugs far
# larger.
TOLERANCE = 1e-4
SHORT_LENGTH = 7


class ContractViolation(AssertionError):
    """Raised if a sublayer violates the contract, with a one-line description."""


def require_condition(condition: Any, message: str) -> None:
    """Raises ContractViolation with `message` unless `condition` is true."""
    if not condition:
        raise ContractViolation(message)


def require_close(actual: Any, expected: Any, actual_name: str, expected_name: str) -> None:
    """Raises ContractViolation if the arrays differ by more than rounding."""
    error = relative_difference(actual, expected)
    require_condition(np.isfinite(error), f'{actual_name}, or {expected_name}, contains NaN or infinity')
    require_condition(error < TOLERANCE, f'{actual_name} differs by {error:.1%} from {expected_name}')


def require_no_dependency(pairs: np.ndarray, message: str) -> None:
    """Raises ContractViolation if any entry of `pairs` [output, input] is True. Formats `message` with the indices."""
    if np.any(pairs):
        raise ContractViolation(message.format(*np.argwhere(pairs)[0]))


def relative_difference(actual: Any, expected: Any) -> float:
    """Returns the largest difference relative to the largest `expected` value; infinity if a value is not finite."""
    expected = np.asarray(expected, np.float32)
    if not expected.size:
        return 0.0
    error = np.max(np.abs(np.asarray(actual, np.float32) - expected)) / (np.max(np.abs(expected)) + 1e-6)
    return float(error) if np.isfinite(error) else np.inf


def check_collections(fixture: SublayerFixture) -> None:
    """Checks that all variables of the layer are parameters, because training discards those in other collections."""
    built = layer.make_layer(fixture.sublayers, fixture.layout, norm=fixture.norm)
    ctx = fixture.make_context([[LENGTH]] * ROWS)
    variables = jax.eval_shape(built.init, make_fast_prng_key(0), fixture.make_random_features(0), ctx)
    discarded = ', '.join(sorted({*variables} - {'params', 'intermediates'}))
    message = f'training would discard the variables in {discarded}; use only parameters and, while decoding, the cache'
    require_condition(not discarded, message)


def check_rows(fixture: SublayerFixture) -> None:
    x, ctx = fixture.make_random_features(28), fixture.make_context([[LENGTH]] * ROWS)
    changed = np.concatenate([fixture.make_random_features(29)[:-1], x[-1:]])
    first, other = (fixture.run_with_gradients(rows, ctx).outputs[-1] for rows in (x, changed))
    require_close(other, first, 'the output of a row in another batch', 'its output in the first batch')


def check_padding(fixture: SublayerFixture) -> None:
    lengths = np.random.default_rng(0).integers(1, SHORT_LENGTH + 1, ROWS)
    x, memory = fixture.make_random_features(21), fixture.make_random_features(22, MEMORY)
    segments = [[int(n)] for n in lengths]
    long = fixture.run_with_gradients(x, fixture.make_context(segments, memory)).outputs
    short_ctx = fixture.make_context(segments, memory, length=SHORT_LENGTH)
    short = np.asarray(fixture.forward(fixture.params, x[:, :SHORT_LENGTH], short_ctx))
    for row, n in enumerate(lengths):
        long_name = f'the output at {n} tokens with {LENGTH - n} positions of padding'
        require_close(long[row, :n], short[row, :n], long_name, f'that with {SHORT_LENGTH - n} positions')
    influence = fixture.compute_position_influence([SHORT_LENGTH])
    influence[:, :SHORT_LENGTH] = influence[SHORT_LENGTH:] = 0
    require_no_dependency(influence, 'token {} reads padding at position {}')


def check_packing(fixture: SublayerFixture) -> None:
    rng = np.random.default_rng(1)
    x, memory = fixture.make_random_features(23), fixture.make_random_features(24, MEMORY)
    first = rng.integers(1, LENGTH, ROWS)
    second = np.minimum(rng.integers(1, LENGTH + 1, ROWS), LENGTH - first)
    memory_first = rng.integers(1, MEMORY, ROWS)
    pairs = np.stack([first, second], 1).tolist()
    memory_pairs = np.stack([memory_first, MEMORY - memory_first], 1).tolist()
    ctx = fixture.make_context(pairs, memory, memory_pairs)
    # For decoders, `run_with_gradients` avoids another compilation, because the causality check uses the same program.
    packed = (
        fixture.run_with_gradients(x, ctx).outputs if fixture.is_decoder else fixture.forward(fixture.params, x, ctx)
    )
    packed = np.asarray(packed)
    zeros = np.zeros_like(first)
    for example, (starts, memory_starts) in enumerate([(zeros, zeros), (first, memory_first)]):
        counts = [[row[example]] for row in pairs]
        memory_counts = [[row[example]] for row in memory_pairs]
        ctx = fixture.make_context(counts, _move_to_front(memory, memory_starts), memory_counts)
        separate = fixture.run_with_gradients(_move_to_front(x, starts), ctx).outputs
        for row, (count,) in enumerate(counts):
            tokens = packed[row, starts[row] : starts[row] + count]
            packed_name = f'the output of example {example + 1} in a row of {pairs[row]} tokens'
            require_close(tokens, separate[row, :count], packed_name, 'its output in a separate row')
    if fixture.is_decoder:
        leaks = fixture.compute_position_influence([5, 4])[:5, 5:9]
        require_no_dependency(leaks, 'token {} of one example reads token {} of another example in the same row')


def _move_to_front(x: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Moves the tokens of each row r that start at position starts[r] to the front, and fills the end with zeros."""
    shifted = np.zeros_like(x)
    for row, start in enumerate(starts):
        shifted[row, : x.shape[1] - start] = x[row, start:]
    return shifted


def check_causality(fixture: SublayerFixture, segments: tuple[int, ...] = (LENGTH,)) -> None:
    influence = fixture.compute_position_influence(segments)
    ids, _ = make_segment_arrays([segments], LENGTH)
    are_tokens = (ids.T > 0) & (ids > 0)
    may_read = are_tokens & (ids == ids.T) & np.tri(LENGTH, dtype=bool)
    require_no_dependency(
        (influence != 0) & ~may_read & are_tokens, f'token {{}} reads token {{}} of a row of {list(segments)} tokens'
    )
    unread = (influence == 0) & are_tokens & np.eye(LENGTH, dtype=bool)
    require_no_dependency(unread, 'the output at token {} does not depend on that token')
    if fixture.reach is not None:
        within_reach = may_read & ~np.tri(LENGTH, k=-fixture.reach, dtype=bool)
        message = f'token {{}} and token {{}}: reach must be {fixture.reach}'
        require_no_dependency(((influence > 0) != within_reach) & are_tokens, message)


def check_prefix(fixture: SublayerFixture) -> None:
    for segments, prefixes in (((SHORT_LENGTH,), (4,)), ((5, 4), (3, 2))):
        ids, positions = make_segment_arrays([list(segments)] * ROWS, LENGTH)
        is_prefix = (ids > 0) & (positions < np.asarray((0, *prefixes))[ids])
        influence = fixture.compute_position_influence(segments, prefix=is_prefix, packed=True)
        is_token, in_prefix = ids[0] > 0, is_prefix[0]
        same_example = (ids[0][:, None] == ids[0][None, :]) & is_token[:, None]
        may_read = same_example & (np.tri(LENGTH, dtype=bool) | in_prefix[None, :])
        row = f'of a row of {list(segments)} tokens with prefixes of {list(prefixes)}'
        require_no_dependency((influence != 0) & ~may_read & is_token[:, None], f'token {{}} reads token {{}} {row}')
        if np.any(influence[~np.eye(LENGTH, dtype=bool)]):
            unread = same_example & in_prefix[:, None] & in_prefix[None, :] & (influence == 0)
            advice = 'read ctx.prefix, or call context.check_no_prefix'
            require_no_dependency(unread, f'token {{}} does not read token {{}} {row}; {advice}')
    x, lengths = fixture.make_random_features(27), [[LENGTH - 1], [SHORT_LENGTH]] * (ROWS // 2)
    is_prefix = np.arange(LENGTH) < np.arange(1, ROWS + 1)[:, None] // 2
    packed = fixture.run_with_gradients(x, fixture.make_context(lengths, prefix=is_prefix, packed=True)).outputs
    separate = np.asarray(fixture.forward(fixture.params, x, fixture.make_context(lengths, prefix=is_prefix)))
    for index, (count,) in enumerate(lengths):
        actual, expected = separate[index, :count], packed[index, :count]
        require_close(actual, expected, 'the output with a prefix', 'that in packed rows (ctx.packed)')


def check_prompt(fixture: SublayerFixture, bidirectional: bool = False) -> None:
    """Checks prompts or, if `bidirectional` is set, prompts with bidirectional attention (prefixes).

    A sublayer may raise UserError for prefixes.
    """
    x = fixture.make_random_features(26)
    counts = np.random.default_rng(3).integers(1, SHORT_LENGTH + 1, ROWS)
    counts[:2] = 1, SHORT_LENGTH
    is_prefix = np.arange(LENGTH) < counts[:, None] if bidirectional else None
    ctx = fixture.make_context([[LENGTH]] * ROWS, prefix=is_prefix)
    # The check of prefixes uses the same program.
    expected = fixture.forward(fixture.params, x, ctx) if bidirectional else fixture.run_with_gradients(x, ctx).outputs
    expected = np.asarray(expected)
    prompt_prefix = None if is_prefix is None else is_prefix[:, :SHORT_LENGTH]
    segments = [[int(n)] for n in counts]
    ctx = fixture.make_context(segments, length=SHORT_LENGTH, decode=True, cache_slots=LENGTH, prefix=prompt_prefix)
    caches = fixture.allocate(x[:, :SHORT_LENGTH], ctx)
    ctx = fixture.make_context([[1]] * ROWS, length=1, decode=True)
    rows = np.arange(ROWS)
    for t in range(LENGTH - SHORT_LENGTH):
        positions = counts - 1 + t
        y, caches = fixture.decode(x[rows, positions][:, None], ctx, caches)
        step_name = f'step {t} after {"bidirectional " if bidirectional else ""}prompts'
        reference = 'the output for all tokens at once; read ctx.cache_slots'
        require_close(np.asarray(y)[:, 0], expected[rows, positions], step_name, reference)


def check_decode(fixture: SublayerFixture) -> None:
    memory, lengths = fixture.make_random_features(5, MEMORY), [[MEMORY], [MEMORY - 2]] * (ROWS // 2)
    expected, caches, outputs = _decode_with_memory(fixture, memory, lengths)
    for path, leaf in jax.tree_util.tree_leaves_with_path(caches['cache']):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        is_counter = leaf.ndim == 0 and name.endswith('cache_index')
        is_batched = leaf.shape[:1] == (ROWS,)
        require_condition(
            is_batched or is_counter, f'the first axis of the cache {name} must be the batch, got {leaf.shape}'
        )
    for t, y in enumerate(outputs):
        step_name, reference = f'step {t} with the cache', 'the output for all tokens at once'
        advice = 'check the masks, and cache what steps read from ctx.memory.hidden'
        require_condition(np.all(np.isfinite(y)), f'{step_name} contains NaN or infinity; {advice}')
        require_close(y[:, 0], expected[:, t], step_name, reference)


def check_beams(fixture: SublayerFixture) -> None:
    memory, lengths = fixture.make_random_features(5, MEMORY, ROWS // 2), [[MEMORY], [MEMORY - 2]] * (ROWS // 4)
    expected, _, outputs = _decode_with_memory(fixture, memory, lengths, beams=2)
    reference = 'that of two sequences with copies of the memory'
    for t, y in zip(range(2), outputs, strict=False):
        require_close(y[:, 0], expected[:, t], 'the output of two beams of a sequence', reference)


def _decode_with_memory(
    fixture: SublayerFixture, memory: np.ndarray, lengths: Segments, beams: int = 1
) -> tuple[np.ndarray, Any, Iterator[np.ndarray]]:
    """Returns the outputs for all tokens at once, the allocated caches, and the output of each decoding step.

    `beams` rows share each row of `memory`, [ROWS / beams, MEMORY, embed].
    """
    x, rows = fixture.make_random_features(4), [[LENGTH]] * ROWS
    ctx = fixture.make_context(rows, np.repeat(memory, beams, axis=0), np.repeat(lengths, beams, axis=0).tolist())
    expected = fixture.run_with_gradients(x, ctx).outputs
    allocated = fixture.allocate(np.zeros_like(x), fixture.make_context(rows, memory, lengths, decode=True))
    # Replace the encoder output with NaN, so that steps that read the encoder output instead of the cache fail.
    ctx = fixture.make_context([[1]] * ROWS, np.full_like(memory, np.nan), lengths, length=1, decode=True)

    def run_steps() -> Iterator[np.ndarray]:
        caches = allocated
        for t in range(LENGTH):
            y, caches = fixture.decode(x[:, t : t + 1], ctx, caches)
            yield np.asarray(y)

    return expected, allocated, run_steps()


def check_bfloat16(fixture: SublayerFixture) -> None:
    """Uses initial parameters, because with larger parameters, attention is so sharp that rounding changes its argmax.

    For three seeds, bfloat16 changes the output of shipped sublayers by at most 6% (norm over all tokens) and 2%
    (median over tokens).
    """
    x, memory, rows = fixture.make_random_features(6), fixture.make_random_features(7, MEMORY), [[LENGTH]] * ROWS
    params = jax.device_get(nn.unbox(fixture.boxed_params))
    expected = fixture.run_with_gradients(x, fixture.make_context(rows, memory), params=params).outputs
    low_x: Any = x.astype(jnp.bfloat16)
    low_context = fixture.make_context(rows, memory.astype(jnp.bfloat16))
    try:
        low = np.asarray(fixture.forward(params, low_x, low_context), np.float32)
    except UserError as reason:
        # The layer checks the dtype of the sublayer's output.
        raise ContractViolation(f'{reason}; compute in x.dtype') from reason
    error, size = np.linalg.norm(low - expected, axis=-1), np.linalg.norm(expected, axis=-1)
    total, median = np.linalg.norm(error) / np.linalg.norm(size), np.median(error) / np.sqrt(np.mean(size**2))
    message = f'the output differs by {total:.1%} from float32 ({median:.1%} in the median token)'
    require_condition(total < 0.1 and median < 0.03, f'{message}; keep long sums and large numbers in float32')


def check_dropout(fixture: SublayerFixture) -> None:
    """Checks the dropout of the layer, or of the sublayers if they have a dropout rate."""
    x = fixture.make_random_features(8)
    ctx = fixture.make_context([[LENGTH]] * ROWS, fixture.make_random_features(9, MEMORY))
    settings = [item for factory in fixture.sublayers for item in vars(factory()).items()]
    has_dropout = any(value for name, value in settings if name.endswith('dropout_rate'))
    model = fixture.build_stack(dropout=0.0) if has_dropout else fixture.build_stack()
    try:
        evaluated = fixture.run_with_gradients(x, ctx).outputs  # without a dropout key
    except errors.InvalidRngError as error:
        advice = "draw random numbers only if ctx.deterministic is False, with make_rng('dropout')"
        raise ContractViolation(f'{str(error).partition(" (")[0]}; {advice}') from error
    train_ctx = dataclasses.replace(ctx, deterministic=False)
    # Pass the context as an argument, because sublayers may require JAX arrays.
    train = jax.jit(lambda params, x, ctx, key: model.apply({'params': params}, x, ctx, rngs={'dropout': key}))
    with stack.trace_layers_once():
        trained = [np.asarray(train(fixture.params, x, train_ctx, make_fast_prng_key(seed))) for seed in (1, 1, 2)]
    require_condition(np.array_equal(trained[0], trained[1], equal_nan=True), 'the same key gives different outputs')
    require_condition(not np.allclose(trained[0], trained[2]), 'different keys give the same output')
    require_condition(not np.allclose(trained[0], evaluated), 'deterministic=False does not enable dropout')


def check_parameters(fixture: SublayerFixture) -> None:
    known_axes = {value for key, value in vars(axes).items() if key.isupper()} | {None}

    def is_boxed_param(leaf):
        return isinstance(leaf, nn.LogicallyPartitioned)

    for path, leaf in jax.tree_util.tree_leaves_with_path(fixture.boxed_params, is_leaf=is_boxed_param):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        require_condition(is_boxed_param(leaf), f'{name} has no logical axes; use nn.with_logical_partitioning')
        require_condition(
            len(leaf.names) == leaf.value.ndim, f'{name} has axes {leaf.names} and shape {leaf.value.shape}'
        )
        unknown = ', '.join(sorted(map(str, set(leaf.names) - known_axes)))
        require_condition(not unknown, f'{name} has axes that remixer_t5x/axes.py does not define: {unknown}')
        named = [axis for axis in leaf.names if axis is not None]
        advice = 'use another name from remixer_t5x/axes.py, or None'
        require_condition(len({*named}) == len(named), f'{name} has a repeated axis in {leaf.names}; {advice}')
        require_condition(leaf.value.dtype == jnp.float32, f'{name} must be float32, got {leaf.value.dtype}')
        is_stacked = 'run_0' in name
        require_condition((leaf.names[:1] == (axes.LAYERS,)) == is_stacked, f'{name} is not stacked over layers')
        is_shared = is_stacked and np.ptp(leaf.value) > 0 and np.array_equal(leaf.value[0], leaf.value[1])
        advice = 'create a module for each layer, and initialize parameters with random numbers or a constant'
        require_condition(not is_shared, f'{name} has the same initial values in both layers; {advice}')


def check_gradients(fixture: SublayerFixture) -> None:
    for path, gradient in jax.tree_util.tree_leaves_with_path(fixture.compute_param_gradients()):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        require_condition(np.all(np.isfinite(gradient)), f'the gradient of {name} is not finite')
        require_condition(np.any(gradient != 0), f'the gradient of {name} is zero')


def check_remat(fixture: SublayerFixture, policies: tuple[Callable[..., bool], ...] = (stack.full_remat,)) -> None:
    expected = jax.tree_util.tree_leaves_with_path(fixture.compute_param_gradients())
    # Tolerate rounding: the exact gradient of attention's key bias is 0, and rounding differs between programs.
    rounding = 1e-6 * max(np.max(np.abs(gradient)) for _, gradient in expected)
    for policy in policies:
        recomputed = jax.tree.leaves(fixture.compute_param_gradients(remat_policy=policy, unroll=None))
        for (path, gradient), other in zip(expected, recomputed, strict=True):
            if max(np.max(np.abs(gradient)), np.max(np.abs(other))) >= rounding:
                name = jax.tree_util.keystr(path, simple=True, separator='/')
                require_close(other, gradient, f'the gradient of {name} with {policy.__name__}', 'that without')
