"""Compares a kernel with its formula on the device before a program uses the kernel.

Tracing reaches a kernel with its shapes, dtype and flags. `failure` then runs it once, forward and backward, on two
random rows, and compares it with the formula in float32. A kernel that differs or raises is replaced by its formula.
Results are cached next to JAX's compiled programs, per version of the kernels, of JAX, of driver and chip. After a
check that crashed or hung, its file in the cache makes the next start use the formula. Of several processes, process 0
checks.
"""

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import json
import logging
import pathlib
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import filelock
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from remixer_t5x.kernels import compile_target

FOLDER = 'kernel_checks'
ROWS, _EXAMPLES = 2, 3  # of the random operands, and in a packed row


@dataclasses.dataclass(frozen=True)
class Check:
    """One call of a kernel.

    Attributes:
        kernel, call: its name, such as 'cudnn', and what it computes: lengths, heads, flags.
        run, formula: functions from `operands` to one array.
        operands: trees of `jax.ShapeDtypeStruct`. Integers are the segments of rows, [ROWS, length].
        packed: whether a row may hold several examples.
    """

    kernel: str
    call: str
    run: Callable[..., jax.Array]
    formula: Callable[..., jax.Array]
    operands: tuple[Any, ...]
    packed: bool

    dtype = property(lambda self: str(jax.tree.leaves(self.operands)[0].dtype))
    key = property(lambda self: repr((self.kernel, self.call, self.operands)))
    # The largest allowed `difference`. Products of float32 may be rounded to TF32 or bfloat16.
    tolerance = property(lambda self: 1e-2 if self.dtype == 'float32' else 3e-2)


class Verdict(NamedTuple):
    """The kernel's difference from the formula, or the error that occurred in place of it."""

    difference: float | None = None
    error: str | None = None

    def failure(self, check: Check) -> str | None:
        """Returns why the kernel must not be used, or None."""
        # The comparison is False for NaN.
        if self.difference is not None and self.difference <= check.tolerance:
            return None
        reason = self.error or f'differs from the formula by {self.difference:.2g}, allowed is {check.tolerance:g}'
        return f'failed its self-check ({check.dtype}, {check.call}): {reason}'


_RECORD: contextvars.ContextVar[dict[str, Check] | None] = contextvars.ContextVar('record', default=None)


@contextlib.contextmanager
def recording() -> Iterator[dict[str, Check]]:
    """Collects the checks of what is traced within, instead of running them."""
    checks: dict[str, Check] = {}
    token = _RECORD.set(checks)
    try:
        yield checks
    finally:
        _RECORD.reset(token)


_failures: dict[str, str | None] = {}


def failure(check: Check) -> str | None:
    """Returns why the kernel must not compute this call on this process's device, or None.

    Programs for a device that is only described are not checked.
    """
    record = _RECORD.get()
    if record is not None:
        record[check.key] = check
        return None
    if compile_target.is_described():
        return None
    if check.key not in _failures:
        reason = run(check).failure(check) if jax.process_index() == 0 else None
        if jax.process_count() > 1:
            failed = _call_outside_trace(multihost_utils.broadcast_one_to_all, np.array(reason is not None))
            reason = reason or ('failed its self-check in process 0' if failed else None)
        _failures[check.key] = reason
    return _failures[check.key]


@functools.cache
def warn_of_formula(operation: str, kernel: str, refusal: str) -> None:
    """Logs one line for each reason to fall back to the formula."""
    logging.getLogger('remixer_t5x').warning('%s falls back to its formula: %s %s', operation, kernel, refusal)


def run(check: Check, platform: str | None = None) -> Verdict:
    """Runs a check, unless its result is cached.

    Args:
        check: the call.
        platform: the platform whose kernel is interpreted on this device, uncached; None for the device's own kernel.
    """
    path = _cache_path(check) if platform is None else None
    if path is None:
        return _call_outside_trace(_measure, check, platform)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may be checking the same call. A process that crashes releases the lock.
    with filelock.FileLock(path.with_suffix('.lock')):
        if path.exists():
            return Verdict(**json.loads(path.read_text()))
        # Remains if this process crashes.
        path.write_text(json.dumps({'error': f'crashed or hung in an earlier check; remove {path} to check again'}))
        verdict = _call_outside_trace(_measure, check, platform)
        if verdict.error is None:
            path.write_text(json.dumps(verdict._asdict()))
        else:
            # The cause of an exception may be temporary, such as too little memory.
            path.unlink()
    return verdict


def _measure(check: Check, platform: str | None) -> Verdict:
    target = compile_target.compiling_for(platform, interpret=True) if platform else contextlib.nullcontext()
    try:
        with target:
            return Verdict(difference(check))
    except Exception as error:
        return Verdict(error=f'{type(error).__name__}: {error}'.splitlines()[0][:300])


def difference(check: Check) -> float:
    """The largest error of the result and the gradients, relative to the norm of each array by the formula."""
    operands = _random_operands(check)
    exact = jax.tree.map(lambda array: array.astype(jnp.float32) if _is_float(array) else array, operands)
    shape = jax.eval_shape(check.formula, *exact).shape
    direction = np.float32(np.random.default_rng(1).standard_normal(shape))
    actual = _results(check.run, operands, direction)
    with jax.default_matmul_precision('highest'):
        expected = _results(check.formula, exact, direction)
    norm = np.linalg.norm
    errors = [norm(np.float32(a) - e) / (norm(e) + 1e-30) for a, e in zip(actual, expected, strict=True)]
    return float(np.max(errors))


def _results(function: Callable[..., jax.Array], operands: Any, direction: Any) -> list[jax.Array]:
    """The function's result, and its gradients with respect to all floating-point operands."""
    leaves, tree = jax.tree.flatten(operands)
    places = [place for place, leaf in enumerate(leaves) if _is_float(leaf)]

    def apply_to_floats(*floats: jax.Array) -> jax.Array:
        replaced = dict(zip(places, floats, strict=True))
        return function(*tree.unflatten([replaced.get(place, leaf) for place, leaf in enumerate(leaves)]))

    @jax.jit
    def compute(*floats: jax.Array) -> list[jax.Array]:
        result, pull_back = jax.vjp(apply_to_floats, *floats)
        return [result, *pull_back(direction.astype(result.dtype))]

    return compute(*(leaves[place] for place in places))


def _random_operands(check: Check) -> Any:
    """Normal numbers, and segments: a full row and one with padding, each of one example or of several."""
    rng = np.random.default_rng(0)
    examples = _EXAMPLES if check.packed else 1

    def make(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if _is_float(leaf):
            return jnp.asarray(0.5 * rng.standard_normal(leaf.shape), leaf.dtype)
        length = leaf.shape[1]
        place, used = np.arange(length), np.array([[length], [length - length // 4]])
        return jnp.asarray(np.where(place < used, place * examples // used + 1, 0), leaf.dtype)

    return jax.tree.map(make, check.operands)


def _is_float(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def _call_outside_trace(function: Callable[..., Any], *args: Any) -> Any:
    """Calls the function in a thread, because the trace of this thread would record what the function computes."""
    with futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(function, *args).result()


def _cache_path(check: Check) -> pathlib.Path | None:
    """The file of a check's result; None without a compilation cache."""
    folder, device = jax.config.jax_compilation_cache_dir, jax.local_devices()[0]
    if not folder:
        return None
    sources = b''.join(source.read_bytes() for source in sorted(pathlib.Path(__file__).parent.rglob('*.py')))
    versions = (jax.__version__, device.device_kind, device.client.platform_version, check.key)
    key = hashlib.sha256(repr(versions).encode() + sources).hexdigest()[:24]
    return pathlib.Path(folder) / FOLDER / f'{check.kernel}-{key}.json'
