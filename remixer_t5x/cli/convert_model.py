"""`remixer-t5x convert` where the user's gin files say which model it is; gin builds the arguments
(configs/runs/convert_model.gin)."""

from __future__ import annotations

from typing import Any

from remixer_t5x.checkpoints import saved_params
from remixer_t5x.cli.conversion import Request
from remixer_t5x.cli.convert_checks import Teller, check_equal, check_same, compare_with_hugging_face, size
from remixer_t5x.config import loading
from remixer_t5x.data import pipeline
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.interop import converted
from remixer_t5x.interop.huggingface import description as hf_description
from remixer_t5x.interop.huggingface import folders as huggingface
from remixer_t5x.interop.huggingface import tokenizer as hf_tokenizer
from remixer_t5x.interop.safetensors import export as safetensors_export
from remixer_t5x.model.seq2seq import Seq2Seq

SETTING = '--checkpoint'


def run(request: Request, model: Seq2Seq, vocabulary: Any, own_names: bool = False) -> None:
    """Converts, compares what was written with what was read, and says both.

    Args:
        request: from where and to where.
        model: the model that was trained, or for a source without a description of its own, that will hold it.
        vocabulary: the seqio vocabulary it was trained with.
        own_names: whether a checkpoint for T5X keeps our names, which configs/t5x read, instead of its network's.
    """
    if own_names and request.written != 'to_t5x':
        raise UserError('OWN_NAMES is for --to_t5x: leave it out (--from_t5x knows our names when it sees them)')
    pipeline.check_ids('VOCABULARY', vocabulary, model.vocab_size)
    if request.read == 'from_t5x':
        _from_t5x(request, model, vocabulary)
    elif request.written == 'to_t5x':
        _to_t5x(request, model, vocabulary, own_names)
    elif request.written == 'to_hf':
        _to_hugging_face(request, model, vocabulary)
    else:
        raise UserError(f'--{request.read} and --{request.written} need no model')


def abstract_params(model: Seq2Seq) -> Any:
    """Shapes of the model's parameters, on one device."""
    # They do not depend on lengths, and no model refuses one as short as this.
    shapes = {'encoder_input_tokens': (1, 2), 'decoder_target_tokens': (1, 2)}
    return saved_params.abstract_params(model, shapes, Partitioner())


def _restored(request: Request, model: Seq2Seq, vocabulary: Any) -> Any:
    record = pipeline.vocabulary_record(vocabulary)
    return saved_params.restore_params(request.source, abstract_params(model), record, SETTING)


def _to_hugging_face(request: Request, model: Seq2Seq, vocabulary: Any) -> None:
    teller = Teller()
    t5, runs = hf_description.describe(model.module)
    step = saved_params.find_step(request.source, SETTING)
    folder = huggingface.check_free(request.target)
    teller.say('reading', str(step))
    params = _restored(request, model, vocabulary)
    teller.say('read', size(params))
    dtype = request.dtype or 'float32'
    huggingface.write(str(folder), t5, params, runs, dtype, int(vocabulary.eos_id))
    teller.say('wrote', f'{folder}, {dtype}')
    teller.say('tokenizer', hf_tokenizer.write(vocabulary, folder))
    params = safetensors_export.rounded(params, dtype)
    check_same(huggingface.first_difference(huggingface.read(str(folder)), params, runs), folder)
    teller.say('check', 'every weight, read back, is what was written')
    compare_with_hugging_face(teller, model, params, folder, vocabulary)


def _from_t5x(request: Request, model: Seq2Seq, vocabulary: Any) -> None:
    from remixer_t5x.interop.t5x import checkpoint as t5x_checkpoint

    teller = Teller()
    folder = converted.claim(request.target)
    teller.say('reading', request.source)
    params, step = t5x_checkpoint.read(request.source, abstract_params(model))
    record = converted.record(pipeline.vocabulary_record(vocabulary), loading.operative_config(), request.source)
    teller.say('read', f'{size(params)}, step {step}')
    teller.say('checkpoint', str(converted.write(folder, params, step, record)))
    check_equal(teller, params, converted.read(str(folder))[0], str(folder))


def _to_t5x(request: Request, model: Seq2Seq, vocabulary: Any, own_names: bool) -> None:
    from remixer_t5x.interop.t5x import checkpoint as t5x_checkpoint

    teller = Teller()
    step = saved_params.find_step(request.source, SETTING)
    teller.say('reading', str(step))
    params = _restored(request, model, vocabulary)
    teller.say('read', size(params))
    written = t5x_checkpoint.write(request.target, params, int(step.name), model, own_names)
    teller.say('checkpoint', written)
    check_equal(teller, params, t5x_checkpoint.read(written, abstract_params(model))[0], written)
