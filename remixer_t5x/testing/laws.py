"""The laws that every sublayer obeys, each a function of a `Subject` that raises `BrokenLaw`.

| law | says |
|---|---|
| padding | what is behind the tokens of a row, and how much, changes nothing at its tokens |
| packing | an example among others in a row gives what it gives alone |
| causality | in a decoder no token sees a later one |
| decode | one token at a time, with a cache, gives what all tokens at once give |
| prefix | a prefix is read in both directions, what follows it is not; or the sublayer refuses it |
| prompt | caches that a prompt filled at once give what all tokens at once give, for prompts of any length |
| beams | beams that share the encoder's output give what copies of it give |
| bfloat16 | bfloat16 in gives bfloat16 out, close to float32 |
| dropout | `deterministic` switches dropout off; without it the key decides |
| parameters | float32, with logical axes, and own ones in each layer |
| gradients | finite, and not zero for every parameter |
| remat | recomputing and unrolling change no gradient |
| layouts | shapes and dtype in every layout of a layer |
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from remixer_t5x import axes
from remixer_t5x.models.architecture import layer, stack
from remixer_t5x.testing.subject import LENGTH, MEMORY, ROWS, Subject, fast_key, layout_rows, uses_dropout

# Of the largest output. Rounding, with parameters this large, is far below it, and a bug far above.
TOLERANCE = 1e-4
SHORT = 7
LAYOUTS = (layer.PreNorm, layer.PostNorm, layer.ReZero, layer.Parallel, layer.Serialized)


class BrokenLaw(AssertionError):
    """One line: which law a sublayer breaks, on which side, and how."""


def require(holds: Any, subject: Subject, law: str, how: str) -> None:
    """Raises BrokenLaw with `how`, a sentence without a full stop, unless `holds`."""
    if not holds:
        raise BrokenLaw(f'{law} in the {subject.side}: {how}')


def difference(actual: Any, wanted: Any) -> float:
    """The largest difference, as a part of the largest of `wanted`; infinite where something is not finite."""
    wanted = np.asarray(wanted, np.float32)
    if not wanted.size:
        return 0.0
    found = np.max(np.abs(np.asarray(actual, np.float32) - wanted)) / (np.max(np.abs(wanted)) + 1e-6)
    return float(found) if np.isfinite(found) else np.inf


def padding(subject: Subject) -> None:
    """Padding may hold anything, and be as long as it likes."""
    lengths = np.random.default_rng(0).integers(1, SHORT + 1, ROWS)
    x, memory, segments = subject.features(21), subject.features(22, MEMORY), [[int(n)] for n in lengths]
    long = subject.trace(x, subject.context(segments, memory)).outputs
    short = subject.forward(subject.params, x[:, :SHORT], subject.context(segments, memory, length=SHORT))
    for row, n in enumerate(lengths):
        apart = difference(long[row, :n], np.asarray(short)[row, :n])
        how = (
            f'with {LENGTH - n} positions of padding the output at {n} tokens is {apart:.1%} off that with {SHORT - n}'
        )
        require(apart < TOLERANCE, subject, 'padding', how)
    reads = subject.influence([SHORT])[:SHORT, SHORT:]
    where = np.argwhere(reads)
    how = f'token {where[0][0]} reads padding at position {where[0][1] + SHORT}' if len(where) else ''
    require(not len(where), subject, 'padding', how)


def packing(subject: Subject) -> None:
    """Two examples in a row, against each of them alone."""
    rng = np.random.default_rng(1)
    x, memory = subject.features(23), subject.features(24, MEMORY)
    first = rng.integers(1, LENGTH, ROWS)
    second = np.minimum(rng.integers(1, LENGTH + 1, ROWS), LENGTH - first)
    memory_first = rng.integers(1, MEMORY, ROWS)
    pairs = np.stack([first, second], 1).tolist()
    memory_pairs = np.stack([memory_first, MEMORY - memory_first], 1).tolist()
    ctx = subject.context(pairs, memory, memory_pairs)
    # A decoder's backward pass is compiled for causality anyway.
    packed = subject.trace(x, ctx).outputs if subject.is_decoder else subject.forward(subject.params, x, ctx)
    packed = np.asarray(packed)
    none = np.zeros_like(first)
    for example, (starts, memory_starts) in enumerate([(none, none), (first, memory_first)]):
        counts = [[row[example]] for row in pairs]
        alone_x, alone_memory = _moved_to_front(x, starts), _moved_to_front(memory, memory_starts)
        ctx = subject.context(counts, alone_memory, [[row[example]] for row in memory_pairs])
        alone = subject.trace(alone_x, ctx).outputs
        for row, (count,) in enumerate(counts):
            start = starts[row]
            apart = difference(packed[row, start : start + count], alone[row, :count])
            how = f'example {example + 1} of a row with {pairs[row]} tokens is {apart:.1%} off what it is alone'
            require(apart < TOLERANCE, subject, 'packing', how)
    if not subject.is_decoder:
        return
    reads = subject.influence([5, 4])
    where = np.argwhere(reads[:5, 5:9])
    how = f'token {where[0][0]} of one example reads token {where[0][1]} of another in its row' if len(where) else ''
    require(not len(where), subject, 'packing', how)


def _moved_to_front(x: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Row r from position starts[r] on, 0 behind."""
    moved = np.zeros_like(x)
    for row, start in enumerate(starts):
        moved[row, : x.shape[1] - start] = x[row, start:]
    return moved


def causality(subject: Subject, segments: tuple[int, ...] = (LENGTH,)) -> None:
    """By gradients, so that the smallest leak counts; `segments` are the examples of a row."""
    influence = subject.influence(segments)
    ids = np.asarray(subject.context([list(segments)], subject.features(3, MEMORY, 1)).segment_ids[0])
    real = ids > 0
    same = (ids[:, None] == ids[None, :]) & real[:, None] & real[None, :]
    may_see = same & np.tri(LENGTH, dtype=bool)
    where = np.argwhere((influence != 0.0) & ~may_see & real[:, None] & real[None, :])
    how = f'token {where[0][0]} reads token {where[0][1]} of a row with {list(segments)} tokens' if len(where) else ''
    require(not len(where), subject, 'causality', how)
    blind = np.argwhere(~(np.diagonal(influence) > 0.0) & real)
    require(
        not len(blind), subject, 'causality', f'token {blind[0][0] if len(blind) else 0} does not reach its own output'
    )
    if subject.reach is not None:
        wanted = may_see & ~np.tri(LENGTH, k=-subject.reach, dtype=bool)
        wrong = np.argwhere(((influence > 0.0) != wanted) & real[:, None] & real[None, :])
        how = f'token {wrong[0][0]} and token {wrong[0][1]}: reach is not {subject.reach}' if len(wrong) else ''
        require(not len(wrong), subject, 'causality', how)


def prefix(subject: Subject) -> None:
    """The first tokens of an example see each other, those behind them what is before them; alone in a row and packed.

    By gradients. A sublayer that mixes no tokens at all keeps the law, too.
    """
    for segments, prefixes in (((SHORT,), (4,)), ((5, 4), (3, 2))):
        ids, positions = layout_rows([list(segments)] * ROWS, LENGTH)
        marked = (ids > 0) & (positions < np.asarray((0, *prefixes))[ids])
        influence = subject.influence(segments, prefix=marked)
        real, in_prefix = ids[0] > 0, marked[0]
        same = (ids[0][:, None] == ids[0][None, :]) & real[:, None]
        may_see = same & (np.tri(LENGTH, dtype=bool) | in_prefix[None, :])
        row = f'of a row with {list(segments)} tokens and prefixes of {list(prefixes)}'
        where = np.argwhere((influence != 0.0) & ~may_see & real[:, None])
        how = f'token {where[0][0]} reads token {where[0][1]} {row}' if len(where) else ''
        require(not len(where), subject, 'prefix', how)
        mixes = np.any(influence[~np.eye(LENGTH, dtype=bool)])
        blind = np.argwhere(same & in_prefix[:, None] & in_prefix[None, :] & (influence == 0.0))
        how = f'token {blind[0][0]} does not read token {blind[0][1]} {row}' if len(blind) else ''
        require(not mixes or not len(blind), subject, 'prefix', f'{how}; read ctx.prefix, or call checks.refuse_prefix')


def prompt(subject: Subject, both_ways: bool = False) -> None:
    """Prompts of several lengths fill the caches in one call, and the last token of each comes once more.

    `both_ways` reads them in both directions, which a sublayer may refuse.
    """
    x, longest = subject.features(26), SHORT
    counts = np.random.default_rng(3).integers(1, longest + 1, ROWS)
    counts[:2] = 1, longest
    marked = np.arange(LENGTH) < counts[:, None] if both_ways else None
    taught = np.asarray(subject.trace(x, subject.context([[LENGTH]] * ROWS, prefix=marked)).outputs)
    model = subject.stack()
    step = jax.jit(lambda variables, x, ctx: model.apply(variables, x, ctx, LENGTH, mutable=['cache']))
    shown = None if marked is None else marked[:, :longest]
    ctx = subject.context([[int(n)] for n in counts], length=longest, decode=True, cache_slots=LENGTH, prefix=shown)
    _, variables = step({'params': subject.params}, x[:, :longest], ctx)
    ctx = subject.context([[1]] * ROWS, length=1, decode=True)
    rows = np.arange(ROWS)
    for t in range(LENGTH - longest):
        at = counts - 1 + t
        y, variables = step({'params': subject.params, **variables}, x[rows, at][:, None], ctx)
        apart = difference(np.asarray(y)[:, 0], taught[rows, at])
        kind = 'read in both directions ' if both_ways else ''
        how = f'step {t} after prompts {kind}is {apart:.1%} off the output for all tokens at once; read ctx.cache_slots'
        require(apart < TOLERANCE, subject, 'prompt', how)


def decode(subject: Subject) -> None:
    """The first call allocates the cache, and each later call takes one token."""
    x, memory = subject.features(4), subject.features(5, MEMORY)
    lengths = [[MEMORY], [MEMORY - 2]] * (ROWS // 2)
    taught = subject.trace(x, subject.context([[LENGTH]] * ROWS, memory, lengths)).outputs
    model = subject.stack()
    step = jax.jit(lambda variables, x, ctx: model.apply(variables, x, ctx, LENGTH, mutable=['cache']))
    ctx = subject.context([[LENGTH]] * ROWS, memory, lengths, decode=True)
    _, variables = step({'params': subject.params}, np.zeros_like(x), ctx)
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables['cache']):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        is_counter = leaf.ndim == 0 and name.endswith('cache_index')
        how = f'the cache {name} has shape {leaf.shape}, whose first axis is not the batch'
        require(leaf.shape[:1] == (ROWS,) or is_counter, subject, 'decode', how)
    # The memory is not read again: its features may be gone by the first step.
    ctx = subject.context([[1]] * ROWS, np.full_like(memory, np.nan), lengths, length=1, decode=True)
    for t in range(LENGTH):
        y, variables = step({'params': subject.params, **variables}, x[:, t : t + 1], ctx)
        apart = difference(np.asarray(y)[:, 0], taught[:, t])
        how = f'step {t} with the cache is {apart:.1%} off the output for all tokens at once'
        require(apart < TOLERANCE, subject, 'decode', how)


def beams(subject: Subject) -> None:
    """Two beams of each sequence decode as two sequences with the same memory do."""
    model, rows, steps = subject.stack(), 2, 2
    x, memory = subject.features(4, rows=2 * rows), subject.features(5, MEMORY, rows)
    lengths = [[MEMORY], [MEMORY - 2]]

    @jax.jit
    def decoded(memory, ctx_all, ctx_step):
        _, variables = model.apply({'params': subject.params}, jnp.zeros_like(x), ctx_all, LENGTH, mutable=['cache'])
        outputs = []
        for t in range(steps):
            variables = {'params': subject.params, 'cache': variables['cache']}
            y, variables = model.apply(variables, x[:, t : t + 1], ctx_step, LENGTH, mutable=['cache'])
            outputs.append(y)
        return jnp.stack(outputs)

    def run(memory, memory_lengths):
        whole = subject.context([[LENGTH]] * 2 * rows, memory, memory_lengths, decode=True)
        one = subject.context([[1]] * 2 * rows, memory, memory_lengths, length=1, decode=True)
        return decoded(memory, whole, one)

    apart = difference(
        run(memory, lengths), run(np.repeat(memory, 2, axis=0), [row for row in lengths for _ in range(2)])
    )
    how = f'two beams of a sequence are {apart:.1%} off two sequences with the same memory'
    require(apart < TOLERANCE, subject, 'beams', how)


def bfloat16(subject: Subject) -> None:
    """With initial parameters: larger ones make attention so sharp that rounding changes which token it picks.

    A few tokens may be far off, because a norm magnifies rounding if a token's features are almost equal before it.
    Over three draws, the shipped sublayers are at most 6% off in the norm of all tokens, and 2% in the median token.
    """
    x, memory, rows = subject.features(6), subject.features(7, MEMORY), [[LENGTH]] * ROWS
    params = jax.device_get(nn.unbox(subject.boxed_params))
    expected = subject.outputs(params, x, subject.context(rows, memory))
    low_x: Any = x.astype(jnp.bfloat16)
    low_context = subject.context(rows, memory.astype(jnp.bfloat16))
    # Each by itself, because a layer refuses another dtype.
    for factory in subject.sublayers:
        one, _ = jax.eval_shape(factory().init_with_output, jax.random.key(0), low_x, low_context)
        how = f'bfloat16 in gives {one.dtype} out; compute in x.dtype'
        require(one.dtype == jnp.bfloat16, subject, 'bfloat16', how)
    low = np.asarray(subject.forward(params, low_x, low_context), np.float32)
    error, size = np.linalg.norm(low - expected, axis=-1), np.linalg.norm(expected, axis=-1)
    whole, half = np.linalg.norm(error) / np.linalg.norm(size), np.median(error) / np.sqrt(np.mean(size**2))
    how = f'it is {whole:.1%} off float32 ({half:.1%} in the median token); keep long sums and large numbers in float32'
    require(whole < 0.1 and half < 0.03, subject, 'bfloat16', how)


def dropout(subject: Subject) -> None:
    """In training only, by the key. Where sublayers drop by themselves, they alone do here."""
    x, ctx = subject.features(8), subject.context([[LENGTH]] * ROWS, subject.features(9, MEMORY))
    own = uses_dropout(subject.sublayers)
    model = subject.stack(dropout=0.0) if own else subject.stack()
    try:
        # No key is given.
        evaluated = subject.trace(x, ctx).outputs
    except Exception as error:
        if 'dropout' not in str(error):
            raise
        raise BrokenLaw(f'dropout in the {subject.side}: with deterministic=True it asks for a key') from error
    in_training = dataclasses.replace(ctx, deterministic=False)
    train = jax.jit(lambda params, key: model.apply({'params': params}, x, in_training, rngs={'dropout': key}))
    with stack.traced_once():
        trained = [np.asarray(train(subject.params, fast_key(seed))) for seed in (1, 1, 2)]
    for holds, how in (
        (np.array_equal(trained[0], trained[1]), 'the same key gives two outputs'),
        (not np.allclose(trained[0], trained[2]), 'another key gives the same output'),
        (not np.allclose(trained[0], evaluated), 'deterministic=False drops nothing, though a rate is set'),
    ):
        require(holds, subject, 'dropout', how)


def parameters(subject: Subject) -> None:
    glossary = {value for key, value in vars(axes).items() if key.isupper()} | {None}

    def is_box(leaf):
        return isinstance(leaf, nn.LogicallyPartitioned)

    for path, leaf in jax.tree_util.tree_leaves_with_path(subject.boxed_params, is_leaf=is_box):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        require(is_box(leaf), subject, 'parameters', f'{name} has no logical axes; use nn.with_logical_partitioning')
        unknown = sorted(set(map(str, set(leaf.names) - glossary)))
        in_run = 'run_0' in name
        equal = in_run and np.ptp(leaf.value) > 0 and np.array_equal(leaf.value[0], leaf.value[1])
        for holds, how in (
            (len(leaf.names) == leaf.value.ndim, f'has {len(leaf.names)} axis names and shape {leaf.value.shape}'),
            (not unknown, f'has axes that remixer_t5x/axes.py does not name: {", ".join(unknown)}'),
            (leaf.value.dtype == jnp.float32, f'is {leaf.value.dtype}, not float32'),
            ((leaf.names[:1] == (axes.LAYERS,)) == in_run, 'is not stacked over layers'),
            (not equal, 'starts equal in both layers'),
        ):
            require(holds, subject, 'parameters', f'{name} {how}')


def gradients(subject: Subject) -> None:
    for path, gradient in jax.tree_util.tree_leaves_with_path(subject.gradients()):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        require(np.all(np.isfinite(gradient)), subject, 'gradients', f'{name} gets one that is not finite')
        require(np.any(gradient != 0), subject, 'gradients', f'{name} gets none')


def remat(subject: Subject, policies: tuple[Callable[..., bool], ...] = (stack.full_remat,)) -> None:
    wanted = jax.tree_util.tree_leaves_with_path(subject.gradients())
    # A bias of attention's keys has a gradient of 0, of which rounding leaves another trace in every program.
    rounding = 1e-6 * max(np.max(np.abs(gradient)) for _, gradient in wanted)
    for policy in policies:
        found = jax.tree.leaves(subject.gradients(remat_policy=policy, unroll=2))
        for (path, gradient), other in zip(wanted, found, strict=True):
            name = jax.tree_util.keystr(path, simple=True, separator='/')
            is_zero = np.max(np.abs(gradient)) < rounding and np.max(np.abs(other)) < rounding
            apart = 0.0 if is_zero else difference(other, gradient)
            how = f'the gradient of {name} with {policy.__name__} is {apart:.1%} off that without'
            require(apart < TOLERANCE, subject, 'remat', how)


def layouts(subject: Subject) -> None:
    """Shapes alone; nothing is computed."""
    ctx, x = subject.context([[LENGTH]] * ROWS), subject.features(15)
    for layout in LAYOUTS:
        norm = None if layout is layer.ReZero else subject.norm
        made = layer.make_layer(subject.sublayers, layout, norm=norm)
        out, _ = jax.eval_shape(made.init_with_output, jax.random.key(0), x, ctx)
        how = f'in {layout.__name__} {x.shape} float32 becomes {out.shape} {out.dtype}'
        require(out.shape == x.shape and out.dtype == jnp.float32, subject, 'layouts', how)
