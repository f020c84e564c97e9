"""A folder with any model of ours, as it is shared: what it needs, and nothing of the place where it was made.

    model.safetensors   the parameters, as --to_safetensors writes them
    model.gin           MODEL and TASK_FEATURE_LENGTHS: the statements of the run's configuration that they read
    config.json         model_type 'remixer_t5x', the frame, and the kind of vocabulary
    spiece.model, tokenizer.json, vocab.json, ...   the vocabulary

model.gin is a program, as every gin file. The vocabulary is not named in it: its place changes with the folder's.
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from flax import traverse_util

from remixer_t5x import safe_paths, untrusted_files
from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface import config as hf_config
from remixer_t5x.interop.huggingface import gpt2
from remixer_t5x.interop.huggingface import tokenizer as hf_tokenizer
from remixer_t5x.interop.safetensors import export
from remixer_t5x.interop.safetensors import files as safetensors_files

MODEL_TYPE = 'remixer_t5x'
CONFIG, GIN, TOKENIZER = 'config.json', 'model.gin', 'tokenizer.json'
PIECES, WORDPIECE, BYTE_PAIRS = 'pieces', 'wordpiece', 'byte_pairs'
_ADVICE = 'download it again'


@dataclasses.dataclass(frozen=True)
class Shared:
    """A folder that `write` wrote. Nothing but config.json has been read.

    Attributes:
        folder: its path.
        vocabulary: PIECES (SentencePiece or bytes), WORDPIECE or BYTE_PAIRS.
        end_id: GPT-2's id of <|endoftext|>, for BYTE_PAIRS.
    """

    folder: pathlib.Path
    vocabulary: str
    end_id: int

    def params(self) -> tuple[Any, int, dict[str, Any]]:
        """The parameters (numpy float32), the step and the record of the checkpoint."""
        return export.read(str(self.folder / safetensors_files.WHOLE))

    def gin_text(self, tokenizer_folder: str | None = None) -> str:
        """model.gin and the vocabulary in `tokenizer_folder`, by default this folder, as one gin text."""
        text = untrusted_files.read_text(self.folder / GIN, _ADVICE)
        return f'{text}\n{self._vocabulary_gin(tokenizer_folder or str(self.folder))}'

    def tokenizer_files(self) -> list[pathlib.Path]:
        """The files of the vocabulary."""
        if self.vocabulary == BYTE_PAIRS:
            return gpt2.tokenizer_files(self.folder)
        names = [TOKENIZER] if self.vocabulary == WORDPIECE else [hf_tokenizer.MODEL, hf_tokenizer.CONFIG]
        return [self.folder / name for name in names if (self.folder / name).is_file()]

    def _vocabulary_gin(self, place: str) -> str:
        lines = ['from __gin__ import dynamic_registration', 'from remixer_tasks import vocabularies']
        if self.vocabulary == WORDPIECE:
            path = f'{place}/{TOKENIZER}'
            lines += ['VOCABULARY = @vocabularies.wordpiece()', f'vocabularies.wordpiece.path = {path!r}']
        elif self.vocabulary == BYTE_PAIRS:
            lines += ['VOCABULARY = @vocabularies.byte_pairs()', f'vocabularies.byte_pairs.folder = {place!r}']
            lines += [f'vocabularies.byte_pairs.end_id = {self.end_id}']
        else:
            found = hf_tokenizer.read(self.folder)
            if found.path is None:
                lines += ['VOCABULARY = @vocabularies.byte()', f'vocabularies.byte.extra_ids = {found.extra_ids}']
            else:
                path = f'{place}/{hf_tokenizer.MODEL}'
                lines += ['VOCABULARY = @vocabularies.sentencepiece()', f'vocabularies.sentencepiece.path = {path!r}']
                lines += [f'vocabularies.sentencepiece.extra_ids = {found.extra_ids}']
        return '\n'.join(lines) + '\n'


def shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of arrays by name, as `model_changes.describe` takes them."""
    return {f'params/{name}': leaf.shape for name, leaf in traverse_util.flatten_dict(params, sep='/').items()}


def is_shared(folder: pathlib.Path) -> bool:
    """Whether config.json in `folder` says that `write` wrote it."""
    path = folder / CONFIG
    return path.is_file() and untrusted_files.read_object(path, _ADVICE).get('model_type') == MODEL_TYPE


def read(folder: pathlib.Path) -> Shared:
    """Opens a folder that `write` wrote. Raises UserError for another folder, or one that lacks a file."""
    safe_paths.check_inside(folder)
    config = untrusted_files.read_object(folder / CONFIG, _ADVICE)
    kind = config.get('vocabulary')
    if config.get('model_type') != MODEL_TYPE or kind not in (PIECES, WORDPIECE, BYTE_PAIRS):
        shown = hf_config.shown(kind)
        raise UserError(f'{folder / CONFIG} says vocabulary {shown}; allowed are {PIECES}, {WORDPIECE}, {BYTE_PAIRS}')
    for name in (GIN, safetensors_files.WHOLE):
        if not (folder / name).is_file():
            raise UserError(f'{folder} has no {name}; {_ADVICE}')
    end_id = hf_config.number(config, 'end_id', str(folder / CONFIG), 1) if kind == BYTE_PAIRS else 0
    return Shared(folder, kind, end_id)


def write(
    folder: pathlib.Path, model: Any, vocabulary: Any, gin_text: str, params: Any, step: int, record: Mapping[str, Any]
) -> None:
    """Writes everything but the model card into the new or empty `folder`.

    Args:
        folder: exists.
        model: the model, for its frame and its number of ids.
        vocabulary: a seqio vocabulary of one of the kinds above.
        gin_text: MODEL and TASK_FEATURE_LENGTHS.
        params: our parameters.
        step: of the checkpoint.
        record: of the checkpoint; its configuration is replaced by `gin_text`.

    Raises:
        UserError: a vocabulary of another kind, or a disk that is full.
    """
    kind, more = _write_vocabulary(vocabulary, folder)
    (folder / GIN).write_text(gin_text, encoding='utf-8')
    config = {'model_type': MODEL_TYPE, 'frame': model.frame, 'vocab_size': model.vocab_size, 'vocabulary': kind}
    (folder / CONFIG).write_text(json.dumps({**config, **more}, indent=2) + '\n', encoding='utf-8')
    export.write(str(folder / safetensors_files.WHOLE), params, step, {**record, 'config': gin_text})


def _write_vocabulary(vocabulary: Any, folder: pathlib.Path) -> tuple[str, dict[str, Any]]:
    """Writes the vocabulary's files. Returns its kind, and what else config.json says of it."""
    save: Callable[[str], None] | None = getattr(vocabulary, 'save', None)
    if save is not None:
        save(str(folder / TOKENIZER))
        return WORDPIECE, {}
    if hasattr(vocabulary, 'end_id') and hasattr(vocabulary, 'folder'):
        for file in gpt2.tokenizer_files(pathlib.Path(vocabulary.folder)):
            shutil.copyfile(file, folder / file.name)
        return BYTE_PAIRS, {'end_id': vocabulary.end_id}
    if hf_tokenizer.write(vocabulary, folder).startswith('no tokenizer'):
        kind = type(vocabulary).__name__
        raise UserError(
            f'VOCABULARY is a {kind}; a folder to share takes SentencePiece, bytes, WordPiece or byte pairs'
        )
    return PIECES, {}
