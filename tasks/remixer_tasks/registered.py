"""Adds every name of `names` to seqio's registry, for T5X and for custom mixtures. Importing it opens no file.

Registered names are not replaced. Import `t5.data.mixtures` before this module, because t5 refuses names that are
registered. The commands of remixer-t5x know the names without this module.
"""

from __future__ import annotations

from remixer_t5x.lazy import seqio
from remixer_tasks import names

for _name in names.MAKERS:
    if _name not in seqio.TaskRegistry.names() and _name not in seqio.MixtureRegistry.names():
        _provider = names.find(_name)
        _registry = seqio.MixtureRegistry if isinstance(_provider, seqio.Mixture) else seqio.TaskRegistry
        _registry.add_provider(_name, _provider)
