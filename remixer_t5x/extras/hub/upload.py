"""Uploads a folder as a model on the Hub."""

import pathlib

from remixer_t5x.errors import UserError
from remixer_t5x.extras.hub import client


def check_name(name: str) -> str:
    """`name` without `hf://`. Raises UserError for a name that the Hub does not take."""
    parsed = client.parse(name)
    if parsed is None or parsed[1] is not None:
        raise UserError(f'{name} is not a name of the Hub; type NAME or USER/NAME, of letters, digits, - _ and .')
    return parsed[0]


def check_login(name: str) -> None:
    """Raises UserError where nobody has logged in, before anything is computed for the upload to `name`."""
    if client.library('--push_to_hub').get_token() is None:
        raise UserError(
            f'nobody has logged in to the Hub, so {name} cannot be uploaded; type hf auth login, or set HF_TOKEN'
        )


def push(folder: pathlib.Path, name: str, private: bool, message: str) -> str:
    """Makes the model `name` on the Hub if it does not exist, and commits the files of `folder`. Returns its address.

    Raises UserError if the Hub refuses, does not answer, or nobody has logged in.
    """
    hub = client.library('--push_to_hub')
    api = hub.HfApi()
    with client.user_errors(name, 'uploaded'):
        made = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(folder_path=str(folder), repo_id=made.repo_id, commit_message=message)
    return str(made)
