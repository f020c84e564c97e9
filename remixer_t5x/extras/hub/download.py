"""Downloads the files of a model on the Hub that we read: configuration, safetensors and tokenizer; never a pickle.

They stay in Hugging Face's cache (HF_HOME), which is all that is read if HF_HUB_OFFLINE is set or the Hub does not
answer.
"""

import pathlib
import re
from collections.abc import Callable
from typing import Any

from remixer_t5x.errors import UserError, reason
from remixer_t5x.extras.hub import client

WEIGHTS = ('model.safetensors', 'model.safetensors.index.json', 'model-*.safetensors')
_OTHERS = (
    *('config.json', 'generation_config.json', 'tokenizer_config.json', 'tokenizer.json', 'special_tokens_map.json'),
    *('spiece.model', 'vocab.txt', 'vocab.json', 'merges.txt', 'model.gin', 'vocabulary/*', 'code/*.py'),
)
# The account by which the Hub itself converts weights that are only pickles. Anybody may open a pull request.
CONVERTER = 'SFconvertbot'


def folder_of(path: str, say: Callable[[str, str], None] = lambda label, text: None) -> pathlib.Path:
    """The folder `path`, or the folder in the cache of the model on the Hub that it names.

    Args:
        path: a folder, or `NAME`, `NAME@REVISION` or `hf://NAME` of the Hub. A folder that exists comes first.
        say: called with what is downloaded, as ('hub', ...).

    Raises:
        UserError: neither a folder nor a model that can be downloaded, or a model without safetensors.
    """
    folder = pathlib.Path(path).expanduser()
    if folder.is_dir():
        return folder
    parsed = client.parse_name(path)
    if parsed is None or folder.exists():
        raise UserError(f'{path} is not a folder; give a folder, or the name of a model on the Hub, as in NAME/MODEL')
    name, revision = parsed
    hub = client.library(f'{path} is not a folder, and a model of the Hub')
    with client.user_errors(name, 'downloaded'):
        snapshot = _download(hub, name, revision)
        if not _has_weights(snapshot) and revision is None and (revision := _converted_revision(hub, name)):
            snapshot = _download(hub, name, revision)
    if not _has_weights(snapshot):
        raise UserError(
            f'{name} has no safetensors on the Hub, in main or by {CONVERTER}; a pickle can run code when it is read: '
            'if you trust it, python -c "import transformers as t; '
            f"t.AutoModelForSeq2SeqLM.from_pretrained({name!r}).save_pretrained('DIR')\" writes a folder with "
            'safetensors'
        )
    say('hub', f'{name}{f", {revision}" if revision else ""}, revision {snapshot.name}')
    return snapshot


def origin(folder: str) -> str:
    """The name and commit of a model whose folder is in Hugging Face's cache; otherwise the folder's own name."""
    match = re.search(r'/models--([^/]+)/snapshots/([^/]+)/?$', folder)
    return (
        f'{match[1].replace("--", "/")} of the Hugging Face Hub, commit {match[2]}'
        if match
        else pathlib.PurePath(folder).name
    )


def _download(hub: Any, name: str, revision: str | None) -> pathlib.Path:
    return pathlib.Path(hub.snapshot_download(name, revision=revision, allow_patterns=[*WEIGHTS, *_OTHERS]))


def _has_weights(folder: pathlib.Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in WEIGHTS)


def _converted_revision(hub: Any, name: str) -> str | None:
    """The pull request by which the Hub's own account adds safetensors, if there is one: refs/pr/N."""
    try:
        requests = hub.HfApi().get_repo_discussions(name, author=CONVERTER, discussion_type='pull_request')
        for request in requests:
            if request.author == CONVERTER and request.is_pull_request and request.status in ('open', 'draft'):
                return f'refs/pr/{request.num}'
        return None
    except Exception as error:
        if not client.is_hub_error(error):
            raise
        # The cache does not say who opened a pull request.
        raise UserError(
            f'{name} has no safetensors in main, and the Hub does not list the pull requests that may have them '
            f'({reason(error)}); name one that you trust, as in {name}@refs/pr/1'
        ) from error
