"""The laws that every sublayer obeys, each a function of a `Subject` that raises `BrokenLaw`.

| law | requires |
|---|---|
| padding | neither the content nor the length of padding changes the outputs at tokens |
| packing | an example packed with others has the outputs that it has alone |
| causality | no token of a decoder reads a later one |
| decode | decoding one token at a time with a cache equals computing all tokens at once |
| prefix | tokens of a prefix read each other in both directions, later tokens from left to right; or `UserError` |
| prompt | caches filled by a prompt in one call, of any length, equal computing all tokens at once |
| beams | beams that share the encoder's output decode as separate sequences with copies of it |
| bfloat16 | bfloat16 in gives bfloat16 out, close to float32 |
| dropout | `deterministic` disables dropout; otherwise the key determines it |
| parameters | float32, with logical axes, separate for each layer |
| gradients | finite, and nonzero for every parameter |
| remat | rematerialization and unrolling change no gradient |
| layouts | every layout of a layer keeps shape and dtype |
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

# Relative to the largest output. Rounding, with parameters this large, is far below it, and a bug far above.
TOLERANCE = 1e-4
SHORT = 7
LAYOUTS = (layer.PreNorm, layer.PostNorm, layer.SandwichNorm, layer.ReZero, layer.Parallel, layer.Serialized)


class BrokenLaw(AssertionError):
    """One line: which law a sublayer breaks, on which side, and how."""


def require(holds: Any, subject: Subject, law: str, how: str) -> None:
    """Raises BrokenLaw with `how`, a sentence without a full stop, unless `holds`."""
    if not holds:
        raise BrokenLaw(f'{law} in the {subject.side}: {how}')


def require_equal(actual: Any, expected: Any, subject: Subject, law: str, what: str, reference: str) -> None:
    """Raises BrokenLaw if `what` differs from `reference` by more than rounding."""
    apart = difference(actual, expected)
    require(apart < TOLERANCE, subject, law, f'{what} is {apart:.1%} off {reference}')


def forbid(pairs: np.ndarray, subject: Subject, law: str, how: str) -> None:
    """Raises BrokenLaw if an entry of [output, input] is True; `how` is formatted with the first one's indices."""
    first = next(iter(np.argwhere(pairs)), None)
    if first is not None:
        require(False, subject, law, how.format(*first))


def difference(actual: Any, expected: Any) -> float:
    """The largest difference relative to the largest of `expected`; infinite if something is not finite."""
    expected = np.asarray(expected, np.float32)
    if not expected.size:
        return 0.0
    error = np.max(np.abs(np.asarray(actual, np.float32) - expected)) / (np.max(np.abs(expected)) + 1e-6)
    return float(error) if np.isfinite(error) else np.inf


def padding(subject: Subject) -> None:
    lengths = np.random.default_rng(0).integers(1, SHORT + 1, ROWS)
    x, memory, segments = subject.features(21), subject.features(22, MEMORY), [[int(n)] for n in lengths]
    long = subject.trace(x, subject.context(segments, memory)).outputs
    short = subject.forward(subject.params, x[:, :SHORT], subject.context(segments, memory, length=SHORT))
    for row, n in enumerate(lengths):
        what = f'with {LENGTH - n} positions of padding the output at {n} tokens'
        reference = f'that with {SHORT - n}'
        require_equal(long[row, :n], np.asarray(short)[row, :n], subject, 'padding', what, reference)
    reads = subject.influence([SHORT])
    reads[:, :SHORT] = reads[SHORT:] = 0
    forbid(reads, subject, 'padding', 'token {} reads padding at position {}')


def packing(subject: Subject) -> None:
    """Two examples in a row, compared with each of them alone."""
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
            tokens = packed[row, starts[row] : starts[row] + count]
            what = f'example {example + 1} of a row with {pairs[row]} tokens'
            require_equal(tokens, alone[row, :count], subject, 'packing', what, 'its output alone')
    if subject.is_decoder:
        reads = subject.influence([5, 4])[:5, 5:9]
        forbid(reads, subject, 'packing', 'token {} of one example reads token {} of another in its row')


def _moved_to_front(x: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Row r from position starts[r] on, followed by zeros."""
    moved = np.zeros_like(x)
    for row, start in enumerate(starts):
        moved[row, : x.shape[1] - start] = x[row, start:]
    return moved


def causality(subject: Subject, segments: tuple[int, ...] = (LENGTH,)) -> None:
    """By gradients, so that the smallest leak counts; `segments` are the lengths of a row's examples."""
    influence = subject.influence(segments)
    ids, _ = layout_rows([segments], LENGTH)
    both = (ids.T > 0) & (ids > 0)
    may_read = both & (ids == ids.T) & np.tri(LENGTH, dtype=bool)
    how = f'token {{}} reads token {{}} of a row with {list(segments)} tokens'
    forbid((influence != 0.0) & ~may_read & both, subject, 'causality', how)
    itself = both & np.eye(LENGTH, dtype=bool)
    forbid((influence == 0.0) & itself, subject, 'causality', 'token {} does not reach its own output')
    if subject.reach is not None:
        within_reach = may_read & ~np.tri(LENGTH, k=-subject.reach, dtype=bool)
        how = f'token {{}} and token {{}}: reach is not {subject.reach}'
        forbid(((influence > 0.0) != within_reach) & both, subject, 'causality', how)


def prefix(subject: Subject) -> None:
    """By gradients, for one example and for packed ones. A sublayer that mixes no tokens keeps the law too."""
    for segments, prefixes in (((SHORT,), (4,)), ((5, 4), (3, 2))):
        ids, positions = layout_rows([list(segments)] * ROWS, LENGTH)
        marked = (ids > 0) & (positions < np.asarray((0, *prefixes))[ids])
        influence = subject.influence(segments, prefix=marked)
        real, in_prefix = ids[0] > 0, marked[0]
        same = (ids[0][:, None] == ids[0][None, :]) & real[:, None]
        may_read = same & (np.tri(LENGTH, dtype=bool) | in_prefix[None, :])
        row = f'of a row with {list(segments)} tokens and prefixes of {list(prefixes)}'
        forbid((influence != 0.0) & ~may_read & real[:, None], subject, 'prefix', f'token {{}} reads token {{}} {row}')
        if np.any(influence[~np.eye(LENGTH, dtype=bool)]):
            blind = same & in_prefix[:, None] & in_prefix[None, :] & (influence == 0.0)
            how = f'token {{}} does not read token {{}} {row}; read ctx.prefix, or call checks.refuse_prefix'
            forbid(blind, subject, 'prefix', how)


def prompt(subject: Subject, both_ways: bool = False) -> None:
    """Prompts of several lengths fill the caches in one call, and the last token of each is processed once more.

    `both_ways` reads them in both directions, which a sublayer may refuse.
    """
    x, longest = subject.features(26), SHORT
    counts = np.random.default_rng(3).integers(1, longest + 1, ROWS)
    counts[:2] = 1, longest
    marked = np.arange(LENGTH) < counts[:, None] if both_ways else None
    expected = np.asarray(subject.trace(x, subject.context([[LENGTH]] * ROWS, prefix=marked)).outputs)
    step = _decoding_step(subject)
    shown = None if marked is None else marked[:, :longest]
    ctx = subject.context([[int(n)] for n in counts], length=longest, decode=True, cache_slots=LENGTH, prefix=shown)
    _, variables = step({'params': subject.params}, x[:, :longest], ctx)
    ctx = subject.context([[1]] * ROWS, length=1, decode=True)
    rows = np.arange(ROWS)
    for t in range(LENGTH - longest):
        at = counts - 1 + t
        y, variables = step({'params': subject.params, **variables}, x[rows, at][:, None], ctx)
        what = f'step {t} after prompts {"read in both directions " if both_ways else ""}'.rstrip()
        reference = 'the output for all tokens at once; read ctx.cache_slots'
        require_equal(np.asarray(y)[:, 0], expected[rows, at], subject, 'prompt', what, reference)


def decode(subject: Subject) -> None:
    """The first call allocates the cache, and each later call processes one token."""
    x, memory = subject.features(4), subject.features(5, MEMORY)
    lengths = [[MEMORY], [MEMORY - 2]] * (ROWS // 2)
    expected = subject.trace(x, subject.context([[LENGTH]] * ROWS, memory, lengths)).outputs
    step = _decoding_step(subject)
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
        what, reference = f'step {t} with the cache', 'the output for all tokens at once'
        require_equal(np.asarray(y)[:, 0], expected[:, t], subject, 'decode', what, reference)


def _decoding_step(subject: Subject) -> Callable[..., Any]:
    model = subject.stack()
    return jax.jit(lambda variables, x, ctx: model.apply(variables, x, ctx, LENGTH, mutable=['cache']))


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

    copies = run(np.repeat(memory, 2, axis=0), [row for row in lengths for _ in range(2)])
    what, reference = 'the output of two beams of a sequence', 'that of two sequences with the same memory'
    require_equal(run(memory, lengths), copies, subject, 'beams', what, reference)


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
    """Applies only in training. If sublayers have dropout of their own, the layer's is off here."""
    x, ctx = subject.features(8), subject.context([[LENGTH]] * ROWS, subject.features(9, MEMORY))
    model = subject.stack(dropout=0.0) if uses_dropout(subject.sublayers) else subject.stack()
    try:
        # Without a key.
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
        (not np.allclose(trained[0], evaluated), 'deterministic=False drops nothing, although a rate is set'),
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
            (not equal, 'has equal initial values in both layers'),
        ):
            require(holds, subject, 'parameters', f'{name} {how}')


def gradients(subject: Subject) -> None:
    for path, gradient in jax.tree_util.tree_leaves_with_path(subject.gradients()):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        require(np.all(np.isfinite(gradient)), subject, 'gradients', f'the one of {name} is not finite')
        require(np.any(gradient != 0), subject, 'gradients', f'the one of {name} is zero')


def remat(subject: Subject, policies: tuple[Callable[..., bool], ...] = (stack.full_remat,)) -> None:
    expected = jax.tree_util.tree_leaves_with_path(subject.gradients())
    # The gradient of a bias of attention's keys is 0 apart from rounding, which differs between programs.
    rounding = 1e-6 * max(np.max(np.abs(gradient)) for _, gradient in expected)
    for policy in policies:
        recomputed = jax.tree.leaves(subject.gradients(remat_policy=policy, unroll=2))
        for (path, gradient), other in zip(expected, recomputed, strict=True):
            if max(np.max(np.abs(gradient)), np.max(np.abs(other))) >= rounding:
                name = jax.tree_util.keystr(path, simple=True, separator='/')
                what = f'the gradient of {name} with {policy.__name__}'
                require_equal(other, gradient, subject, 'remat', what, 'that without')


def layouts(subject: Subject) -> None:
    """Traces shapes; nothing is computed."""
    ctx, x = subject.context([[LENGTH]] * ROWS), subject.features(15)
    for layout in LAYOUTS:
        norm = None if layout is layer.ReZero else subject.norm
        module = layer.make_layer(subject.sublayers, layout, norm=norm)
        out, _ = jax.eval_shape(module.init_with_output, jax.random.key(0), x, ctx)
        how = f'in {layout.__name__} {x.shape} float32 becomes {out.shape} {out.dtype}'
        require(out.shape == x.shape and out.dtype == jnp.float32, subject, 'layouts', how)
