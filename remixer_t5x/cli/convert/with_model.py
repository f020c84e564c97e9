"""Conversions of files that hold parameters alone: the user's gin files say which model and vocabulary they are of."""

import argparse
from typing import Any

from remixer_t5x.checkpoints import saved_params
from remixer_t5x.cli.convert import with_bert, with_gpt2
from remixer_t5x.cli.convert.checks import check_equal, check_same, compare_with_hugging_face, say, size
from remixer_t5x.cli.convert.model_params import SETTING, abstract_params, restored
from remixer_t5x.config import loading
from remixer_t5x.data import frames, task_vocabulary
from remixer_t5x.interop import converted
from remixer_t5x.interop.huggingface import description as hf_description
from remixer_t5x.interop.huggingface import folders as huggingface
from remixer_t5x.interop.huggingface import tokenizer as hf_tokenizer
from remixer_t5x.interop.huggingface.config import Refusal
from remixer_t5x.interop.safetensors import export as safetensors_export
from remixer_t5x.models import interface
from remixer_t5x.models.language_model import LanguageModel
from remixer_t5x.models.masked_lm import MaskedLM
from remixer_t5x.models.seq2seq import Seq2Seq
from remixer_t5x.run_folder import model_dir


def to_hugging_face(args: argparse.Namespace, model: Any, vocabulary: Any) -> None:
    """`--checkpoint=PATH --to_hf=DIR`. Raises Refusal, with nothing written, for a model that Hugging Face does not
    have.
    """
    task_vocabulary.check_ids('VOCABULARY', vocabulary, model.vocab_size)
    if isinstance(model, MaskedLM):
        with_bert.write(args, model, vocabulary)
        return
    if isinstance(model, LanguageModel):
        with_gpt2.write(args, model, vocabulary)
        return
    if not isinstance(model, Seq2Seq):
        raise Refusal(
            f'--to_hf writes a T5, a BERT or a GPT-2, and FRAME is {model.frame!r}; --to_safetensors=FILE writes the '
            'parameters of any model'
        )
    t5, runs = hf_description.describe(model.module)
    step = saved_params.find_step(args.checkpoint, SETTING)
    folder = huggingface.check_free(args.to_hf)
    say('reading', str(step))
    params = restored(args, model, vocabulary)
    say('read', size(params))
    dtype = args.dtype or 'float32'
    huggingface.write(str(folder), t5, params, runs, dtype, int(vocabulary.eos_id))
    say('wrote', f'{folder}, {dtype}')
    say('tokenizer', hf_tokenizer.write(vocabulary, folder))
    params = safetensors_export.rounded(params, dtype)
    check_same(huggingface.first_difference(huggingface.read(str(folder)), params, runs), folder)
    say('check', 'every weight, read back, is what was written')
    compare_with_hugging_face(model, params, folder, vocabulary)


def _from_t5x(args: argparse.Namespace, model: Seq2Seq, vocabulary: Any) -> None:
    from remixer_t5x.interop.t5x import checkpoint as t5x_checkpoint

    interface.require_frame(model, frames.ENCODER_DECODER, '--from_t5x')
    task_vocabulary.check_ids('VOCABULARY', vocabulary, model.vocab_size)
    folder = converted.claim(args.to)
    say('reading', args.from_t5x)
    params, step = t5x_checkpoint.read(args.from_t5x, abstract_params(model))
    config = loading.config_text()
    model_dir.write_config(folder, config)
    task_vocabulary.save(vocabulary, folder / task_vocabulary.FOLDER)
    record = converted.record(task_vocabulary.record(vocabulary), config, args.from_t5x)
    say('read', f'{size(params)}, step {step}')
    say('checkpoint', str(converted.write(folder, params, step, record)))
    check_equal(params, converted.read(str(folder))[0], str(folder))


def _to_t5x(args: argparse.Namespace, model: Seq2Seq, vocabulary: Any) -> None:
    from remixer_t5x.interop.t5x import checkpoint as t5x_checkpoint

    interface.require_frame(model, frames.ENCODER_DECODER, '--to_t5x')
    task_vocabulary.check_ids('VOCABULARY', vocabulary, model.vocab_size)
    step = saved_params.find_step(args.checkpoint, SETTING)
    say('reading', str(step))
    params = restored(args, model, vocabulary)
    say('read', size(params))
    written = t5x_checkpoint.write(args.to_t5x, params, int(step.name), model, bool(args.own_names))
    say('checkpoint', written)
    check_equal(params, t5x_checkpoint.read(written, abstract_params(model))[0], written)


CONVERSIONS = {
    ('checkpoint', 'to_hf'): to_hugging_face,
    ('from_t5x', 'to'): _from_t5x,
    ('checkpoint', 'to_t5x'): _to_t5x,
}
