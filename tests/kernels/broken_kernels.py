"""Broken attention kernels for tests of the self-check."""

import os
import signal

import jax

from remixer_t5x.kernels import self_check
from remixer_t5x.kernels.attention_formula import Visibility, dot_product_attention


class Kernel:
    """An attention kernel that calls a function, with the interface of the modules in `attention.KERNELS`."""

    def __init__(self, attend):
        self.attend = attend

    @staticmethod
    def unsupported_reason(*_):
        return None


def correct(query, key, value, visibility, bias):
    return dot_product_attention(query, key, value, visibility.build_mask(), bias)


@jax.custom_vjp
def _doubled(x):
    return x


_doubled.defvjp(lambda x: (x, None), lambda _, gradient: (2 * gradient,))


def wrong_gradient(query, key, value, visibility, bias):
    return correct(query, _doubled(key), value, visibility, bias)


def not_a_number(query, key, value, visibility, bias):
    return correct(query, key, value, visibility, bias) * float('nan')


def raises(*_):
    raise ValueError('Mosaic failed to compile')


def kills_its_process(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def check(attend):
    shape = jax.ShapeDtypeStruct((2, 8, 1, 4), 'float32')
    visibility = Visibility(None, jax.ShapeDtypeStruct((2, 8), 'int32'))
    return self_check.KernelCheck('test', '8 tokens', attend, correct, (shape, shape, shape, visibility, None))
