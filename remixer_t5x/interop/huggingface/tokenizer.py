"""The files of Hugging Face's tokenizers for T5 (a SentencePiece model) and ByT5 (bytes), and our vocabularies."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from etils import epath

from remixer_t5x import safe_paths, untrusted_files
from remixer_t5x.errors import UserError

MODEL = 'spiece.model'
CONFIG = 'tokenizer_config.json'
BYTES_TOKENIZER = 'ByT5Tokenizer'
# Reading adds each as a piece of the vocabulary.
MAX_SENTINELS = 10_000
# The number that T5Tokenizer and ByT5Tokenizer add by default.
DEFAULT_SENTINELS = {'T5Tokenizer': 100, BYTES_TOKENIZER: 125}


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A vocabulary: the SentencePiece model at `path`, or bytes if it is None, and `extra_ids` sentinels."""

    path: str | None
    extra_ids: int


def read(folder: pathlib.Path, vocabulary: str | None = None) -> Tokenizer:
    """The vocabulary of the tokenizer in `folder`.

    Args:
        folder: a folder of Hugging Face's.
        vocabulary: a SentencePiece model to use instead of the folder's.

    Raises:
        UserError: the folder has no vocabulary that we can read, and `vocabulary` is None.
    """
    safe_paths.check_inside(folder)
    config = _config(folder)
    if config.get('tokenizer_class') == BYTES_TOKENIZER and vocabulary is None:
        return Tokenizer(None, _sentinels(config, BYTES_TOKENIZER, folder))
    path = vocabulary or (str(folder / MODEL) if (folder / MODEL).is_file() else None)
    if path is None:
        raise UserError(
            f'{folder} has no {MODEL}, and ids mean nothing without it; give --vocabulary=/path/to/{MODEL} '
            '(T5, T5 v1.1 and FLAN-T5 share one: gs://t5-data/vocabs/cc_all.32000/sentencepiece.model)'
        )
    return Tokenizer(path, _sentinels(config, 'T5Tokenizer', folder))


def write(vocabulary: Any, folder: pathlib.Path) -> str:
    """Writes the files of a tokenizer that gives `vocabulary`'s ids. Returns one line that says what it wrote.

    vocabulary: a seqio vocabulary. Nothing is written if it is neither SentencePiece nor bytes.
    """
    sentinels = vocabulary.extra_ids
    special = {'eos_token': '</s>', 'unk_token': '<unk>', 'pad_token': '<pad>', 'extra_ids': sentinels}
    special['additional_special_tokens'] = [f'<extra_id_{i}>' for i in range(sentinels)]
    model = getattr(vocabulary, 'sentencepiece_model_file', None)
    if model:
        # Copy the file, because in memory seqio has added its sentinels to the pieces.
        (folder / MODEL).write_bytes(epath.Path(model).expanduser().read_bytes())
        _write(folder, {'tokenizer_class': 'T5Tokenizer', **special})
        return f'{MODEL} and {CONFIG} ({vocabulary.vocab_size:,} ids, {sentinels} of them sentinels)'
    if type(vocabulary).__name__ == 'ByteVocabulary':
        _write(folder, {'tokenizer_class': BYTES_TOKENIZER, **special})
        return f'{CONFIG} (bytes, {sentinels} sentinels)'
    return f'no tokenizer: Hugging Face has none for {type(vocabulary).__name__}'


def _config(folder: pathlib.Path) -> Mapping[str, Any]:
    path = folder / CONFIG
    return untrusted_files.read_object(path) if path.is_file() else {}


def _write(folder: pathlib.Path, config: Mapping[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + '\n', encoding='utf-8')


def _sentinels(config: Mapping[str, Any], kind: str, folder: pathlib.Path) -> int:
    said = config.get('extra_ids')
    if said is not None:
        if isinstance(said, bool) or not isinstance(said, int) or not 0 <= said <= MAX_SENTINELS:
            raise UserError(
                f'{folder / CONFIG} says extra_ids {said!a:.60}; it takes a number from 0 to {MAX_SENTINELS}'
            )
        return said
    named = set(re.findall(r'<extra_id_\d+>', json.dumps(config)))
    return len(named) or DEFAULT_SENTINELS[kind]
