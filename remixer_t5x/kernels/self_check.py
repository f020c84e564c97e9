"""Compares a kernel with its formula on the device before a program uses the kernel.

When tracing reaches a kernel with new shapes, dtypes or flags, `failure` runs it once on two random rows, forward and
backward, and compares it with the formula in float32. If the kernel differs or raises, the formula replaces it. Results
are cached next to JAX's compiled programs, with a key of the kernels' source, the versions of JAX and the driver, and
the chip. A check that crashes or hangs leaves a file in the cache, so that the next start uses the formula. With
several processes, only process 0 runs checks.
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
ROWS, _EXAMPLES = 2, 3  # rows of the random operands, and examples in a packed row


@dataclasses.dataclass(frozen=True)
class Check:
    """A kernel call to compare with its formula.

    Attributes:
        kernel: name of the kernel, such as 'cudnn'.
        call: description of the call: lengths, heads, flags.
        run, formula: functions from `operands` to one array.
        operands: trees of `jax.ShapeDtypeStruct`. Integer arrays are segment ids, [ROWS, length].
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
    # The largest allowed `difference`. Devices may round the operands of float32 products to TF32 or bfloat16.
    tolerance = property(lambda self: 1e-2 if self.dtype == 'float32' else 3e-2)


class Verdict(NamedTuple):
    """The kernel's difference from the formula, or the error that the check raised."""

    difference: float | None = None
    error: str | None = None

    def failure(self, check: Check) -> str | None:
        """Returns why the kernel must not be used, or None."""
        # False if the difference is NaN.
        if self.difference is not None and self.difference <= check.tolerance:
            return None
        reason = self.error or f'differs from the formula by {self.difference:.2g}, allowed is {check.tolerance:g}'
        return f'failed its self-check ({check.dtype}, {check.call}): {reason}'


_RECORD: contextvars.ContextVar[dict[str, Check] | None] = contextvars.ContextVar('record', default=None)


@contextlib.contextmanager
def record_checks() -> Iterator[dict[str, Check]]:
    """Records the checks of the traced kernels instead of running them."""
    checks: dict[str, Check] = {}
    token = _RECORD.set(checks)
    try:
        yield checks
    finally:
        _RECORD.reset(token)


_failures: dict[str, str | None] = {}


def failure(check: Check) -> str | None:
    """Returns why the kernel must not be used for this call on this process's device, or None.

    Programs for a device that this process does not have are not checked.
    """
    record = _RECORD.get()
    if record is not None:
        record[check.key] = check
        return None
    if compile_target.is_cross_compiling():
        return None
    if check.key not in _failures:
        reason = run(check).failure(check) if jax.process_index() == 0 else None
        if jax.process_count() > 1:
            failed = _run_outside_trace(multihost_utils.broadcast_one_to_all, np.array(reason is not None))
            reason = reason or ('failed its self-check in process 0' if failed else None)
        _failures[check.key] = reason
    return _failures[check.key]


@functools.cache
def log_fallback(operation: str, kernel: str, unsupported_reason: str) -> None:
    """Logs a fallback to the formula, once for each reason."""
    logging.getLogger('remixer_t5x').warning(
        '%s falls back to its formula: %s %s', operation, kernel, unsupported_reason
    )


def run(check: Check, platform: str | None = None) -> Verdict:
    """Runs a check, unless its result is cached.

    Args:
        check: the call to check.
        platform: platform whose kernel is interpreted on this device, without the cache; None runs the device's kernel.
    """
    path = _cache_path(check) if platform is None else None
    if path is None:
        return _run_outside_trace(_measure, check, platform)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may check the same call. The lock is released if that process crashes.
    with filelock.FileLock(path.with_suffix('.lock')):
        if path.exists():
            return Verdict(**json.loads(path.read_text()))
        # This file remains if the process crashes.
        path.write_text(json.dumps({'error': f'crashed or hung in an earlier check; remove {path} to check again'}))
        verdict = _run_outside_trace(_measure, check, platform)
        if verdict.error is None:
            path.write_text(json.dumps(verdict._asdict()))
        else:
            # The cause of an exception may be temporary, such as a lack of memory.
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
    """Returns the largest error of the result and the gradients, relative to the norm of each expected array."""
    operands = _random_operands(check)
    exact = jax.tree.map(lambda array: array.astype(jnp.float32) if _is_float(array) else array, operands)
    shape = jax.eval_shape(check.formula, *exact).shape
    direction = np.float32(np.random.default_rng(1).standard_normal(shape))
    actual = _value_and_gradients(check.run, operands, direction)
    with jax.default_matmul_precision('highest'):
        expected = _value_and_gradients(check.formula, exact, direction)
    norm = np.linalg.norm
    errors = [norm(np.float32(a) - e) / (norm(e) + 1e-30) for a, e in zip(actual, expected, strict=True)]
    return float(np.max(errors))


def _value_and_gradients(function: Callable[..., jax.Array], operands: Any, direction: Any) -> list[jax.Array]:
    """Computes the function's result and its gradients with respect to all floating-point operands."""
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
    """Draws normal numbers, and segment ids of a full row and a row with padding, with one or several examples."""
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


def _run_outside_trace(function: Callable[..., Any], *args: Any) -> Any:
    """Calls the function in another thread, because this thread may be tracing."""
    with futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(function, *args).result()


def _cache_path(check: Check) -> pathlib.Path | None:
    """Returns the cache file of a check; None without a compilation cache."""
    folder, device = jax.config.jax_compilation_cache_dir, jax.local_devices()[0]
    if not folder:
        return None
    sources = b''.join(source.read_bytes() for source in sorted(pathlib.Path(__file__).parent.rglob('*.py')))
    versions = (jax.__version__, device.device_kind, device.client.platform_version, check.key)
    key = hashlib.sha256(repr(versions).encode() + sources).hexdigest()[:24]
    return pathlib.Path(folder) / FOLDER / f'{check.kernel}-{key}.json'
