"""Downloads the files of a model on the Hub that we read: configuration, safetensors and tokenizer; never a pickle.

They stay in Hugging Face's cache (HF_HOME), which is all that is read where HF_HUB_OFFLINE is set or the Hub does not
answer.
"""

import pathlib
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
_PULL_REQUESTS = 'refs/pr/'
# In the cache, the folder of NAME/MODEL is models--NAME--MODEL.
_KEPT = 'models--'


def folder_of(given: str, say: Callable[[str, str], None] = lambda what, text: None) -> pathlib.Path:
    """The folder `given`, or the folder in the cache of the model on the Hub that it names.

    Args:
        given: a folder, or `NAME`, `NAME@REVISION` or `hf://NAME` of the Hub. A folder that exists comes first.
        say: called with what is downloaded, as ('hub', ...).

    Raises:
        UserError: neither a folder nor a model that can be downloaded, or a model without safetensors.
    """
    folder = pathlib.Path(given).expanduser()
    if folder.is_dir():
        return folder
    parsed = client.parse(given)
    if parsed is None or folder.exists():
        raise UserError(f'{given} is not a folder; give a folder, or the name of a model on the Hub, as in NAME/MODEL')
    name, revision = parsed
    hub = client.library(f'{given} is not a folder, and a model of the Hub')
    with client.user_errors(name, 'downloaded'):
        found = _snapshot(hub, name, revision)
        if not _has_weights(found) and revision is None:
            revision = _converted(hub, name, found)
            found = found if revision is None else _snapshot(hub, name, revision)
    if not _has_weights(found):
        raise UserError(_without_weights(name))
    say('hub', f'{name}{f", {revision}" if revision else ""}, revision {found.name}')
    return found


def origin(folder: str) -> str:
    """The name and commit of a model whose folder is in Hugging Face's cache; otherwise the folder's own name."""
    path = pathlib.PurePath(folder)
    kept = path.parts[-3] if len(path.parts) > 2 and path.parts[-2] == 'snapshots' else ''
    if not kept.startswith(_KEPT):
        return path.name
    return f'{kept.removeprefix(_KEPT).replace("--", "/")} of the Hugging Face Hub, commit {path.name}'


def _snapshot(hub: Any, name: str, revision: str | None) -> pathlib.Path:
    return pathlib.Path(hub.snapshot_download(name, revision=revision, allow_patterns=[*WEIGHTS, *_OTHERS]))


def _has_weights(folder: pathlib.Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in WEIGHTS)


def _converted(hub: Any, name: str, main: pathlib.Path) -> str | None:
    """The pull request by which the Hub's own account adds safetensors, if there is one: refs/pr/N."""
    try:
        for one in hub.HfApi().get_repo_discussions(name, author=CONVERTER, discussion_type='pull_request'):
            if one.author == CONVERTER and one.is_pull_request and one.status in ('open', 'draft'):
                return f'{_PULL_REQUESTS}{one.num}'
        return None
    except Exception as error:
        if not client.is_of_the_hub(error):
            raise
        # The cache does not say who made a pull request.
        raise UserError(
            f'{name} has no safetensors in main, and the Hub does not list the pull requests that may have them '
            f'({reason(error)}); name one that you trust, as in {name}@{_PULL_REQUESTS}1'
        ) from error


def _without_weights(name: str) -> str:
    return (
        f'{name} has no safetensors on the Hub, in main or by {CONVERTER}; a pickle can run code when it is read: if '
        f'you trust it, python -c "import transformers as t; t.AutoModelForSeq2SeqLM.from_pretrained({name!r})'
        ".save_pretrained('DIR')\" writes a folder with safetensors"
    )
