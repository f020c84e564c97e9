"""Conversions of Hugging Face's GPT-2: a folder to a MODEL_DIR with a language model, and back."""

import argparse
import pathlib
import shutil
from typing import Any

import jax
import numpy as np

from remixer_t5x.cli.convert import model_params
from remixer_t5x.cli.convert.checks import check_equal, check_same, compare_logits, say, size
from remixer_t5x.data import task_vocabulary
from remixer_t5x.errors import UserError
from remixer_t5x.interop import converted
from remixer_t5x.interop.huggingface import check as hf_check
from remixer_t5x.interop.huggingface import folders as huggingface
from remixer_t5x.interop.huggingface import gpt2, gpt2_description
from remixer_t5x.interop.huggingface.config import Refusal
from remixer_t5x.interop.safetensors import export as safetensors_export
from remixer_t5x.interop.safetensors import files as safetensors_files
from remixer_t5x.models.language_model import LanguageModel
from remixer_tasks import vocabularies
from remixer_tasks.vocabulary.byte_pairs import BytePairs

# Rows and tokens of the batch whose logits are compared.
ROWS, LENGTH = 2, 64


def read(args: argparse.Namespace) -> None:
    """Converts the folder `--from_hf` into the MODEL_DIR `--to`."""
    source = gpt2.read(args.from_hf)
    if args.vocabulary is not None:
        raise UserError(f'--vocabulary is for a T5; {source.folder} is a GPT-2, whose tokenizer is next to its weights')
    files = gpt2.tokenizer_files(source.folder)
    folder = converted.claim(args.to)
    say('reading', f'{source.folder}')
    params = source.params()
    for file in files:
        shutil.copyfile(file, pathlib.Path(folder) / file.name)
    origin = str(source.folder.resolve())
    text = gpt2.model_gin(source.gpt2, str(folder), f'Converted from the Hugging Face folder {origin}.')
    vocabulary = vocabularies.byte_pairs(str(folder), source.gpt2.end_id)
    task_vocabulary.check_ids(str(source.folder), vocabulary, source.gpt2.vocab_size + 1)
    model_params.write(folder, params, vocabulary, text, origin)
    model, read = model_params.read(folder, vocabulary)
    check_equal(params, read, str(folder))
    if compare_logits(lambda: _logits(model, read, source.gpt2, source.folder)):
        say('check', hf_check.compared_ids(source.folder, vocabulary))


def write(args: argparse.Namespace, model: LanguageModel, vocabulary: Any) -> None:
    """`--checkpoint=PATH --to_hf=DIR`."""
    if not isinstance(vocabulary, BytePairs):
        raise Refusal(
            f'--to_hf writes a decoder alone as a GPT-2, whose vocabulary is byte pairs, and VOCABULARY is a '
            f'{type(vocabulary).__name__}; --to_safetensors=FILE writes the parameters of any model'
        )
    found, runs = gpt2_description.describe(model.module, vocabulary.end_id)
    huggingface.check_free(args.to_hf)
    tokenizer = gpt2.tokenizer_files(pathlib.Path(vocabulary.folder))
    params = model_params.restored(args, model, vocabulary)
    say('read', size(params))
    dtype = args.dtype or 'float32'
    arrays = gpt2.to_huggingface(found, params, runs)
    folder = huggingface.write_model(args.to_hf, gpt2.to_config(found), arrays, dtype)
    say('wrote', f'{folder}, {dtype}')
    for file in tokenizer:
        shutil.copyfile(file, folder / file.name)
    say('tokenizer', ' and '.join(file.name for file in tokenizer))
    params = safetensors_export.rounded(params, dtype)
    check_same(gpt2.first_difference(found, safetensors_files.read_folder(folder), params, runs), folder)
    say('check', 'every weight, read back, is what was written')
    if compare_logits(lambda: _logits(model, params, found, folder)):
        say('check', hf_check.compared_ids(folder, vocabulary))


def _logits(model: LanguageModel, params: Any, found: gpt2.Gpt2, folder: pathlib.Path) -> tuple[Any, Any]:
    """Logits of our model and of Hugging Face's on random tokens."""
    length = min(LENGTH, found.max_length)
    # Hugging Face's ids, without 0, which `logits_of_transformers` masks.
    tokens = np.random.default_rng(0).integers(1, found.vocab_size, (ROWS, length), dtype=np.int32)
    tokens[:, 0] = found.end_id
    begun = np.where(np.arange(length) == 0, 0, tokens + 1)
    module = model.module.clone(dtype='float32')
    logits = jax.jit(lambda params: module.apply({'params': params}, begun, enable_dropout=False))
    theirs = hf_check.logits_of_transformers('AutoModelForCausalLM', folder, {'input_ids': tokens})
    return np.asarray(logits(params))[..., 1:], theirs
