"""Reads added tokens and settings from the JSON files of a Hugging Face tokenizer."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError

TOKENIZER, CONFIG, ADDED_TOKENS = 'tokenizer.json', 'tokenizer_config.json', 'added_tokens.json'
SENTENCEPIECE, BYTES_TOKENIZER = 'spiece.model', 'ByT5Tokenizer'


def read_tokenizer_config(folder: pathlib.Path) -> Mapping[str, Any]:
    """Returns the content of tokenizer_config.json in `folder`, or an empty mapping if the file does not exist.

    Raises UserError if special tokens in a text must be split into pieces, which our vocabularies do not do.
    """
    config = untrusted_files.read_json_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    check_tokenizer_settings(config, {'split_special_tokens': (None, False)}, str(folder / CONFIG))
    return config


def read_added_tokens(folder: pathlib.Path) -> dict[str, int]:
    """Maps each added token to its id. Added tokens are matched before the rest of the text is tokenized."""
    return {name: entry['id'] for name, entry in read_added_token_entries(folder).items()}


def read_added_token_entries(folder: pathlib.Path) -> dict[str, Mapping[str, Any]]:
    """Maps each added token to its entry in the files: `content`, `id`, and flags such as `special`."""
    entries: list[Any] = []
    by_id = read_tokenizer_config(folder).get('added_tokens_decoder')
    for index, entry in (by_id if isinstance(by_id, dict) else {}).items():
        entries.append({**(entry if isinstance(entry, dict) else {}), 'id': int(index) if index.isdecimal() else None})
    if (folder / TOKENIZER).is_file():
        listed = untrusted_files.read_json_object(folder / TOKENIZER).get('added_tokens')
        entries += listed if isinstance(listed, list) else []
    if (folder / ADDED_TOKENS).is_file():
        entries += [
            {'content': name, 'id': index}
            for name, index in untrusted_files.read_json_object(folder / ADDED_TOKENS).items()
        ]
    tokens: dict[str, Mapping[str, Any]] = {}
    for entry in entries:
        name, index = (entry.get('content'), entry.get('id')) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not name or not isinstance(index, int) or isinstance(index, bool):
            raise UserError(
                f'each added token in {folder} must have content and id, got {entry!r:.80}; download the folder again'
            )
        if (other := tokens.setdefault(name, entry)['id']) != index:
            raise UserError(f'the token {name!r:.60} must have one id, got {other} and {index}; correct {folder}')
    return tokens


def check_tokenizer_settings(settings: Any, allowed: Mapping[str, Any], where: str) -> None:
    """Raises UserError if a tokenizer setting does not have an allowed value."""
    settings = settings if isinstance(settings, dict) else {}
    for name, values in allowed.items():
        values = values if isinstance(values, tuple) else (values,)
        if settings.get(name) not in values:
            raise UserError(f'{name} in {where} must be {values[-1]!r}, got {settings.get(name)!r:.60}')
