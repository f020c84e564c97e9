"""What real processes of the command line do in test_several_processes: commands on a small task of text lines."""

import json
import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import seqio
import tensorflow as tf

from remixer_t5x.cli import main, process_flags
from remixer_t5x.config import loading
from remixer_t5x.devices import collectives, processes
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import (
    checkpoint_evaluation,  # noqa: F401 (imported once, for all)
    text_inference,  # noqa: F401
)
from remixer_t5x.train import loop  # noqa: F401

LENGTHS = {'inputs': 16, 'targets': 12}
VOCABULARY = seqio.ByteVocabulary(extra_ids=0)


def register(file):
    """The task `lines` in `file`: one file, so that there are fewer than processes, and seqio's own source of files,
    which reads in parallel."""

    def both(dataset):
        return dataset.map(lambda line: {'inputs': line, 'targets': tf.strings.substr(line, 0, 4)})

    def exact(targets, predictions):
        return {'exact': 100.0 * sum(a == b for a, b in zip(targets, predictions, strict=True)) / len(targets)}

    seqio.TaskRegistry.add(
        'lines',
        source=seqio.TextLineDataSource({'train': file, 'validation': file}),
        preprocessors=[both, seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
        output_features={name: seqio.Feature(VOCABULARY) for name in LENGTHS},
        metric_fns=[exact],
        shuffle_buffer_size=16,
    )


def work(file, commands, join):
    """Runs the commands one after the other on the lines of `file`; the first that fails ends all processes.

    `join` has fields of `processes.ProcessFlags` if several commands run over several processes; a single command has
    flags for them.
    """
    register(file)
    # AutoGraph takes seconds to rewrite seqio's functions, none of which needs it here.
    run = tf.autograph.experimental.do_not_convert(main.main)
    with processes.connected_processes(processes.ProcessFlags(**join), main.report_error, saves=True):
        for argv in commands:
            code = run(argv)
            if code and not join:
                return code
            if code:
                # Reported to the other processes, which would otherwise wait for this one.
                raise UserError(f'{argv[0]} has ended with exit code {code}')
    return 0


def compare_identities(gin_files, flags, join):
    """Compares what processes share with each value in turn changed on process 1, and prints a JSON line for each:
    its name, its value, and the error (None for the comparison without a change, which comes last)."""
    loading.load(loading.ConfigSources(gin_files, flags))
    with processes.connected_processes(processes.ProcessFlags(**join), main.report_error):
        identity = process_flags.process_identity('train')
        for name in [*identity, None]:
            values = {**identity, name: 'changed'} if name and join['index'] else identity
            try:
                collectives.check_same(values)
                error = None
            except UserError as raised:
                error = str(raised)
            print(json.dumps([name, identity.get(name), error]))
