"""The library huggingface_hub, and its errors as one line each."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from remixer_t5x.errors import UserError, reason
from remixer_t5x.interop import shared_folder

# Namespace and name, as in google/flan-t5-small; old models such as gpt2 have no namespace. Then a branch, tag, commit
# or refs/pr/N.
_NAME = re.compile(r'(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>[\w./-]+))?')
# Of huggingface_hub 1 and 2, and of what it asks the Hub with.
_MODULES = {'huggingface_hub', 'httpx', 'httpx2', 'requests'}


def parse(text: str) -> tuple[str, str | None] | None:
    """(name, revision) of `NAME` or `NAME@REVISION`; None where `text` cannot be the name of a model on the Hub."""
    found = _NAME.fullmatch(text.removeprefix(shared_folder.HUB_SCHEME))
    return (found['name'], found['revision']) if found else None


def library(what: str) -> Any:
    """huggingface_hub. Raises UserError, which says that `what` needs it, where it is not installed."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError(
            f'{what} needs huggingface_hub, which cannot be imported ({reason(error)}); '
            "type pip install 'remixer-t5x[hub]'"
        ) from error
    return huggingface_hub


@contextlib.contextmanager
def user_errors(name: str, what: str) -> Iterator[None]:
    """Turns the library's errors about the model `name` into a UserError; `what` was tried, as in 'downloaded'."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not is_of_the_hub(error):
            raise
        raise UserError(f'{name} {_reason(error, what)}') from error


def is_of_the_hub(error: Exception) -> bool:
    """Whether the library or its HTTP client raised `error`, or the disk did."""
    modules = {kind.__module__.partition('.')[0] for kind in type(error).__mro__}
    return bool(modules & _MODULES) or isinstance(error, OSError)


def _reason(error: Exception, what: str) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return 'is gated; accept its terms on its page of the Hub, then type hf auth login'
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            'is not a folder here, and the Hub has no such model, or a private one; check the name, or type '
            'hf auth login'
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return 'does not have this revision on the Hub; check what follows @, or leave it out'
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        why = 'HF_HUB_OFFLINE is set' if constants.HF_HUB_OFFLINE else 'the Hub does not answer'
        return f'cannot be {what}: {why}, and the cache has no whole copy; connect, or give a folder'
    if getattr(getattr(error, 'response', None), 'status_code', None) in (401, 403):
        return f'cannot be {what}: the Hub does not let you; type hf auth login, with a token that may'
    return f'cannot be {what}: {reason(error)}'
