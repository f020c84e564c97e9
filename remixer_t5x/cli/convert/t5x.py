"""`convert --from_t5x` and `--to_t5x`: checkpoints of T5X."""

import argparse

from remixer_t5x.checkpoints import saved_params
from remixer_t5x.cli.convert import conversion
from remixer_t5x.cli.convert.conversion import say
from remixer_t5x.config import loading
from remixer_t5x.data import frames, task_vocabulary
from remixer_t5x.interop import converted
from remixer_t5x.interop.t5x import checkpoint as t5x_checkpoint
from remixer_t5x.models import interface
from remixer_t5x.models.seq2seq import Seq2Seq


def to_model_dir(args: argparse.Namespace, model: Seq2Seq, vocabulary: object) -> None:
    """`--from_t5x=DIR --to=MODEL_DIR`."""
    interface.require_frame(model, frames.ENCODER_DECODER, '--from_t5x')
    task_vocabulary.check_ids('VOCABULARY', vocabulary, model.vocab_size)
    folder = converted.claim(args.to)
    say('reading', args.from_t5x)
    params, step = t5x_checkpoint.read(args.from_t5x, conversion.abstract_params(model))
    config = loading.config_text()
    task_vocabulary.save(vocabulary, folder / task_vocabulary.FOLDER)
    record = converted.record(task_vocabulary.record(vocabulary), config, args.from_t5x)
    conversion.write_model_dir(folder, params, step, record, config)
    conversion.check_equal(params, converted.read(str(folder))[0], folder)


def from_model(args: argparse.Namespace, model: Seq2Seq, vocabulary: object) -> None:
    """`--checkpoint=PATH --to_t5x=DIR`."""
    interface.require_frame(model, frames.ENCODER_DECODER, '--to_t5x')
    params = conversion.restore(args, model, vocabulary)
    step = int(saved_params.find_step(args.checkpoint, '--checkpoint').name)
    checkpoint = t5x_checkpoint.write(args.to_t5x, params, step, model, bool(args.own_names))
    say('checkpoint', checkpoint)
    conversion.check_equal(params, t5x_checkpoint.read(checkpoint, conversion.abstract_params(model))[0], checkpoint)
