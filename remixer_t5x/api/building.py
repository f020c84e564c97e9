"""Builds a model from gin files and macros, without a run."""

import dataclasses
from typing import Any

from remixer_t5x.config import loading
from remixer_t5x.errors import UserError
from remixer_t5x.models.interface import Model


def build_model(*gin_files: str, **macros: object) -> Model:
    """Builds the model that gin files and macros describe; `model.init` makes its parameters.

    `build_model('models/remixer.gin', 'sizes/tiny.gin', VOCAB_SIZE=384)`; your own mixer needs no gin file:
    `build_model('models/t5_1_1.gin', 'sizes/tiny.gin', ENCODER_MIXER=MyMixer, ENCODER_POSITION_BIAS=None)`.

    Args:
        *gin_files: shipped files or your own files, which gin runs as programs; a later file overrides an earlier file.
        **macros: override the files. A string that begins with `@` or `%` is a gin reference (`'@fnet.FNet'`, of a
            module that a file imports); every other value, a class or function too, is used as it is.

    The result is a plain value: configurations that are loaded later do not change it. gin's own configuration is
    replaced.

    Raises:
        UserError: a file, a name or a value is wrong, or MODEL lacks something, such as `sizes/*.gin`.
    """
    if not gin_files:
        raise UserError("build_model takes gin files: type build_model('models/t5_1_1.gin', 'sizes/tiny.gin')")
    references = {name: value for name, value in macros.items() if isinstance(value, str) and value[:1] in ('@', '%')}
    objects = {name: value for name, value in macros.items() if name not in references}
    given = loading.ConfigSources([str(file) for file in gin_files], list(references.items()), objects=objects)
    (model,) = loading.values(given, 'MODEL', only=True)
    if not isinstance(model, Model):
        return model
    return dataclasses.replace(model, config=_config_text(given))


def _config_text(given: loading.ConfigSources) -> str:
    """Returns the gin text of MODEL; empty if a value has no importable name."""
    try:
        values = {name: _gin_text(value) for name, value in given.objects.items()}
    except ValueError:
        return ''
    loading.load(dataclasses.replace(given, flags=[*given.flags, *values.items()], objects={}), '%MODEL', only=True)
    return loading.config_text()


def _gin_text(value: Any) -> str:
    """Returns `value` as gin text. Raises ValueError for what gin cannot name."""
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    if isinstance(value, tuple | list):
        items = ''.join(f'{_gin_text(item)}, ' for item in value)
        return f'({items})' if isinstance(value, tuple) else f'[{items}]'
    module, name = getattr(value, '__module__', '__main__'), getattr(value, '__name__', '')
    if module == '__main__' or not name or getattr(value, '__qualname__', '') != name:
        raise ValueError(name)
    return f'@{module}.{name}'
