"""Where loops over the rows of a batch pay."""

from __future__ import annotations

import jax


def on_single_cpu() -> bool:
    """Whether everything runs on one CPU device.

    There what one row needs stays in cache, and rows can be copied in place. With several devices the batch may be
    sharded, and a loop over its rows would gather every one; an accelerator is left waiting by small steps.
    """
    return jax.default_backend() == 'cpu' and jax.device_count() == 1
