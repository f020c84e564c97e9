"""A model run on texts: what gin builds for `remixer-t5x infer`, and the parts of the run that follow from it."""

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

import jax

from remixer_t5x.checkpoints import saved_params, watch
from remixer_t5x.data import fingerprint, frames, task_vocabulary
from remixer_t5x.devices import collectives, partition
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import classes, predictions, text_outputs
from remixer_t5x.evaluate.text_inputs import TextInputs
from remixer_t5x.models import interface


@dataclasses.dataclass(frozen=True)
class TextInference:
    """Which model reads which texts.

    `vocabulary` is the seqio vocabulary the model was trained with, `checkpoint` one checkpoint or a MODEL_DIR (its
    newest), `output` a file or '-' for standard output. `refuse_long` stops at a text that is longer than `decoding`
    allows, instead of cutting it.
    """

    model: Any
    partitioner: partition.Partitioner
    vocabulary: Any
    checkpoint: str
    decoding: predictions.Decoding
    inputs: TextInputs
    output: str = '-'
    refuse_long: bool = False

    def check(self, embed: bool = False) -> None:
        """Raises UserError for standard streams with several processes, a vocabulary too large for the model, and a
        model that gives no answers, or, with `embed`, encodes nothing.
        """
        if embed:
            interface.require(self.model, 'encode', 'infer --embed')
        elif not classes.is_classifier(self.model):
            interface.require(self.model, 'generate', 'infer without --embed')
        if collectives.several() and (self.inputs.is_stdin or self.output == '-'):
            raise UserError('with several hosts, --input and --output must be files that all of them see')
        task_vocabulary.check_ids('VOCABULARY', self.vocabulary, self.model.vocab_size)
        if collectives.several():
            texts = fingerprint.mark(os.path.expanduser(self.inputs.path))
            collectives.check_same({'VOCABULARY': task_vocabulary.record(self.vocabulary), 'the texts of INPUT': texts})

    def step_folder(self) -> str:
        """The checkpoint's folder, the same on every process; the newest one, where `checkpoint` is a MODEL_DIR."""
        return collectives.broadcast(str(saved_params.find_step(self.checkpoint, watch.SETTING)))

    def open_output(self, folder: str) -> text_outputs.Output:
        """The output of this process, at the end of what is there already; only the first process writes."""
        name = text_outputs.name_of(self.decoding.decoder)
        output = text_outputs.Output(self.output, {'checkpoint': folder, 'decoder': name})
        # All have read the output before the first one writes more of it.
        collectives.barrier()
        return _Silent(output) if jax.process_index() else output

    def restore(self, folder: str) -> Any:
        """The parameters in `folder`."""
        lengths, size = self.decoding.feature_lengths, self.decoding.batch_size
        shapes = frames.batch_shapes(self.model.frame, lengths, size)
        abstract = saved_params.abstract_params(self.model, shapes, self.partitioner)
        return saved_params.restore_params(folder, abstract, task_vocabulary.record(self.vocabulary), watch.SETTING)

    def codec(self) -> text_outputs.Texts:
        """Texts to ids and back. A model of tasks without inputs continues its prompts, which then have no end."""
        lengths = self.decoding.feature_lengths
        longest = frames.text_lengths(lengths)['inputs']
        return text_outputs.Texts(self.vocabulary, longest, self.refuse_long, 'inputs' in lengths)

    def predictor(self) -> predictions.Predictor:
        eos_id = 1 if self.vocabulary.eos_id is None else int(self.vocabulary.eos_id)
        return predictions.Predictor(self.model, self.partitioner, self.decoding, eos_id)


class _Silent(text_outputs.Output):
    """The output of the other processes: they compute with the first one and write nothing."""

    def __init__(self, output: text_outputs.Output):
        self.path, self.hashes, self.counts = output.path, output.hashes, output.counts

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        self.counts.written += sum(1 for _ in rows)

    def close(self) -> None:
        pass
