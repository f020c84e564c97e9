"""Registers all tasks and mixtures of `remixer_tasks.names` with seqio, for T5X and custom mixtures.

Names that are already registered with seqio are skipped. Import `t5.data.mixtures` before this module, because t5
raises an error for names that already exist.
"""

from __future__ import annotations

from remixer_t5x.lazy_imports import seqio
from remixer_tasks import names

for _name in names.BUILDERS:
    if _name not in seqio.TaskRegistry.names() and _name not in seqio.MixtureRegistry.names():
        _provider = names.find_task(_name)
        _registry = seqio.MixtureRegistry if isinstance(_provider, seqio.Mixture) else seqio.TaskRegistry
        _registry.add_provider(_name, _provider)
