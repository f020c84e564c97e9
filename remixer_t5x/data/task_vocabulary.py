"""The vocabulary of a task: its record in checkpoints, its files in MODEL_DIR, the check of its ids; task labels."""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

from etils import epath

from remixer_t5x.errors import UserError

if TYPE_CHECKING:
    from remixer_t5x.lazy import seqio

# Folder of a MODEL_DIR with the files of its vocabulary. `vocabularies.saved` reads it, so that a trained model works
# without the text that its vocabulary was made from.
FOLDER = 'vocabulary'
INDEX, PIECES, WORDS, TOKENIZER = 'vocabulary.json', 'spiece.model', 'words.txt', 'tokenizer.json'
_BYTE_PAIR_FILES = (
    *('vocab.json', 'merges.txt', TOKENIZER),
    *('tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json'),
)


def of(source: seqio.Task | seqio.Mixture) -> seqio.Vocabulary:
    """The vocabulary of the targets. Raises UserError if inputs use another vocabulary, because the model has one
    table.
    """
    features = source.output_features
    targets = features['targets'].vocabulary
    if 'inputs' in features and features['inputs'].vocabulary != targets:
        raise UserError(
            f'{source.name} has one vocabulary for inputs and another for targets; '
            'the model has one table of embeddings: give both features the same vocabulary'
        )
    return targets


def labels(task: seqio.Task) -> tuple[str, ...] | None:
    """The answers of a task that has a fixed number of them, which its postprocessor knows; None for another task."""
    labels = getattr(task.postprocessor, 'labels', None)
    return tuple(labels) if labels else None


def fingerprint(vocab: seqio.Vocabulary) -> str:
    """16 hex digits that change if ids mean other text."""
    model = getattr(vocab, 'sp_model', None)
    # A vocabulary of words has no model file; its words define what ids mean.
    name = '\n'.join((type(vocab).__name__, *getattr(vocab, 'words', ())))
    text = model if isinstance(model, bytes) else name.encode()
    return hashlib.sha256(text + f'|{vocab.vocab_size}|{vocab.extra_ids}'.encode()).hexdigest()[:16]


def record(vocab: seqio.Vocabulary) -> str:
    """The record of the vocabulary in a checkpoint; a checkpoint with another record does not fit."""
    return f'{fingerprint(vocab)} of {vocab.vocab_size} ids'


def check_ids(name: str, vocab: seqio.Vocabulary, model_vocab_size: int) -> None:
    """Raises UserError if `vocab`, the vocabulary of `name`, has ids that the model's table does not have."""
    size = vocab.vocab_size
    if size > model_vocab_size:
        raise UserError(
            f'the vocabulary of {name} has {size} ids and the model has VOCAB_SIZE = '
            f'{model_vocab_size}; set VOCAB_SIZE to {-(-size // 128) * 128} or use a smaller vocabulary'
        )


def save(vocab: seqio.Vocabulary, folder: epath.PathLike) -> bool:
    """Writes the files of `vocab` into `folder`. Returns False, and writes nothing, for a user's own class."""
    with tempfile.TemporaryDirectory() as temporary:
        local = pathlib.Path(temporary)
        settings = _write_files(vocab, local)
        if settings is None:
            return False
        target = epath.Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for file in sorted(local.iterdir()):
            (target / file.name).write_bytes(file.read_bytes())
        # Written last: a folder without it is incomplete.
        (target / INDEX).write_text(json.dumps(settings) + '\n')
    return True


def _write_files(vocab: Any, folder: pathlib.Path) -> dict[str, Any] | None:
    """Writes the files and returns what `vocabularies.saved` needs besides them."""
    if hasattr(vocab, 'save'):
        vocab.save(str(folder / TOKENIZER))
        return {'kind': 'wordpiece'}
    if hasattr(vocab, 'end_id') and hasattr(vocab, 'folder'):
        for name in _BYTE_PAIR_FILES:
            if (file := pathlib.Path(vocab.folder, name)).is_file():
                shutil.copyfile(file, folder / name)
        return {'kind': 'byte_pairs', 'end_id': int(vocab.end_id)}
    if hasattr(vocab, 'words'):
        (folder / WORDS).write_text('\n'.join(vocab.words), encoding='utf-8')
        return {'kind': 'words'}
    if model := getattr(vocab, 'sentencepiece_model_file', None):
        # The file and not `sp_model`, to which seqio has added its sentinels.
        (folder / PIECES).write_bytes(epath.Path(model).expanduser().read_bytes())
        return {'kind': 'sentencepiece', 'extra_ids': int(vocab.extra_ids)}
    if type(vocab).__name__ == 'ByteVocabulary':
        return {'kind': 'bytes', 'extra_ids': int(vocab.extra_ids)}
    return None


def gin_text(folder: epath.PathLike) -> str:
    """The gin statements that read the vocabulary that `save` wrote in the MODEL_DIR `folder`."""
    return f"""from __gin__ import dynamic_registration
from remixer_tasks import vocabularies
VOCABULARY = @vocabularies.saved()
vocabularies.saved.folder = {str(folder)!r}
"""


def saved(model_dir: epath.PathLike | None) -> list[tuple[str, str]]:
    """The gin flags that read the vocabulary in MODEL_DIR, and no text; none if MODEL_DIR has no vocabulary."""
    if model_dir is None or not (epath.Path(model_dir) / FOLDER / INDEX).is_file():
        return []
    function = 'remixer_tasks.vocabularies.saved'
    return [('VOCABULARY', f'@{function}()'), (f'{function}.folder', repr(str(epath.Path(model_dir) / FOLDER)))]
