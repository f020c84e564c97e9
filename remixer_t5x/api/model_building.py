"""Builds a model from gin files and macros."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from remixer_t5x.config import gin_files, loading, reference_resolver
from remixer_t5x.errors import UserError
from remixer_t5x.models.interface import Model


def build_model(*gin_files: str, **macros: object) -> Model:
    """Builds the model configured by gin files and macros. `model.init` creates the model's parameters.

    For example, `build_model('models/remixer.gin', 'sizes/tiny.gin', VOCAB_SIZE=384)` builds a small Remixer, and
    `build_model('models/t5_1_1.gin', 'sizes/tiny.gin', ENCODER_MIXER=MyMixer, ENCODER_POSITION_BIAS=None)` builds a T5
    with a custom mixer.

    Args:
        *gin_files: shipped or custom gin files. A gin file can run any code. Later files override earlier files.
        **macros: values of macros, which override the values in the gin files. A string that starts with `@` or `%` is
            a gin reference, such as `'@fnet.FNet'`. Any other value, including a class or function, is used directly.

    Replaces gin's global configuration. Loading another configuration later does not change the model.

    Raises:
        UserError: a file does not exist, a name is unknown, a value is invalid, a macro configures runs instead of
            models, or a model setting, such as one from `sizes/*.gin`, is missing.
    """
    if not gin_files:
        raise UserError(
            "gin_files must not be empty; use, for example, build_model('models/t5_1_1.gin', 'sizes/tiny.gin')"
        )
    try:
        return _build_model(gin_files, macros)
    except UserError as error:
        # Remove command-line flags from the message.
        raise UserError(str(error).replace(loading.FLAG, '').replace('--gin_file=', '')) from error


def _build_model(gin_files: Sequence[str], macros: Mapping[str, object]) -> Model:
    macros = {name: value.item() if isinstance(value, np.generic) else value for name, value in macros.items()}
    references = {name: value for name, value in macros.items() if isinstance(value, str) and value[:1] in ('@', '%')}
    objects = {name: value for name, value in macros.items() if name not in references}
    sources = loading.ConfigSources([str(file) for file in gin_files], list(references.items()), objects=objects)
    (model,) = loading.load_macro_values(sources, 'MODEL', only_roots=True)
    # With `only_roots=True`, the loaded configuration contains only macros that MODEL reads.
    _check_macros_are_for_models(
        name for name in macros if reference_resolver.get_unevaluated_macro(name) is reference_resolver.UNDEFINED
    )
    if not isinstance(model, Model):
        return model
    try:
        flags = [*sources.flags, *((name, _format_gin_value(value)) for name, value in objects.items())]
    except ValueError:
        # The model has no gin text if one of the values, such as a lambda, cannot be written in gin.
        return dataclasses.replace(model, config='')
    loading.load_gin_config(dataclasses.replace(sources, flags=flags, objects={}), '%MODEL', only_roots=True)
    return dataclasses.replace(model, config=loading.get_config_text())


def _check_macros_are_for_models(unread: Iterable[str]) -> None:
    """Raises UserError if an unread macro is a setting of runs. A macro that another model reads is allowed."""
    for name in unread:
        files = gin_files.find_files_with_macro(name)
        if files and all(file.startswith('runs/') for file in files):
            lora = ', and train adapters as in docs/guide/python.md' if 'LORA' in name else ''
            raise UserError(f'{name} is a setting of {files[0]}, which build_model does not read; omit it{lora}')


def _format_gin_value(value: Any) -> str:
    """Formats `value` as gin text. Raises ValueError if gin text cannot express `value`."""
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    if isinstance(value, tuple | list):
        items = ''.join(f'{_format_gin_value(item)}, ' for item in value)
        return f'({items})' if isinstance(value, tuple) else f'[{items}]'
    module, name = getattr(value, '__module__', '__main__'), getattr(value, '__name__', '')
    if module == '__main__' or not name or getattr(value, '__qualname__', '') != name:
        raise ValueError(name)
    return f'@{module}.{name}'
