"""Downloads models from the Hugging Face Hub and uploads models to it, using huggingface_hub.

Downloads the configuration, safetensors and tokenizer of a model, but never pickles. Files are cached in HF_HOME; only
this cache is used if HF_HUB_OFFLINE is set or the Hub does not respond.
"""

import contextlib
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from remixer_t5x.errors import UserError, import_optional, root_cause_message
from remixer_t5x.interop import safetensors_files, shared_folder
from remixer_t5x.interop.huggingface import model_folders

WEIGHTS = ('model.safetensors', 'model.safetensors.index.json', 'model-*.safetensors')
_OTHER_FILES = (
    *('config.json', 'generation_config.json', 'tokenizer_config.json', 'tokenizer.json', 'special_tokens_map.json'),
    *('added_tokens.json', 'spiece.model', 'vocab.txt', 'vocab.json', 'merges.txt'),
    *('model.gin', 'vocabulary/*', 'code/*.py'),
    *('modules.json', 'sentence_bert_config.json', '1_Pooling/config.json'),
    *('2_Dense/config.json', '2_Dense/model.safetensors'),
)
# The Hub's bot that opens pull requests with safetensors for models that have only pickles.
CONVERSION_BOT = 'SFconvertbot'
# Matches NAMESPACE/NAME, or NAME for old models such as gpt2, optionally followed by @ and a branch, tag, commit or
# refs/pr/N.
_HUB_NAME = re.compile(r'(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>[\w./-]+))?')


def resolve_folder(path: str, print_line: Callable[[str, str], None] = lambda label, text: None) -> pathlib.Path:
    """Returns the folder `path`, or downloads the Hub model `path` and returns its folder in the cache.

    Args:
        path: a folder, or a Hub model as `NAME`, `NAME@REVISION` or `hf://NAME`. Existing folders take precedence.
        print_line: callback for progress lines; receives the label 'hub' and a description of the downloaded model.

    Raises:
        UserError: `path` is neither a folder nor a downloadable model, or the model has no safetensors.
    """
    folder = pathlib.Path(path).expanduser()
    if folder.is_dir():
        return folder
    parsed = _parse_hub_name(path)
    if parsed is None or folder.exists():
        raise UserError(f'{path} is not a folder; use a folder, or the name of a model on the Hub, such as USER/NAME')
    name, revision = parsed
    hub = import_optional('huggingface_hub', f'{path} is not a folder, and a model on the Hub', 'hub')

    def download_revision(revision: str | None) -> pathlib.Path:
        return pathlib.Path(hub.snapshot_download(name, revision=revision, allow_patterns=[*WEIGHTS, *_OTHER_FILES]))

    def has_weights(folder: pathlib.Path) -> bool:
        return any(next(folder.glob(pattern), None) for pattern in WEIGHTS)

    with _wrap_hub_errors(name, 'downloaded'):
        snapshot = download_revision(revision)
        if not has_weights(snapshot) and revision is None and (revision := _find_converted_revision(hub, name)):
            snapshot = download_revision(revision)
    if not has_weights(snapshot):
        family, _ = model_folders.read_family(snapshot)
        raise safetensors_files.missing_weights_error(name, family.auto_class)
    print_line('hub', f'{name}{f", {revision}" if revision else ""}, revision {snapshot.name}')
    return snapshot


def format_model_name(folder: str) -> str:
    """Returns NAME@COMMIT for a folder in the Hugging Face cache, and the path of any other folder unchanged."""
    match = re.search(r'/models--([^/]+)/snapshots/([^/]+)/?$', folder)
    return folder if match is None else f'{match[1].replace("--", "/")}@{match[2]}'


def check_upload_name(name: str) -> str:
    """Removes `hf://` from a Hub name. Raises UserError if the name is invalid or the user is not logged in."""
    parsed = _parse_hub_name(name)
    if parsed is None or parsed[1] is not None:
        raise UserError(f'{name} is not a valid Hub name; use NAME or USER/NAME with only letters, digits, -, _ and .')
    if import_optional('huggingface_hub', '--push_to_hub', 'hub').get_token() is None:
        raise UserError(f'you must be logged in to the Hub to upload {name}; run hf auth login, or set HF_TOKEN')
    return parsed[0]


def upload_model(folder: pathlib.Path, name: str, private: bool, message: str) -> str:
    """Commits the files of `folder` to the Hub model `name`, and returns its URL.

    Creates the model if it does not exist; unless `private` is true, the Hub's default determines whether it is
    private. Raises UserError if `private` is true but the model is public, or if the Hub returns an error or does not
    respond.
    """
    api = import_optional('huggingface_hub', '--push_to_hub', 'hub').HfApi()
    with _wrap_hub_errors(name, 'uploaded'):
        address = api.create_repo(name, private=private or None, exist_ok=True)
        # `create_repo` does not change an existing model.
        if private and not api.model_info(address.repo_id).private:
            raise UserError(
                f'with --private, {name} must be private, but it exists and is public; make it private on the Hub, or '
                'use another name'
            )
        api.upload_folder(folder_path=str(folder), repo_id=address.repo_id, commit_message=message)
    return str(address)


def _parse_hub_name(text: str) -> tuple[str, str | None] | None:
    """Parses `NAME` or `NAME@REVISION` to (name, revision). Returns None if `text` is not a valid Hub name."""
    match = _HUB_NAME.fullmatch(text.removeprefix(shared_folder.HUB_SCHEME))
    return (match['name'], match['revision']) if match else None


def _find_converted_revision(hub: Any, name: str) -> str | None:
    """Returns refs/pr/N of the pull request in which the Hub's conversion bot adds safetensors, or None."""
    for request in hub.HfApi().get_repo_discussions(name, author=CONVERSION_BOT, discussion_type='pull_request'):
        if request.author == CONVERSION_BOT and request.is_pull_request and request.status in ('open', 'draft'):
            return f'refs/pr/{request.num}'
    return None


@contextlib.contextmanager
def _wrap_hub_errors(name: str, action: str) -> Iterator[None]:
    """Converts errors of huggingface_hub, its HTTP client and the disk to UserError.

    `action` is 'downloaded' or 'uploaded'.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        from huggingface_hub import errors

        if isinstance(error, errors.RepositoryNotFoundError) and not isinstance(error, errors.GatedRepoError):
            text = 'is not a folder, and the Hub has no such model, or it is private; check the name, or log in'
        else:
            advice = 'check the name, the revision and the connection, or run hf auth login'
            text = f'cannot be {action}: {root_cause_message(error)}; {advice}'
        raise UserError(f'{name} {text}') from error
