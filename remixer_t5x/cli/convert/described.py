"""Conversions of files that say which model they hold."""

import argparse
import pathlib
from typing import Any

from etils import epath

from remixer_t5x import lazy
from remixer_t5x.checkpoints import saved_params
from remixer_t5x.cli.convert import from_shared, model_params, to_adapters, with_bert, with_gpt2
from remixer_t5x.cli.convert.checks import check_equal, check_same, compare_with_hugging_face, say, size
from remixer_t5x.interop import converted, shared_folder
from remixer_t5x.interop.huggingface import bert, gpt2
from remixer_t5x.interop.huggingface import folders as huggingface
from remixer_t5x.interop.huggingface import gin_file as hf_gin
from remixer_t5x.interop.huggingface import tokenizer as hf_tokenizer
from remixer_t5x.interop.safetensors import export as safetensors_export
from remixer_t5x.run_folder import model_dir
from remixer_tasks import vocabularies


def _from_hugging_face(args: argparse.Namespace) -> None:
    given = lazy.extra('hub.download').folder_of(args.from_hf, say)
    # Everything below reads a folder.
    args.from_hf = str(given)
    if shared_folder.is_shared(given):
        from_shared.read(args, given)
        return
    _, config = huggingface.read_config(args.from_hf)
    if config.get('model_type') == bert.MODEL_TYPE:
        with_bert.read(args)
        return
    if config.get('model_type') == gpt2.MODEL_TYPE:
        with_gpt2.read(args)
        return
    source = huggingface.read(args.from_hf)
    tokenizer = hf_tokenizer.read(source.folder, args.vocabulary)
    vocabulary = _vocabulary_of(tokenizer, source)
    folder = converted.claim(args.to)
    say('reading', f'{source.folder}')
    params = source.params()
    if tokenizer.path is not None:
        tokenizer = _copy_tokenizer(vocabulary, folder)
    text = hf_gin.model_gin(source.t5, tokenizer, f'Converted from the Hugging Face folder {source.folder.resolve()}.')
    model_params.write(folder, params, vocabulary, text, str(source.folder.resolve()))
    del params
    model, params = model_params.read(folder, vocabulary)
    check_same(huggingface.first_difference(source, params), folder)
    say('check', 'every weight, read back, is what was read')
    compare_with_hugging_face(model, params, source.folder, vocabulary)


def _vocabulary_of(tokenizer: hf_tokenizer.Tokenizer, source: huggingface.Source) -> Any:
    """The vocabulary of `tokenizer`. Raises UserError if it cannot belong to the model in `source`."""
    if tokenizer.path is None:
        vocabulary, name = vocabularies.byte(extra_ids=tokenizer.extra_ids), 'the vocabulary of bytes'
    else:
        vocabulary, name = (
            vocabularies.sentencepiece(path=tokenizer.path, extra_ids=tokenizer.extra_ids),
            tokenizer.path,
        )
    huggingface.check_vocabulary(source, vocabulary, name)
    return vocabulary


def _copy_tokenizer(vocabulary: Any, folder: epath.Path) -> hf_tokenizer.Tokenizer:
    """Copies the SentencePiece model into `folder`, so that the Hugging Face folder may go."""
    copy = folder / hf_tokenizer.MODEL
    copy.write_bytes(epath.Path(vocabulary.sentencepiece_model_file).expanduser().read_bytes())
    return hf_tokenizer.Tokenizer(str(copy), vocabulary.extra_ids)


def _from_safetensors(args: argparse.Namespace) -> None:
    params, step, record = safetensors_export.read(args.from_safetensors)
    folder = converted.claim(args.to)
    record = {**record, 'converted_from': str(pathlib.Path(args.from_safetensors).expanduser().resolve())}
    written = converted.write(folder, params, step, record)
    say('read', size(params))
    say('checkpoint', str(written))
    if record['config']:
        model_dir.write_config(folder, record['config'])
        say('model', f'{folder / model_dir.CONFIG}, the configuration it was trained with')
    check_equal(params, converted.read(str(folder))[0], str(folder))


def _to_checkpoint(args: argparse.Namespace) -> None:
    params, record, step = converted.read(args.checkpoint, '--checkpoint')
    folder = converted.claim(args.to)
    record = {name: value for name, value in record.items() if name != saved_params.BASE}
    source = str(saved_params.find_step(args.checkpoint, '--checkpoint'))
    written = converted.write(folder, params, step, {**record, 'converted_from': source})
    model_dir.write_config(folder, str(record.get('config') or ''))
    converted.copy_vocabulary(source, folder)
    say('read', f'{size(params)}, adapters merged')
    say('checkpoint', str(written))
    check_equal(params, converted.read(str(folder))[0], str(folder))


def _to_safetensors(args: argparse.Namespace) -> None:
    params, record, step = converted.read(args.checkpoint)
    dtype = args.dtype or 'float32'
    file = safetensors_export.write(args.to_safetensors, params, step, record, dtype)
    say('read', f'{size(params)}, step {step}')
    say('wrote', f'{file}, {dtype}, {file.stat().st_size / 2**20:,.1f} MiB')
    written = safetensors_export.read(str(file))[0]
    check_equal(safetensors_export.rounded(params, dtype), written, str(file))


CONVERSIONS = {
    ('from_hf', 'to'): _from_hugging_face,
    ('from_safetensors', 'to'): _from_safetensors,
    ('checkpoint', 'to'): _to_checkpoint,
    ('checkpoint', 'to_adapters'): to_adapters.write,
    ('checkpoint', 'to_safetensors'): _to_safetensors,
    ('checkpoint', 'to_shared'): lambda args: lazy.extra('hub.share').to_folder(args),
    ('checkpoint', 'push_to_hub'): lambda args: lazy.extra('hub.share').push(args),
}
