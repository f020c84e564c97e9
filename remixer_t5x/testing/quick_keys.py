"""Random keys whose numbers take few operations, so that a program that draws many of them compiles in less time.

JAX's own generators take about a hundred operations for each array. Numbers of these keys are good enough to initialise
a model or to drop something, and no better: do not train with them.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl

# 2**32 divided by the golden ratio: its multiples are far from each other.
_STEP = 0x9E3779B9


def quick_key(seed: int) -> jax.Array:
    """A key for `jax.random` and for a module's `init`."""
    return jax.random.key(seed, impl=_QUICK)


@jax.jit
def _mix(x: jax.Array) -> jax.Array:
    """Every bit of the result depends on every bit of `x`, uint32 (MurmurHash3's last step, Appleby 2011)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _numbered(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number for each place of `shape`, uint32."""
    places = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return _mix(places * jnp.uint32(_STEP) + key[0])


def _seed(seed: jax.Array) -> jax.Array:
    return _mix(jnp.asarray(seed).astype(jnp.uint32) + jnp.uint32(_STEP))[None]


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return _numbered(_mix(key + jnp.uint32(1)), shape)[..., None]


@jax.jit
def _fold_in(key: jax.Array, data: jax.Array) -> jax.Array:
    return _mix(key ^ _seed(data))


def _bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    if bit_width > 32:
        raise NotImplementedError(f'quick keys give up to 32 bits for a number, not {bit_width}')
    narrow: Any = jnp.dtype(f'uint{bit_width}')
    return _numbered(key, shape).astype(narrow)


_QUICK = define_prng_impl(
    key_shape=(1,), seed=_seed, split=_split, random_bits=_bits, fold_in=_fold_in, name='quick', tag='qk'
)
