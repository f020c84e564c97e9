"""The functions of the processes in test_several_processes, which run commands on a small task of text lines."""

import itertools
import json
import os
import signal
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import seqio
import tensorflow as tf

from remixer_t5x.cli import main, process_flags
from remixer_t5x.config import loading
from remixer_t5x.devices import collectives, processes
from remixer_t5x.errors import UserError
from remixer_t5x.train import preemption
from tests.support import command_without_autograph

LENGTHS = {'inputs': 16, 'targets': 12}
VOCABULARY = seqio.ByteVocabulary(extra_ids=0)


def register(file):
    """Registers the task `lines`, which reads one file (fewer than there are processes) with seqio's file source."""

    def add_targets(dataset):
        return dataset.map(lambda line: {'inputs': line, 'targets': tf.strings.substr(line, 0, 4)})

    def exact(targets, predictions):
        return {'exact': 100.0 * sum(a == b for a, b in zip(targets, predictions, strict=True)) / len(targets)}

    seqio.TaskRegistry.add(
        'lines',
        source=seqio.TextLineDataSource({'train': file, 'validation': file}),
        preprocessors=[add_targets, seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
        output_features={name: seqio.Feature(VOCABULARY) for name in LENGTHS},
        metric_fns=[exact],
        shuffle_buffer_size=16,
    )


def work(file, commands, join):
    """Runs commands in sequence on the lines of `file`; an error of one process ends all.

    `join` contains fields of `processes.ProcessFlags`, to run several commands in connected processes. A single command
    sets them by flags instead.
    """
    register(file)
    with processes.connect_processes(processes.ProcessFlags(**join), main.report_error, saves=True):
        for argv in commands:
            code = command_without_autograph.main(argv)
            if code and not join:
                return code
            if code:
                # Reports the error to the other processes, which would otherwise wait for this one.
                raise UserError(f'{argv[0]} ended with exit code {code}')
    return 0


def work_rejected(file, commands, join):
    """Runs commands that end with a user error in all processes."""
    register(file)
    with processes.connect_processes(processes.ProcessFlags(**join), main.report_error):
        for argv in commands:
            assert command_without_autograph.main(argv) == 2
    return 0


def work_until_signal(file, commands, join, number):
    """Like `work`, but process 1 sends itself SIGTERM before its evaluation batch `number`."""
    check, calls = preemption.StopSignalHandler.raise_if_stopping, itertools.count(1)

    def check_after_signal(stop):
        call = next(calls)
        if call == number and '--process_index=1' in commands[0]:
            signal.raise_signal(signal.SIGTERM)
        if call >= number:
            # JAX notifies the other processes after about a second, in which this tiny run would finish.
            time.sleep(1)
        check(stop)

    preemption.StopSignalHandler.raise_if_stopping = check_after_signal
    return work(file, commands, join)


def compare_identities(gin_files, flags, join):
    """Compares the identities of two processes, with one value changed in process 1 at a time and finally none.

    Prints a JSON line for each comparison: the name and the value (null without a change), and the error or null.
    """
    # Loads generated code as a module with a random name, as a task module does if it maps a dataset when imported.
    tf.autograph.to_graph(register)
    loading.load_gin_config(loading.ConfigSources(gin_files, flags))
    with processes.connect_processes(processes.ProcessFlags(**join), main.report_error):
        identity = process_flags.collect_shared_values('train')
        for name in [*identity, None]:
            values = {**identity, name: 'changed'} if name and join['index'] else identity
            try:
                collectives.check_same_on_processes(values)
                error = None
            except UserError as raised:
                error = str(raised)
            print(json.dumps([name, identity.get(name), error]))
