"""A model from gin files and macros, without a run around it."""

from remixer_t5x.config import loading
from remixer_t5x.errors import UserError
from remixer_t5x.models.interface import Model


def build_model(*gin_files: str, **macros: object) -> Model:
    """The model that gin files and macros describe; it has no parameters yet (`model.init` makes them).

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
    given = loading.Given([str(file) for file in gin_files], list(references.items()), objects=objects)
    (model,) = loading.values(given, 'MODEL')
    return model
