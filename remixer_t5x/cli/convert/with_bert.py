"""Conversions of Hugging Face's BERT: a folder to a MODEL_DIR with a masked language model, and back."""

import argparse
import pathlib
from typing import Any

from remixer_t5x.cli.convert import model_params
from remixer_t5x.cli.convert.checks import check_same, compare_logits, say, size
from remixer_t5x.errors import UserError
from remixer_t5x.interop import converted
from remixer_t5x.interop.huggingface import bert, bert_check, bert_description
from remixer_t5x.interop.huggingface import check as hf_check
from remixer_t5x.interop.huggingface import folders as huggingface
from remixer_t5x.interop.safetensors import export as safetensors_export
from remixer_t5x.interop.safetensors import files as safetensors_files
from remixer_t5x.models.masked_lm import MaskedLM
from remixer_tasks import vocabularies
from remixer_tasks.vocabulary import wordpiece

TOKENIZER = bert.TOKENIZERS[0]


def read(args: argparse.Namespace) -> None:
    """`--from_hf=DIR --to=MODEL_DIR`: weights, a gin file, and the tokenizer as tokenizer.json."""
    source, config = huggingface.read_config(args.from_hf)
    tensors = safetensors_files.read_folder(source)
    found = bert.from_config(config, str(source))
    tokenizer = wordpiece.read(bert.tokenizer_file(source, args.vocabulary))
    folder = converted.claim(args.to)
    say('reading', str(source))
    params = bert.from_huggingface(found, tensors, str(source))
    path = str(folder / TOKENIZER)
    pathlib.Path(path).write_text(tokenizer.to_str(pretty=True), encoding='utf-8')
    vocabulary = vocabularies.wordpiece(path)
    if vocabulary.vocab_size > found.vocab_size:
        raise UserError(f'{path} has {vocabulary.vocab_size} ids, and the model {found.vocab_size}; give its tokenizer')
    text = bert_description.model_gin(found, path, f'Converted from the Hugging Face folder {source.resolve()}.')
    model_params.write(folder, params, vocabulary, text, str(source.resolve()))
    model, params = model_params.read(folder, vocabulary)
    check_same(bert.first_difference(found, tensors, params), str(folder))
    say('check', 'every weight, read back, is what was read')
    _compare(model, params, source, vocabulary)


def write(args: argparse.Namespace, model: MaskedLM, vocabulary: Any) -> None:
    """`--checkpoint=PATH --to_hf=DIR`."""
    found, runs = bert_description.describe(model.module)
    huggingface.check_free(args.to_hf)
    params = model_params.restored(args, model, vocabulary)
    say('read', size(params))
    dtype = args.dtype or 'float32'
    arrays = bert.to_huggingface(found, params, runs)
    folder = huggingface.write_model(args.to_hf, bert.to_config(found), arrays, dtype)
    say('wrote', f'{folder}, {dtype}')
    if isinstance(vocabulary, wordpiece.WordPieceVocabulary):
        vocabulary.save(str(folder / TOKENIZER))
        say('tokenizer', TOKENIZER)
    else:
        say('tokenizer', f'none: BERT has no {type(vocabulary).__name__}')
    params = safetensors_export.rounded(params, dtype)
    check_same(bert.first_difference(found, safetensors_files.read_folder(folder), params, runs), folder)
    say('check', 'every weight, read back, is what was written')
    _compare(model, params, folder, vocabulary)


def _compare(model: MaskedLM, params: Any, folder: pathlib.Path, vocabulary: Any) -> None:
    batch = bert_check.random_batch(model.vocab_size, model.module)
    if compare_logits(lambda: (bert_check.our_logits(model, params, batch), bert_check.their_logits(folder, batch))):
        say('check', hf_check.compared_ids(folder, vocabulary))
