"""`remixer-t5x convert` where the files say which model it is; gin builds the arguments (configs/runs/convert.gin).

The directions that need a model of the user's gin files are in `convert_model`.
"""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

from etils import epath

from remixer_t5x.checkpoints import saved_params
from remixer_t5x.cli.conversion import Request
from remixer_t5x.cli.convert_checks import Teller, check_equal, check_same, compare_with_hugging_face, size
from remixer_t5x.cli.convert_model import abstract_params
from remixer_t5x.config import loading
from remixer_t5x.data import pipeline
from remixer_t5x.errors import UserError
from remixer_t5x.interop import converted
from remixer_t5x.interop.huggingface import folders as huggingface
from remixer_t5x.interop.huggingface import gin_file as hf_gin
from remixer_t5x.interop.huggingface import tokenizer as hf_tokenizer
from remixer_t5x.interop.safetensors import export as safetensors_export
from remixer_t5x.run_folder import model_dir

# In MODEL_DIR, beside the checkpoint.
MODEL_GIN = 'model.gin'


def run(
    request: Request, sentencepiece: Callable[..., Any], byte: Callable[..., Any], vocabulary_path: str | None = None
) -> None:
    """Converts, compares what was written with what was read, and says both.

    Args:
        request: from where and to where.
        sentencepiece: makes the vocabulary of a SentencePiece model, from `path` and `extra_ids`.
        byte: makes the vocabulary of bytes, from `extra_ids`.
        vocabulary_path: a SentencePiece model to take instead of that of a Hugging Face folder.
    """
    if vocabulary_path is not None and request.read != 'from_hf':
        raise UserError(f'--vocabulary is for --from_hf; what --{request.read} gives names its own: leave it out')
    if request.read == 'from_hf':
        _from_hugging_face(request, sentencepiece, byte, vocabulary_path)
    elif request.read == 'from_safetensors':
        _from_safetensors(request)
    else:
        _to_safetensors(request)


def _from_hugging_face(request: Request, sentencepiece: Any, byte: Any, vocabulary_path: str | None) -> None:
    teller = Teller()
    source = huggingface.read(request.source)
    tokenizer = hf_tokenizer.read(source.folder, vocabulary_path)
    vocabulary = _vocabulary_of(tokenizer, source, sentencepiece, byte)
    folder = converted.claim(request.target)
    teller.say('reading', f'{source.folder}')
    params = source.params()
    if tokenizer.path is not None:
        tokenizer = _beside(tokenizer, folder)
    text = hf_gin.model_gin(source.t5, tokenizer, f'Converted from the Hugging Face folder {source.folder.resolve()}.')
    (folder / MODEL_GIN).write_text(text)
    record = converted.record(pipeline.vocabulary_record(vocabulary), text, str(source.folder.resolve()))
    written = converted.write(folder, params, 0, record)
    teller.say('read', size(params))
    teller.say('checkpoint', str(written))
    teller.say('model', f'{folder / MODEL_GIN}')
    del params
    _check_against_source(teller, source, folder, vocabulary)


def _vocabulary_of(tokenizer: hf_tokenizer.Tokenizer, source: huggingface.Source, sentencepiece: Any, byte: Any) -> Any:
    """The vocabulary of `tokenizer`. Raises UserError where it cannot be that of the model in `source`."""
    if tokenizer.path is None:
        vocabulary, name = byte(extra_ids=tokenizer.extra_ids), 'the vocabulary of bytes'
    else:
        vocabulary, name = sentencepiece(path=tokenizer.path, extra_ids=tokenizer.extra_ids), tokenizer.path
    huggingface.check_vocabulary(source, vocabulary, name)
    return vocabulary


def _beside(tokenizer: hf_tokenizer.Tokenizer, folder: epath.Path) -> hf_tokenizer.Tokenizer:
    """The same, with its model copied into `folder`, so that the Hugging Face folder may go."""
    assert tokenizer.path is not None
    copy = folder / hf_tokenizer.MODEL
    with epath.Path(tokenizer.path).expanduser().open('rb') as source, copy.open('wb') as target:
        shutil.copyfileobj(source, target)
    return hf_tokenizer.Tokenizer(str(copy), tokenizer.extra_ids)


def _check_against_source(teller: Teller, source: huggingface.Source, folder: epath.Path, vocabulary: Any) -> None:
    """The written gin file and checkpoint, read as a user's command reads them, against the Hugging Face folder."""
    model = loading.build_model(str(folder / MODEL_GIN))
    params = saved_params.restore_params(str(folder), abstract_params(model), pipeline.vocabulary_record(vocabulary))
    check_same(huggingface.first_difference(source, params), folder)
    teller.say('check', 'every weight, read back, is what was read')
    compare_with_hugging_face(teller, model, params, source.folder, vocabulary)


def _from_safetensors(request: Request) -> None:
    teller = Teller()
    params, step, record = safetensors_export.read(request.source)
    folder = converted.claim(request.target)
    record = {**record, 'converted_from': str(pathlib.Path(request.source).expanduser().resolve())}
    written = converted.write(folder, params, step, record)
    teller.say('read', size(params))
    teller.say('checkpoint', str(written))
    if record['config']:
        model_dir.write_config(folder, record['config'])
        teller.say('model', f'{folder / model_dir.CONFIG}, the configuration it was trained with')
    check_equal(teller, params, converted.read(str(folder))[0], str(folder))


def _to_safetensors(request: Request) -> None:
    teller = Teller()
    params, record, step = converted.read(request.source)
    dtype = request.dtype or 'float32'
    file = safetensors_export.write(request.target, params, step, record, dtype)
    teller.say('read', f'{size(params)}, step {step}')
    teller.say('wrote', f'{file}, {dtype}, {file.stat().st_size / 2**20:,.1f} MiB')
    written = safetensors_export.read(str(file))[0]
    check_equal(teller, safetensors_export.rounded(params, dtype), written, str(file))
