"""Compares a kernel with its plain-JAX implementation on the device before a program uses the kernel.

When a kernel is traced with new shapes, dtypes or flags, `failure_reason` runs its forward and backward pass on two
random rows, and compares the results with the plain-JAX implementation in float32. If the results differ or the kernel
raises an error, the program uses the plain-JAX implementation instead. Results are cached in a subfolder of JAX's
compilation cache. If a check crashes or hangs, it leaves a file in this subfolder that makes later processes use the
plain-JAX implementation. In multi-process runs, only process 0 runs checks.
"""

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
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

CACHE_FOLDER = 'kernel_checks'
NUM_CHECK_ROWS = 2  # number of rows of the random operands


@dataclasses.dataclass(frozen=True)
class KernelCheck:
    """A kernel call to compare with the plain-JAX implementation.

    Attributes:
        kernel: name of the kernel, such as 'cudnn'.
        call: description of the call for messages: lengths, heads and flags.
        run, formula: the kernel and its plain-JAX implementation, functions of the operands.
        operands: trees of `jax.ShapeDtypeStruct`. Integer arrays are segment ids, [NUM_CHECK_ROWS, length].
    """

    kernel: str
    call: str
    run: Callable[..., jax.Array]
    formula: Callable[..., jax.Array]
    operands: tuple[Any, ...]

    dtype = property(lambda self: str(jax.tree.leaves(self.operands)[0].dtype))
    key = property(lambda self: repr((self.kernel, self.call, self.operands)))
    # Maximum relative error. Devices may round the operands of float32 matmuls to TF32 or bfloat16.
    tolerance = property(lambda self: 1e-2 if self.dtype == 'float32' else 3e-2)


class KernelCheckResult(NamedTuple):
    """Result of a check: the kernel's relative error, or an error message if the kernel did not run."""

    difference: float | None = None
    error: str | None = None

    def failure_reason(self, check: KernelCheck) -> str | None:
        """Returns why the check failed, or None if it passed."""
        # A check fails if the difference is NaN.
        if self.difference is not None and self.difference <= check.tolerance:
            return None
        reason = self.error or f'the relative error must be at most {check.tolerance:g}, got {self.difference:.2g}'
        return f'failed its self-check ({check.dtype}, {check.call}): {reason}'


def get_operand_shapes(tree: Any, rows: int | None = None) -> Any:
    """Returns the shape and dtype of each array in a tree; if `rows` is set, it replaces the size of the first axis."""
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct((rows, *array.shape[1:]) if rows else array.shape, array.dtype), tree
    )


_RECORDED_CHECKS: contextvars.ContextVar[dict[str, KernelCheck] | None] = contextvars.ContextVar('record', default=None)


@contextlib.contextmanager
def record_checks() -> Iterator[dict[str, KernelCheck]]:
    """Records the checks of the kernels that are traced in this context, instead of running them."""
    checks: dict[str, KernelCheck] = {}
    token = _RECORDED_CHECKS.set(checks)
    try:
        yield checks
    finally:
        _RECORDED_CHECKS.reset(token)


_failures: dict[str, str | None] = {}


def failure_reason(check: KernelCheck) -> str | None:
    """Returns why the kernel fails its check on this device, or None if it passes or the check is not run."""
    record = _RECORDED_CHECKS.get()
    if record is not None:
        record[check.key] = check
        return None
    if compile_target.is_cross_compiling():
        return None
    if check.key not in _failures:
        reason = run_kernel_check(check).failure_reason(check) if jax.process_index() == 0 else None
        if jax.process_count() > 1:
            failed = _run_outside_trace(multihost_utils.broadcast_one_to_all, np.array(reason is not None))
            reason = reason or ('failed its self-check in process 0' if failed else None)
        _failures[check.key] = reason
    return _failures[check.key]


@functools.cache
def log_fallback(operation: str, kernel: str, unsupported_reason: str) -> None:
    """Logs, once for each reason, that an operation uses its plain-JAX implementation."""
    logging.getLogger('remixer_t5x').warning(
        '%s falls back to its plain-JAX implementation: %s %s', operation, kernel, unsupported_reason
    )


def run_kernel_check(check: KernelCheck, platform: str | None = None) -> KernelCheckResult:
    """Runs a check on this device, or returns its cached result.

    If `platform` is set, runs the kernel of this platform in Pallas's interpreter, without caching the result.
    """
    path = _get_cache_path(check) if platform is None else None
    if path is None:
        return _run_outside_trace(_compare_kernel_with_formula, check, platform)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may be running the same check.
    with filelock.FileLock(path.with_suffix('.lock')):
        if path.exists():
            return KernelCheckResult(**json.loads(path.read_text()))
        # Write the error message before running the check, because a crash would end this process.
        path.write_text(json.dumps({'error': f'crashed or hung in an earlier check; remove {path} to check again'}))
        result = _run_outside_trace(_compare_kernel_with_formula, check, platform)
        if result.error is None:
            path.write_text(json.dumps(result._asdict()))
        else:
            # Do not cache exceptions, whose cause may be temporary, such as a lack of memory.
            path.unlink()
    return result


def _compare_kernel_with_formula(check: KernelCheck, platform: str | None) -> KernelCheckResult:
    target = compile_target.compile_for_platform(platform, interpret=True) if platform else contextlib.nullcontext()
    try:
        with target:
            return KernelCheckResult(compute_relative_error(check))
    except Exception as error:
        return KernelCheckResult(error=f'{type(error).__name__}: {error}'.splitlines()[0][:300])


def compute_relative_error(check: KernelCheck) -> float:
    """Returns the largest relative error, in the Euclidean norm, of the kernel's output and gradients."""
    operands = _draw_random_operands(check)
    exact = jax.tree.map(lambda array: array.astype(jnp.float32) if _is_float_array(array) else array, operands)
    shape = jax.eval_shape(check.formula, *exact).shape
    direction = np.float32(np.random.default_rng(1).standard_normal(shape))
    actual = _compute_value_and_gradients(check.run, operands, direction)
    with jax.default_matmul_precision('highest'):
        expected = _compute_value_and_gradients(check.formula, exact, direction)
    norm = np.linalg.norm
    errors = [norm(np.float32(a) - e) / (norm(e) + 1e-30) for a, e in zip(actual, expected, strict=True)]
    return float(np.max(errors))


def _compute_value_and_gradients(function: Callable[..., jax.Array], operands: Any, direction: Any) -> list[jax.Array]:
    """Returns the output y of `function`, and the gradients of `y . direction` for all float operands."""

    @jax.jit
    def compute_with_gradients(*operands: Any) -> list[jax.Array]:
        result, pull_back = jax.vjp(function, *operands)
        gradients = jax.tree.leaves(pull_back(direction.astype(result.dtype)))
        return [result, *(gradient for gradient in gradients if gradient.dtype != jax.dtypes.float0)]

    return compute_with_gradients(*operands)


def _draw_random_operands(check: KernelCheck) -> Any:
    """Returns normally distributed arrays, and segment ids of three examples in a full row and in a padded row."""
    rng = np.random.default_rng(0)

    def draw_array(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if _is_float_array(leaf):
            return jnp.asarray(0.5 * rng.standard_normal(leaf.shape), leaf.dtype)
        length = leaf.shape[1]
        index, used = np.arange(length), np.array([[length], [length - length // 4]])
        return jnp.asarray(np.where(index < used, index * 3 // used + 1, 0), leaf.dtype)

    return jax.tree.map(draw_array, check.operands)


def _is_float_array(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def _run_outside_trace(function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function` in another thread, because this thread may be tracing a JAX program."""
    with futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(function, *args).result()


def _get_cache_path(check: KernelCheck) -> pathlib.Path | None:
    """Returns the cache file of a check, or None if JAX's compilation cache is disabled."""
    folder, device = jax.config.jax_compilation_cache_dir, jax.local_devices()[0]
    if not folder:
        return None
    sources = b''.join(source.read_bytes() for source in sorted(pathlib.Path(__file__).parent.rglob('*.py')))
    flags = [os.environ.get(name) for name in ('XLA_FLAGS', 'LIBTPU_INIT_ARGS')]
    versions = (device.device_kind, device.client.platform_version, _list_library_versions(), flags, check.key)
    key = hashlib.sha256(repr(versions).encode() + sources).hexdigest()[:24]
    return pathlib.Path(folder) / CACHE_FOLDER / f'{check.kernel}-{key}.json'


@functools.cache
def _list_library_versions() -> list[tuple[str, str]]:
    """Returns the versions of the installed packages of JAX, libtpu, and NVIDIA's libraries such as cuDNN."""
    packages = ((str(package.name), package.version) for package in importlib.metadata.distributions())
    return sorted(package for package in packages if package[0].startswith(('jax', 'libtpu', 'nvidia')))
