"""The vocabulary of an exported model, for programs that have only SentencePiece, or only Python."""

import pathlib
from collections.abc import Mapping
from typing import Any

MODEL = 'vocabulary.model'
SENTENCEPIECE, BYTES, IDS = 'sentencepiece', 'bytes', 'ids'


def kind(vocabulary: Any) -> str:
    """SENTENCEPIECE, BYTES, or IDS for a vocabulary that is not written: its programs take and give ids."""
    if isinstance(getattr(vocabulary, 'sp_model', None), bytes):
        return SENTENCEPIECE
    return BYTES if type(vocabulary).__name__ == 'ByteVocabulary' else IDS


def write(vocabulary: Any, folder: pathlib.Path, ends_inputs: bool) -> Mapping[str, Any]:
    """Writes what the vocabulary needs into `folder`; returns its description for the list of contents."""
    found = kind(vocabulary)
    if found == SENTENCEPIECE:
        # With the sentinels as pieces, as this package reads it.
        (folder / MODEL).write_bytes(vocabulary.sp_model)
    eos_id = None if vocabulary.eos_id is None else int(vocabulary.eos_id)
    return {'kind': found, 'ids': int(vocabulary.vocab_size), 'eos_id': eos_id, 'ends_inputs': ends_inputs}
