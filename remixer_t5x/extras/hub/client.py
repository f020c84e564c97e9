"""The Hugging Face Hub by the library huggingface_hub: names, errors as one line each, and uploads."""

import contextlib
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from remixer_t5x.errors import UserError, reason
from remixer_t5x.interop import shared_folder

# Namespace and name, as in google/flan-t5-small; old models such as gpt2 have no namespace. Then a branch, tag, commit
# or refs/pr/N.
_NAME = re.compile(r'(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>[\w./-]+))?')
# huggingface_hub 1 and 2, and their HTTP clients.
_MODULES = {'huggingface_hub', 'httpx', 'httpx2', 'requests'}


def parse_name(text: str) -> tuple[str, str | None] | None:
    """(name, revision) of `NAME` or `NAME@REVISION`; None if `text` cannot be the name of a model on the Hub."""
    match = _NAME.fullmatch(text.removeprefix(shared_folder.HUB_SCHEME))
    return (match['name'], match['revision']) if match else None


def library(user: str) -> Any:
    """Imports huggingface_hub. Raises UserError, which says that `user` needs it, if it is not installed."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError(
            f'{user} needs huggingface_hub, which cannot be imported ({reason(error)}); '
            "type pip install 'remixer-t5x[hub]'"
        ) from error
    return huggingface_hub


@contextlib.contextmanager
def user_errors(name: str, action: str) -> Iterator[None]:
    """Turns the library's errors about the model `name` into a UserError; `action` is 'downloaded' or 'uploaded'."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not is_hub_error(error):
            raise
        raise UserError(f'{name} {_explain(error, action)}') from error


def is_hub_error(error: Exception) -> bool:
    """Whether the library, its HTTP client or the disk raised `error`."""
    modules = {kind.__module__.partition('.')[0] for kind in type(error).__mro__}
    return bool(modules & _MODULES) or isinstance(error, OSError)


def _explain(error: Exception, action: str) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return 'is gated; accept its terms on its page of the Hub, then type hf auth login'
    if isinstance(error, errors.RepositoryNotFoundError):
        return 'is not a folder, and the Hub has no such model, or it is private; check the name, or type hf auth login'
    if isinstance(error, errors.RevisionNotFoundError):
        return 'does not have this revision on the Hub; check what follows @, or leave it out'
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        why = 'HF_HUB_OFFLINE is set' if constants.HF_HUB_OFFLINE else 'the Hub does not answer'
        return f'cannot be {action}: {why}, and the cache has no whole copy; connect, or give a folder'
    if getattr(getattr(error, 'response', None), 'status_code', None) in (401, 403):
        return f'cannot be {action}: the Hub does not allow it; type hf auth login, with a token that has the rights'
    return f'cannot be {action}: {reason(error)}'


def check_upload(name: str) -> str:
    """`name` without `hf://`. Raises UserError for an invalid name, or if nobody has logged in."""
    parsed = parse_name(name)
    if parsed is None or parsed[1] is not None:
        raise UserError(f'{name} is not a name of the Hub; type NAME or USER/NAME, of letters, digits, - _ and .')
    if library('--push_to_hub').get_token() is None:
        raise UserError(f'uploading {name} needs a login to the Hub; type hf auth login, or set HF_TOKEN')
    return parsed[0]


def upload(folder: pathlib.Path, name: str, private: bool, message: str) -> str:
    """Creates the model `name` on the Hub if it does not exist, and commits the files of `folder`. Returns its address.

    Raises UserError if the Hub refuses or does not answer.
    """
    api = library('--push_to_hub').HfApi()
    with user_errors(name, 'uploaded'):
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(folder_path=str(folder), repo_id=address.repo_id, commit_message=message)
    return str(address)
